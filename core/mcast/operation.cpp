#include "core/mcast/operation.h"

#include <algorithm>

#include "core/base/digest.h"
#include "core/base/threads.h"

namespace offcore::mcast {
namespace {

constexpr int64_t kLookNs = 50'000;  // of a caller, who would take long to wake

constexpr const char* kNames[] = {"broadcast", "all-gather", "reduce-scatter"};

}  // namespace

std::string text_of(const AnnouncedCall& call) {
  const uint32_t kind = call.kind & 0xff, op = call.kind >> 8 & 0xff, dtype = call.kind >> 16;
  if (kind > static_cast<uint32_t>(OperationKind::reduce_scatter) ||
      op > static_cast<uint32_t>(ReduceOp::max) || dtype > static_cast<uint32_t>(DType::f64)) {
    return "a call unknown here";
  }
  const bool reduces = kind == static_cast<uint32_t>(OperationKind::reduce_scatter);
  const std::string what = reduces ? cat(" (", to_string(static_cast<ReduceOp>(op)), " of ",
                                         to_string(static_cast<DType>(dtype)), ")")
                                   : std::string();
  return cat(kNames[kind], what, " of ", call.bytes, " bytes");
}

void OperationReport::add(const OperationReport& other) {
  bytes += other.bytes;
  datagrams += other.datagrams;
  lost_chunks += other.lost_chunks;
  fetched_chunks += other.fetched_chunks;
  fetches += other.fetches;
  shares += other.shares;
  cutoffs += other.cutoffs;
  barrier_ns += other.barrier_ns;
  multicast_ns += other.multicast_ns;
  recovery_ns += other.recovery_ns;
  handshake_ns += other.handshake_ns;
  exchange_ns += other.exchange_ns;
}

Operation::Operation(OperationRequest request, std::shared_ptr<const BlockLayout> layout)
    : OfProcess("the operation"), request_(std::move(request)), layout_(std::move(layout)) {
  call_ = {.digest = layout_->digest(),
           .kind = static_cast<uint32_t>(request_.kind),
           .bytes = layout_->bytes()};
  if (!request_.reduction) return;
  const Reduction& reduction = *request_.reduction;
  check(reduction, "reduce_scatter");
  for (const uint64_t bytes : request_.counts) {
    if (bytes % size_of(reduction.dtype) == 0) continue;
    fail(Code::invalid, "reduce_scatter: a part of ", bytes, " bytes is not a whole number of ",
         to_string(reduction.dtype), " elements");
  }
  call_.kind |= static_cast<uint32_t>(reduction.op) << 8;
  call_.kind |= static_cast<uint32_t>(reduction.dtype) << 16;
  Digest digest;
  digest.add(call_.digest);
  digest.add(call_.kind);
  digest.add(reduction.scale);
  call_.digest = digest.value();
}

OperationReport Operation::wait(const Deadline& deadline) const {
  spin_until([&] { return ended(); }, std::min(kLookNs, deadline.left_ns()));
  std::unique_lock lock(mutex_);
  if (!sleep_until(ended_, lock, deadline, [&] { return ended(); })) {
    fail(Code::timeout, "the operation has not ended within ", shown_s(deadline.wait_ns()),
         " s; it goes on: wait again, or close the communicator");
  }
  if (error_) throw Error(*error_);
  return report_;
}

void Operation::end(std::optional<Error> error, const OperationReport& report) {
  {
    const std::lock_guard lock(mutex_);
    error_ = std::move(error);
    report_ = report;
    request_.keep.reset();
    done_ = true;
  }
  ended_.notify_all();
}

}  // namespace offcore::mcast
