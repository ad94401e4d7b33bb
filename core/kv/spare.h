// Lists that jobs need, kept for the next ones: where other work has emptied the caches, a caller
// takes longer to allocate more than a kilobyte than to fill it.
#pragma once
#include <algorithm>
#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

#include "core/kv/rows.h"

namespace offcore::kv {

struct JobLists {
  std::vector<int64_t> blocks;
  std::vector<int64_t> slots;
  std::vector<Row> rows;
};

class SpareLists {
 public:
  SpareLists() { lists_.reserve(kMost); }

  // Empty ones, with the room of those used last.
  JobLists take() {
    const std::scoped_lock lock(mutex_);
    if (lists_.empty()) return {};
    JobLists last = std::move(lists_.back());
    lists_.pop_back();
    return last;
  }
  void put(JobLists lists) noexcept {
    lists.blocks.clear();
    lists.slots.clear();
    lists.rows.clear();
    const size_t room = std::max(lists.blocks.capacity(), lists.rows.capacity());
    const std::scoped_lock lock(mutex_);
    if (room <= kRoomMost && lists_.size() < kMost) lists_.push_back(std::move(lists));
  }

 private:
  static constexpr size_t kMost = 8;
  static constexpr size_t kRoomMost = 4096;  // blocks of a job: 128 KiB

  std::mutex mutex_;
  std::vector<JobLists> lists_;
};

}  // namespace offcore::kv
