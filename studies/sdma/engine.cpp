#include "studies/sdma/engine.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>

#include "core/base/clock.h"
#include "core/base/error.h"
#include "core/base/swap_bytes.h"

namespace offcore::sdma {
namespace {

constexpr uint64_t kAtomicAdd64 = 47;

uint64_t rows_of(const Packet& packet) { return packet[Field::height] * packet[Field::depth]; }

}  // namespace

void EngineMemory::add(uint64_t address, std::byte* data, uint64_t bytes) {
  const std::unique_lock lock(mutex_);
  if (bytes == 0 || address + (bytes - 1) < address) {
    fail(Code::invalid, bytes, " bytes at ", hex(address), " are not a valid range");
  }
  const auto after = ranges_.upper_bound(address);
  const bool before_next = after == ranges_.end() || address + (bytes - 1) < after->first;
  const bool behind_last = after == ranges_.begin() ||
                           std::prev(after)->first + (std::prev(after)->second.bytes - 1) < address;
  if (!before_next || !behind_last) {
    fail(Code::invalid, bytes, " bytes at ", hex(address), " overlap memory that is there");
  }
  ranges_[address] = {data, bytes};
}

void EngineMemory::remove(uint64_t address) {
  const std::unique_lock lock(mutex_);
  ranges_.erase(address);
}

std::byte* EngineMemory::find(uint64_t address, uint64_t bytes) const {
  const std::shared_lock lock(mutex_);
  const auto after = ranges_.upper_bound(address);
  if (after == ranges_.begin() || bytes == 0) return nullptr;
  const auto& [begin, range] = *std::prev(after);
  const uint64_t at = address - begin;
  return at < range.bytes && bytes <= range.bytes - at ? range.data + at : nullptr;
}

std::string_view to_string(Engine::EngineState state) {
  constexpr std::string_view kNames[] = {"idle", "busy", "parked", "faulted"};
  return kNames[static_cast<size_t>(state)];
}

Engine::Engine(const RingMemory& ring, const EngineMemory& memory, EngineOptions options)
    : ring_(ring),
      memory_(memory),
      options_(std::move(options)),
      random_(options_.seed),
      rptr_(std::atomic_ref(*ring.rptr).load(std::memory_order_acquire)) {
  if (options_.overlap == 0) fail(Code::invalid, "an engine has at least one copy in flight");
  if (!options_.now_ns) options_.now_ns = [] { return offcore::now_ns(); };
}

// A well spread sequence (splitmix64); 0 for ever with seed 0.
uint64_t Engine::draw() {
  if (options_.seed == 0) return 0;
  uint64_t z = random_ += 0x9e3779b97f4a7c15;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
  z = (z ^ z >> 27) * 0x94d049bb133111eb;
  return z ^ z >> 31;
}

bool Engine::refuse(const std::string& why) {
  state_ = EngineState::faulted;
  fault_ = cat("dword ", rptr_ / 4, " (byte ", rptr_, "): ", why);
  in_flight_.clear();
  return false;
}

Engine::EngineState Engine::run(uint64_t packets_max) {
  while (state_ != EngineState::faulted) {
    const uint64_t doorbell = std::atomic_ref(*ring_.doorbell).load(std::memory_order_acquire);
    const uint64_t left_bytes = doorbell - rptr_;
    if (left_bytes == 0) {
      drain();
      return state_ = EngineState::idle;
    }
    if (packets_max-- == 0) return state_ = EngineState::busy;
    state_ = EngineState::busy;
    if (fetch(left_bytes)) continue;
    if (state_ != EngineState::parked) continue;
    if (in_flight_.empty()) return state_;
    advance();  // what is in flight goes on while the engine looks
  }
  return state_;
}

// Takes the next packet; false where it does not get past it.
bool Engine::fetch(uint64_t left_bytes) {
  if (left_bytes > ring_.bytes() || left_bytes % 4 != 0) {
    return refuse(cat("the doorbell is ", static_cast<int64_t>(left_bytes),
                      " bytes ahead, and the ring has ", ring_.bytes()));
  }
  const uint64_t at = rptr_ % ring_.bytes();
  const uint64_t lap_left = ring_.bytes() - at;
  const std::span<const uint32_t> there =
      ring_.dwords.subspan(at / 4, std::min(left_bytes, lap_left) / 4);
  uint32_t count = 1;
  Packet packet;
  if (there[0] != 0) {  // a zero dword is a nop
    std::string why;
    count = unpack(there, 0, packet, rptr_ / 4, why);
    if (count == 0) {
      const bool straddles = packet_dwords(there[0]) * uint64_t{4} > lap_left;
      return refuse(straddles ? "a packet across the ring's end: pad with zero dwords" : why);
    }
    if (!execute(packet)) return false;
  }
  ++counts_.packets;
  rptr_ += count * uint64_t{4};
  if (count * uint64_t{4} == lap_left) ++counts_.laps;
  std::atomic_ref(*ring_.rptr).store(rptr_, std::memory_order_release);
  return true;
}

bool Engine::execute(const Packet& packet) {
  if (const std::string why = refusal(packet); !why.empty()) {
    return refuse(cat(layout_of(packet.kind).name, ": ", why));
  }
  switch (packet.kind) {
    case PacketKind::nop:
      return true;
    case PacketKind::copy:
    case PacketKind::broadcast:
    case PacketKind::swap:
    case PacketKind::rect:
    case PacketKind::fill:
      return begin(packet);
    case PacketKind::poll:
      return poll(packet);
    case PacketKind::atomic:
      return atomic(packet);
    case PacketKind::fence: {
      std::byte* word = reach(packet[Field::dst], 4, "FENCE");
      if (word == nullptr) return false;
      drain();
      std::atomic_ref(*reinterpret_cast<uint32_t*>(word))
          .store(static_cast<uint32_t>(packet[Field::value]), std::memory_order_release);
      ++counts_.fences;
      return true;
    }
    case PacketKind::timestamp: {
      std::byte* place = reach(packet[Field::dst], 8, "TIMESTAMP");
      if (place == nullptr) return false;
      const auto ticks = static_cast<uint64_t>(options_.now_ns() / kTickNs);
      std::atomic_ref(*reinterpret_cast<uint64_t*>(place)).store(ticks, std::memory_order_release);
      ++counts_.timestamps;
      return true;
    }
    case PacketKind::trap:
      ++counts_.traps;
      return true;
  }
  return refuse("no such packet");
}

// Null, having faulted, where an engine cannot go.
std::byte* Engine::reach(uint64_t address, uint64_t bytes, const char* what) {
  std::byte* data = memory_.find(address, bytes);
  if (data == nullptr) {
    refuse(cat(what, ": ", bytes, " bytes at ", hex(address), " are not in the engine's memory"));
  }
  return data;
}

bool Engine::poll(const Packet& packet) {
  if (packet[Field::memory] != 1) return refuse("POLL_REGMEM: registers are not emulated");
  if (packet[Field::retry] != kPollForever) {
    return refuse("POLL_REGMEM: only polls that wait for ever are emulated");
  }
  std::byte* place = reach(packet[Field::dst], 4, "POLL_REGMEM");
  if (place == nullptr) return false;
  const uint32_t word =
      std::atomic_ref(*reinterpret_cast<uint32_t*>(place)).load(std::memory_order_acquire);
  const uint64_t value = word & packet[Field::mask];
  const uint64_t wanted = packet[Field::value];
  const bool holds[] = {
      true,
      value<wanted, value <= wanted, value == wanted, value != wanted, value >= wanted, value>
          wanted,
      false};
  if (holds[packet[Field::func]]) {
    ++counts_.polls;
    return true;
  }
  ++counts_.parks;
  state_ = EngineState::parked;
  return false;
}

bool Engine::atomic(const Packet& packet) {
  if (packet[Field::operation] != kAtomicAdd64) {
    return refuse(cat("ATOMIC: operation ", packet[Field::operation], " is not emulated; ",
                      kAtomicAdd64, " (a 64-bit add) is"));
  }
  std::byte* place = reach(packet[Field::dst], 8, "ATOMIC");
  if (place == nullptr) return false;
  drain();
  std::atomic_ref(*reinterpret_cast<uint64_t*>(place))
      .fetch_add(packet[Field::value], std::memory_order_acq_rel);
  ++counts_.atomics;
  return true;
}

bool Engine::begin(const Packet& packet) {
  EngineMove move{.packet = packet};
  if (!resolve(move)) return false;
  move.upper_first = draw() % 2 == 1;
  move.number = ++moves_begun_;
  while (in_flight_.size() >= options_.overlap) advance();
  in_flight_.push_back(move);
  if (draw() % 2 == 1) advance();
  return true;
}

bool Engine::resolve(EngineMove& move) {
  const Packet& packet = move.packet;
  const char* name = layout_of(packet.kind).name;
  if (packet.kind == PacketKind::rect) return resolve_rect(move);
  const uint64_t bytes = packet[Field::bytes];
  const bool fill = packet.kind == PacketKind::fill;
  move.units = fill ? bytes / 4 : bytes;
  move.dst = reach(packet[Field::dst], bytes, name);
  if (move.dst == nullptr) return false;
  if (fill) return true;
  move.src = reach(packet[Field::src], bytes, name);
  if (move.src == nullptr) return false;
  if (packet.kind != PacketKind::broadcast) return true;
  move.dst2 = reach(packet[Field::dst2], bytes, name);
  return move.dst2 != nullptr;
}

bool Engine::resolve_rect(EngineMove& move) {
  const Packet& packet = move.packet;
  const uint64_t element = packet[Field::element];
  const auto side = [&](Field address, Field x, Field y, Field z, Field pitch,
                        Field slice) -> std::byte* {
    const uint64_t first = packet[x] + packet[y] * packet[pitch] + packet[z] * packet[slice];
    const uint64_t elements = (packet[Field::height] - 1) * packet[pitch] +
                              (packet[Field::depth] - 1) * packet[slice] + packet[Field::width];
    return reach(packet[address] + (first << element), elements << element, "COPY_LINEAR_RECT");
  };
  move.units = rows_of(packet);
  move.dst = side(Field::dst, Field::dst_x, Field::dst_y, Field::dst_z, Field::dst_pitch,
                  Field::dst_slice);
  if (move.dst == nullptr) return false;
  move.src = side(Field::src, Field::src_x, Field::src_y, Field::src_z, Field::src_pitch,
                  Field::src_slice);
  return move.src != nullptr;
}

namespace {

void copy_rows(const Packet& packet, std::byte* dst, const std::byte* src, uint64_t from,
               uint64_t to) {
  const uint64_t element = packet[Field::element];
  for (uint64_t row = from; row < to; ++row) {
    const uint64_t y = row % packet[Field::height];
    const uint64_t z = row / packet[Field::height];
    std::memmove(dst + ((y * packet[Field::dst_pitch] + z * packet[Field::dst_slice]) << element),
                 src + ((y * packet[Field::src_pitch] + z * packet[Field::src_slice]) << element),
                 packet[Field::width] << element);
  }
}

void fill(std::byte* dst, uint64_t value, uint64_t from, uint64_t to) {
  const auto word = static_cast<uint32_t>(value);
  for (uint64_t i = from; i < to; ++i) std::memcpy(dst + 4 * i, &word, 4);
}

}  // namespace

// Moves a piece of one of the packets in flight.
void Engine::advance() {
  const size_t pick = draw() % in_flight_.size();
  EngineMove& move = in_flight_[pick];
  const bool upper = move.upper_first != move.half_done;
  const bool whole = options_.seed == 0 || move.units < 2;
  const uint64_t cut = whole ? 0 : move.units / 2;
  const uint64_t from = whole || !upper ? 0 : cut;
  const uint64_t to = whole || upper ? move.units : cut;
  switch (move.packet.kind) {
    case PacketKind::swap:
      swap_bytes(move.dst + from, move.src + from, to - from);
      break;
    case PacketKind::rect:
      copy_rows(move.packet, move.dst, move.src, from, to);
      break;
    case PacketKind::fill:
      fill(move.dst, move.packet[Field::value], from, to);
      break;
    default:
      std::memmove(move.dst + from, move.src + from, to - from);
      if (move.dst2 != nullptr) std::memmove(move.dst2 + from, move.src + from, to - from);
  }
  if (!whole && !std::exchange(move.half_done, true)) return;
  const bool rect = move.packet.kind == PacketKind::rect;
  const uint64_t bytes = rect
                             ? move.units * move.packet[Field::width] << move.packet[Field::element]
                             : move.packet[Field::bytes];
  const bool twice =
      move.packet.kind == PacketKind::swap || move.packet.kind == PacketKind::broadcast;
  counts_.bytes += bytes * (twice ? 2 : 1);
  ++counts_.moves;
  if (move.number < ended_last_) ++counts_.overtaken;
  ended_last_ = std::max(ended_last_, move.number);
  in_flight_.erase(in_flight_.begin() + static_cast<ptrdiff_t>(pick));
}

void Engine::drain() {
  while (!in_flight_.empty()) advance();
}

}  // namespace offcore::sdma
