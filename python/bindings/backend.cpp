// Backends, and a session that runs a program with all ranks in this process: what the conformance
// suite drives every backend by.
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <dlfcn.h>

#include <chrono>
#include <cstring>
#include <deque>
#include <map>
#include <optional>
#include <thread>

#include "core/backend/registry.h"
#include "core/backend/sim/faults.h"
#include "core/backend/wakeup.h"
#include "core/base/error.h"
#include "core/ir/verify.h"
#include "module.h"
#include "process.h"
#include "released.h"
#include "studies/gpu_timer.h"
#include "studies/sdma/packet_path.h"

namespace offcore {
namespace {

using Bytes = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Arrays = std::map<std::string, std::vector<std::optional<Bytes>>>;

using cuda::GpuTimer;

struct RunReport {
  Report report;                  // of the last launch
  std::vector<int64_t> times_ns;  // of every launch; behind a gate from its opening on
  std::vector<double> controls_ns;
};

// What is enqueued behind a gate has reached the GPU.
constexpr std::chrono::microseconds kSettled{200};

// Owns a backend. A run that failed may still touch its memory, so its launch owns that.
class Session : public OfProcess {
 public:
  Session(const std::string& backend, const Machine& machine, Rank ranks, BackendOptions options)
      : OfProcess("the session") {
    std::vector<Rank> all(ranks);
    for (Rank rank = 0; rank < ranks; ++rank) all[rank] = rank;
    backend_ = open_backend(backend, machine, ranks, std::move(all), std::move(options));
  }

  RunReport run(const Program& program, const Arrays& arrays, double timeout_s, uint32_t repeat,
                uint32_t epoch, bool checked, GpuTimer* gate) {
    if (checked) verify(program);
    const auto memory = std::make_shared<Memory>();
    Launch launch{.binding = Binding(program.buffers.size(), program.ranks),
                  .epoch = epoch,
                  .lane = 0,
                  .wakeups = {},
                  .owner = memory};
    if (gate != nullptr) {
      launch.streams.assign(program.ranks, 0);
      launch.streams[0] = reinterpret_cast<uintptr_t>(gate->stream());
    }
    std::vector<Copy> copies;
    bind_flags(*memory, launch, program);
    for (size_t id = kFlagBuffer + 1; id < program.buffers.size(); ++id) {
      bind_buffer(*memory, copies, launch, program, static_cast<BufferId>(id), arrays);
    }
    RunReport result;
    {
      LockReleased released;
      launch_all(program, launch, released, timeout_s, repeat, gate, result);
    }
    for (const Copy& copy : copies) {
      copy.share.copy(copy.array.data(), copy.share.data, copy.array.size());
    }
    return result;
  }

  int64_t now_ns() const { return backend_->now_ns(); }

 private:
  struct Copy {
    Bytes array;
    Share share;
  };
  struct Memory {
    std::vector<Share> shares;
    std::deque<Wakeup> wakeups;
  };

  Share allocate_host(Memory& memory, uint64_t bytes) {
    return memory.shares.emplace_back(backend_->allocate_host(bytes));
  }

  // The same bytes of every rank, mapped by all where it is a window.
  std::vector<Share> allocate(Memory& memory, Rank ranks, uint64_t bytes, bool window) {
    std::vector<Share> shares;
    for (Rank rank = 0; rank < ranks; ++rank) shares.push_back(backend_->allocate(rank, bytes));
    if (window) backend_->map(shares);
    memory.shares.insert(memory.shares.end(), shares.begin(), shares.end());
    return shares;
  }

  void bind_flags(Memory& memory, Launch& launch, const Program& program) {
    for (Rank rank = 0; rank < program.ranks; ++rank) {
      launch.wakeups.push_back(&memory.wakeups.emplace_back());
    }
    if (program.flag_words == 0) return;
    const uint64_t bytes = program.flag_words * kWordBytes;
    std::vector<std::byte> words(bytes);
    for (uint32_t word = 0; word < program.flag_words; ++word) {
      std::memcpy(&words[word * kWordBytes], &launch.epoch, sizeof launch.epoch);
    }
    std::vector<Share> shares = allocate(memory, program.ranks, bytes, true);
    shares.push_back(allocate_host(memory, bytes));
    for (Rank rank = 0; rank <= program.ranks; ++rank) {
      const Share& share = shares[rank];
      launch.binding.base(kFlagBuffer, rank == program.ranks ? kHostRank : rank) = share.data;
      if (share.data != nullptr) share.copy(share.data, words.data(), bytes);
    }
  }

  void bind_buffer(Memory& memory, std::vector<Copy>& copies, Launch& launch,
                   const Program& program, BufferId id, const Arrays& arrays) {
    const Buffer& buffer = program.buffers[id];
    if (buffer.kind == Buffer::Home::paged) {
      fail(Code::unsupported, "buffer ", buffer.name, " lies in pages, which have no array");
    }
    const bool host = buffer.kind == Buffer::Home::host;
    const Rank places = host ? Rank{1} : program.ranks;
    const auto found = arrays.find(buffer.name);
    if (found != arrays.end() && found->second.size() != places) {
      fail(Code::invalid, "buffer ", buffer.name, " needs ", places, " arrays, not ",
           found->second.size());
    }
    const bool window = buffer.kind == Buffer::Home::window;
    const std::vector<Share> shares = host ? std::vector<Share>{allocate_host(memory, buffer.bytes)}
                                           : allocate(memory, places, buffer.bytes, window);
    for (Rank i = 0; i < places; ++i) {
      launch.binding.base(id, host ? kHostRank : i) = shares[i].data;
      if (found == arrays.end() || !found->second[i].has_value()) continue;
      const Bytes& array = *found->second[i];
      if (array.size() > buffer.bytes) {
        fail(Code::invalid, "buffer ", buffer.name, " has ", buffer.bytes, " bytes, the array of ",
             i, " has ", array.size());
      }
      if (shares[i].data == nullptr || array.size() == 0) continue;
      shares[i].copy(shares[i].data, array.data(), array.size());
      copies.push_back({array, shares[i]});
    }
  }

  // Whatever happens, nothing stays behind the gate.
  struct Opening {
    GpuTimer* gate;
    ~Opening() {
      if (gate != nullptr) gate->open();
    }
  };

  void launch_all(const Program& program, Launch& launch, LockReleased& released, double timeout_s,
                  uint32_t repeat, GpuTimer* gate, RunReport& result) {
    const std::shared_ptr<Loaded> loaded = backend_->load(std::make_shared<const Program>(program));
    for (uint32_t i = 0; i < repeat; ++i, launch.epoch += program.flag_span) {
      if (program.mode == Mode::armed) loaded->arm(launch);
      const Opening opening{gate};
      if (gate != nullptr) gate->shut();
      const std::unique_ptr<Run> run = loaded->launch(launch);
      if (gate != nullptr) std::this_thread::sleep_for(kSettled);
      const int64_t opened_ns = offcore::now_ns();
      if (gate != nullptr) gate->open();
      try {
        wait_in_slices(*run, released.within(timeout_s), [](const Error&) {});
      } catch (const Error&) {
        // Nobody waits any more: every rank stops where it is.
        for (Wakeup* wakeup : launch.wakeups) poison(*wakeup, 0);
        throw;
      }
      result.report = run->report();
      result.times_ns.push_back(gate == nullptr ? result.report.time_ns
                                                : offcore::now_ns() - opened_ns);
      result.controls_ns.push_back(result.report.phases.control_ns);
    }
  }

  std::unique_ptr<Backend> backend_;
};

sim::Fault make_fault(const std::string& kind, Rank rank, const nb::object& queue, uint32_t nth,
                      double factor, int64_t ns) {
  sim::Fault fault{
      .kind = sim::parse_fault_kind(kind), .rank = rank, .nth = nth, .factor = factor, .ns = ns};
  if (!nb::isinstance<nb::str>(queue)) {
    fault.queue = nb::cast<uint16_t>(queue);
  } else if (nb::cast<std::string>(queue) == "caller") {
    fault.queue = kCallerQueue;
  } else {
    fail(Code::invalid, "the queue of a fault is a number or \"caller\"");
  }
  return fault;
}

Arrays arrays_of(const nb::dict& buffers) {
  Arrays arrays;
  for (const auto& [name, list] : buffers) {
    std::vector<std::optional<Bytes>>& row = arrays[nb::cast<std::string>(name)];
    for (const nb::handle item : list) {
      Bytes array;
      if (item.is_none()) {
        row.emplace_back();
      } else if (nb::try_cast(item, array, false)) {
        row.emplace_back(array);
      } else {
        fail(Code::invalid, "buffers hold writable, contiguous 1-D uint8 arrays or None");
      }
    }
  }
  return arrays;
}

void bind_faults(nb::module_& module) {
  nb::class_<sim::Fault>(module, "Fault", "What the simulator is to do wrong (core/backend/sim).")
      .def(
          "__init__",
          [](sim::Fault* place, const std::string& kind, Rank rank, const nb::object& queue,
             uint32_t nth, double factor, int64_t ns) {
            new (place) sim::Fault(make_fault(kind, rank, queue, nth, factor, ns));
          },
          nb::arg("kind"), nb::arg("rank") = 0, nb::arg("queue") = 0, nb::arg("nth") = 0,
          nb::arg("factor") = 1.0, nb::arg("ns") = 0)
      .def_prop_ro("kind",
                   [](const sim::Fault& fault) { return std::string(to_string(fault.kind)); })
      .def_ro("rank", &sim::Fault::rank)
      .def_ro("nth", &sim::Fault::nth)
      .def_ro("factor", &sim::Fault::factor)
      .def_ro("ns", &sim::Fault::ns)
      .def("__repr__", [](const sim::Fault& fault) { return to_string(fault); });
}

void bind_report(nb::module_& module) {
  nb::class_<CommandTime>(module, "CommandTime", "When a command ran, from the launch on.")
      .def_ro("queue", &CommandTime::queue)
      .def_ro("command", &CommandTime::command)
      .def_ro("start_ns", &CommandTime::start_ns)
      .def_ro("end_ns", &CommandTime::end_ns)
      .def_ro("phases", &CommandTime::phases);
  nb::class_<RunReport>(module, "RunReport",
                        "What a session's run took; phases of the last launch.")
      .def_prop_ro("time_ns", [](const RunReport& run) { return run.report.time_ns; })
      .def_prop_ro("phases", [](const RunReport& run) { return run.report.phases; })
      .def_prop_ro("commands", [](const RunReport& run) { return run.report.commands; })
      .def_prop_ro("timestamps_ns", [](const RunReport& run) { return run.report.timestamps_ns; })
      .def_ro("times_ns", &RunReport::times_ns)
      .def_ro("controls_ns", &RunReport::controls_ns, "The host's share of each launch.");
}

void bind_gpu_timer(nb::module_& module) {
  nb::class_<GpuTimer>(module, "GpuTimer", "Times work on a GPU: studies/gpu_timer.h.")
      .def(
          nb::new_([](int device) { return owned_that_waits(std::make_unique<GpuTimer>(device)); }),
          nb::arg("device"))
      .def_prop_ro("stream",
                   [](const GpuTimer& self) { return reinterpret_cast<uintptr_t>(self.stream()); })
      .def("shut", &GpuTimer::shut, Unlocked())
      .def("open", &GpuTimer::open)
      .def("start", &GpuTimer::start, Unlocked())
      .def("stop", &GpuTimer::stop, Unlocked())
      .def(
          "elapsed_us",
          [](const GpuTimer& self, double timeout_s) {
            LockReleased released;
            return self.elapsed_us(released.within(timeout_s));
          },
          nb::arg("timeout_s"));
}

void bind_add_backend(nb::module_& module) {
  module.def(
      "add_backend",
      [](const std::string& library) {
        void* opened = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
        void* symbol = opened == nullptr ? nullptr : dlsym(opened, "offcore_backend");
        if (symbol == nullptr) fail(Code::unavailable, dlerror());
        add_backend(*reinterpret_cast<const BackendRow* (*)()>(symbol)());
      },
      nb::arg("library"), "For tests: a backend of the same build, from a library of its own.");
}

}  // namespace

void bind_backend(nb::module_& module) {
  module.def(
      "probe_backends",
      [] {
        std::vector<nb::tuple> rows;
        for (const Probe& probe : probe_backends()) {
          rows.push_back(nb::make_tuple(probe.name, probe.available, probe.reason));
        }
        return rows;
      },
      "Rows of (name, available, reason).");

  bind_add_backend(module);
  bind_faults(module);
  bind_report(module);
  bind_gpu_timer(module);
  module.def(
      "gpus", [] { return cuda::Driver::open().devices(); },
      "How many GPUs the driver shows. Raises unavailable.");
  module.def(
      "gpu_name",
      [] {
        cuda::Driver::open();
        return cuda::device_name(0);
      },
      "What the driver calls the first GPU. Raises unavailable.");
  module.def(
      "own_copies",
      [] { return std::vector<std::string>(std::begin(kOwnCopies), std::end(kOwnCopies)); },
      "What copies within a GPU may be asked to use.");
  nb::class_<CudaOptions>(module, "CudaOptions", "See core/backend/cuda/cuda.h.")
      .def(
          "__init__",
          [](CudaOptions* place, std::vector<int> devices, std::string signals, std::string proven,
             std::string own_copy, uint32_t sms) {
            new (place) CudaOptions{std::move(devices), std::move(signals), std::move(proven),
                                    std::move(own_copy), sms};
          },
          nb::kw_only(), nb::arg("devices") = std::vector<int>{}, nb::arg("signals") = "auto",
          nb::arg("proven") = "fenced", nb::arg("own_copy") = "engines", nb::arg("sms") = 12)
      .def_ro("proven", &CudaOptions::proven);
  nb::class_<Session>(module, "Session", "A backend with all ranks in this process.")
      .def(nb::new_([](const std::string& backend, const Machine& machine, Rank ranks, bool phantom,
                       uint64_t seed, std::vector<sim::Fault> faults, const CudaOptions& cuda,
                       bool packets) {
             return owned_that_waits(std::make_unique<Session>(
                 backend, machine, ranks,
                 BackendOptions{.sim = {phantom, seed, std::move(faults),
                                        packets ? sdma::through_packets : nullptr},
                                .cuda = cuda}));
           }),
           nb::arg("backend"), nb::arg("machine"), nb::arg("ranks"), nb::arg("phantom") = false,
           nb::arg("seed") = 0, nb::arg("faults") = std::vector<sim::Fault>{},
           nb::arg("cuda") = CudaOptions{}, nb::arg("packets") = false)
      .def(
          "run",
          [](Session& session, const Program& program, const nb::dict& buffers, double timeout_s,
             uint32_t repeat, uint32_t epoch, bool checked, GpuTimer* gate) {
            return session.run(program, arrays_of(buffers), timeout_s, repeat, epoch, checked,
                               gate);
          },
          nb::arg("program"), nb::arg("buffers") = nb::dict(), nb::arg("timeout_s") = 10.0,
          nb::arg("repeat") = 1, nb::arg("epoch") = 0, nb::arg("checked") = true,
          nb::arg("gate").none() = nullptr,
          "Runs the program `repeat` times on copies of the arrays (uint8, one a rank, one for a\n"
          "host buffer; None or an absent name: zeros) and copies back what it left in them.\n"
          "Unless `checked` is false the program is verified first. gate: of rank 0's GPU; each\n"
          "launch of rank 0 is enqueued behind it, and its time runs from its opening on.")
      .def_prop_ro("now_ns", &Session::now_ns);
}

}  // namespace offcore
