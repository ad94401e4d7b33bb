// A GPU's own words: what signals are copied from, and what gates wait for.
#pragma once
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "core/backend/cuda/memory.h"

namespace offcore::cuda {

// Words of all local devices; each lies 64 bytes from the next.
class SignalWords {
 public:
  SignalWords(Rank ranks, std::span<const std::shared_ptr<LocalGpu>> devices);
  const PeerMapping& mapping() const { return mapping_; }
  // So many in a row. Throws unsupported when there are no more.
  CUdeviceptr take(const LocalGpu& device, uint64_t count = 1);
  void give(const LocalGpu& device, CUdeviceptr words, uint64_t count = 1);

 private:
  struct Free {
    uint64_t next = 0;
    std::map<uint64_t, std::vector<CUdeviceptr>> returned;  // by count
  };
  PeerMapping mapping_;
  std::mutex mutex_;
  std::map<Rank, Free> free_;
};

class SignalWord {
 public:
  SignalWord(std::shared_ptr<const LocalGpu> device, std::shared_ptr<SignalWords> words,
             uint64_t count = 1)
      : device_(std::move(device)),
        words_(std::move(words)),
        count_(count),
        address_(words_->take(*device_, count)) {}
  ~SignalWord() { words_->give(*device_, address_, count_); }
  SignalWord(const SignalWord&) = delete;
  SignalWord& operator=(const SignalWord&) = delete;
  CUdeviceptr address() const { return address_; }  // of the first
  const LocalGpu& device() const { return *device_; }

 private:
  std::shared_ptr<const LocalGpu> device_;
  std::shared_ptr<SignalWords> words_;
  uint64_t count_;
  CUdeviceptr address_;
};

// Flag values that lie ready in a GPU's own memory, so that a signal is a copy and nothing else.
//
// Value v lies at place v modulo twice kHalf. The host fills the halves by turns, when all launches
// that read what was there have ended; a value is missing where they have not.
class SignalTable {
 public:
  static constexpr uint32_t kHalf = 1024;  // values

  SignalTable(std::shared_ptr<const LocalGpu> device, std::shared_ptr<SignalWords> words);
  // Puts these values in place if that can be done at once: at most kHalf of them.
  void prepare(uint32_t first, uint32_t count);
  // Commands that were enqueued since read what was prepared last, until then.
  void used_until(const std::shared_ptr<const CudaEvent>& done);
  CUdeviceptr find(uint32_t value) const;  // 0: it is missing

 private:
  struct Half {
    bool filled = false;
    uint32_t turn = 0;  // its values divided by kHalf
    bool prepared = false;
    std::shared_ptr<const CudaEvent> read;  // null: nobody reads it
  };

  void prepare(uint32_t turn);
  CUdeviceptr at(uint32_t value) const;

  SignalWord block_;
  Half halves_[2];
};

}  // namespace offcore::cuda
