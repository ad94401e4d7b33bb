// An emulated SDMA engine: it fetches packets from a real ring in memory when the doorbell moves,
// and does to memory what they say.
//
// Copies, swaps, rectangles and fills are in flight together, each in two pieces, and move in an
// order that a seed picks, until a FENCE or an ATOMIC waits for all of them: a program that relies
// on any other order gets wrong bytes. A poll parks the engine while what is in flight goes on.
// Whatever hardware leaves undefined or forbids (unknown packets, addresses outside of the memory
// it was given, misaligned ones, packets across the ring's end) stops it for good: state faulted,
// and a text that names the dword. Seed 0 runs everything in order.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <shared_mutex>
#include <string>
#include <vector>

#include "core/backend/sdma/packet_ring.h"
#include "studies/sdma/unpack.h"

namespace offcore::sdma {

// What an engine reaches: ranges of addresses, and where their bytes are in this process. Ranges
// may come and go while engines run, but not those that packets in flight use.
class EngineMemory {
 public:
  // Throws invalid where it overlaps a range that is there, or is empty.
  void add(uint64_t address, std::byte* data, uint64_t bytes);
  void remove(uint64_t address);
  // The bytes of [address, address + bytes); null unless one range holds them all.
  std::byte* find(uint64_t address, uint64_t bytes) const;

 private:
  struct EngineRange {
    std::byte* data;
    uint64_t bytes;
  };
  mutable std::shared_mutex mutex_;
  std::map<uint64_t, EngineRange> ranges_;
};

inline constexpr int64_t kTickNs = 10;  // of the timestamps' counter: 100 MHz

struct EngineOptions {
  uint64_t seed = 0;
  uint32_t overlap = 8;                       // packets in flight
  std::function<int64_t()> now_ns = nullptr;  // null: the process's clock
};

// What an engine has done.
struct EngineCounts {
  uint64_t packets = 0;    // fetched, with nops
  uint64_t moves = 0;      // copies, broadcasts, swaps, rectangles and fills that have ended
  uint64_t bytes = 0;      // that they wrote
  uint64_t overtaken = 0;  // moves that ended after one that was fetched later
  uint64_t fences = 0;
  uint64_t atomics = 0;
  uint64_t polls = 0;  // that have passed
  uint64_t parks = 0;  // looks at a word that had not come yet
  uint64_t timestamps = 0;
  uint64_t traps = 0;
  uint64_t laps = 0;  // the ring's end, passed
};

class Engine {
 public:
  enum class EngineState : uint8_t {
    idle,     // all that the doorbell told of is done
    busy,     // there is more to do now
    parked,   // at a poll that has not passed, nothing in flight
    faulted,  // for good
  };

  Engine(const RingMemory& ring, const EngineMemory& memory, EngineOptions options);

  // Goes on until it is idle, parked or faulted, or has fetched so many packets.
  EngineState run(uint64_t packets_max = UINT64_MAX);

  EngineState state() const { return state_; }
  const std::string& fault() const { return fault_; }
  const EngineCounts& counts() const { return counts_; }
  uint64_t fetched_bytes() const { return rptr_; }

 private:
  struct EngineMove {
    Packet packet;
    std::byte* dst = nullptr;
    std::byte* dst2 = nullptr;
    std::byte* src = nullptr;
    uint64_t units = 0;  // bytes, or rows of a rectangle, or dwords of a fill
    bool upper_first = false;
    bool half_done = false;
    uint64_t number = 0;
  };
  struct Side;

  bool fetch(uint64_t left_bytes);
  bool execute(const Packet& packet);
  bool begin(const Packet& packet);
  bool resolve(EngineMove& move);
  bool resolve_rect(EngineMove& move);
  bool poll(const Packet& packet);
  bool atomic(const Packet& packet);
  void advance();
  void drain();
  std::byte* reach(uint64_t address, uint64_t bytes, const char* what);
  bool refuse(const std::string& why);
  uint64_t draw();

  RingMemory ring_;
  const EngineMemory& memory_;
  EngineOptions options_;
  uint64_t random_;
  EngineState state_ = EngineState::idle;
  std::string fault_;
  EngineCounts counts_;
  uint64_t rptr_;
  std::vector<EngineMove> in_flight_;
  uint64_t moves_begun_ = 0;
  uint64_t ended_last_ = 0;  // the number of the latest fetched move that has ended
};

std::string_view to_string(Engine::EngineState state);

}  // namespace offcore::sdma
