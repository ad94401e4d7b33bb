#include "core/backend/cuda/cuda.h"

#include <algorithm>

#include "core/backend/cuda/cache_memory.h"
#include "core/backend/cuda/executor.h"
#include "core/backend/cuda/foreign_memory.h"
#include "core/backend/cuda/gates.h"
#include "core/backend/cuda/pointer_info.h"
#include "core/backend/cuda/request_engine.h"

namespace offcore {
namespace cuda {
namespace {

// What owns the shares of a window.
struct MappedWindow {
  MappedWindow(std::vector<RankMemory> parts, std::span<const std::shared_ptr<LocalGpu>> devices,
               std::shared_ptr<MappingTable> mappings)
      : mapping(std::move(parts), devices), registry(std::move(mappings)) {
    registry->add(mapping);
  }
  ~MappedWindow() { registry->remove(mapping); }
  MappedWindow(const MappedWindow&) = delete;
  MappedWindow& operator=(const MappedWindow&) = delete;

  PeerMapping mapping;
  std::shared_ptr<MappingTable> registry;
};

// A program in a graph: nothing of it is under way.
class RecordedRun final : public Run {
 public:
  explicit RecordedRun(const CudaSubmission& submission) {
    for (const CudaSubmission::RankPart& part : submission.parts) part.stats.add_to(report_);
  }
  bool done() override { return true; }
  void wait(const Deadline&) override {}
  Report report() const override { return report_; }

 private:
  Report report_;
};

// The place that a stream has come to.
class StreamMark : public CudaMark {
 public:
  StreamMark(const GpuContext& gpu, CUstream stream) : event_(gpu.event()) {
    event_.record(stream);
  }
  bool passed() override { return event_.passed(); }
  void enqueue_wait(CUstream stream) const override { event_.enqueue_wait(stream); }

 private:
  CudaEvent event_;
};

// What an event of the caller's stands for now. It may be recorded anew or destroyed meanwhile, so
// a stream of ours waits for it, and an event of ours behind that is looked at.
class EventMark final : public CudaMark {
 public:
  // The stream waits for the event already.
  EventMark(std::shared_ptr<const GpuContext> gpu, std::unique_ptr<CudaStream> stream)
      : gpu_(std::move(gpu)), stream_(std::move(stream)), mark_(*gpu_, stream_->handle()) {}

  bool passed() override {
    if (!mark_.passed()) return false;
    if (stream_ != nullptr) gpu_->give_idle_stream(std::move(stream_));
    return true;
  }
  void enqueue_wait(CUstream stream) const override { mark_.enqueue_wait(stream); }

 private:
  std::shared_ptr<const GpuContext> gpu_;
  std::unique_ptr<CudaStream> stream_;
  StreamMark mark_;
};

class CudaRun final : public exec::SubmissionRun {
 public:
  using SubmissionRun::SubmissionRun;
  void enqueue_wait(uintptr_t stream) {
    static_cast<CudaExecutor&>(*executor_)
        .enqueue_wait(static_cast<const CudaSubmission&>(*submission_), stream);
  }
};

class CudaLoaded final : public exec::LoadedProgram {
 public:
  CudaLoaded(std::shared_ptr<CudaExecutor> executor, std::shared_ptr<const CudaProgram> compiled)
      : LoadedProgram(executor, compiled), cuda_(*executor), program_(std::move(compiled)) {}

  ~CudaLoaded() override {
    try {
      cuda_.dismiss(*program_, armed_, *armed_streams_);
    } catch (const Error&) {  // engines still hold it: kept for good
      new std::pair(std::move(armed_), std::move(armed_streams_));
    }
  }

  bool native() const override {
    const auto& queues = program_->program->queues;
    return cuda_.strided() || std::none_of(queues.begin(), queues.end(), [](const Queue& queue) {
             return std::any_of(queue.commands.begin(), queue.commands.end(),
                                [](const Command& c) { return c.rows > 1 && c.op != Op::poll; });
           });
  }

  std::unique_ptr<Run> launch(const Launch& launch) override {
    const LocalGpu& first = *cuda_.devices().front();
    // Once, for all that is called below.
    if (program_->program->mode != Mode::capture) {
      // A kernel may be loaded by its first launch.
      const ContextGuard current =
          first.copy_kernel() != nullptr ? first.current() : first.enqueuing();
      return std::make_unique<CudaRun>(executor_, submit(launch));
    }
    const ContextGuard current = first.current();
    refuse_unfit(launch);
    return std::make_unique<RecordedRun>(*cuda_.record(program_, launch));
  }

 private:
  void check(const Launch& launch) const override {
    LoadedProgram::check(launch);
    cuda_.check_places(*program_, launch);
  }
  std::shared_ptr<exec::Submission> build(const Launch& launch) override {
    return std::make_shared<CudaSubmission>(program_, launch);
  }
  std::shared_ptr<exec::Submission> build_ahead(const Launch& launch) override {
    return cuda_.park(program_, launch, *armed_streams_);
  }
  void recall() override { cuda_.recall(*program_, armed_, *armed_streams_); }

  CudaExecutor& cuda_;
  const std::shared_ptr<const CudaProgram> program_;
  std::unique_ptr<ArmedStreams> armed_streams_ = std::make_unique<ArmedStreams>();
};

class CudaBackend final : public Backend,
                          private Streams,
                          private Graphs,
                          private GpuRanks,
                          private CrossedCopies,
                          private ForeignMemory,
                          private SignalChoice,
                          private RequestEngines {
 public:
  CudaBackend(const Machine& machine, Rank ranks, std::vector<std::shared_ptr<LocalGpu>> devices,
              EncodeOptions options)
      : machine_(machine),
        executor_(std::make_shared<CudaExecutor>(ranks, std::move(devices), options)) {
    machine_.signals = to_string(options.signals);
    const double share = static_cast<double>(options.sms) / EncodeOptions().sms;
    machine_.cost.reduce_gbps *= share;
    machine_.cost.push_gbps *= share;
  }
  ~CudaBackend() override {
    try {
      executor_->close();
    } catch (const Error&) {
      new std::shared_ptr<CudaExecutor>(
          std::move(executor_));  // a GPU still holds it: kept for good
    }
  }

  const Machine& machine() const override { return machine_; }
  bool host_visible() const override { return false; }

  Share allocate(Rank rank, uint64_t bytes) override {
    const std::shared_ptr<LocalGpu> device = local(rank);
    const std::shared_ptr<const GpuContext>& gpu = device->shared();
    auto owner = std::make_shared<ShareMemory>();
    const std::shared_ptr<const Allocation> part = Allocation::create(*gpu, bytes, exported());
    owner->memory.allocations = {part};
    const CUdeviceptr base = owner->map({&device, 1});
    try {
      gpu->zero(base, part->bytes());
    } catch (const Error&) {
      gpu->keep_if_served(owner);
      throw;
    }
    return {.rank = rank,
            .bytes = bytes,
            .fd = part->fd(),
            .data = reinterpret_cast<std::byte*>(base),
            .owner = owner,
            .port = gpu};
  }

  Capabilities capabilities() override {
    return {.streams = this,
            .graphs = this,
            .gpus = this,
            .crossed_copies = this,
            .foreign_memory = this,
            .signal_choice = this,
            .request_engines = this,
            .packs = packs(executor_->devices()),
            .signals = to_string(executor_->options().signals)};
  }

  Share import(Rank rank, uint64_t bytes, int fd) override {
    auto owner = std::make_shared<ShareMemory>();
    owner->memory.allocations = {Allocation::import(first_gpu().context(), bytes, fd)};
    return {.rank = rank, .bytes = bytes, .owner = owner};
  }

  bool map(std::span<Share> shares) override {
    const bool held = std::any_of(shares.begin(), shares.end(),
                                  [](const Share& share) { return share.held != nullptr; });
    const auto owner = [](const Share& share) {
      return std::static_pointer_cast<ShareMemory>(share.owner);
    };
    if (held && !strided(shares)) {
      for (Share& share : shares) {
        share.data = reinterpret_cast<std::byte*>(owner(share)->map(executor_->devices()));
      }
      return false;
    }
    std::vector<RankMemory> parts;
    for (const Share& share : shares) {
      owner(share)->range.reset();
      parts.push_back(owner(share)->memory);
    }
    const auto mapped = std::make_shared<MappedWindow>(std::move(parts), executor_->devices(),
                                                       executor_->mappings());
    try {
      executor_->try_strided(mapped->mapping, !held);
    } catch (const Error&) {
      for (const auto& device : executor_->devices()) device->gpu().keep_if_served(mapped);
      throw;
    }
    if (!held) executor_->alias_copies(mapped->mapping);
    for (Share& share : shares) {
      share.data = reinterpret_cast<std::byte*>(mapped->mapping.part(share.rank));
      share.owner = mapped;
    }
    return true;
  }

  Share register_host(std::byte* data, uint64_t bytes, std::shared_ptr<void> keep) override {
    return {.rank = kHostRank,
            .bytes = bytes,
            .data = data,
            .owner = register_pinned(first_gpu().context(), data, bytes, std::move(keep))};
  }

  Share allocate_host(uint64_t bytes) override {
    std::shared_ptr<void> pinned = allocate_pinned(first_gpu().context(), bytes);
    return {.rank = kHostRank,
            .bytes = bytes,
            .data = static_cast<std::byte*>(pinned.get()),
            .owner = pinned};
  }

  std::unique_ptr<Loaded> load(std::shared_ptr<const Program> program) override {
    return std::make_unique<CudaLoaded>(
        executor_, compile(std::move(program), executor_->ranks(), executor_->devices()));
  }

  int64_t now_ns() const override { return offcore::now_ns(); }

 private:
  bool exported() const { return executor_->devices().size() < executor_->ranks(); }

  Share hold(Rank rank, std::byte* data, uint64_t bytes, std::shared_ptr<void> keep) override {
    return hold_foreign(rank, local(rank)->shared(), data, bytes, std::move(keep), exported());
  }
  Share import_held(Rank rank, uint64_t bytes, std::string_view layout) override {
    return import_foreign(rank, first_gpu(), bytes, layout);
  }
  void import_part(Share& share, Descriptor part) override {
    import_foreign_part(share, first_gpu(), std::move(part));
  }

  std::unique_ptr<RequestEngine> open_requests(Rank rank) override {
    return std::make_unique<CudaRequestEngine>(executor_, local(rank));
  }

  int device(Rank rank) override { return local(rank)->ordinal(); }

  uint64_t capture_of(std::span<const uintptr_t> streams) override {
    return executor_->capture_of(streams);
  }
  bool gone(uint64_t capture) override { return executor_->gone(capture); }

  uint64_t memory_of(const std::byte* first, const std::byte* last) override {
    return allocation_of(first_gpu(), first, last);
  }

  bool reaches(Rank rank, const std::byte* first, const std::byte* last) override {
    return cuda::reaches(local(rank)->gpu(), first, last);
  }

  std::unique_ptr<MappedAgain> at_steps(std::span<const MemoryExtent> extents) override {
    try {
      return TensorsAtSteps::map(first_gpu(), extents);
    } catch (const Error&) {  // the driver does not map it once more, or has no addresses left
      return nullptr;
    }
  }

  bool enable(Rank rank, const Reach& reach) override {
    try {
      return local(rank)->cross(reach);
    } catch (const Error&) {  // too far apart, a driver that does not do it, or no memory is left
      return false;
    }
  }

  void disable(Rank rank) override { local(rank)->uncross(); }

  void settle(std::string_view form) override {
    executor_->set_signals(parse_signals(form));
    machine_.signals = form;
  }

  std::unique_ptr<Mark> mark_stream(uintptr_t stream) override {
    const ContextGuard current = first_gpu().current();
    refuse_capture(stream);
    return std::make_unique<StreamMark>(first_gpu(), reinterpret_cast<CUstream>(stream));
  }

  void enqueue_wait(Run& run, uintptr_t stream) override {
    static_cast<CudaRun&>(run).enqueue_wait(stream);
  }

  std::shared_ptr<Gate> gate(uint32_t line) override {
    executor_->check_channels("a stream can wait for copies that are not enqueued yet (gate)");
    {
      const std::scoped_lock lock(gates_mutex_);
      if (gates_ == nullptr) gates_ = std::make_shared<Gates>(executor_);
    }
    return gates_->gate(line);
  }

  void open_behind(Gate& gate, std::span<const std::shared_ptr<Run>> runs) override {
    auto& own = static_cast<CudaGate&>(gate);
    for (const std::shared_ptr<Run>& run : runs) {
      static_cast<CudaRun&>(*run).enqueue_wait(reinterpret_cast<uintptr_t>(own.line()));
    }
    own.open_in_line();
  }

  std::unique_ptr<Mark> mark_event(uintptr_t event) override {
    const GpuContext& gpu = first_gpu();
    const ContextGuard current = gpu.current();
    std::unique_ptr<CudaStream> stream = gpu.take_idle_stream();
    check(Driver::get().cuStreamWaitEvent(stream->handle(), reinterpret_cast<CUevent>(event), 0),
          "cuStreamWaitEvent for the event that a transfer follows");
    refuse_capture(
        reinterpret_cast<uintptr_t>(stream->handle()));  // it would have joined the event's
    return std::make_unique<EventMark>(executor_->devices().front()->shared(), std::move(stream));
  }

  void refuse_capture(uintptr_t stream) const {
    if (executor_->capture_of({&stream, 1}) == 0) return;
    fail(Code::unsupported, "the stream is being captured, and a transfer cannot be part of a ",
         "graph: call it outside");
  }

  const GpuContext& first_gpu() const { return executor_->devices().front()->gpu(); }

  std::shared_ptr<LocalGpu> local(Rank rank) const {
    for (const auto& device : executor_->devices()) {
      if (device->rank() == rank) return device;
    }
    fail(Code::invalid, "rank ", rank, " is not local");
  }

  Machine machine_;
  std::shared_ptr<CudaExecutor> executor_;
  std::mutex gates_mutex_;
  std::shared_ptr<Gates> gates_;  // null: there were none
};

std::vector<int> devices_of(const std::vector<Rank>& local_ranks, Rank ranks,
                            const CudaOptions& options) {
  const int visible = Driver::get().devices();
  std::vector<int> devices = options.devices;
  if (devices.empty()) {
    const bool alone = local_ranks.size() == ranks;
    for (Rank rank : local_ranks) devices.push_back(alone ? rank : rank % visible);
  }
  if (devices.size() != local_ranks.size()) {
    fail(Code::invalid, "devices: ", devices.size(), " given for ", local_ranks.size(),
         " local ranks");
  }
  for (int device : devices) {
    if (device >= 0 && device < visible) continue;
    fail(Code::invalid, "there is no GPU ", device, ": ", visible,
         " are visible (CUDA_VISIBLE_DEVICES); use fewer ranks, or devices=[...] to put ranks "
         "together");
  }
  return devices;
}

// Why a visible device cannot take part, or nothing.
std::string why_not(int ordinal) {
  if (attribute(ordinal, Attribute::virtual_memory) == 0) {
    return cat("device ", ordinal, " (", device_name(ordinal),
               ") has no virtual memory management");
  }
  if (attribute(ordinal, Attribute::posix_descriptors) == 0) {
    return cat("device ", ordinal, " (", device_name(ordinal),
               ") cannot share memory by file descriptors");
  }
  const Driver& driver = Driver::get();
  for (int peer = 0; peer < driver.devices(); ++peer) {
    CUdevice device = 0;
    CUdevice other = 0;
    int can = 0;
    if (peer == ordinal) continue;
    check(driver.cuDeviceGet(&device, ordinal), "cuDeviceGet");
    check(driver.cuDeviceGet(&other, peer), "cuDeviceGet");
    check(driver.cuDeviceCanAccessPeer(&can, device, other), "cuDeviceCanAccessPeer");
    if (can == 0) {
      return cat("devices ", ordinal, " and ", peer, " have no peer access to each other (",
                 device_name(ordinal),
                 "; a partitioned GPU, or no NVLink or PCIe path); hide one "
                 "with CUDA_VISIBLE_DEVICES");
    }
  }
  return "";
}

}  // namespace
}  // namespace cuda

Probe probe_cuda() {
  Probe probe{.name = "cuda"};
  try {
    const cuda::Driver& driver = cuda::Driver::open();
    for (int device = 0; device < driver.devices() && probe.reason.empty(); ++device) {
      probe.reason = cuda::why_not(device);
    }
    probe.available = probe.reason.empty();
    if (probe.available) {
      probe.reason = cat(driver.devices(), " x ", cuda::device_name(0), ", driver for CUDA ",
                         driver.version() / 1000, ".", driver.version() % 1000 / 10);
    }
  } catch (const Error& error) {
    probe.reason = error.message();
    probe.refusal = error.code();
  }
  return probe;
}

std::unique_ptr<Backend> make_cuda(const Machine& machine, Rank ranks,
                                   std::vector<Rank> local_ranks, const CudaOptions& options) {
  local_ranks = exec::sorted_ranks(std::move(local_ranks), ranks);
  check(machine);
  if (machine.flags != FlagHome::peer) {
    fail(Code::unsupported, "machine ", machine.name, " keeps flags in host memory; the cuda ",
         "backend waits for words in the GPUs' own: use a machine such as h200-4");
  }
  cuda::EncodeOptions encode{.call_min = machine.batches.call_min};
  encode.signals =
      cuda::parse_signals(options.signals == "auto" ? options.proven : options.signals);
  encode.sms = options.sms;
  if (std::count(std::begin(kOwnCopies), std::end(kOwnCopies), options.own_copy) == 0) {
    fail(Code::invalid, "unknown own_copy '", options.own_copy, "': ", kOwnCopies[0], ", ",
         kOwnCopies[1], " or ", kOwnCopies[2]);
  }
  encode.own_copy_on_sm = options.own_copy == "sm";
  encode.spare_engines = options.own_copy == "engines";
  const std::vector<int> ordinals = cuda::devices_of(local_ranks, ranks, options);
  std::vector<std::shared_ptr<cuda::LocalGpu>> devices;
  for (size_t i = 0; i < local_ranks.size(); ++i) {
    devices.push_back(std::make_shared<cuda::LocalGpu>(local_ranks[i], ordinals[i], options.gather,
                                                       options.packs));
  }
  for (const int ordinal : options.peers) {
    const auto peer = cuda::GpuContext::of(ordinal);
    for (const auto& device : devices) device->gpu().reach(*peer);
  }
  return std::make_unique<cuda::CudaBackend>(machine, ranks, std::move(devices), encode);
}

}  // namespace offcore
