// All-to-alls whose counts only the ranks' own processors know (exchange.h).
#include "core/proxy/exchange.h"

#include <algorithm>
#include <utility>

#include "core/base/threads.h"
#include "core/proxy/control.h"
#include "core/proxy/endings.h"
#include "core/proxy/host_calls.h"

namespace offcore::proxy {
namespace {

// Of the control window, behind the schedule: a line for `ended`, then the rows, in two places.
uint64_t exchanges_from(Rank ranks, const Schedule& schedule) {
  size_t most = 0;
  for (const auto& planned : schedule) most = std::max(most, planned.size());
  return (received_from(ranks) + 8 * most + 63) / 64 * 64;
}

uint64_t row_bytes(Rank ranks) { return 8 * (uint64_t{ranks} + 1); }

}  // namespace

uint64_t control_bytes(Rank ranks, const Schedule& schedule) {
  return exchanges_from(ranks, schedule) + 64 + 2 * ranks * row_bytes(ranks);
}

uint64_t RequestProxy::exchange(const ExchangeCall& call) {
  check_engine();
  if (over_) fail_stopped();
  if (exchange_broken_) {
    fail(Code::invalid, "rank ", rank_,
         ": an earlier all_to_all_v with counts on the device failed: ", "pass other buffers");
  }
  const Rank ranks = control_->ranks();
  const uint64_t from = exchanges_from(ranks, options_.schedule);
  const uint64_t rows = from + 64 + ++exchanges_ % 2 * ranks * row_bytes(ranks);
  const auto word = [&](Rank rank, uint64_t offset) {
    return reinterpret_cast<Word*>(control(rank, offset));
  };
  ExchangeArgs args{
      .port = reinterpret_cast<const RequestPort*>(port_address()),
      .counts = call.counts,
      .received = call.received,
      .out = reinterpret_cast<char*>(at(call.dst)),
      .in = reinterpret_cast<const char*>(at(call.src)),
      .rows = {},
      .matrix = word(rank_, rows),
      .ended = word(rank_, from),
      .told = reinterpret_cast<Word*>(host_.data + kTold),
      .call = exchanges_,
      .unit = call.unit_bytes,
      .out_units = buffers_[call.dst].bytes / call.unit_bytes,
      .in_units = buffers_[call.src].bytes / call.unit_bytes,
      .wide = call.wide ? 1u : 0u,
      .dst = call.dst,
      .src = call.src,
  };
  for (Rank rank = 0; rank < ranks; ++rank) {
    args.rows[rank] = word(rank, rows + rank_ * row_bytes(ranks));
  }
  if (engine_->launches()) {
    try {
      engine_->launch(call.stream, &args);
    } catch (...) {  // the next one has its number
      --exchanges_;
      throw;
    }
    return exchanges_;
  }
  if (exchanger_.joinable()) exchanger_.join();
  const SignalsBlocked blocked;
  exchanger_ = std::thread([args] {
    if (const unsigned fault = ExchangeCalls<HostWords>::run(args)) {
      HostWords::store(&args.told[1], Word{fault});
    }
    HostWords::store(args.told, args.call);
  });
  return exchanges_;
}

bool RequestProxy::exchanged(uint64_t call) const {
  return HostWords::load(reinterpret_cast<const Word*>(host_.data + kTold)) >= call;
}

void RequestProxy::wait_exchange(uint64_t call, const Deadline& deadline) {
  while (!exchanged(call)) {
    if (deadline.passed()) {
      fail(Code::timeout, "rank ", rank_, ": all_to_all_v with counts on the device did not end ",
           "within ", shown_s(deadline.wait_ns()), " s");
    }
    deadline.listen();
    nap(0);
  }
  auto* const told = reinterpret_cast<Word*>(host_.data + kTold) + 1;
  const auto fault = static_cast<unsigned>(HostWords::load(told));
  if (fault == kNone) return;
  if (fault != kInvalid || over_) {
    exchange_broken_ = true;
    check();  // what has ended the engine, or the wait that was too long
    fail(Code::peer, "rank ", rank_, ": a peer's requests ended before its part of all_to_all_v");
  }
  HostWords::store(told, 0);
  fail(Code::invalid, "all_to_all_v: counts on the device are more than an input or an output of ",
       "some rank holds; nothing was sent");
}

}  // namespace offcore::proxy
