// Through HIP's batch copy: a stream a rank, calls of at most kBatchMax copies.
#include <algorithm>
#include <cstring>

#include "core/backend/sdma/hip.h"
#include "core/backend/sdma/way.h"
#include "core/base/error.h"

namespace offcore::sdma {
namespace {

constexpr size_t kBatchMax = 8192;  // more entries fault in some versions

class HipTicket final : public Ticket {
 public:
  HipTicket(Rank rank, hip::Stream stream) : rank_(rank), stream_(stream) {}
  bool done() override {
    const hip::Runtime& runtime = hip::Runtime::open();
    hip::check(runtime.hipSetDevice(rank_), "hipSetDevice");
    const hip::Error state = runtime.hipStreamQuery(stream_);
    if (state == hip::kNotReady) return false;
    hip::check(state, "a batch of copies has failed");
    return true;
  }

 private:
  Rank rank_;
  hip::Stream stream_;
};

class HipWay final : public Way {
 public:
  explicit HipWay(Rank ranks) : runtime_(hip::Runtime::open()), streams_(ranks) {
    for (Rank rank = 0; rank < ranks; ++rank) {
      hip::check(runtime_.hipSetDevice(rank), "hipSetDevice");
      for (Rank peer = 0; peer < ranks; ++peer) {
        if (peer == rank) continue;
        const hip::Error error = runtime_.hipDeviceEnablePeerAccess(peer, 0);
        if (error != hip::kPeerAccessAlready) hip::check(error, "GPUs do not reach each other");
      }
      hip::check(runtime_.hipStreamCreateWithFlags(&streams_[rank], hip::kNonBlocking),
                 "cannot create a stream");
    }
  }
  ~HipWay() override {
    for (const hip::Stream stream : streams_) runtime_.hipStreamDestroy(stream);
  }

  std::string_view name() const override { return "hip_batch"; }
  bool swaps() const override { return false; }

  Share allocate(Rank rank, uint64_t bytes) override {
    if (rank >= streams_.size()) fail(Code::invalid, "there is no rank ", rank);
    hip::check(runtime_.hipSetDevice(rank), "hipSetDevice");
    return keep(
        rank, bytes, [&](void** data) { return runtime_.hipMalloc(data, bytes); },
        runtime_.hipFree);
  }
  Share allocate_host(uint64_t bytes) override {
    const unsigned flags = hip::kHostPortable | hip::kHostMapped;
    return keep(
        0, bytes, [&](void** data) { return runtime_.hipHostMalloc(data, bytes, flags); },
        runtime_.hipHostFree);
  }

  Pinned pin(std::byte* data, uint64_t bytes) override {
    if (own_->hold(data)) return {.address = reinterpret_cast<uint64_t>(data)};
    hip::check(runtime_.hipHostRegister(data, bytes, hip::kHostPortable | hip::kHostMapped),
               cat("memory of the caller's (", bytes, " bytes) cannot be pinned"));
    void* seen = data;
    runtime_.hipHostGetDevicePointer(&seen, data, 0);
    return {.address = reinterpret_cast<uint64_t>(seen),
            .owner = std::shared_ptr<void>(
                data, [](void* memory) { hip::Runtime::open().hipHostUnregister(memory); })};
  }

  std::unique_ptr<Ticket> copy(Rank rank, std::span<const Piece> pieces) override {
    hip::check(runtime_.hipSetDevice(rank), "hipSetDevice");
    for (size_t from = 0; from < pieces.size(); from += kBatchMax) {
      std::vector<void*> dsts;
      std::vector<void*> srcs;
      std::vector<size_t> sizes;
      for (const Piece& piece : pieces.subspan(from, std::min(kBatchMax, pieces.size() - from))) {
        dsts.push_back(reinterpret_cast<void*>(piece.dst));
        srcs.push_back(reinterpret_cast<void*>(piece.src));
        sizes.push_back(piece.bytes);
      }
      size_t failed = SIZE_MAX;
      const hip::Error error =
          runtime_.hipMemcpyBatchAsync(dsts.data(), srcs.data(), sizes.data(), dsts.size(), nullptr,
                                       nullptr, 0, &failed, streams_[rank]);
      if (error == hip::kSuccess) continue;
      hip::check(error, failed < dsts.size()
                            ? cat("copy ", from + failed, " of a batch was refused")
                            : cat("a batch of ", dsts.size(), " copies was refused"));
    }
    return std::make_unique<HipTicket>(rank, streams_[rank]);
  }

 private:
  template <typename Allocate>
  Share keep(Rank rank, uint64_t bytes, Allocate allocate, hip::Error (*release)(void*)) {
    Share share{.rank = rank, .bytes = bytes};
    if (bytes == 0) return share;
    void* data = nullptr;
    hip::check(allocate(&data), cat("cannot allocate ", bytes, " bytes for rank ", rank));
    std::memset(data, 0, bytes);  // large BAR
    share.data = static_cast<std::byte*>(data);
    own_->add(share.data, bytes);
    share.owner = std::shared_ptr<void>(data, [own = own_, release](void* memory) {
      own->remove(static_cast<std::byte*>(memory));
      release(memory);
    });
    return share;
  }

  const hip::Runtime& runtime_;
  std::vector<hip::Stream> streams_;
  std::shared_ptr<Ranges> own_ = std::make_shared<Ranges>();
};

}  // namespace

std::unique_ptr<Way> make_hip_way(Rank ranks) { return std::make_unique<HipWay>(ranks); }

}  // namespace offcore::sdma
