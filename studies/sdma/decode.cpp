#include "studies/sdma/decode.h"

#include <algorithm>

#include "core/backend/backend.h"
#include "core/backend/sdma/encode.h"
#include "core/base/error.h"

namespace offcore::sdma {
namespace {

constexpr const char* kImpliedAlone = "the FENCE before it belongs to a poll or a timestamp";

// Reads one queue's packets as commands.
class PacketReader {
 public:
  PacketReader(const Program& program, const Addresses& addresses)
      : program_(program), addresses_(addresses), places_(program, addresses) {}

  std::vector<Command> run(std::span<const uint32_t> dwords) {
    for (const Decoded& decoded : decode(dwords)) {
      try {
        if (const std::string why = refusal(decoded.packet); !why.empty()) fail(Code::invalid, why);
        read(decoded.packet);
      } catch (const Error& error) {
        fail(error.code(), "dword ", decoded.dword, " (", layout_of(decoded.packet.kind).name,
             "): ", error.message());
      }
    }
    if (implied_) {
      fail(Code::invalid, "dword ", dwords.size(), " (the end): ", kImpliedAlone);
    }
    return std::move(commands_);
  }

 private:
  void read(const Packet& packet) {
    if (implied_ && packet.kind != PacketKind::poll && packet.kind != PacketKind::timestamp) {
      fail(Code::invalid, kImpliedAlone);
    }
    switch (packet.kind) {
      case PacketKind::copy:
      case PacketKind::swap:
        return push({.dst = data(packet[Field::dst], packet[Field::bytes]),
                     .src = data(packet[Field::src], packet[Field::bytes]),
                     .bytes = packet[Field::bytes],
                     .op = packet.kind == PacketKind::swap ? Op::swap : Op::copy});
      case PacketKind::broadcast:
        return broadcast(packet);
      case PacketKind::rect:
        return rect(packet);
      case PacketKind::poll:
        return poll(packet);
      case PacketKind::fence:
        return fence(packet);
      case PacketKind::timestamp:
        return timestamp(packet);
      case PacketKind::atomic:
      case PacketKind::trap:
      case PacketKind::fill:
      case PacketKind::nop:
        fail(Code::unsupported, "a program has no command for it");
    }
  }

  void push(const Command& command) { commands_.push_back(command); }

  Slice data(uint64_t address, uint64_t bytes) const {
    const Slice place = places_.find(address, bytes);
    if (place.buffer == kFlagBuffer) fail(Code::unsupported, "it copies flag words");
    return place;
  }

  void broadcast(const Packet& packet) {
    const uint64_t bytes = packet[Field::bytes];
    Command command{.dst = data(packet[Field::dst], bytes),
                    .src = data(packet[Field::src], bytes),
                    .bytes = bytes,
                    .rows = 2,
                    .op = Op::copy};
    const Slice second = data(packet[Field::dst2], bytes);
    if (second == command.dst) fail(Code::unsupported, "its two destinations are one");
    if (row_of(command.dst, kRankStep, 1, program_.ranks) == second && program_.ranks > 1) {
      command.dst_step = kRankStep;
    } else if (second.buffer == command.dst.buffer && second.rank == command.dst.rank) {
      command.dst_step = static_cast<int64_t>(second.offset - command.dst.offset);
    } else {
      fail(Code::unsupported, "no step leads from its first destination to its second");
    }
    push(command);
  }

  void rect(const Packet& packet) {
    const uint64_t element = packet[Field::element];
    const bool slices = packet[Field::depth] > 1;
    if (slices && packet[Field::height] > 1) {
      fail(Code::unsupported, "it has rows and slices, and a command one of the two");
    }
    const auto first = [&](Field address, Field x, Field y, Field z, Field pitch, Field slice) {
      return packet[address] +
             ((packet[x] + packet[y] * packet[pitch] + packet[z] * packet[slice]) << element);
    };
    const uint64_t bytes = packet[Field::width] << element;
    const uint64_t dst = first(Field::dst, Field::dst_x, Field::dst_y, Field::dst_z,
                               Field::dst_pitch, Field::dst_slice);
    const uint64_t src = first(Field::src, Field::src_x, Field::src_y, Field::src_z,
                               Field::src_pitch, Field::src_slice);
    Command command{.dst = data(dst, bytes),
                    .src = data(src, bytes),
                    .bytes = bytes,
                    .rows = static_cast<uint32_t>(packet[Field::height] * packet[Field::depth]),
                    .op = Op::copy};
    if (command.rows > 1) {
      // As encode has them: a row begins at x of an address aligned down, and ends in its pitch and
      // before the next one.
      const uint64_t end =
          std::max(packet[Field::dst_x], packet[Field::src_x]) + packet[Field::width];
      uint64_t room = std::min(packet[Field::dst_pitch], packet[Field::src_pitch]);
      if (slices) room = std::min({room, packet[Field::dst_slice], packet[Field::src_slice]});
      if (end > room) fail(Code::unsupported, "its rows are wider than the steps between them");
      const uint64_t dst_step = packet[slices ? Field::dst_slice : Field::dst_pitch] << element;
      const uint64_t src_step = packet[slices ? Field::src_slice : Field::src_pitch] << element;
      data(dst, dst_step * (command.rows - 1) + bytes);
      data(src, src_step * (command.rows - 1) + bytes);
      command.dst_step = static_cast<int64_t>(dst_step);
      command.src_step = static_cast<int64_t>(src_step);
    }
    push(command);
  }

  uint16_t relative(uint64_t value) const {
    const uint32_t less = static_cast<uint32_t>(value) - addresses_.epoch;
    if (less <= UINT16_MAX) return static_cast<uint16_t>(less);
    fail(Code::invalid, "the value ", value, " does not belong to epoch ", addresses_.epoch);
  }

  Slice word(const Packet& packet) const {
    const Slice place = places_.find(packet[Field::dst], 4);
    if (place.buffer != kFlagBuffer) fail(Code::invalid, "its address is not a flag word");
    return place;
  }

  void poll(const Packet& packet) {
    const bool plain = packet[Field::func] == kPollAtLeast && packet[Field::memory] == 1 &&
                       packet[Field::mask] == UINT32_MAX && packet[Field::retry] == kPollForever &&
                       packet[Field::interval] == kPollInterval;
    if (!plain) {
      fail(Code::unsupported,
           "a command polls memory for ever, all 32 bits, until >= its value, every ",
           kPollInterval, " clocks");
    }
    ordered();
    push({.dst = word(packet), .value = relative(packet[Field::value]), .op = Op::poll});
  }

  void fence(const Packet& packet) {
    if (packet[Field::dst] != addresses_.scratch) {
      return push({.dst = word(packet), .value = relative(packet[Field::value]), .op = Op::signal});
    }
    if (packet[Field::value] == kFenceCommand) return push({.op = Op::fence});
    if (packet[Field::value] != kFenceImplied) {
      fail(Code::invalid, "a FENCE to the scratch word has the value ", kFenceCommand, " or ",
           kFenceImplied, ", not ", packet[Field::value]);
    }
    if (!moving()) fail(Code::invalid, "no data commands before it need it");
    implied_ = true;
  }

  bool moving() const { return !commands_.empty() && moves_data(commands_.back().op); }

  void timestamp(const Packet& packet) {
    const uint64_t at = packet[Field::dst] - addresses_.timestamps;
    if (at % kTimestampAlign != 0 || at / kTimestampAlign > UINT16_MAX) {
      fail(Code::invalid, "its address is not that of a timestamp");
    }
    ordered();
    push({.value = static_cast<uint16_t>(at / kTimestampAlign), .op = Op::timestamp});
  }

  // A command that orders its queue: what precedes it has to be behind a FENCE.
  void ordered() {
    if (moving() && !implied_) {
      fail(Code::invalid, "no FENCE orders it after the data commands before it");
    }
    implied_ = false;
  }

  const Program& program_;
  const Addresses& addresses_;
  Places places_;
  std::vector<Command> commands_;
  bool implied_ = false;  // the last packet was the FENCE that a poll or timestamp implies
};

}  // namespace

std::vector<Decoded> decode(std::span<const uint32_t> dwords) {
  std::vector<Decoded> packets;
  for (size_t at = 0; at < dwords.size();) {
    Decoded decoded{.packet = {}, .dword = static_cast<uint32_t>(at)};
    std::string why;
    const uint32_t count = unpack(dwords, at, decoded.packet, 0, why);
    if (count == 0) fail(Code::invalid, why);
    at += count;
    if (decoded.packet.kind != PacketKind::nop) packets.push_back(decoded);
  }
  return packets;
}

Places::Places(const Program& program, const Addresses& addresses) {
  for (const auto& [place, base] : addresses.bases) {
    const auto& [buffer, rank] = place;
    const uint64_t bytes =
        buffer == kFlagBuffer ? program.flag_words * kWordBytes : program.buffers.at(buffer).bytes;
    if (bytes > 0) regions_.push_back({base, base + (bytes - 1), buffer, rank});
  }
  std::sort(regions_.begin(), regions_.end(),
            [](const Region& one, const Region& other) { return one.begin < other.begin; });
}

Slice Places::find(uint64_t address, uint64_t bytes) const {
  const auto after =
      std::upper_bound(regions_.begin(), regions_.end(), address,
                       [](uint64_t at, const Region& region) { return at < region.begin; });
  if (after != regions_.begin()) {
    const Region& region = *(after - 1);
    const uint64_t at = address - region.begin;
    const uint64_t unit = region.buffer == kFlagBuffer ? kWordBytes : 1;
    const bool inside = address <= region.last && bytes - 1 <= region.last - address;
    if (inside && at % unit == 0) return {at / unit, region.rank, region.buffer};
  }
  fail(Code::invalid, bytes, " bytes from address ", hex(address), " on lie in no buffer");
}

std::vector<Command> decode(std::span<const uint32_t> dwords, const Program& program,
                            const Addresses& addresses) {
  return PacketReader(program, addresses).run(dwords);
}

Program decode(const std::vector<EncodedQueue>& streams, Program program,
               const Addresses& addresses) {
  for (const EncodedQueue& stream : streams) {
    program.queues.at(stream.queue).commands = decode(stream.dwords, program, addresses);
  }
  return program;
}

Addresses model_addresses(const Program& program) {
  constexpr uint64_t kOwn = uint64_t{1} << 38;
  constexpr uint64_t kHost = uint64_t{1} << 39;
  constexpr uint64_t kRank = uint64_t{1} << 40;
  constexpr uint64_t kStep = 2 << 20;
  Addresses addresses;
  addresses.scratch = kOwn;
  addresses.timestamps = kOwn + kStep;
  const auto lay_out = [&](Rank rank, uint64_t at) {
    for (size_t id = 0; id < program.buffers.size(); ++id) {
      const Buffer& buffer = program.buffers[id];
      const bool flags = id == kFlagBuffer;
      if (!flags && (buffer.kind == Buffer::Home::host) != (rank == kHostRank)) continue;
      const uint64_t bytes = flags ? program.flag_words * kWordBytes : buffer.bytes;
      addresses.bases[{static_cast<BufferId>(id), rank}] = at;
      if (bytes > kRank - kHost) fail(Code::invalid, "buffer ", buffer.name, " is too large");
      at += bytes / kStep * kStep + kStep;
    }
  };
  for (Rank rank = 0; rank < program.ranks; ++rank) lay_out(rank, kRank * (rank + 1));
  lay_out(kHostRank, kHost);
  return addresses;
}

}  // namespace offcore::sdma
