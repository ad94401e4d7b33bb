// Host memory for KV blocks: rows of one block each, or of several, with all layers (layout.h).
//
// The memory, or what others have allocated, comes in chunks, registered in the background, because
// registering takes about 0.1 s/GB and a whole pool at once may fail. A row lies in one chunk, and
// so does every copy. Slots (numbers of rows) are given out once their chunk is ready.
//
// - A slot is given back by free(). While jobs use it, that is deferred: it cannot be allocated or
//   named by new jobs meanwhile.
// - Memory outlives its chunk's place in the pool while somebody holds a view of a row.
#pragma once
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "core/backend/backend.h"
#include "core/base/error.h"
#include "core/base/fork.h"
#include "core/kv/listed.h"
#include "core/kv/rows.h"

namespace offcore::kv {

// Memory that others have allocated, in the order of its rows: in each part one every `row_step`
// bytes.
struct ForeignRows {
  struct RowMemory {
    std::byte* data = nullptr;
    uint64_t bytes = 0;
    uint64_t row_step = 0;
  };
  std::vector<RowMemory> parts;
  std::shared_ptr<void> keep;
};

class HostPool : public HostRows {
 public:
  static std::shared_ptr<HostPool> create(std::shared_ptr<Backend> backend, uint64_t row_bytes,
                                          uint64_t chunk_bytes);
  // Rows of memory that others have allocated. Throws invalid.
  static std::shared_ptr<HostPool> create(std::shared_ptr<Backend> backend, uint64_t row_bytes,
                                          uint64_t chunk_bytes, ForeignRows memory);
  ~HostPool() override;
  HostPool(const HostPool&) = delete;
  HostPool& operator=(const HostPool&) = delete;

  uint64_t row_bytes() const override { return row_bytes_; }

  // Adds rows at the end; they become usable in the background.
  void grow(uint64_t rows);
  // Gives back whole chunks at the end in which no slot is taken, as long as at least `keep` rows
  // are left. Returns how many are.
  uint64_t shrink(uint64_t keep);
  struct PoolCounts {
    uint64_t rows = 0;     // those still to be registered included
    uint64_t ready = 0;    // registered
    uint64_t free = 0;     // ready, and to be had
    uint64_t leaving = 0;  // freed, but jobs still use them
  };
  PoolCounts counts() const;
  // Until all is registered. Throws timeout, or what a registration failed with; the pool then goes
  // on with what is ready.
  void wait_ready(const Deadline& deadline);

  // As few runs of consecutive slots in one chunk as the free ones allow, sorted: the smallest run
  // that holds them all, else the largest runs. Waits for registrations and frees. Throws memory.
  std::vector<int64_t> allocate(uint64_t count, const Deadline& deadline);
  // All or none. Throws invalid for slots that are not allocated, or named twice.
  void free(std::span<const int64_t> slots);
  // An allocated slot's memory, and what keeps it mapped.
  std::pair<std::byte*, std::shared_ptr<void>> row(int64_t slot) const;

  // As HostRows::pin; throws invalid for slots in rows that are not allocated, too.
  void pin(std::span<const int64_t> slots, bool distinct, const RowPlaces& places,
           std::vector<Row>& rows) override;
  void unpin(std::span<const int64_t> slots, const RowPlaces& places) noexcept override;

  // Waits for the jobs, and lets go of the memory. Throws timeout while jobs go on.
  void close(const Deadline& deadline);

 private:
  using PoolLock = std::unique_lock<std::mutex>;
  // Where rows are to be had.
  struct RowSource {
    std::byte* data = nullptr;  // null: the pool's own, still to be allocated
    uint64_t row_step = 0;
    uint64_t rows = 0;
    uint64_t rows_chunk = 0;
    uint64_t rows_step = 1;  // chunks have whole multiples of it
    uint64_t first = 0;      // row
  };
  struct Chunk {
    uint64_t first = 0;
    uint64_t rows = 0;
    const RowSource* source = nullptr;
    Share share;  // without data: not registered yet

    std::byte* at(uint64_t slot) const { return share.data + (slot - first) * source->row_step; }
  };
  struct Slot {
    uint32_t users : 30 = 0;  // times that jobs name it
    bool taken : 1 = false;
    bool leaving : 1 = false;
  };

  HostPool(std::shared_ptr<Backend> backend, uint64_t row_bytes, std::vector<RowSource> sources,
           std::shared_ptr<void> keep);
  static std::vector<RowSource> sources_of(std::vector<ForeignRows::RowMemory> parts,
                                           uint64_t row_bytes, uint64_t chunk_bytes);
  void check_room(uint64_t rows) const;
  PoolLock enter() const;
  void start_thread();
  void end_thread(PoolLock lock);
  void register_chunks();
  bool halve(size_t index);
  void check(std::span<const int64_t> slots, bool distinct, uint32_t row_blocks);
  void check_taken(int64_t slot, uint64_t row, uint32_t row_blocks) const;
  const Chunk& chunk_of(uint64_t slot) const;
  const RowSource& source_of(uint64_t row) const;
  void give(uint64_t first, uint64_t count) noexcept;
  void remove(uint64_t first, uint64_t count);
  void release(uint64_t slot);
  bool registering() const { return ready_ < slots_.size(); }
  [[noreturn]] void fail_exhausted(uint64_t count) const;

  const std::shared_ptr<Backend> backend_;
  const uint64_t row_bytes_;
  const std::shared_ptr<void> keep_;      // others' memory
  const std::vector<RowSource> sources_;  // by their first row

  mutable std::mutex mutex_;  // of all below
  std::condition_variable changed_;
  std::vector<Chunk> chunks_;          // by their first slot; the ready ones come first
  std::vector<Slot> slots_;            // of whole rows
  Listed listed_;                      // by the number in a call
  std::map<uint64_t, uint64_t> runs_;  // free: first slot -> how many, in one chunk
  std::set<std::pair<uint64_t, uint64_t>> by_count_;  // the same as (how many, first)
  uint64_t ready_ = 0;
  uint64_t free_ = 0;
  uint64_t leaving_ = 0;
  uint64_t pinned_ = 0;  // slots that jobs use
  std::optional<Error> failure_;
  bool running_ = false;  // the thread has yet to leave the mutex for the last time
  bool busy_ = false;     // the thread registers a chunk, without the mutex
  bool closed_ = false;
  std::thread thread_;
};

}  // namespace offcore::kv
