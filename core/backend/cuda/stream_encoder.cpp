#include "core/backend/cuda/stream_encoder.h"

#include <algorithm>
#include <utility>

#include "core/backend/cuda/dual_engine.h"
#include "core/ir/text.h"

namespace offcore::cuda {
namespace {

constexpr size_t kCopiesMax = 1024;  // in a batch
constexpr uint32_t kLooksPerPeer = 4;
constexpr uint32_t kLooksMax = 16;

// Rows of pages that cores have laid side by side are few, and all the engine is to copy.
constexpr uint32_t kPackedCallMin = 2;

uint32_t call_min(const Program& program, const EncodeOptions& options) {
  const bool paged = program.buffers.back().kind == Buffer::Home::paged;
  return paged ? std::min(kPackedCallMin, options.call_min) : options.call_min;
}

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

StreamEncoder::StreamEncoder(const LocalGpu& device, CUstream stream, const SignalSource& source,
                             const Program& program, const Launch& launch,
                             const MappingTable& mappings, const EncodeOptions& options,
                             const MappingTwins* twins, SubmitStats& stats)
    : device_(device),
      stream_(stream),
      source_(source),
      program_(program),
      launch_(launch),
      mappings_(mappings),
      options_(options),
      twins_(twins),
      stats_(stats),
      batches_(takes_batches()),
      call_min_(call_min(program, options)) {
  if (device.copy_kernel() != nullptr) kernel_copies_.emplace(*device.copy_kernel(), stream);
}

void StreamEncoder::lead(std::span<const Command> commands) {
  leading_ = true;
  run(commands);
  leading_ = false;
}

void StreamEncoder::run(std::span<const Command> commands) {
  add(commands);
  flush();
}

void StreamEncoder::whole(std::span<const Command> queue) {
  expect(queue);
  run(queue);
}

void StreamEncoder::add(std::span<const Command> commands) {
  bool in_group = false;
  for (size_t i = 0; i < commands.size(); ++i) {
    if (const size_t taken = program_.reduction ? reduce(commands.subspan(i)) : 0; taken > 0) {
      i += taken - 1;
      continue;
    }
    const bool data = moves_data(commands[i].op);
    if (data && !in_group) many_ = in_calls(commands.subspan(i), call_min_);
    in_group = data;
    run(commands[i]);
  }
}

void StreamEncoder::run(const Command& command) {
  flush_jobs();
  if (command.op != Op::signal) flush_aside();
  const bool signalled = std::exchange(signalled_, command.op == Op::signal && aside_ == nullptr);
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
      stats_.stamps.push_back({command.value, device_.event(true)});
      return stats_.stamps.back().event.record(stream_);
    case Op::fence:
      return flush_copies();
    case Op::reduce:  // add() has taken it
      return;
    case Op::swap:
      fail(Code::unsupported, "no GPU of NVIDIA swaps: legalize the program for its machine");
  }
}

void StreamEncoder::flush() {
  flush_jobs();
  flush_copies();
  flush_ops();
  flush_aside();
}

StreamEncoder::MappedAddress StreamEncoder::place(const Slice& slice) const {
  std::byte* base = launch_.binding.base(slice.buffer, slice.rank);
  if (slice.buffer == kFlagBuffer) {
    if (slice.rank == kHostRank && mappings_.find(base) == nullptr) {
      return {device_pointer(base) + slice.offset * kWordBytes, nullptr};
    }
    base += slice.offset * kWordBytes;
  } else {
    base += slice.offset;
  }
  const auto address = reinterpret_cast<CUdeviceptr>(base);
  const PeerMapping* mapping = mappings_.find(base);
  if (mapping == nullptr || twins_ == nullptr) return {address, mapping};
  const auto twin = twins_->find(mapping);
  if (twin == twins_->end()) return {address, mapping};
  return {address - mapping->base() + twin->second->base(), twin->second.get()};
}

CUdeviceptr StreamEncoder::address(const Slice& slice) const {
  if (twins_ != nullptr) return place(slice).address;
  // Only a mapping that stands in for another one changes it, and to look for mappings takes a
  // while.
  const std::byte* base = launch_.binding.base(slice.buffer, slice.rank);
  return reinterpret_cast<CUdeviceptr>(base + slice.offset);
}

// Whether the ranks' parts of the buffer lie in the mapping as they follow each other.
bool StreamEncoder::walks(const Slice& slice, uint32_t rows, const PeerMapping* mapping) const {
  if (mapping == nullptr || mapping->ranks() != program_.ranks || rows > program_.ranks)
    return false;
  const auto at = [&](Rank rank) {
    return reinterpret_cast<CUdeviceptr>(launch_.binding.base(slice.buffer, rank));
  };
  for (uint32_t row = 1; row < rows; ++row) {
    const Rank rank = row_of(slice, kRankStep, row, program_.ranks).rank;
    // Unsigned, so a rank before the first wraps, on both sides alike.
    if (at(rank) - at(slice.rank) != (uint64_t{rank} - slice.rank) * mapping->stride())
      return false;
  }
  return true;
}

void StreamEncoder::add(uint32_t operation, CUdeviceptr address, uint32_t value, unsigned flags) {
  flush_copies();
  if (ops_.size() == kMemOpsMax) flush_ops();
  ops_.push_back({.operation = operation, .address = address, .value = value, .flags = flags});
}

// The word itself, never a double: whoever releases the poll writes there.
CUdeviceptr StreamEncoder::polled_word(const Slice& word) const {
  std::byte* base = launch_.binding.base(kFlagBuffer, word.rank);
  const bool device = mappings_.find(base) != nullptr;
  return (device ? reinterpret_cast<CUdeviceptr>(base) : device_pointer(base)) +
         word.offset * kWordBytes;
}

void StreamEncoder::poll(const Command& command) {
  const bool captured = program_.mode == Mode::capture;
  std::vector<CUdeviceptr> consumed;
  for (uint32_t row = 0; row < command.rows; ++row) {
    const CUdeviceptr address =
        polled_word(row_of(command.dst, command.dst_step, row, program_.ranks));
    // In what order a batch is executed the driver does not say: a word of this stream's own comes
    // from an earlier one.
    const auto writes = [&](const CUstreamMemOp& op) {
      return op.operation == kOpWrite32 && op.address == address;
    };
    if (std::any_of(ops_.begin(), ops_.end(), writes)) flush_ops();
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
void StreamEncoder::linger() {
  if (source_.signal_table == nullptr || program_.mode == Mode::capture) return;
  const uint32_t value = launch_.epoch + 1;
  const CUdeviceptr there = source_.signal_table->find(value);
  const uint32_t looks = std::min(kLooksPerPeer * (program_.ranks - 1), kLooksMax);
  for (uint32_t look = 0; there != 0 && look < looks; ++look) wait(there, value);
}

void StreamEncoder::expect(std::span<const Command> commands) {
  strided_signals_ = std::none_of(commands.begin(), commands.end(),
                                  [&](const Command& command) { return goes_plain(command); });
}

bool StreamEncoder::one_command(const Command& signal) const {
  return strided_signals_ && signal.rows > 1 && signal.dst_step == kRankStep &&
         signal.dst.rank != kHostRank &&
         walks(signal.dst, signal.rows, place(signal.dst).mapping) &&
         place(signal.dst).mapping->strided() && place(signal.dst).mapping->stride() <= kPitchMax;
}

void StreamEncoder::signal(const Command& command) {
  if (&command < aside_end_) return signal_aside(command);
  const uint32_t value = launch_.epoch + command.value;
  flush_copies();
  const bool copied = source_.signal_table != nullptr &&
                      (leading_ || (options_.signals == SignalForm::copy_order && !batched_));
  const CUdeviceptr preset = copied ? source_.signal_table->find(value) : 0;
  const Rank own = device_.rank();
  if (one_command(command)) {
    if (preset == 0) add(kOpWrite32, source_.word, value);
    flush();
    const MappedAddress dst = place(command.dst);
    const PeerMapping& words = source_.words;
    const CUdeviceptr src = preset == 0 ? source_.word : preset;
    const StridedCopy rows{.dst = dst.address,
                           .dst_pitch = dst.mapping->stride(),
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

bool StreamEncoder::within(const Command& command) const {
  const auto here = [&](const Slice& slice, int64_t step) {
    return slice.rank == device_.rank() && (command.rows == 1 || step != kRankStep);
  };
  return here(command.dst, command.dst_step) && here(command.src, command.src_step);
}

// Whether it leaves the GPU for another one by copies that are not strided.
bool StreamEncoder::goes_plain(const Command& command) const {
  if (!moves_data(command.op) || within(command)) return false;
  if (command.dst.rank == kHostRank || command.src.rank == kHostRank) return false;
  if (command.rows == 1) return true;
  MappedAddress dst = place(command.dst);
  MappedAddress src = place(command.src);
  uint64_t dst_pitch = 0;
  uint64_t src_pitch = 0;
  return !pitches(command, dst, src, dst_pitch, src_pitch);
}

void StreamEncoder::copy(const Command& command) {
  if (paged(command)) return;
  const Rank own = device_.rank();
  if (command.rows > 1 && !within(command)) {
    MappedAddress dst = place(command.dst);
    MappedAddress src = place(command.src);
    uint64_t dst_pitch = 0;
    uint64_t src_pitch = 0;
    if (pitches(command, dst, src, dst_pitch, src_pitch)) {
      const StridedCopy rows{.dst = dst.address,
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
bool StreamEncoder::pitches(const Command& command, MappedAddress& dst, MappedAddress& src,
                            uint64_t& dst_pitch, uint64_t& src_pitch) const {
  const auto pitch = [&](const Slice& slice, int64_t step, MappedAddress& at, uint64_t& result) {
    if (step == kRankStep) {
      if (slice.rank == kHostRank || !walks(slice, command.rows, at.mapping)) return false;
      if (!at.mapping->strided()) return false;
      result = at.mapping->stride();
    } else if (step == 0) {  // one source, read through its repeated mappings
      if (at.mapping == nullptr || slice.rank != device_.rank()) return false;
      const CUdeviceptr repeated = at.mapping->repeated(slice.rank);
      if (repeated == 0 || command.rows > at.mapping->ranks()) return false;
      at.address = repeated + (at.address - at.mapping->part(slice.rank));
      result = at.mapping->stride();
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
bool StreamEncoder::gather(const StridedCopy& rows) {
  if (!kernel_copies_ || rows.dst_host == rows.src_host || !KernelCopies::takes(rows)) return false;
  flush_ops();
  stats_.calls.kernels += kernel_copies_->add(rows);
  return true;
}

// False: the driver refuses it.
bool StreamEncoder::strided(StridedCopy rows) {
  flush();
  const DualEngine* crossing = launch_.crossed ? device_.crossing() : nullptr;
  const bool crossed = crossing != nullptr && crossing->turn(rows);
  const CUresult result = copy_rows(rows, stream_);
  // Its caller does without crossed launches from then on (kv/transfer_worker.h).
  if (crossed) submitted(result, "a crossed copy of rows");
  if (!crossed && !accepted(result, "a strided copy")) return false;
  ++stats_.calls.strided;
  stats_.calls.crossed += crossed;
  return true;
}

// Whether batches of copies go into the stream: the driver takes none where it is captured, or the
// legacy default one.
bool StreamEncoder::takes_batches() const {
  return program_.mode != Mode::capture && reinterpret_cast<uintptr_t>(stream_) != kLegacyStream &&
         Driver::get().cuMemcpyBatchAsync != nullptr;
}

// A copy that leaves the GPU, or comes to it. Several in a row to other GPUs cost little more than
// one where they are a batch: an all-gather of 4 KiB on 4 x H200 takes 11 us then, one by one 17.
void StreamEncoder::outside(const Slice& dst, const Slice& src, uint64_t bytes) {
  const bool host = (dst.rank == kHostRank) != (src.rank == kHostRank);
  const CUdeviceptr to = address(dst);
  const CUdeviceptr from = address(src);
  if (kernel_copies_ && gather({.dst = to,
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

void StreamEncoder::plain(CUdeviceptr dst, CUdeviceptr src, uint64_t bytes) {
  flush();
  ++stats_.calls.plain;
  submitted(Driver::get().cuMemcpyAsync(dst, src, bytes, stream_), "cuMemcpyAsync");
}

void StreamEncoder::submitted(CUresult result, const char* call) {
  check(result, call);
  stats_.submitted = true;
}

bool StreamEncoder::accepted(CUresult result, const char* call) {
  if (refused(result)) {
    stats_.native = false;
    return false;
  }
  submitted(result, call);
  return true;
}

// For a batch of at most so many copies.
void StreamEncoder::collect(CUdeviceptr dst, CUdeviceptr src, uint64_t bytes, unsigned flags,
                            size_t most) {
  flush_ops();
  if (flags != flags_ || sizes_.size() == most) flush_copies();
  flags_ = flags;
  dsts_.push_back(dst);
  srcs_.push_back(src);
  sizes_.push_back(bytes);
}

void StreamEncoder::flush_copies() {
  if (kernel_copies_) {
    const uint32_t kernels = kernel_copies_->flush();
    stats_.calls.kernels += kernels;
    stats_.submitted = stats_.submitted || kernels > 0;
  }
  if (sizes_.empty()) return;
  const Driver& driver = Driver::get();
  const bool alone = (sizes_.size() == 1 && flags_ == 0) || !batches_;
  CUmemcpyAttributes attributes{.src_order = kSrcOrderStream, .flags = flags_};
  size_t first = 0;
  if (!alone && accepted(driver.cuMemcpyBatchAsync(dsts_.data(), srcs_.data(), sizes_.data(),
                                                   sizes_.size(), &attributes, &first, 1, stream_),
                         "cuMemcpyBatchAsync")) {
    batched_ = true;
    ++stats_.calls.batches;
    stats_.calls.batched += static_cast<uint32_t>(sizes_.size());
  } else {
    if (flags_ == kPreferOverlap) stats_.own_copy = OwnCopy::sm;
    for (size_t i = 0; i < sizes_.size(); ++i) {
      submitted(driver.cuMemcpyAsync(dsts_[i], srcs_[i], sizes_[i], stream_), "cuMemcpyAsync");
      ++stats_.calls.plain;
    }
  }
  dsts_.clear();
  srcs_.clear();
  sizes_.clear();
}

void StreamEncoder::flush_ops() {
  if (ops_.empty()) return;
  submitted(
      Driver::get().cuStreamBatchMemOp(stream_, static_cast<unsigned>(ops_.size()), ops_.data(), 0),
      "cuStreamBatchMemOp");
  ops_.clear();
}

}  // namespace offcore::cuda
