#include "core/backend/cuda/feed.h"

#include <algorithm>

#include "core/ir/text.h"

namespace offcore::cuda {
namespace {

constexpr size_t kCopiesMax = 1024;  // in a batch

CUdeviceptr device_pointer(std::byte* host) {
  CUdeviceptr pointer = 0;
  check(Driver::get().cuMemHostGetDevicePointer(&pointer, host, 0), "cuMemHostGetDevicePointer");
  return pointer;
}

}  // namespace

std::string_view to_string(SignalForm form) {
  return form == SignalForm::copy_order ? "copy_order" : "fenced";
}

SignalForm parse_signals(std::string_view text) {
  if (text == "copy_order") return SignalForm::copy_order;
  if (text == "fenced") return SignalForm::fenced;
  fail(Code::invalid, "unknown signal form '", text, "': auto, fenced or copy_order");
}

Feed::Feed(const Device& device, CUstream stream, const Source& source, const Program& program,
           const Launch& launch, const Rings& rings, const Habits& habits, const Doubles* doubles,
           Notes& notes)
    : device_(device),
      stream_(stream),
      source_(source),
      program_(program),
      launch_(launch),
      rings_(rings),
      habits_(habits),
      doubles_(doubles),
      notes_(notes) {}

void Feed::run(std::span<const Command> commands) {
  for (const Command& command : commands) run(command);
  flush();
}

void Feed::run(const Command& command) {
  switch (command.op) {
    case Op::copy:
      return copy(command);
    case Op::poll:
      return poll(command);
    case Op::signal:
      return signal(command);
    case Op::timestamp:
      flush();
      notes_.stamps.push_back({command.value, device_.event(true)});
      return notes_.stamps.back().event.record(stream_);
    case Op::fence:
      return flush_copies();
    case Op::swap:
      fail(Code::unsupported, "no GPU of NVIDIA swaps: legalize the program for its machine");
  }
}

void Feed::flush() {
  flush_copies();
  flush_ops();
}

Feed::Place Feed::place(const Slice& slice) const {
  std::byte* base = launch_.binding.base(slice.buffer, slice.rank);
  if (slice.buffer == kFlagBuffer) {
    if (slice.rank == kHostRank && rings_.find(base) == nullptr) {
      return {device_pointer(base) + slice.offset * kWordBytes, nullptr};
    }
    base += slice.offset * kWordBytes;
  } else {
    base += slice.offset;
  }
  const auto address = reinterpret_cast<CUdeviceptr>(base);
  const Ring* ring = rings_.find(base);
  if (ring == nullptr || doubles_ == nullptr) return {address, ring};
  const auto twin = doubles_->find(ring);
  if (twin == doubles_->end()) return {address, ring};
  return {address - ring->base() + twin->second->base(), twin->second.get()};
}

// Whether the ranks' parts of the buffer lie in the ring as they follow each other.
bool Feed::walks(const Slice& slice, uint32_t rows, const Ring* ring) const {
  if (ring == nullptr || ring->ranks() != program_.ranks || rows > program_.ranks) return false;
  const auto at = [&](Rank rank) {
    return reinterpret_cast<CUdeviceptr>(launch_.binding.base(slice.buffer, rank));
  };
  for (uint32_t row = 1; row < rows; ++row) {
    const Rank rank = row_of(slice, kRankStep, row, program_.ranks).rank;
    // Unsigned, so a rank before the first wraps, on both sides alike.
    if (at(rank) - at(slice.rank) != (uint64_t{rank} - slice.rank) * ring->stride()) return false;
  }
  return true;
}

void Feed::add(uint32_t operation, CUdeviceptr address, uint32_t value, unsigned flags) {
  flush_copies();
  if (ops_.size() == kMemOpsMax) flush_ops();
  ops_.push_back({.operation = operation, .address = address, .value = value, .flags = flags});
}

void Feed::poll(const Command& command) {
  const bool captured = program_.mode == Mode::capture;
  std::vector<CUdeviceptr> consumed;
  for (uint32_t row = 0; row < command.rows; ++row) {
    const Slice word = row_of(command.dst, command.dst_step, row, program_.ranks);
    std::byte* base = launch_.binding.base(kFlagBuffer, word.rank);
    const bool device = rings_.find(base) != nullptr;
    // The word itself, never a double: whoever releases the poll writes there.
    const CUdeviceptr address =
        (device ? reinterpret_cast<CUdeviceptr>(base) : device_pointer(base)) +
        word.offset * kWordBytes;
    add(kOpWait32, address, launch_.epoch + command.value, captured ? kWaitEq : kWaitGeq);
    if (captured) consumed.push_back(address);
  }
  for (CUdeviceptr word : consumed) add(kOpWrite32, word, 0);
}

bool Feed::one_command(const Command& signal) const {
  return signal.rows > 1 && signal.dst_step == kRankStep && signal.dst.rank != kHostRank &&
         walks(signal.dst, signal.rows, place(signal.dst).ring) &&
         place(signal.dst).ring->strided() && place(signal.dst).ring->stride() <= kPitchMax;
}

void Feed::signal(const Command& command) {
  const uint32_t value = launch_.epoch + command.value;
  const CUdeviceptr preset = source_.presets == nullptr ? 0 : source_.presets->find(value);
  const Rank own = device_.rank();
  if (one_command(command)) {
    if (preset == 0) add(kOpWrite32, source_.word, value);
    flush();
    const Place dst = place(command.dst);
    const Ring& words = source_.words;
    const CUdeviceptr src = preset == 0 ? source_.word : preset;
    return strided(dst.address, dst.ring->stride(), words.repeated(own) + (src - words.part(own)),
                   words.stride(), sizeof value, command.rows);
  }
  const Rank to = command.dst.rank;
  if (preset != 0 && command.rows == 1 && to != kHostRank && to != own) {
    flush();
    return check(
        Driver::get().cuMemcpyAsync(place(command.dst).address, preset, sizeof value, stream_),
        "cuMemcpyAsync");
  }
  for (uint32_t row = 0; row < command.rows; ++row) {
    add(kOpWrite32, place(row_of(command.dst, command.dst_step, row, program_.ranks)).address,
        value);
  }
}

void Feed::copy(const Command& command) {
  const Rank own = device_.rank();
  const auto here = [&](const Slice& slice, int64_t step) {
    return slice.rank == own && (command.rows == 1 || step != kRankStep);
  };
  const bool within = here(command.dst, command.dst_step) && here(command.src, command.src_step);
  if (command.rows > 1 && !within) {
    Place dst = place(command.dst);
    Place src = place(command.src);
    uint64_t dst_pitch = 0;
    uint64_t src_pitch = 0;
    if (pitches(command, dst, src, dst_pitch, src_pitch)) {
      flush();
      return strided(dst.address, dst_pitch, src.address, src_pitch, command.bytes, command.rows);
    }
  }
  for (uint32_t row = 0; row < command.rows; ++row) {
    const Slice dst = row_of(command.dst, command.dst_step, row, program_.ranks);
    const Slice src = row_of(command.src, command.src_step, row, program_.ranks);
    plain(place(dst).address, place(src).address, command.bytes,
          dst.rank == own && src.rank == own);
  }
}

// The pitches by which one strided copy does the command, if one can.
bool Feed::pitches(const Command& command, Place& dst, Place& src, uint64_t& dst_pitch,
                   uint64_t& src_pitch) const {
  const auto pitch = [&](const Slice& slice, int64_t step, Place& at, uint64_t& result) {
    if (step == kRankStep) {
      if (slice.rank == kHostRank || !walks(slice, command.rows, at.ring)) return false;
      if (!at.ring->strided()) return false;
      result = at.ring->stride();
    } else if (step == 0) {  // one source, read through its repeated mappings
      if (at.ring == nullptr || slice.rank != device_.rank()) return false;
      const CUdeviceptr repeated = at.ring->repeated(slice.rank);
      if (repeated == 0 || command.rows > at.ring->ranks()) return false;
      at.address = repeated + (at.address - at.ring->part(slice.rank));
      result = at.ring->stride();
    } else {
      if (step < 0) return false;
      result = static_cast<uint64_t>(step);
    }
    return result >= command.bytes;
  };
  if (command.dst_step == 0) return false;
  if (!pitch(command.dst, command.dst_step, dst, dst_pitch)) return false;
  if (!pitch(command.src, command.src_step, src, src_pitch)) return false;
  return has_pitch(dst_pitch, command.bytes) && has_pitch(src_pitch, command.bytes);
}

void Feed::plain(CUdeviceptr dst, CUdeviceptr src, uint64_t bytes, bool own) {
  flush_ops();
  const bool batched = !habits_.own_copy_on_sm && program_.mode != Mode::capture &&
                       Driver::get().cuMemcpyBatchAsync != nullptr;
  if (!own || !batched) {
    flush_copies();
    notes_.own_on_sm = notes_.own_on_sm || own;
    return check(Driver::get().cuMemcpyAsync(dst, src, bytes, stream_), "cuMemcpyAsync");
  }
  if (sizes_.size() == kCopiesMax) flush_copies();
  dsts_.push_back(dst);
  srcs_.push_back(src);
  sizes_.push_back(bytes);
}

void Feed::strided(CUdeviceptr dst, uint64_t dst_pitch, CUdeviceptr src, uint64_t src_pitch,
                   uint64_t bytes, uint32_t rows) {
  copy_rows({dst, dst_pitch, src, src_pitch, bytes, rows}, stream_);
}

void Feed::flush_copies() {
  if (sizes_.empty()) return;
  CUmemcpyAttributes attributes{.src_order = kSrcOrderStream, .flags = kPreferOverlap};
  size_t first = 0;
  check(Driver::get().cuMemcpyBatchAsync(dsts_.data(), srcs_.data(), sizes_.data(), sizes_.size(),
                                         &attributes, &first, 1, stream_),
        "cuMemcpyBatchAsync");
  dsts_.clear();
  srcs_.clear();
  sizes_.clear();
}

void Feed::flush_ops() {
  if (ops_.empty()) return;
  check(
      Driver::get().cuStreamBatchMemOp(stream_, static_cast<unsigned>(ops_.size()), ops_.data(), 0),
      "cuStreamBatchMemOp");
  ops_.clear();
}

}  // namespace offcore::cuda
