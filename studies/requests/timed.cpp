#include "studies/requests/timed.h"

#include <atomic>
#include <cstring>
#include <thread>

#include "core/base/clock.h"
#include "core/proxy/host_calls.h"

namespace offcore {
namespace {

using proxy::HostCalls;
using proxy::HostWords;
using proxy::RequestPort;
using proxy::Word;

constexpr unsigned kSent = 0;
constexpr unsigned kReceived = 1;

// Runs `send(k)` and `wait(k)` in turns in two threads, the first of which keeps the times.
// `send` and `wait`: of a side, and a round from 1; whether all went well.
template <typename Send, typename Wait>
std::vector<int64_t> in_turns(uint32_t rounds, const Send& send, const Wait& wait) {
  std::vector<int64_t> times;
  times.reserve(rounds);
  std::atomic<bool> failed{false};
  std::thread other([&] {
    for (uint32_t k = 1; k <= rounds && !failed; ++k) {
      if (!wait(1, k) || !send(1, k)) failed = true;
    }
  });
  for (uint32_t k = 1; k <= rounds && !failed; ++k) {
    const int64_t began_ns = now_ns();
    if (!send(0, k) || !wait(0, k)) failed = true;
    times.push_back(now_ns() - began_ns);
  }
  other.join();
  if (failed) times.clear();
  return times;
}

}  // namespace

std::vector<int64_t> time_trips(const RequestPort& first, const RequestPort& second,
                                uint64_t chunks, uint32_t rounds) {
  const RequestPort* const ports[] = {&first, &second};
  Word base[2];
  for (int side : {0, 1}) {
    base[side] = HostCalls::received(*ports[side], ports[1 - side]->rank, kReceived);
  }
  return in_turns(
      rounds,
      [&](int side, uint32_t) {
        return HostCalls::put_signal(*ports[side], ports[1 - side]->rank, kReceived, kSent, 0,
                                     chunks)
                   .fault == proxy::kNone;
      },
      [&](int side, uint32_t k) {
        return HostCalls::wait(*ports[side], ports[1 - side]->rank, kReceived, base[side] + k) ==
               proxy::kNone;
      });
}

std::vector<int64_t> time_plain_trips(std::byte* (&dsts)[2], const std::byte* (&srcs)[2],
                                      uint64_t bytes, uint32_t rounds) {
  struct alignas(64) Line {
    Word word = 0;
  };
  Line told[2];
  return in_turns(
      rounds,
      [&](int side, uint32_t k) {
        std::memcpy(dsts[1 - side], srcs[side], bytes);
        HostWords::store(&told[1 - side].word, k);
        return true;
      },
      [&](int side, uint32_t k) {
        for (unsigned looks = 1; HostWords::load(&told[side].word) < k; ++looks) {
          HostWords::pause(looks);
        }
        return true;
      });
}

PushTimes time_pushes(const RequestPort& port, uint32_t rounds) {
  const unsigned peer = port.rank == 0 ? 1 : 0;
  PushTimes times;
  for (uint32_t k = 0; k < rounds; ++k) {
    const int64_t began_ns = now_ns();
    const proxy::PutTicket ticket = HostCalls::put(port, peer, kReceived, kSent, 0, 0);
    times.pushed.push_back(now_ns() - began_ns);
    for (unsigned looks = 1; HostWords::load(port.taken) < ticket.position; ++looks) {
      HostWords::pause(looks);
    }
    times.taken.push_back(now_ns() - began_ns);
    if (ticket.fault != proxy::kNone || HostCalls::wait_sent(port, ticket) != proxy::kNone) {
      return {};
    }
  }
  return times;
}

int64_t time_messages(const RequestPort& port, const Messages& messages) {
  const unsigned peer = port.rank == 0 ? 1 : 0;
  const uint64_t places = messages.chunks_of_buffer / messages.stride;
  std::atomic<bool> failed{places == 0};
  const auto push = [&](uint64_t thread) {
    proxy::PutTicket ticket{};
    for (uint64_t i = 0; i < messages.each && !failed; ++i) {
      const uint64_t place = (thread + i * messages.threads) % places;
      ticket =
          HostCalls::put(port, peer, kReceived, kSent, place * messages.stride, messages.chunks);
      if (ticket.fault != proxy::kNone) failed = true;
    }
    if (!failed && HostCalls::wait_sent(port, ticket) != proxy::kNone) failed = true;
  };
  const int64_t began_ns = now_ns();
  std::vector<std::thread> threads;
  for (uint32_t thread = 1; thread < messages.threads; ++thread) threads.emplace_back(push, thread);
  push(0);
  for (std::thread& thread : threads) thread.join();
  return failed ? 0 : now_ns() - began_ns;
}

int64_t time_copies(std::byte* dst, const std::byte* src, uint64_t bytes, uint64_t count,
                    uint64_t bytes_of_buffer) {
  const uint64_t places = bytes_of_buffer / bytes;
  if (places == 0) return 0;
  const int64_t began_ns = now_ns();
  for (uint64_t m = 0; m < count; ++m) {
    const uint64_t at = m % places * bytes;
    std::memcpy(dst + at, src + at, bytes);
  }
  return now_ns() - began_ns;
}

}  // namespace offcore
