#include "core/backend/sdma/encode_program.h"

#include <span>

#include "core/backend/backend.h"
#include "core/backend/sdma/encode.h"
#include "core/base/error.h"
#include "core/ir/text.h"

namespace offcore::sdma {

uint64_t Addresses::base(BufferId buffer, Rank rank) const {
  const auto found = bases.find({buffer, rank});
  if (found == bases.end()) {
    fail(Code::invalid, "buffer ", unsigned{buffer}, " of ",
         rank == kHostRank ? "the host" : cat("rank ", rank), " has no address");
  }
  return found->second;
}

uint64_t Addresses::of(const Slice& slice) const {
  const uint64_t unit = slice.buffer == kFlagBuffer ? kWordBytes : 1;
  return base(slice.buffer, slice.rank) + slice.offset * unit;
}

namespace {

// One engine queue.
class QueueEncoder {
 public:
  QueueEncoder(const Program& program, const Addresses& addresses, uint64_t copy_bytes_max)
      : program_(program), addresses_(addresses), encoder_(copy_bytes_max) {}

  EncodedQueue run(uint32_t index) {
    stream_.queue = index;
    const Queue& queue = program_.queues[index];
    for (size_t i = 0; i < queue.commands.size(); ++i) {
      stream_.starts.push_back(static_cast<uint32_t>(stream_.dwords.size()));
      try {
        add(queue.commands[i]);
      } catch (const Error& error) {
        fail(error.code(), "queue ", queue_name(queue), ", command ", i, " (",
             print(queue.commands[i], program_), "): ", error.message());
      }
    }
    return std::move(stream_);
  }

 private:
  Slice row(const Slice& slice, int64_t step, uint32_t number) const {
    return row_of(slice, step, number, program_.ranks);
  }

  // Lays out what the encoder got since the last call, and notes which dwords a replay changes.
  void take(const Slice& dst, const Slice& src = {}, const Slice& dst2 = {}) {
    for (; taken_ < encoder_.packets().size(); ++taken_) {
      const Packet& packet = encoder_.packets()[taken_];
      const auto first = static_cast<uint32_t>(stream_.dwords.size());
      pack(packet, stream_.dwords);
      for (const Bits& bits : layout_of(packet.kind).fields) {
        if (bits.bits != 64) continue;
        const Slice* slice = bits.field == Field::dst    ? &dst
                             : bits.field == Field::src  ? &src
                             : bits.field == Field::dst2 ? &dst2
                                                         : nullptr;
        if (slice == nullptr) continue;
        stream_.patches.push_back(
            {.dword = first + bits.bit / 32,
             .what = Patch::PatchKind::address,
             .buffer = slice->buffer,
             .rank = slice->rank,
             .value = packet[bits.field] - addresses_.base(slice->buffer, slice->rank)});
      }
    }
  }

  // A packet whose address is the backend's own, not a buffer's.
  void take_own(Patch::PatchKind what, uint64_t base) {
    const Packet& packet = encoder_.packets()[taken_++];
    stream_.patches.push_back({.dword = static_cast<uint32_t>(stream_.dwords.size()) + 1,
                               .what = what,
                               .value = packet[Field::dst] - base});
    pack(packet, stream_.dwords);
  }

  void order(uint32_t value) {
    encoder_.fence(addresses_.scratch, value);
    take_own(Patch::PatchKind::scratch, addresses_.scratch);
    moving_ = false;
  }

  void add(const Command& command) {
    switch (command.op) {
      case Op::copy:
        return copy(command);
      case Op::swap:
        return swap(command);
      case Op::poll:
      case Op::signal:
        return word(command);
      case Op::timestamp:
        if (moving_) order(kFenceImplied);
        encoder_.timestamp(addresses_.timestamps + kTimestampAlign * command.value);
        return take_own(Patch::PatchKind::timestamp, addresses_.timestamps);
      case Op::fence:
        return order(kFenceCommand);
      case Op::reduce:  // no program with one is loaded
        return;
    }
  }

  void word(const Command& command) {
    if (command.op == Op::poll && moving_) order(kFenceImplied);
    for (uint32_t i = 0; i < command.rows; ++i) {
      const Slice place = row(command.dst, command.dst_step, i);
      const uint32_t value = addresses_.epoch + command.value;
      if (command.op == Op::poll) {
        encoder_.poll(addresses_.of(place), value);
      } else {
        encoder_.fence(addresses_.of(place), value);
      }
      const auto first = static_cast<uint32_t>(stream_.dwords.size());
      take(place);
      stream_.patches.push_back(
          {.dword = first + 3, .what = Patch::PatchKind::flag, .value = command.value});
    }
    if (command.op == Op::signal) moving_ = false;
  }

  void swap(const Command& command) {
    for (uint32_t i = 0; i < command.rows; ++i) {
      const Slice dst = row(command.dst, command.dst_step, i);
      const Slice src = row(command.src, command.src_step, i);
      if ((addresses_.of(dst) | addresses_.of(src)) % kSwapAlign != 0) {
        fail(Code::unsupported, "swap packets need addresses that are multiples of ", kSwapAlign,
             ": legalize the program for this machine");
      }
      encoder_.swap(addresses_.of(dst), addresses_.of(src), command.bytes);
      take(dst, src);
    }
    moving_ = true;
  }

  bool broadcasts(const Command& command) const {
    if (command.src_step != 0) return false;
    if (command.dst_step == kRankStep) return true;
    return command.dst_step != 0 && command.dst_step % static_cast<int64_t>(kBroadcastAlign) == 0;
  }

  void broadcast(const Command& command) {
    const Slice src = row(command.src, 0, 0);
    for (uint32_t i = 0; i < command.rows; i += 2) {
      const bool pair = i + 1 < command.rows;
      const Slice dst = row(command.dst, command.dst_step, i);
      const Slice dst2 = pair ? row(command.dst, command.dst_step, i + 1) : dst;
      const uint64_t dsts[] = {addresses_.of(dst), addresses_.of(dst2)};
      encoder_.broadcast(std::span(dsts, pair ? 2 : 1), addresses_.of(src), command.bytes);
      take(dst, src, dst2);
    }
  }

  void copy(const Command& command) {
    moving_ = true;
    if (command.rows > 1 && broadcasts(command)) return broadcast(command);
    const bool over_ranks = command.dst_step == kRankStep || command.src_step == kRankStep;
    if (!over_ranks) {
      encoder_.strided(addresses_.of(command.dst), addresses_.of(command.src), command.bytes,
                       command.rows, command.dst_step, command.src_step);
      return take(command.dst, command.src);
    }
    for (uint32_t i = 0; i < command.rows; ++i) {
      const Slice dst = row(command.dst, command.dst_step, i);
      const Slice src = row(command.src, command.src_step, i);
      encoder_.copy(addresses_.of(dst), addresses_.of(src), command.bytes);
      take(dst, src);
    }
  }

  const Program& program_;
  const Addresses& addresses_;
  Encoder encoder_;
  EncodedQueue stream_;
  size_t taken_ = 0;     // packets of the encoder that are in the stream
  bool moving_ = false;  // data commands since the last FENCE
};

void store64(std::vector<uint32_t>& dwords, uint32_t at, uint64_t value) {
  dwords[at] = static_cast<uint32_t>(value);
  dwords[at + 1] = static_cast<uint32_t>(value >> 32);
}

}  // namespace

std::vector<EncodedQueue> encode(const Program& program, const Addresses& addresses,
                                 uint64_t copy_bytes_max, bool callers) {
  if (program.mode == Mode::capture) {
    fail(Code::unsupported, "a captured program has no packets: its polls set their words to 0");
  }
  std::vector<EncodedQueue> streams;
  for (uint32_t index = 0; index < program.queues.size(); ++index) {
    if (program.queues[index].index == kCallerQueue && !callers) continue;
    streams.push_back(QueueEncoder(program, addresses, copy_bytes_max).run(index));
  }
  return streams;
}

void replay(EncodedQueue& stream, const Addresses& from, const Addresses& to) {
  for (const Patch& patch : stream.patches) {
    if (patch.what != Patch::PatchKind::address) continue;
    const uint64_t moved = to.base(patch.buffer, patch.rank) - from.base(patch.buffer, patch.rank);
    if (moved % kBaseAlign == 0) continue;
    fail(Code::invalid, "buffer ", unsigned{patch.buffer}, " has moved by no multiple of ",
         kBaseAlign, " bytes: encode the program anew");
  }
  if ((to.timestamps - from.timestamps) % kTimestampAlign != 0 || to.scratch % 4 != 0) {
    fail(Code::invalid, "timestamps need addresses that are multiples of ", kTimestampAlign);
  }
  for (const Patch& patch : stream.patches) {
    switch (patch.what) {
      case Patch::PatchKind::address:
        store64(stream.dwords, patch.dword, to.base(patch.buffer, patch.rank) + patch.value);
        break;
      case Patch::PatchKind::flag:
        stream.dwords[patch.dword] = to.epoch + static_cast<uint32_t>(patch.value);
        break;
      case Patch::PatchKind::scratch:
        store64(stream.dwords, patch.dword, to.scratch + patch.value);
        break;
      case Patch::PatchKind::timestamp:
        store64(stream.dwords, patch.dword, to.timestamps + patch.value);
        break;
    }
  }
}

}  // namespace offcore::sdma
