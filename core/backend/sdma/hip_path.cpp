// Through HIP's batch copy: a stream a rank, calls of at most kBatchMax copies.
#include <algorithm>
#include <map>
#include <mutex>
#include <optional>

#include "core/backend/sdma/hip.h"
#include "core/backend/sdma/submit_path.h"
#include "core/base/error.h"

namespace offcore::sdma {
namespace {

constexpr size_t kBatchMax = 8192;  // more entries fault in some versions

class HipTicket final : public Ticket {
 public:
  HipTicket(Rank rank, hip::HipStream stream, std::optional<Error> refused)
      : rank_(rank), stream_(stream), refused_(std::move(refused)) {}
  bool done() override {
    const hip::HipRuntime& runtime = hip::HipRuntime::get();
    hip::check(runtime.hipSetDevice(rank_), "hipSetDevice");
    const hip::HipError state = runtime.hipStreamQuery(stream_);
    if (state == hip::kNotReady) return false;
    hip::check(state, "a batch of copies has failed");
    if (refused_) throw *refused_;  // what was not refused has ended
    return true;
  }

 private:
  Rank rank_;
  hip::HipStream stream_;
  std::optional<Error> refused_;
};

// The host's pages that are registered. The runtime takes each once, and launches share them.
class RegisteredPages {
 public:
  // Registers what of these bytes is not yet; `seen` is where devices see them.
  std::vector<uintptr_t> take(const std::byte* data, uint64_t bytes, uint64_t& seen) {
    const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + bytes + kPage - 1) / kPage * kPage;
    const std::lock_guard lock(mutex_);
    std::vector<uintptr_t> taken;
    seen = 0;
    try {
      for (uintptr_t at = reinterpret_cast<uintptr_t>(data) / kPage * kPage; at < end;) {
        PageRun& run = run_at(at, end);
        ++run.users;
        taken.push_back(run.begin);
        const uint64_t here = reinterpret_cast<uintptr_t>(data) + run.shift;
        if (seen != 0 && seen != here) {
          fail(Code::unsupported, "devices see the ", bytes, " bytes in pieces: they lie over ",
               "memory that other calls under way have registered; call one after the other");
        }
        seen = here;
        at = run.end;
      }
    } catch (...) {
      drop(taken);
      throw;
    }
    return taken;
  }

  // How many bytes from there on, as devices see it, lie in one registration: no copy may go over
  // its end.
  uint64_t bytes_from(uint64_t address) {
    const std::lock_guard lock(mutex_);
    const auto after = seen_.upper_bound(address);
    if (after == seen_.begin() || address >= std::prev(after)->second) return UINT64_MAX;
    return std::prev(after)->second - address;
  }

  void release(const std::vector<uintptr_t>& taken) {
    const std::lock_guard lock(mutex_);
    drop(taken);
  }

 private:
  static constexpr uintptr_t kPage = 4096;
  struct PageRun {
    uintptr_t begin = 0;
    uintptr_t end = 0;
    uint64_t shift = 0;  // from the host's address to the devices'
    uint32_t users = 0;
  };

  // What is registered at `at`, made to end before what is behind it where there is nothing yet.
  PageRun& run_at(uintptr_t at, uintptr_t end) {
    const auto after = runs_.upper_bound(at);
    if (after != runs_.begin() && at < std::prev(after)->second.end)
      return std::prev(after)->second;
    if (after != runs_.end()) end = std::min(end, after->first);
    const hip::HipRuntime& runtime = hip::HipRuntime::get();
    void* const memory = reinterpret_cast<void*>(at);
    hip::check(runtime.hipHostRegister(memory, end - at, hip::kHostPortable | hip::kHostMapped),
               cat("memory of the caller's (", end - at, " bytes) cannot be pinned"));
    void* seen = memory;
    const hip::HipError error = runtime.hipHostGetDevicePointer(&seen, memory, 0);
    if (error != hip::kSuccess) {
      runtime.hipHostUnregister(memory);
      hip::check(error, "devices do not see pinned memory");
    }
    const uint64_t shift = reinterpret_cast<uintptr_t>(seen) - at;
    seen_[at + shift] = end + shift;
    return runs_[at] = {.begin = at, .end = end, .shift = shift};
  }

  void drop(const std::vector<uintptr_t>& taken) {
    for (const uintptr_t begin : taken) {
      const auto found = runs_.find(begin);
      if (--found->second.users > 0) continue;
      hip::HipRuntime::get().hipHostUnregister(reinterpret_cast<void*>(begin));
      seen_.erase(begin + found->second.shift);
      runs_.erase(found);
    }
  }

  std::mutex mutex_;
  std::map<uintptr_t, PageRun> runs_;
  std::map<uint64_t, uint64_t> seen_;  // of each as devices see it: its end
};

class HipPath final : public SubmitPath {
 public:
  explicit HipPath(Rank ranks) : runtime_(hip::HipRuntime::get()), streams_(ranks) {
    for (Rank rank = 0; rank < ranks; ++rank) {
      hip::check(runtime_.hipSetDevice(rank), "hipSetDevice");
      for (Rank peer = 0; peer < ranks; ++peer) {
        if (peer == rank) continue;
        const hip::HipError error = runtime_.hipDeviceEnablePeerAccess(peer, 0);
        if (error != hip::kPeerAccessAlready) hip::check(error, "GPUs do not reach each other");
      }
      hip::check(runtime_.hipStreamCreateWithFlags(&streams_[rank], hip::kNonBlocking),
                 "cannot create a stream");
    }
  }
  ~HipPath() override {
    for (const hip::HipStream stream : streams_) runtime_.hipStreamDestroy(stream);
  }

  std::string_view name() const override { return "hip_batch"; }
  bool swaps() const override { return false; }

  Share allocate(Rank rank, uint64_t bytes) override {
    if (rank >= streams_.size()) fail(Code::invalid, "there is no rank ", rank);
    hip::check(runtime_.hipSetDevice(rank), "hipSetDevice");
    void* data = nullptr;
    if (bytes > 0) hip::check(runtime_.hipMalloc(&data, bytes), refusal(bytes, rank));
    return keep(rank, bytes, data, [](void* own) { hip::HipRuntime::get().hipFree(own); });
  }
  Share allocate_host(uint64_t bytes) override {
    const unsigned flags = hip::kHostPortable | hip::kHostMapped;
    void* data = nullptr;
    if (bytes > 0) hip::check(runtime_.hipHostMalloc(&data, bytes, flags), refusal(bytes, 0));
    return keep(kHostRank, bytes, data, [](void* own) { hip::HipRuntime::get().hipHostFree(own); });
  }

  std::unique_ptr<Ticket> copy(Rank rank, std::span<const BatchCopy> pieces) override {
    hip::check(runtime_.hipSetDevice(rank), "hipSetDevice");
    std::vector<void*> dsts;
    std::vector<void*> srcs;
    std::vector<size_t> sizes;
    for (const BatchCopy& piece : pieces) {
      for (uint64_t done = 0; done < piece.bytes; done += sizes.back()) {
        dsts.push_back(reinterpret_cast<void*>(piece.dst + done));
        srcs.push_back(reinterpret_cast<void*>(piece.src + done));
        sizes.push_back(std::min({piece.bytes - done, pages_->bytes_from(piece.dst + done),
                                  pages_->bytes_from(piece.src + done)}));
      }
    }
    std::optional<Error> refused;
    for (size_t from = 0; from < sizes.size() && !refused; from += kBatchMax) {
      const size_t count = std::min(kBatchMax, sizes.size() - from);
      size_t failed = SIZE_MAX;
      const hip::HipError error =
          runtime_.hipMemcpyBatchAsync(&dsts[from], &srcs[from], &sizes[from], count, nullptr,
                                       nullptr, 0, &failed, streams_[rank]);
      try {
        hip::check(error, failed < count ? cat("copy ", from + failed, " of a batch was refused")
                                         : cat("a batch of ", count, " copies was refused"));
      } catch (const Error& why) {
        refused = why;
      }
    }
    return std::make_unique<HipTicket>(rank, streams_[rank], std::move(refused));
  }

 private:
  Pinned pin_callers(std::byte* data, uint64_t bytes) override {
    Pinned pinned;
    const auto taken = pages_->take(data, bytes, pinned.address);
    pinned.owner =
        std::shared_ptr<void>(data, [pages = pages_, taken](void*) { pages->release(taken); });
    return pinned;
  }

  static std::string refusal(uint64_t bytes, Rank rank) {
    return cat("cannot allocate ", bytes, " bytes for rank ", rank);
  }

  const hip::HipRuntime& runtime_;
  std::vector<hip::HipStream> streams_;
  std::shared_ptr<RegisteredPages> pages_ = std::make_shared<RegisteredPages>();
};

}  // namespace

std::unique_ptr<SubmitPath> make_hip_path(Rank ranks) { return std::make_unique<HipPath>(ranks); }

}  // namespace offcore::sdma
