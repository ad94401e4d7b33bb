#include "core/backend/cuda/feed.h"

#include <algorithm>
#include <utility>

#include "core/backend/cuda/crossing.h"
#include "core/backend/cuda/engine_alias.h"
#include "core/ir/text.h"

namespace offcore::cuda {
namespace {

constexpr size_t kCopiesMax = 1024;    // in a batch
constexpr size_t kOwnCopiesMax = 32;   // in one within a GPU: the engine starts on it meanwhile
constexpr size_t kHostCopiesMany = 8;  // collectives have fewer, which stay as they are
constexpr uint32_t kLooksPerPeer = 4;
constexpr uint32_t kLooksMax = 16;

CUdeviceptr device_pointer(std::byte* host) {
  CUdeviceptr pointer = 0;
  check(Driver::get().cuMemHostGetDevicePointer(&pointer, host, 0), "cuMemHostGetDevicePointer");
  return pointer;
}

}  // namespace

bool worth_batches(std::span<const Command> rest) {
  size_t copies = 0;
  for (const Command& command : rest) {
    if (copies == kHostCopiesMany) break;
    if (command.op == Op::fence) continue;  // where a call ends
    if (!moves_data(command.op)) break;
    copies +=
        command.rows == 1 && (command.dst.rank == kHostRank) != (command.src.rank == kHostRank);
  }
  return copies == kHostCopiesMany;
}

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
      notes_(notes),
      batches_(takes_batches()) {
  if (device.gather() != nullptr) gathering_.emplace(*device.gather(), stream);
}

void Feed::lead(std::span<const Command> commands) {
  leading_ = true;
  run(commands);
  leading_ = false;
}

void Feed::run(std::span<const Command> commands) {
  add(commands);
  flush();
}

void Feed::whole(std::span<const Command> queue) {
  expect(queue);
  run(queue);
}

void Feed::add(std::span<const Command> commands) {
  bool in_group = false;
  for (size_t i = 0; i < commands.size(); ++i) {
    const bool data = moves_data(commands[i].op);
    if (data && !in_group) many_ = worth_batches(commands.subspan(i));
    in_group = data;
    run(commands[i]);
  }
}

void Feed::run(const Command& command) {
  const bool signalled = std::exchange(signalled_, command.op == Op::signal);
  switch (command.op) {
    case Op::copy:
      return copy(command);
    case Op::poll:
      if (signalled) linger();
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

CUdeviceptr Feed::address(const Slice& slice) const {
  if (doubles_ != nullptr) return place(slice).address;
  // Only a ring that stands in for another one changes it, and to look for rings takes a while.
  const std::byte* base = launch_.binding.base(slice.buffer, slice.rank);
  return reinterpret_cast<CUdeviceptr>(base + slice.offset);
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

// A wait that does not find its word costs a GPU 4 us beyond the word's coming, and puts it so far
// behind that its peer's next wait fails as well; ranks that have once come apart stay so for many
// calls. Peers' words come a little after this rank's own have gone, so waits for words that are
// there pass that time (0.2 us each): with them most calls of 4 KiB take 7.6 us on 2 x H200 and 8.6
// on 4, without them 7 to 11.
void Feed::linger() {
  if (source_.presets == nullptr || program_.mode == Mode::capture) return;
  const uint32_t value = launch_.epoch + 1;
  const CUdeviceptr there = source_.presets->find(value);
  const uint32_t looks = std::min(kLooksPerPeer * (program_.ranks - 1), kLooksMax);
  for (uint32_t look = 0; there != 0 && look < looks; ++look) wait(there, value);
}

void Feed::expect(std::span<const Command> commands) {
  strided_signals_ = std::none_of(commands.begin(), commands.end(),
                                  [&](const Command& command) { return goes_plain(command); });
}

bool Feed::one_command(const Command& signal) const {
  return strided_signals_ && signal.rows > 1 && signal.dst_step == kRankStep &&
         signal.dst.rank != kHostRank && walks(signal.dst, signal.rows, place(signal.dst).ring) &&
         place(signal.dst).ring->strided() && place(signal.dst).ring->stride() <= kPitchMax;
}

void Feed::signal(const Command& command) {
  const uint32_t value = launch_.epoch + command.value;
  flush_copies();
  const bool copied = source_.presets != nullptr &&
                      (leading_ || (habits_.signals == SignalForm::copy_order && !batched_));
  const CUdeviceptr preset = copied ? source_.presets->find(value) : 0;
  const Rank own = device_.rank();
  if (one_command(command)) {
    if (preset == 0) add(kOpWrite32, source_.word, value);
    flush();
    const Place dst = place(command.dst);
    const Ring& words = source_.words;
    const CUdeviceptr src = preset == 0 ? source_.word : preset;
    const Rows rows{.dst = dst.address,
                    .dst_pitch = dst.ring->stride(),
                    .src = words.repeated(own) + (src - words.part(own)),
                    .src_pitch = words.stride(),
                    .bytes = sizeof value,
                    .rows = command.rows};
    if (accepted(copy_rows(rows, stream_), "a strided copy of a signal")) return;
  }
  const Rank to = command.dst.rank;
  if (preset != 0 && command.rows == 1 && to != kHostRank && to != own) {
    flush();
    return submitted(
        Driver::get().cuMemcpyAsync(place(command.dst).address, preset, sizeof value, stream_),
        "cuMemcpyAsync");
  }
  for (uint32_t row = 0; row < command.rows; ++row) {
    add(kOpWrite32, place(row_of(command.dst, command.dst_step, row, program_.ranks)).address,
        value);
  }
}

bool Feed::within(const Command& command) const {
  const auto here = [&](const Slice& slice, int64_t step) {
    return slice.rank == device_.rank() && (command.rows == 1 || step != kRankStep);
  };
  return here(command.dst, command.dst_step) && here(command.src, command.src_step);
}

// Whether it leaves the GPU for another one by copies that are not strided.
bool Feed::goes_plain(const Command& command) const {
  if (!moves_data(command.op) || within(command)) return false;
  if (command.dst.rank == kHostRank || command.src.rank == kHostRank) return false;
  if (command.rows == 1) return true;
  Place dst = place(command.dst);
  Place src = place(command.src);
  uint64_t dst_pitch = 0;
  uint64_t src_pitch = 0;
  return !pitches(command, dst, src, dst_pitch, src_pitch);
}

void Feed::copy(const Command& command) {
  const Rank own = device_.rank();
  if (command.rows > 1 && !within(command)) {
    Place dst = place(command.dst);
    Place src = place(command.src);
    uint64_t dst_pitch = 0;
    uint64_t src_pitch = 0;
    if (pitches(command, dst, src, dst_pitch, src_pitch)) {
      const Rows rows{.dst = dst.address,
                      .dst_pitch = dst_pitch,
                      .src = src.address,
                      .src_pitch = src_pitch,
                      .bytes = command.bytes,
                      .rows = command.rows,
                      .dst_host = command.dst.rank == kHostRank,
                      .src_host = command.src.rank == kHostRank};
      if (gather(rows) || strided(rows)) return;
    }
  }
  const auto one = [&](const Slice& dst, const Slice& src) {
    if (dst.rank == own && src.rank == own) {
      inside(place(dst).address, place(src).address, command.bytes);
    } else {
      outside(dst, src, command.bytes);
    }
  };
  if (command.rows == 1) return one(command.dst, command.src);
  for (uint32_t row = 0; row < command.rows; ++row) {
    one(row_of(command.dst, command.dst_step, row, program_.ranks),
        row_of(command.src, command.src_step, row, program_.ranks));
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
  const auto fits = [&](uint64_t result) {
    const uint64_t height = rows_of_slice(result);
    return height != 0 && result / height >= command.bytes;
  };
  return fits(dst_pitch) && fits(src_pitch);
}

// Leaves a copy between the host and the GPU to the kernel, where there is one that takes it.
bool Feed::gather(const Rows& rows) {
  if (!gathering_ || rows.dst_host == rows.src_host || !Gathering::takes(rows)) return false;
  flush_ops();
  notes_.calls.kernels += gathering_->add(rows);
  return true;
}

// False: the driver refuses it.
bool Feed::strided(Rows rows) {
  flush();
  const Crossing* crossing = launch_.crossed ? device_.crossing() : nullptr;
  const bool crossed = crossing != nullptr && crossing->turn(rows);
  const CUresult result = copy_rows(rows, stream_);
  // Its caller does without crossed launches from then on (kv/courier.h).
  if (crossed) submitted(result, "a crossed copy of rows");
  if (!crossed && !accepted(result, "a strided copy")) return false;
  ++notes_.calls.strided;
  notes_.calls.crossed += crossed;
  return true;
}

// Whether batches of copies go into the stream: the driver takes none where it is captured, or the
// legacy default one.
bool Feed::takes_batches() const {
  return program_.mode != Mode::capture && reinterpret_cast<uintptr_t>(stream_) != kLegacyStream &&
         Driver::get().cuMemcpyBatchAsync != nullptr;
}

// A copy that leaves the GPU, or comes to it. Several in a row to other GPUs cost little more than
// one where they are a batch: an all-gather of 4 KiB on 4 x H200 takes 11 us then, one by one 17.
void Feed::outside(const Slice& dst, const Slice& src, uint64_t bytes) {
  const bool host = (dst.rank == kHostRank) != (src.rank == kHostRank);
  const CUdeviceptr to = address(dst);
  const CUdeviceptr from = address(src);
  if (gathering_ && gather({.dst = to,
                            .src = from,
                            .bytes = bytes,
                            .rows = 1,
                            .dst_host = dst.rank == kHostRank,
                            .src_host = src.rank == kHostRank})) {
    return;
  }
  if ((host && !many_) || !batches_) return plain(to, from, bytes);
  collect(to, from, bytes, 0, kCopiesMax);
}

void Feed::inside(CUdeviceptr dst, CUdeviceptr src, uint64_t bytes) {
  if (!habits_.own_copy_on_sm && !habits_.parked && device_.engine_alias() != nullptr) {
    const uint64_t done = by_engine(dst, src, bytes);
    if (done == bytes) return;
    dst += done;
    src += done;
    bytes -= done;
  }
  const bool asked = !habits_.own_copy_on_sm && batches_;
  notes_.own_copy = std::max(notes_.own_copy, asked ? OwnCopy::hint : OwnCopy::sm);
  if (!asked) return plain(dst, src, bytes);
  collect(dst, src, bytes, kPreferOverlap, kOwnCopiesMax);
}

// The bytes that are copied so: all, unless the driver refuses some.
uint64_t Feed::by_engine(CUdeviceptr dst, CUdeviceptr src, uint64_t bytes) {
  flush();
  uint64_t done = 0;
  while (done < bytes) {
    const CUmemcpy2D piece = device_.engine_alias()->first(dst + done, src + done, bytes - done);
    if (!accepted(Driver::get().cuMemcpy2DAsync(&piece, stream_), "cuMemcpy2DAsync")) break;
    ++notes_.calls.strided;
    done += piece.width;
  }
  return done;
}

void Feed::plain(CUdeviceptr dst, CUdeviceptr src, uint64_t bytes) {
  flush();
  ++notes_.calls.plain;
  submitted(Driver::get().cuMemcpyAsync(dst, src, bytes, stream_), "cuMemcpyAsync");
}

void Feed::submitted(CUresult result, const char* call) {
  check(result, call);
  notes_.submitted = true;
}

bool Feed::accepted(CUresult result, const char* call) {
  if (refused(result)) {
    notes_.native = false;
    return false;
  }
  submitted(result, call);
  return true;
}

// For a batch of at most so many copies.
void Feed::collect(CUdeviceptr dst, CUdeviceptr src, uint64_t bytes, unsigned flags, size_t most) {
  flush_ops();
  if (flags != flags_ || sizes_.size() == most) flush_copies();
  flags_ = flags;
  dsts_.push_back(dst);
  srcs_.push_back(src);
  sizes_.push_back(bytes);
}

void Feed::flush_copies() {
  if (gathering_) {
    const uint32_t kernels = gathering_->flush();
    notes_.calls.kernels += kernels;
    notes_.submitted = notes_.submitted || kernels > 0;
  }
  if (sizes_.empty()) return;
  const Driver& driver = Driver::get();
  const bool alone = sizes_.size() == 1 && flags_ == 0;
  CUmemcpyAttributes attributes{.src_order = kSrcOrderStream, .flags = flags_};
  size_t first = 0;
  if (!alone && accepted(driver.cuMemcpyBatchAsync(dsts_.data(), srcs_.data(), sizes_.data(),
                                                   sizes_.size(), &attributes, &first, 1, stream_),
                         "cuMemcpyBatchAsync")) {
    batched_ = true;
    ++notes_.calls.batches;
    notes_.calls.batched += static_cast<uint32_t>(sizes_.size());
  } else {
    if (flags_ == kPreferOverlap) notes_.own_copy = OwnCopy::sm;
    for (size_t i = 0; i < sizes_.size(); ++i) {
      submitted(driver.cuMemcpyAsync(dsts_[i], srcs_[i], sizes_[i], stream_), "cuMemcpyAsync");
      ++notes_.calls.plain;
    }
  }
  dsts_.clear();
  srcs_.clear();
  sizes_.clear();
}

void Feed::flush_ops() {
  if (ops_.empty()) return;
  submitted(
      Driver::get().cuStreamBatchMemOp(stream_, static_cast<unsigned>(ops_.size()), ops_.data(), 0),
      "cuStreamBatchMemOp");
  ops_.clear();
}

}  // namespace offcore::cuda
