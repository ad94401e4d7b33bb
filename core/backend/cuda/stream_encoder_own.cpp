// Copies within the GPU.
#include <algorithm>

#include "core/backend/cuda/spare_engines.h"
#include "core/backend/cuda/stream_encoder.h"

namespace offcore::cuda {
namespace {

constexpr size_t kOwnCopiesMax = 32;  // in a batch: the engine starts on it meanwhile
constexpr uint64_t kPartAlign = 4096;

}  // namespace

void StreamEncoder::lend(std::vector<CUstream> streams, uint64_t bytes) {
  spare_streams_ = std::move(streams);
  spare_bytes_ = bytes;
}

// What its own stream copies comes first: its engine has most to do.
void StreamEncoder::inside(CUdeviceptr dst, CUdeviceptr src, uint64_t bytes) {
  const uint64_t lent = std::min(bytes, spare_bytes_);
  spare_bytes_ -= lent;
  in_own_stream(dst + lent, src + lent, bytes - lent);
  const size_t engines = spare_streams_.size() / 2;
  const uint64_t part = rounded(lent / std::max<size_t>(engines, 1), kPartAlign);
  uint64_t at = 0;
  for (size_t i = 0; i < engines && at < lent; ++i) {
    const uint64_t end = i + 1 == engines ? lent : std::min(lent, at + part);
    const uint64_t done = by_spare(i, dst + at, src + at, end - at);
    in_own_stream(dst + at + done, src + at + done, end - at - done);
    at = end;
  }
}

// An engine keeps to a stream until that is empty. Others' copies to and from the host get in
// between rows that alternate between two streams.
uint64_t StreamEncoder::by_spare(size_t engine, CUdeviceptr dst, CUdeviceptr src, uint64_t bytes) {
  const EngineAlias& alias = device_.spare_engines()->aliases()[engine];
  const CUstream streams[] = {spare_streams_[2 * engine], spare_streams_[2 * engine + 1]};
  uint64_t done = 0;
  for (size_t turn = 0; done < bytes; ++turn) {
    const uint64_t wanted = std::min(bytes - done, SpareEngines::kRowMax);
    const uint64_t copied = by_alias(alias, dst + done, src + done, wanted, streams[turn % 2]);
    done += copied;
    if (copied > 0) stats_.own_copy = std::max(stats_.own_copy, OwnCopy::engines);
    if (copied < wanted) break;
    const CudaEvent passed = device_.event();
    passed.record(streams[turn % 2]);
    passed.enqueue_wait(streams[(turn + 1) % 2]);
  }
  return done;
}

void StreamEncoder::in_own_stream(CUdeviceptr dst, CUdeviceptr src, uint64_t bytes) {
  if (bytes == 0) return;
  if (!options_.own_copy_on_sm && !options_.armed && device_.engine_alias() != nullptr) {
    flush();
    const uint64_t done = by_alias(*device_.engine_alias(), dst, src, bytes, stream_);
    if (done == bytes) return;
    dst += done;
    src += done;
    bytes -= done;
  }
  const bool asked = !options_.own_copy_on_sm && batches_;
  stats_.own_copy = std::max(stats_.own_copy, asked ? OwnCopy::hint : OwnCopy::sm);
  if (!asked) return plain(dst, src, bytes);
  collect(dst, src, bytes, kPreferOverlap, kOwnCopiesMax);
}

// The bytes that are copied so: all, unless the driver refuses some.
uint64_t StreamEncoder::by_alias(const EngineAlias& alias, CUdeviceptr dst, CUdeviceptr src,
                                 uint64_t bytes, CUstream stream) {
  uint64_t done = 0;
  while (done < bytes) {
    const CUmemcpy2D piece = alias.first(dst + done, src + done, bytes - done);
    if (!accepted(Driver::get().cuMemcpy2DAsync(&piece, stream), "cuMemcpy2DAsync")) break;
    ++stats_.calls.strided;
    done += piece.width;
  }
  return done;
}

}  // namespace offcore::cuda
