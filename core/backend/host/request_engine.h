// Requests of other threads, done by the thread that takes them: its stores are the engine.
#pragma once
#include <atomic>
#include <cstring>

#include "core/backend/backend.h"

namespace offcore::host {

class HostRequestEngine final : public RequestEngine {
 public:
  uint64_t room(Rank) override { return 1; }
  void submit(Rank, std::span<const RequestCopy> copies,
              std::span<const RequestWord> words) override {
    for (const RequestCopy& copy : copies) std::memcpy(copy.dst, copy.src, copy.bytes);
    store(words);
  }
  void store(std::span<const RequestWord> words) override {
    for (const RequestWord& word : words) {
      std::atomic_ref<uint64_t>(*reinterpret_cast<uint64_t*>(word.word))
          .store(word.value, std::memory_order_release);
    }
  }
  bool idle() override { return true; }
  void prepare_parking(std::span<std::byte* const>) override {
    fail(Code::unsupported, "a schedule: this backend's engine parks nothing; cuda's does");
  }
  void park(Rank, const ParkedRequest&) override {}
  void recall(uint64_t, uint64_t, const std::function<bool()>&) override {}
};

}  // namespace offcore::host
