// Communicators, windows and operations under way.
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <numeric>

#include "bytes.h"
#include "core/backend/registry.h"
#include "core/backend/sim/faults.h"
#include "core/base/error.h"
#include "core/comm/communicator.h"
#include "keep.h"
#include "module.h"
#include "process.h"
#include "region.h"
#include "released.h"
#include "studies/pattern.h"
#include "studies/sdma/packet_path.h"
#include "tensors.h"

namespace offcore {
namespace {

using Bytes = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ConstBytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

Region region(Window& window, uint64_t offset, uint64_t bytes) {
  if (offset > window.bytes() || bytes > window.bytes() - offset) {
    fail(Code::invalid, "region ", offset, "+", bytes, " lies outside a window of ", window.bytes(),
         " bytes");
  }
  return {window.shared_from_this(), offset, bytes};
}

// This process's view of a rank's share.
nb::object view(Window& window, Rank rank, uint64_t offset, uint64_t bytes) {
  if (rank >= window.ranks()) fail(Code::invalid, "rank ", rank, " is not in this window");
  if (window.phantom()) fail(Code::unsupported, "phantom memory has sizes but no bytes");
  if (!window.host_visible()) {
    fail(Code::unsupported,
         "a window in GPU memory is no numpy array: use its tensor(), or read() "
         "and write()");
  }
  const Region checked = region(window, offset, bytes);
  return nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>(
             reinterpret_cast<uint8_t*>(window.base(rank) + checked.offset), {bytes},
             capsule_of(checked.window))
      .cast();
}

// A region; the one local rank's tensor; or for each local rank (address, bytes), or None: absent.
// What the Python layer has checked.
std::vector<Operand> operands(nb::handle given, const std::vector<Rank>& local_ranks) {
  std::vector<Operand> result;
  if (given.is_none()) return result;
  if (nb::isinstance<Region>(given)) {
    for (Rank rank : local_ranks) {
      result.push_back(nb::cast<const Region&>(given).operand(rank));
    }
    return result;
  }
  if (is_tensor(given)) {
    result.push_back(operand_of(given));
    return result;
  }
  for (nb::handle item : given) {
    if (item.is_none()) {
      result.emplace_back();
      continue;
    }
    const auto pair = nb::cast<nb::tuple>(item);
    result.push_back(operand_at(nb::cast<uintptr_t>(pair[0]), nb::cast<uint64_t>(pair[1])));
  }
  return result;
}

// An array's (address, bytes) by the buffer protocol; None where it has no such buffer: it is not
// contiguous, not writable, or of a type that the protocol cannot tell.
nb::object buffer_of(nb::handle array, bool writable) {
  Py_buffer view;
  const int wanted = PyBUF_C_CONTIGUOUS | (writable ? PyBUF_WRITABLE : 0);
  if (PyObject_GetBuffer(array.ptr(), &view, wanted) != 0) {
    PyErr_Clear();
    return nb::none();
  }
  nb::object place =
      nb::make_tuple(reinterpret_cast<uintptr_t>(view.buf), static_cast<uint64_t>(view.len));
  PyBuffer_Release(&view);
  return place;
}

// All of `ranks` ranks here, or the one that meets the others by a bootstrap.
std::shared_ptr<Communicator> open_communicator(const std::string& backend, const Machine& machine,
                                                Rank ranks, const Bootstrap* bootstrap,
                                                bool phantom, uint64_t seed,
                                                std::vector<sim::Fault> faults, bool packets,
                                                const CudaOptions& cuda, double timeout_s) {
  LockReleased released;
  const Deadline deadline = released.within(timeout_s);
  BackendOptions options{.sim = {.phantom = phantom,
                                 .seed = seed,
                                 .faults = std::move(faults),
                                 .fetch_path = packets ? sdma::through_packets : nullptr},
                         .cuda = cuda};
  std::vector<Rank> local(ranks);
  std::iota(local.begin(), local.end(), Rank{0});
  if (bootstrap != nullptr) local = {static_cast<Rank>(bootstrap->rank())};
  // A rank that cannot open its backend fails before it keeps others waiting.
  auto opened = open_backend(backend, machine, ranks, std::move(local), std::move(options));
  std::shared_ptr<Rendezvous> rendezvous;
  if (bootstrap != nullptr) rendezvous = Rendezvous::join(*bootstrap, deadline);
  return Communicator::create(std::move(opened), std::move(rendezvous), ranks, cuda.signals,
                              deadline);
}

// (operation, dtype, scale), or None for what does not reduce.
std::optional<Reduction> reduction_of(nb::handle given) {
  if (given.is_none()) return std::nullopt;
  const auto [op, dtype, scale] = nb::cast<std::tuple<std::string, std::string, double>>(given);
  return Reduction{.op = parse_reduce_op(op), .dtype = parse_dtype(dtype), .scale = scale};
}

Request request_of(Communicator& self, const std::string& op, nb::handle out, nb::handle in,
                   std::vector<uint64_t> counts, Rank root, std::string variant,
                   const std::string& protocol, uint32_t lane, nb::handle reduction) {
  return {.collective = parse_collective(op),
          .counts = std::move(counts),
          .root = root,
          .variant = std::move(variant),
          .protocol = parse_wanted(protocol),
          .reduction = reduction_of(reduction),
          .lane = lane,
          .out = operands(out, self.local_ranks()),
          .in = operands(in, self.local_ranks())};
}

std::unique_ptr<Pending> start(Communicator& self, const std::string& op, nb::handle out,
                               nb::handle in, std::vector<uint64_t> counts, Rank root,
                               std::string variant, const std::string& protocol, uint32_t lane,
                               nb::handle reduction, std::vector<uintptr_t> streams,
                               nb::object keep, double timeout_s) {
  Released::drop();
  Request request = request_of(self, op, out, in, std::move(counts), root, std::move(variant),
                               protocol, lane, reduction);
  request.streams = std::move(streams);
  request.keep = keep_alive(std::move(keep));
  LockReleased released;
  return self.start(std::move(request), released.within(timeout_s));
}

// `places`: each local rank's (address, bytes); none, where the Python layer refuses them.
uint32_t register_memory(Communicator& self,
                         const std::vector<std::pair<uintptr_t, uint64_t>>& places,
                         const std::string& refusal, nb::object keep, double timeout_s) {
  Released::drop();
  std::vector<GivenMemory> given;
  for (const auto& [address, bytes] : places) {
    given.push_back({.data = reinterpret_cast<std::byte*>(address), .bytes = bytes});
  }
  if (!refusal.empty()) given.assign(self.local_ranks().size(), {.refusal = refusal});
  const std::shared_ptr<void> kept = keep_alive(std::move(keep));
  LockReleased released;
  return self.register_memory(given, kept, released.within(timeout_s));
}

nb::object host_array(Communicator& self, uint64_t bytes) {
  // Freeing pinned memory waits until the GPU is idle.
  const std::shared_ptr<Share> share =
      owned_that_waits(std::make_unique<Share>(self.backend().allocate_host(bytes)));
  auto* data = reinterpret_cast<uint8_t*>(share->data);
  return nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>(data, {bytes}, capsule_of(share)).cast();
}

// Whether a tensor lives that was made with it, or an array that shares its memory.
struct Lease {
  std::shared_ptr<std::atomic<bool>> held = std::make_shared<std::atomic<bool>>(false);
};

// DLPack's managed tensor, and behind it what keeps its memory and its shape.
struct Lent {
  nb::dlpack::dltensor tensor;
  void* context = nullptr;
  void (*deleter)(Lent*) = [](Lent* self) { delete self; };
  std::shared_ptr<Window> window;
  std::vector<int64_t> shape;
  std::shared_ptr<std::atomic<bool>> held;

  ~Lent() {
    if (held) *held = false;
  }
};

// A capsule that nobody has taken the tensor from, which then would have another name.
void drop_lent(PyObject* capsule) {
  if (!PyCapsule_IsValid(capsule, "dltensor")) return;
  auto* lent = static_cast<Lent*>(PyCapsule_GetPointer(capsule, "dltensor"));
  lent->deleter(lent);
}

uint64_t bytes_of(const std::vector<int64_t>& shape, uint64_t item_bytes, uint64_t most) {
  if (std::find(shape.begin(), shape.end(), 0) != shape.end()) return 0;
  uint64_t bytes = item_bytes;
  for (const int64_t size : shape) {
    if (size < 0 || bytes > most / static_cast<uint64_t>(size)) {
      fail(Code::invalid, "an array of such a shape lies outside a window of ", most, " bytes");
    }
    bytes *= static_cast<uint64_t>(size);
  }
  return bytes;
}

// A local rank's part of a window from `offset` on, as a DLPack capsule. Made by hand, because an
// object that torch.from_dlpack has to ask takes ten times as long, and views make one at a call.
nb::object dlpack(Window& window, Rank rank, uint64_t offset, std::vector<int64_t> shape,
                  uint8_t code, uint8_t bits, const Lease* lease) {
  if (rank >= window.ranks()) fail(Code::invalid, "rank ", rank, " is not in this window");
  if (window.phantom()) fail(Code::unsupported, "phantom memory has sizes but no bytes");
  const int device = window.device(rank);
  if (device < 0 && !window.host_visible()) {
    fail(Code::unsupported, "rank ", rank, " is not local: its own process has its tensors");
  }
  const Region checked = region(window, offset, bytes_of(shape, bits / 8, window.bytes()));
  auto lent = std::make_unique<Lent>();
  lent->window = checked.window;
  lent->shape = std::move(shape);
  if (lease != nullptr) {
    lent->held = lease->held;
    *lent->held = true;
  }
  lent->tensor.data = window.base(rank) + checked.offset;
  lent->tensor.device = device < 0 ? nb::dlpack::device{nb::device::cpu::value, 0}
                                   : nb::dlpack::device{nb::device::cuda::value, device};
  lent->tensor.ndim = static_cast<int32_t>(lent->shape.size());
  lent->tensor.dtype = {code, bits, 1};
  lent->tensor.shape = lent->shape.data();
  nb::object capsule = nb::steal(PyCapsule_New(lent.get(), "dltensor", drop_lent));
  if (!capsule.is_valid()) throw nb::python_error();
  lent.release();
  return capsule;
}

void bind_windows(nb::module_& module) {
  nb::class_<Lease>(module, "Lease").def(nb::init<>()).def_prop_ro("held", [](const Lease& self) {
    return self.held->load();
  });
  nb::class_<Window>(module, "Window")
      .def_prop_ro("ranks", &Window::ranks)
      .def_prop_ro("nbytes", &Window::bytes)
      .def_prop_ro("phantom", &Window::phantom)
      .def_prop_ro("host_visible", &Window::host_visible)
      .def("view", &view, nb::arg("rank"), nb::arg("offset"), nb::arg("nbytes"))
      .def("dlpack", &dlpack, nb::arg("rank"), nb::arg("offset"), nb::arg("shape"), nb::arg("code"),
           nb::arg("bits"), nb::arg("lease").none() = nb::none(),
           "Memory as a DLPack capsule, of that code and bits; it holds the lease.")
      .def(
          "address",
          [](const Window& self, Rank rank) {
            if (rank >= self.ranks()) fail(Code::invalid, "rank ", rank, " is not in this window");
            return reinterpret_cast<uintptr_t>(self.base(rank));
          },
          nb::arg("rank"))
      .def(
          "read",
          [](const Window& self, uintptr_t dst, Rank rank, uint64_t offset, uint64_t bytes) {
            LockReleased released;
            self.read(reinterpret_cast<void*>(dst), rank, offset, bytes);
          },
          nb::arg("dst"), nb::arg("rank"), nb::arg("offset"), nb::arg("nbytes"))
      .def(
          "write",
          [](const Window& self, Rank rank, uint64_t offset, uintptr_t src, uint64_t bytes) {
            LockReleased released;
            self.write(rank, offset, reinterpret_cast<const void*>(src), bytes);
          },
          nb::arg("rank"), nb::arg("offset"), nb::arg("src"), nb::arg("nbytes"))
      .def("region", &region, nb::arg("offset"), nb::arg("nbytes"));
  nb::class_<Region>(module, "Region", "The same bytes of a window on every rank.")
      .def_ro("window", &Region::window)
      .def_ro("offset", &Region::offset)
      .def_ro("nbytes", &Region::bytes);
  module.def("buffer_of", &buffer_of, nb::arg("array"), nb::arg("writable"),
             nb::sig("def buffer_of(array: object, writable: bool) -> tuple[int, int] | None"),
             "An array's (address, bytes); None: it is not contiguous, or not writable.");
  module.def(
      "fill",
      [](Bytes array, uint64_t seed, uint64_t offset) {
        LockReleased released;
        fill_pattern({reinterpret_cast<std::byte*>(array.data()), array.size()}, seed, offset);
      },
      nb::arg("array"), nb::arg("seed"), nb::arg("offset") = 0,
      "Fills a uint8 array with bytes [offset, offset + len) of the stream `seed`.");
  module.def(
      "wrong_bytes",
      [](ConstBytes array, uint64_t offset, uint64_t bytes, uint64_t seed, uint64_t source_offset) {
        if (offset > array.size() || bytes > array.size() - offset) {
          fail(Code::invalid, "wrong_bytes: ", offset, "+", bytes, " lies outside ", array.size(),
               " bytes");
        }
        LockReleased released;
        return count_wrong({reinterpret_cast<const std::byte*>(array.data()) + offset, bytes}, seed,
                           source_offset);
      },
      nb::arg("array"), nb::arg("offset"), nb::arg("nbytes"), nb::arg("seed"),
      nb::arg("source_offset") = 0,
      "How many of array[offset : offset + nbytes] differ from the stream's bytes from\n"
      "source_offset on.");
}

void bind_outcome(nb::module_& module) {
  nb::class_<Result>(module, "Result")
      .def_ro("op", &Result::op)
      .def_ro("variant", &Result::variant)
      .def_ro("protocol", &Result::protocol)
      .def_ro("signals", &Result::signals)
      .def_prop_ro("mode", [](const Result& self) { return std::string(to_string(self.mode)); })
      .def_ro("native", &Result::native)
      .def_ro("staged", &Result::staged)
      .def_ro("registered", &Result::registered)
      .def_ro("tuned", &Result::tuned)
      .def_ro("armed_ahead", &Result::armed_ahead)
      .def_ro("in_place", &Result::in_place)
      .def_ro("own_copy", &Result::own_copy)
      .def_prop_ro("sms", [](const Result& self) { return self.report.sms; })
      .def_prop_ro("way", [](const Result& self) { return std::string(self.report.way); })
      .def_ro("bytes", &Result::total_bytes)
      .def_ro("slot_bytes", &Result::slot_bytes)
      .def_ro("counts", &Result::counts)
      .def_prop_ro("time_ns", [](const Result& self) { return self.report.time_ns; })
      .def_prop_ro("phases", [](const Result& self) { return self.report.phases; });
  nb::class_<Pending>(module, "Pending")
      .def("done", &Pending::done)
      .def_prop_ro(
          "view",
          [](const Pending& self) { return std::pair(self.view().window, self.view().offset); })
      .def("release", &Pending::release, nb::arg("streams"), Unlocked())
      .def("follow", &Pending::follow, nb::arg("stream"), Unlocked())
      .def(
          "wait",
          [](Pending& self, double timeout_s) {
            LockReleased released;
            return self.wait(released.within(timeout_s));
          },
          nb::arg("timeout_s"));
}

void bind_exchanges(nb::class_<Communicator>& communicator) {
  communicator
      .def(
          "barrier",
          [](Communicator& self, double timeout_s) {
            LockReleased released;
            self.barrier(released.within(timeout_s));
          },
          nb::arg("timeout_s"))
      .def(
          "exchange",
          [](Communicator& self, const std::string& tag, const nb::bytes& bytes, double timeout_s) {
            return gathered([&, said = string_of(bytes)](LockReleased& released) {
              return self.exchange(tag, said, released.within(timeout_s));
            });
          },
          nb::arg("tag"), nb::arg("bytes"), nb::arg("timeout_s"), "Every rank's bytes, by rank.");
}

}  // namespace

void bind_comm(nb::module_& module) {
  bind_windows(module);
  bind_outcome(module);
  module.def("open_communicator", &open_communicator, nb::arg("backend"), nb::arg("machine"),
             nb::kw_only(), nb::arg("ranks"), nb::arg("bootstrap").none(), nb::arg("phantom"),
             nb::arg("seed"), nb::arg("faults"), nb::arg("packets"), nb::arg("cuda"),
             nb::arg("timeout_s"));
  nb::class_<Communicator> communicator(module, "Communicator");
  bind_exchanges(communicator);
  communicator.def_prop_ro("ranks", &Communicator::ranks)
      .def_prop_ro("local_ranks", &Communicator::local_ranks)
      .def_prop_ro("machine", [](Communicator& self) { return self.backend().machine(); })
      .def_prop_ro("now_ns", [](Communicator& self) { return self.backend().now_ns(); })
      .def(
          "window",
          [](Communicator& self, uint64_t bytes, double timeout_s) {
            LockReleased released;
            return self.window(bytes, released.within(timeout_s));
          },
          nb::arg("nbytes"), nb::arg("timeout_s"))
      .def("register_memory", &register_memory, nb::arg("places"), nb::arg("refusal"),
           nb::arg("keep").none(), nb::arg("timeout_s"), "The number of the registered window.")
      .def(
          "deregister",
          [](nb::handle_t<Communicator> self, uint32_t number) {
            Communicator* const here = if_here(self);
            LockReleased released;
            if (here != nullptr) here->deregister(number);
          },
          nb::arg("number"))
      .def(
          "knows",
          [](Communicator& self, const std::string& op, nb::handle out, nb::handle in,
             std::vector<uint64_t> counts, const std::string& variant, nb::handle reduction) {
            return self.knows(
                request_of(self, op, out, in, std::move(counts), 0, variant, "auto", 0, reduction));
          },
          nb::arg("op"), nb::arg("out"), nb::arg("inp").none(), nb::arg("counts"),
          nb::arg("variant"), nb::arg("reduction") = nb::none(),
          "Whether the operation's plan is kept already: no new planning.")
      .def_prop_ro("kept", &Communicator::kept, "How many plans and windows it keeps track of.")
      .def_prop_ro_static(
          "plans_max", [](nb::handle) { return PlanCache::kDroppableMax; },
          "Of the plans that can be made again, how many are kept.")
      .def("start", &start, nb::arg("op"), nb::arg("out").none(), nb::arg("inp").none(),
           nb::arg("counts"), nb::arg("root"), nb::arg("variant"), nb::arg("protocol"),
           nb::arg("lane"), nb::arg("reduction").none(), nb::arg("streams"), nb::arg("keep").none(),
           nb::arg("timeout_s"))
      .def(
          "next_input",
          [](Communicator& self, uint32_t lane, uint64_t bytes, double timeout_s) {
            LockReleased released;
            const Slots::SlotPlace place = self.next_input(lane, bytes, released.within(timeout_s));
            return std::pair(place.window, place.offset);
          },
          nb::arg("lane"), nb::arg("nbytes"), nb::arg("timeout_s"))
      .def_prop_ro("host_visible", [](Communicator& self) { return self.backend().host_visible(); })
      .def("host_array", &host_array, nb::arg("nbytes"),
           "Zeroed host memory that the engines reach, as a uint8 array.")
      .def(
          "device", [](Communicator& self, Rank rank) { return self.backend().device(rank); },
          nb::arg("rank"))
      .def("check", &Communicator::check, Unlocked())
      .def("abort", &Communicator::abort)
      .def("close", [](nb::handle_t<Communicator> self) {
        Communicator* const here = if_here(self);
        LockReleased released;
        if (here != nullptr) here->close();
      });
}

}  // namespace offcore
