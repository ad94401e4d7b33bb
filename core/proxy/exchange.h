// An all-to-all of counts that only the ranks' own processors know: one call's part of one rank, as
// a kernel of a few blocks (core/backend/cuda/kernels/exchange.cu) or as a thread of the host.
//
// Each rank stores its counts into every rank's memory, and behind them the call's number; so all
// know the same matrix, and that nobody reads the output of the call before any more. Then each
// pushes a request a peer, with a signal, and waits for the peers' signals and for its own requests
// to have left. What does not fit somewhere is sent nowhere: all ranks see that alike, and only
// signal. Rows are written by turns in two places: the peers' last blocks may still look at those
// of the call before.
#pragma once

#include "core/proxy/ring.h"

namespace offcore::proxy {

struct ExchangeArgs {
  const RequestPort* port;  // null: nothing is to be done
  const void* counts;       // own: units for each rank, in the order of the input
  void* received;           // units from each rank; null: nobody asks
  char* out;
  const char* in;
  Word* rows[kRanksMax];  // by rank: where it has this rank's counts, and behind them the number
  const Word* matrix;     // own memory: the rows of all ranks
  Word* ended;            // own memory: blocks that have ended, of all calls
  Word* told;             // host memory: the last call that has ended; then a fault, if any
  Word call;              // from 1
  Word unit;              // bytes
  Word out_units;         // of every rank's output, and input: what is in them
  Word in_units;
  unsigned wide;  // counts have 64 bits, not 32
  unsigned dst;   // numbers of the output and the input
  unsigned src;
};

template <typename Memory>
struct ExchangeCalls {
  using Pushes = RequestCalls<Memory>;

  OFFCORE_INLINE static Word count_at(const ExchangeArgs& args, unsigned rank) {
    return args.wide != 0 ? static_cast<const Word*>(args.counts)[rank]
                          : static_cast<const unsigned*>(args.counts)[rank];
  }

  OFFCORE_INLINE static Word units(const ExchangeArgs& args, unsigned from, unsigned to) {
    return Memory::peek(&args.matrix[from * (args.port->ranks + 1) + to]);
  }

  // The own counts for all ranks, told to one of them.
  OFFCORE_INLINE static void publish(const ExchangeArgs& args, unsigned rank) {
    const unsigned ranks = args.port->ranks;
    for (unsigned to = 0; to < ranks; ++to) {
      Memory::append(&args.rows[rank][to], count_at(args, to));
    }
    Memory::store(&args.rows[rank][ranks], args.call);
  }

  // Until that rank's counts are here.
  OFFCORE_INLINE static unsigned enter(const ExchangeArgs& args, unsigned rank) {
    const unsigned ranks = args.port->ranks;
    return Pushes::wait_word(*args.port, rank, &args.matrix[rank * (ranks + 1) + ranks], args.call);
  }

  // Whether what that rank sends, and what it gets, has room there.
  OFFCORE_INLINE static bool fits(const ExchangeArgs& args, unsigned rank) {
    Word out_left = args.out_units;
    Word in_left = args.in_units;
    for (unsigned other = 0; other < args.port->ranks; ++other) {
      const Word sent = units(args, rank, other);
      const Word got = units(args, other, rank);
      if (sent > in_left || got > out_left) return false;
      in_left -= sent;
      out_left -= got;
    }
    return true;
  }

  OFFCORE_INLINE static Word in_place(const ExchangeArgs& args, unsigned from, unsigned to) {
    Word before = 0;
    for (unsigned other = 0; other < to; ++other) before += units(args, from, other);
    return before * args.unit;
  }

  OFFCORE_INLINE static Word out_place(const ExchangeArgs& args, unsigned from, unsigned to) {
    Word before = 0;
    for (unsigned other = 0; other < from; ++other) before += units(args, other, to);
    return before * args.unit;
  }

  OFFCORE_INLINE static PutTicket send(const ExchangeArgs& args, unsigned peer, bool all_fit) {
    const unsigned own = args.port->rank;
    const Word bytes = all_fit ? units(args, own, peer) * args.unit : 0;
    if (bytes == 0) return Pushes::signal(*args.port, peer, args.dst);
    return Pushes::put_bytes(*args.port, peer, args.dst, out_place(args, own, peer), args.src,
                             in_place(args, own, peer), bytes, true);
  }

  OFFCORE_INLINE static unsigned finish(const ExchangeArgs& args, unsigned peer,
                                        const PutTicket& ticket) {
    const unsigned fault = Pushes::wait(*args.port, peer, args.dst, args.call);
    return fault != kNone ? fault : Pushes::wait_sent(*args.port, ticket);
  }

  OFFCORE_INLINE static void tell_received(const ExchangeArgs& args, unsigned rank) {
    if (args.received == nullptr) return;
    const Word got = units(args, rank, args.port->rank);
    if (args.wide != 0) {
      static_cast<Word*>(args.received)[rank] = got;
    } else {
      static_cast<unsigned*>(args.received)[rank] = unsigned(got);
    }
  }

  // One part of a rank's own data, of `parts`.
  OFFCORE_INLINE static void copy_own(const ExchangeArgs& args, Word part, Word parts) {
    const unsigned own = args.port->rank;
    char* const dst = args.out + out_place(args, own, own);
    const char* const src = args.in + in_place(args, own, own);
    const Word bytes = units(args, own, own) * args.unit;
    struct alignas(16) Pack {
      Word words[2];
    };
    Word done = 0;
    if (((reinterpret_cast<Word>(dst) | reinterpret_cast<Word>(src)) & 15) == 0) {
      const Word count = bytes / sizeof(Pack);
      auto* const to = reinterpret_cast<Pack*>(dst);
      const auto* const from = reinterpret_cast<const Pack*>(src);
      constexpr Word kLoads = 8;  // under way at once
      Word i = part;
      for (; i + (kLoads - 1) * parts < count; i += kLoads * parts) {
        Pack packs[kLoads];
        for (Word k = 0; k < kLoads; ++k) packs[k] = from[i + k * parts];
        for (Word k = 0; k < kLoads; ++k) to[i + k * parts] = packs[k];
      }
      for (; i < count; i += parts) to[i] = from[i];
      done = count * sizeof(Pack);
    }
    for (Word i = done + part; i < bytes; i += parts) dst[i] = src[i];
  }

  // All of it, by one thread.
  OFFCORE_INLINE static unsigned run(const ExchangeArgs& args) {
    const unsigned ranks = args.port->ranks;
    const unsigned own = args.port->rank;
    unsigned fault = kNone;
    bool all_fit = true;
    const auto each = [&](const auto& step) {
      for (unsigned rank = 0; rank < ranks && fault == kNone; ++rank) step(rank);
    };
    PutTicket tickets[kRanksMax];
    each([&](unsigned rank) { publish(args, rank); });
    each([&](unsigned rank) { fault = enter(args, rank); });
    each([&](unsigned rank) { all_fit = all_fit && fits(args, rank); });
    each([&](unsigned rank) {
      if (rank != own) tickets[rank] = send(args, rank, all_fit);
    });
    if (fault == kNone && all_fit) copy_own(args, 0, 1);
    each([&](unsigned rank) {
      if (rank != own) fault = finish(args, rank, tickets[rank]);
    });
    each([&](unsigned rank) { tell_received(args, rank); });
    return fault == kNone && !all_fit ? unsigned{kInvalid} : fault;
  }
};

}  // namespace offcore::proxy
