// Why engines for requests end, and waits: real and simulated ones say so alike.
#pragma once
#include "core/base/error.h"
#include "core/ir/command.h"

namespace offcore::proxy {

inline Error peer_lost(Rank lost) {
  return Error(Code::peer, cat("rank ", lost, " died or aborted"));
}

inline Error not_registered(Rank rank) {
  return Error(Code::invalid, cat("rank ", rank, ": a kernel named a rank, a buffer or a range ",
                                  "that is not registered"));
}

inline Error no_room(Rank rank, double limit_s) {
  return Error(Code::timeout,
               cat("rank ", rank, ": a kernel found no room in the ring for ", limit_s, " s"));
}

[[noreturn]] inline void fail_late(Rank rank) {
  fail(Code::timeout, "rank ", rank,
       ": a kernel waited longer than its limit for a peer's signal, or for a put");
}

[[noreturn]] inline void fail_stopped() {
  fail(Code::invalid, "the engine for requests was stopped");
}

}  // namespace offcore::proxy
