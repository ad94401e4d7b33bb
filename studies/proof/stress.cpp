#include "studies/proof/stress.h"

#include <algorithm>
#include <utility>

#include "core/base/threads.h"

namespace offcore::cuda {
namespace {

constexpr uint32_t kRoundOperations = 64;  // enqueued at once: far fewer than a stream holds
constexpr uint32_t kBanks = 16;
constexpr uint64_t kNoiseBytes = 1 << 20;
constexpr uint32_t kNoiseCopies = 4;  // a round
constexpr uint64_t kFlagLimitNs = 2'000'000'000;
constexpr double kLetGoS = 10;
constexpr BufferId kChunks = 1;
constexpr BufferId kSource = 2;

}  // namespace

Stress::Stress(const std::vector<int>& ordinals) : OfProcess("the stress") {
  if (ordinals.size() < 2) fail(Code::invalid, "the stress needs at least two GPUs");
  for (int ordinal : ordinals) {
    const auto rank = static_cast<Rank>(devices_.size());
    devices_.push_back(std::make_shared<LocalGpu>(rank, ordinal));
  }
  const auto ranks = static_cast<Rank>(devices_.size());
  words_ = std::make_shared<SignalWords>(ranks, devices_);
  std::vector<RankMemory> parts;
  const uint64_t bytes = banks_at() + (kBanks + ranks) * kChunkBytesMax + 2 * kNoiseBytes;
  for (const auto& device : devices_)
    parts.push_back({{Allocation::create(device->gpu(), bytes, false)}});
  mapping_ = std::make_shared<PeerMapping>(std::move(parts), devices_);
  mapping_->set_strided(mapping_->try_strided(devices_));
  mappings_.add(*mapping_);
  for (const auto& device : devices_) {
    device->gpu().zero(mapping_->part(device->rank()), banks_at());
    seats_.push_back({.device = device,
                      .copies = device->gpu().stream(),
                      .kernel = device->gpu().stream(),
                      .noise = device->gpu().stream(),
                      .word = std::make_unique<SignalWord>(device, words_),
                      .signal_table = std::make_unique<SignalTable>(device, words_),
                      .gate = std::make_unique<SignalWord>(device, words_),
                      .outcome = std::make_unique<SignalWord>(device, words_),
                      .kernels = std::make_unique<Kernels>(device->gpu().context())});
    const StressGpu& seat = seats_.back();
    device->gpu().zero(seat.gate->address(), kWordBytes);
    device->gpu().zero(seat.outcome->address(), kWordBytes);
    // Its first launch, while nothing waits that it could wait for.
    seat.kernels->read(seat.kernel->handle(), {.outcome = seat.outcome->address()});
  }
  if (!finish(Deadline::after_s(kLetGoS))) fail(Code::driver, "a kernel did not end");
}

Stress::~Stress() {
  if (lost_) {  // a GPU still reads and writes it: kept for good
    keep_for_good(std::make_shared<std::vector<StressGpu>>(std::move(seats_)));
    keep_for_good(std::move(mapping_));
    return;
  }
  mappings_.remove(*mapping_);
}

// A rank's memory: two words for each rank, a chunk from each, banks of data.
uint64_t Stress::chunks_at() const { return 4096 * (1 + 2 * devices_.size() * kWordBytes / 4096); }

uint64_t Stress::banks_at() const { return chunks_at() + devices_.size() * kChunkBytesMax; }

// Word r: rank r's data is there; word `ranks` + r: rank r has read this rank's data.
CUdeviceptr Stress::flag(Rank at, uint32_t word) const {
  return mapping_->part(at) + word * kWordBytes;
}

// One operation of one rank: value 0 is the last one's, value 1 this one's.
Program Stress::program(const StressTrial& trial, Rank rank) const {
  const auto ranks = static_cast<Rank>(devices_.size());
  const auto next = static_cast<Rank>((rank + 1) % ranks);
  const uint32_t peers = ranks - 1u;
  Program program{.op = "stress", .ranks = ranks, .flag_words = 2u * ranks, .flag_span = 1};
  program.buffers = {flag_buffer(),
                     {.name = "out", .bytes = ranks * trial.chunk_bytes},
                     {.name = "in", .bytes = (kBanks + ranks) * trial.chunk_bytes}};
  std::vector<Command> commands;
  for (Rank peer = 0; peer < ranks; ++peer) {
    if (peer == rank) continue;
    commands.push_back({.dst = {.offset = uint64_t{ranks} + peer, .rank = rank}, .op = Op::poll});
  }
  Command signal{.dst = {.offset = rank, .rank = next},
                 .dst_step = kRankStep,
                 .rows = peers,
                 .value = 1,
                 .op = Op::signal};
  Command copy{.dst = {.offset = rank * trial.chunk_bytes, .rank = next, .buffer = kChunks},
               .src = {.rank = rank, .buffer = kSource},
               .bytes = trial.chunk_bytes,
               .dst_step = kRankStep,
               .src_step = trial.shape == "fan" ? static_cast<int64_t>(trial.chunk_bytes) : 0,
               .rows = peers,
               .op = Op::copy};
  const bool apart = trial.shape == "pcpy";  // each peer's copy and flag by themselves
  if (apart) {
    copy.rows = signal.rows = 1;
    signal.dst_step = 0;
  }
  for (uint32_t peer = 0; peer < (apart ? peers : 1); ++peer) {
    copy.dst.rank = signal.dst.rank = static_cast<Rank>((next + peer) % ranks);
    commands.push_back(trial.planted ? signal : copy);
    commands.push_back(trial.planted ? copy : signal);
  }
  program.queues = {{.rank = rank, .commands = std::move(commands)}};
  return program;
}

// Binds an operation whose flags get `value`.
Launch Stress::launch(uint32_t value, uint64_t chunk_bytes) const {
  const auto ranks = static_cast<Rank>(devices_.size());
  Launch launch{.binding = Binding(3, ranks), .epoch = value - 1};
  for (Rank rank = 0; rank < ranks; ++rank) {
    const auto part = reinterpret_cast<std::byte*>(mapping_->part(rank));
    launch.binding.base(kFlagBuffer, rank) = part;
    launch.binding.base(kChunks, rank) = part + chunks_at();
    launch.binding.base(kSource, rank) = part + banks_at() + value % kBanks * chunk_bytes;
  }
  return launch;
}

void Stress::fill(const StressTrial& trial) {
  const uint64_t words = trial.chunk_bytes / 4;
  const uint64_t banks = kBanks + devices_.size();
  std::vector<uint32_t> data(banks * words);
  for (const StressGpu& seat : seats_) {
    const Rank rank = seat.device->rank();
    for (uint32_t bank = 0; bank < banks; ++bank) {
      const uint32_t base = bank * kBankStep + rank * kRankShift;
      for (uint32_t at = 0; at < words; ++at) data[bank * words + at] = base + at;
    }
    seat.device->gpu().copy(reinterpret_cast<void*>(mapping_->part(rank) + banks_at()), data.data(),
                            data.size() * sizeof(uint32_t));
    seat.device->gpu().zero(seat.outcome->address(), kWordBytes);
  }
}

void Stress::start(const Round& round) {
  const StressTrial& trial = round.trial;
  const EncodeOptions options{.signals = trial.signals};
  const auto ranks = static_cast<uint32_t>(devices_.size());
  SubmitStats stats;  // nobody asks for them
  ++turn_;
  for (const StressGpu& seat : seats_) {
    const Rank rank = seat.device->rank();
    const ContextGuard current = seat.device->current();
    const Program& program = round.programs[rank];
    const Launch first = launch(value_ + 1, trial.chunk_bytes);
    const SignalSource source{seat.word->address(), words_->mapping(), seat.signal_table.get()};
    seat.signal_table->prepare(value_ + 1, round.count);  // whoever read what was there has ended
    StreamEncoder gate(*seat.device, seat.copies->handle(), source, program, first, mappings_,
                       options, nullptr, stats);
    gate.wait(seat.gate->address(), turn_);
    gate.flush();
    for (uint32_t i = 1; i <= round.count; ++i) {
      const Launch bound = launch(value_ + i, trial.chunk_bytes);
      StreamEncoder encoder(*seat.device, seat.copies->handle(), source, program, bound, mappings_,
                            options, nullptr, stats);
      encoder.whole(program.queues[0].commands);
    }
    seat.kernels->read(seat.kernel->handle(),
                       {.chunks = mapping_->part(rank) + chunks_at(),
                        .flags = flag(rank, 0),
                        .consumed = flag(0, ranks + rank),
                        .stride = mapping_->stride(),
                        .outcome = seat.outcome->address(),
                        .limit_ns = kFlagLimitNs,
                        .words = static_cast<uint32_t>(trial.chunk_bytes / 4),
                        .own = rank,
                        .ranks = ranks,
                        .first = value_ + 1,
                        .count = round.count,
                        .banks = kBanks,
                        .fans = trial.shape == "fan"});
    const CUdeviceptr noise = banks_at() + (kBanks + ranks) * kChunkBytesMax;
    for (uint32_t i = 0; i < kNoiseCopies; ++i) {
      check(Driver::get().cuMemcpyAsync(
                mapping_->part(static_cast<Rank>((rank + 1) % ranks)) + noise + kNoiseBytes,
                mapping_->part(rank) + noise, kNoiseBytes, seat.noise->handle()),
            "cuMemcpyAsync");
    }
  }
  value_ += round.count;
  for (const StressGpu& seat : seats_)
    seat.device->gpu().write_words({seat.gate->address()}, turn_);
}

// Whether all streams are idle before the deadline.
bool Stress::finish(const Deadline& deadline) {
  const int64_t began_ns = now_ns();
  for (const StressGpu& seat : seats_) {
    const ContextGuard current = seat.device->current();
    for (const CudaStream* stream : {seat.copies.get(), seat.kernel.get(), seat.noise.get()}) {
      for (;;) {
        const CUresult result = Driver::get().cuStreamQuery(stream->handle());
        if (result == kSuccess) break;
        if (result != kNotReady) check(result, "a GPU failed: cuStreamQuery");
        if (deadline.passed()) return false;
        nap(now_ns() - began_ns);
        deadline.listen();
      }
    }
  }
  return true;
}

// Releases what waits: as if every rank had read everything up to `value`.
void Stress::let_go(uint32_t value) {
  lost_ = true;
  const auto ranks = static_cast<uint32_t>(devices_.size());
  const Deadline deadline = Deadline::after_s(kLetGoS);
  const auto write = [&] {
    for (const StressGpu& seat : seats_) {
      std::vector<CUdeviceptr> words;
      for (uint32_t word = 0; word < 2 * ranks; ++word) {
        words.push_back(flag(seat.device->rank(), word));
      }
      seat.device->gpu().write_words(words, value);
      seat.device->gpu().write_words({seat.gate->address()}, turn_);
    }
  };
  do {
    write();
    // What ran out meanwhile may have lowered a word again.
    if (finish(Deadline::after_s(0.1))) {
      lost_ = false;
      return write();
    }
  } while (!deadline.passed());
  fail(Code::driver, "the stress test on a GPU does not end; its memory stays mapped: end this ",
       "process");
}

StressOutcome Stress::run(const StressTrial& trial, const Deadline& deadline) {
  if (lost_) fail(Code::driver, "a GPU is still held by an earlier trial: end this process");
  if (trial.chunk_bytes == 0 || trial.chunk_bytes % 4 != 0 || trial.chunk_bytes > kChunkBytesMax) {
    fail(Code::invalid, "chunks of ", trial.chunk_bytes, " bytes: a multiple of 4, from 4 to ",
         kChunkBytesMax);
  }
  if (trial.shape != "bcst" && trial.shape != "fan" && trial.shape != "pcpy") {
    fail(Code::invalid, "unknown shape '", trial.shape, "': bcst, fan or pcpy");
  }
  fill(trial);
  std::vector<Program> programs;
  for (const StressGpu& seat : seats_) programs.push_back(program(trial, seat.device->rank()));
  StressOutcome outcome;
  const int64_t began_ns = now_ns();
  while (outcome.operations < trial.operations && !outcome.stuck && !deadline.passed()) {
    const auto left = static_cast<uint32_t>(trial.operations - outcome.operations);
    const Round round{trial, programs, std::min(left, kRoundOperations)};
    try {
      start(round);
    } catch (...) {
      let_go(value_ + kRoundOperations);
      value_ += kRoundOperations;
      throw;
    }
    outcome.stuck = !finish(deadline);
    outcome.operations += round.count;
  }
  outcome.time_ns = now_ns() - began_ns;
  // Before anything is let go: readers of a round that was cut off then read what is not there.
  lost_ = outcome.stuck;  // until then
  for (const StressGpu& seat : seats_) {
    struct {
      uint64_t wrong;
      uint32_t missed;
    } told{};
    seat.device->gpu().copy(&told, reinterpret_cast<void*>(seat.outcome->address()), sizeof told);
    outcome.wrong_words += told.wrong;
    outcome.stuck = outcome.stuck || told.missed != 0;
  }
  if (outcome.stuck) let_go(value_);
  return outcome;
}

}  // namespace offcore::cuda
