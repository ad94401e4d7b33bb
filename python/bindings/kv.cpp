// Host pools and transfers of KV blocks. The Python layer turns tensors into pieces.
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>

#include "core/backend/registry.h"
#include "core/base/error.h"
#include "core/kv/pool.h"
#include "core/kv/transfer.h"
#include "keep.h"
#include "module.h"
#include "process.h"
#include "released.h"
#include "studies/driver_copies.h"

namespace offcore {
namespace {

using kv::Direction;
using kv::HostPool;
using kv::HostRows;
using kv::Job;
using kv::JobReport;
using kv::Layout;
using kv::Transfer;
using PoolMemory = std::tuple<uint64_t, uint64_t, uint64_t>;  // address, bytes, row step
using Numbers = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

constexpr double kLingerMaxS = 60;

// A job, and the transfer whose thread it needs.
struct Started : OfProcess {
  Started(std::shared_ptr<Transfer> of, std::shared_ptr<Job> started)
      : OfProcess("the job"), transfer(std::move(of)), job(std::move(started)) {}
  std::shared_ptr<Transfer> transfer;
  std::shared_ptr<Job> job;
};

std::shared_ptr<Backend> open_one(const std::string& name, const Machine& machine, int device,
                                  bool kernel = false, uint32_t sms = 0) {
  BackendOptions options;
  options.cuda.gather = kernel;
  options.cuda.packs = sms > 0;
  if (sms > 0) options.cuda.sms = sms;
  if (device >= 0) options.cuda.devices = {device};
  return open_backend(name, machine, 1, {0}, std::move(options));
}

std::shared_ptr<Layout> layout_of(
    const std::vector<std::tuple<uintptr_t, uint64_t, uint64_t, uint32_t, uint32_t>>& rows,
    uint64_t blocks, uint32_t row_blocks) {
  std::vector<kv::Piece> pieces;
  for (const auto& [address, block_step, bytes, layer, tensor] : rows) {
    pieces.push_back({.address = reinterpret_cast<std::byte*>(address),
                      .block_step = block_step,
                      .bytes = bytes,
                      .layer = layer,
                      .tensor = tensor});
  }
  return std::make_shared<Layout>(std::move(pieces), blocks, row_blocks);
}

std::shared_ptr<HostPool> open_host_pool(const std::string& backend, const Machine& machine,
                                         int device, uint64_t block_bytes, uint64_t blocks,
                                         uint64_t chunk_bytes,
                                         const std::vector<PoolMemory>& memory, nb::object keep) {
  const bool own = keep.is_none();
  kv::ForeignRows foreign{.keep = keep_alive(std::move(keep))};
  for (const auto& [address, bytes, row_stride] : memory) {
    foreign.parts.push_back({reinterpret_cast<std::byte*>(address), bytes, row_stride});
  }
  const LockReleased released;
  auto here = open_one(backend, machine, device);
  const auto pool =
      own ? HostPool::create(std::move(here), block_bytes, chunk_bytes)
          : HostPool::create(std::move(here), block_bytes, chunk_bytes, std::move(foreign));
  pool->grow(blocks);
  return pool;
}

nb::object allocate(HostPool& pool, uint64_t count, double timeout_s) {
  auto slots = std::make_unique<std::vector<int64_t>>();
  {
    LockReleased released;
    *slots = pool.allocate(count, released.within(timeout_s));
  }
  const size_t size = slots->size();
  int64_t* data = slots->data();
  nb::capsule owner(slots.release(),
                    [](void* p) noexcept { delete static_cast<std::vector<int64_t>*>(p); });
  return nb::ndarray<nb::numpy, int64_t, nb::ndim<1>>(data, {size}, owner).cast();
}

nb::object row(const HostPool& pool, int64_t slot) {
  auto [data, memory] = pool.row(slot);
  return nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>(
             reinterpret_cast<uint8_t*>(data), {pool.row_bytes()}, capsule_of(std::move(memory)))
      .cast();
}

std::shared_ptr<Transfer> open_transfer(const std::string& backend, const Machine& machine,
                                        int device, std::vector<std::shared_ptr<Layout>> layouts,
                                        const nb::list& pools, const std::vector<int>& links,
                                        const Machine& pair, uint64_t link_bytes,
                                        uint64_t crossing_bytes, nb::object keep,
                                        uint64_t ahead_bytes, uint32_t ahead_commands,
                                        std::array<std::optional<uint64_t>, 2> plain_from,
                                        std::optional<double> linger_s, bool kernel,
                                        const std::tuple<bool, bool, bool>& flags,
                                        const std::tuple<std::string, uint32_t, uint64_t>& pack) {
  if (layouts.size() != pools.size()) {
    fail(Code::invalid, layouts.size(), " caches and ", pools.size(),
         " host pools: each cache needs its pool");
  }
  std::vector<kv::CacheGroup> groups;
  for (size_t i = 0; i < layouts.size(); ++i) {
    groups.push_back({layouts[i], nb::cast<HostRows&>(pools[i]).shared_from_this()});
  }
  const std::shared_ptr<const void> kept = keep_alive(std::move(keep));
  if (linger_s && !(*linger_s >= 0 && *linger_s <= kLingerMaxS)) {
    fail(Code::invalid, "linger is ", *linger_s, " s; it must lie in 0..", kLingerMaxS);
  }
  const auto linger_ns = linger_s ? static_cast<int64_t>(*linger_s * 1e9) : kv::usual_linger_ns();
  const auto& [policy, pack_sms, pack_bytes] = pack;
  const auto& [adopt, hold, checked] = flags;
  const kv::PackOptions packing{
      .policy = kv::parse_policy(policy), .sms = pack_sms, .bytes = pack_bytes};
  const bool packs = device >= 0 && packing.policy != kv::Policy::zero_sm && pack_sms > 0;
  LockReleased released;
  std::vector<std::shared_ptr<Backend>> neighbours;
  for (const int link : links) {
    BackendOptions options;
    if (device >= 0) {
      options.cuda.devices = {link};
      options.cuda.own_copy = "engine";  // spare ones have transfers of their own
      options.cuda.peers = {device};
    }
    neighbours.push_back(open_backend(backend, pair, 2, {kv::kNeighbour}, std::move(options)));
  }
  return Transfer::create(
      open_one(backend, machine, device, kernel, packs ? kv::sms_of_lane(pack_sms) : 0),
      std::move(neighbours), std::move(groups),
      {.pace = {.ahead_bytes = ahead_bytes, .ahead_commands = ahead_commands},
       .plain_from = plain_from,
       .checked = checked,
       .link_bytes = link_bytes,
       .crossing_bytes = crossing_bytes,
       .packing = packing,
       .hold = hold,
       .adopt = adopt,
       .linger_ns = linger_ns,
       .kernel = kernel},
      kept);
}

std::unique_ptr<Mark> mark(Backend& backend, const std::string& what, uintptr_t handle) {
  Streams* streams = backend.capabilities().streams;
  if (streams == nullptr) {
    fail(Code::unsupported, "this backend has no ", what, "s to wait for");
  }
  return what == "stream" ? streams->mark_stream(handle) : streams->mark_event(handle);
}

// Numbers as nearly all calls name them: a contiguous array of int64. Or something else.
class PlainNumbers {
 public:
  explicit PlainNumbers(nb::handle given) {
    if (PyObject_CheckBuffer(given.ptr()) == 0) return;
    held_ = PyObject_GetBuffer(given.ptr(), &view_, PyBUF_ND | PyBUF_FORMAT) == 0;
    if (!held_) PyErr_Clear();  // it is not contiguous
  }
  PlainNumbers(const PlainNumbers&) = delete;
  PlainNumbers& operator=(const PlainNumbers&) = delete;
  ~PlainNumbers() {
    if (held_) PyBuffer_Release(&view_);
  }

  bool plain() const {
    if (!held_ || view_.ndim != 1 || view_.itemsize != sizeof(int64_t)) return false;
    const std::string_view format = view_.format == nullptr ? "B" : view_.format;
    return format == "l" || format == "q";
  }
  void put(std::vector<int64_t>& numbers) const {
    const auto* const first = static_cast<const int64_t*>(view_.buf);
    numbers.assign(first, first + view_.shape[0]);
  }

 private:
  Py_buffer view_;
  bool held_ = false;
};

// Whether it is one of Python's own, from 0 on, or False or True.
bool plain_count(nb::handle given, uint32_t& result) {
  if (PyBool_Check(given.ptr())) {
    result = given.is(Py_True);
    return true;
  }
  return PyLong_CheckExact(given.ptr()) && nb::try_cast(given, result, false) &&
         result <= INT32_MAX;
}

// Reads the arguments of nearly all calls by itself: what Python does for one takes as long as the
// call where other work has emptied the caches. `how`: group, priority and layers together.
// `after`: what that is, and its handle; or nothing. None: an argument is something else.
nb::object start(Transfer& self, bool load, nb::handle blocks, nb::handle slots,
                 const nb::tuple& how, const nb::tuple& after) {
  Released::drop();
  const PlainNumbers named(blocks);
  const PlainNumbers places(slots);
  if (!named.plain() || !places.plain()) return nb::none();
  kv::TransferRequest request = self.request(load ? Direction::load : Direction::store);
  named.put(request.blocks);
  places.put(request.slots);
  const nb::handle priority = how[1];
  if (!plain_count(how[0], request.group) || !plain_count(how[2], request.layers_together) ||
      !PyLong_CheckExact(priority.ptr()) || !nb::try_cast(priority, request.priority, false) ||
      request.priority == INT32_MIN) {
    return nb::none();
  }
  std::pair<std::string, uintptr_t> work;
  if (after.size() > 0 && !nb::try_cast(nb::handle(after), work)) {
    fail(Code::invalid, "after: a handle of a stream or an event is from 0 to 2^64 - 1");
  }
  std::shared_ptr<Job> job;
  {
    const LockReleased released;
    if (after.size() > 0) request.after = mark(self.backend(), work.first, work.second);
    job = self.start(std::move(request));
  }
  return nb::cast(Started(self.shared_from_this(), std::move(job)));
}

void bind_pools(nb::module_& module) {
  nb::class_<Layout>(module, "KvLayout", "core/kv/layout.h")
      .def_prop_ro("blocks", &Layout::blocks)
      .def_prop_ro("layers", &Layout::layers)
      .def_prop_ro("block_bytes", &Layout::block_bytes)
      .def(
          "folds",
          [](const Layout& self) {
            std::vector<std::pair<uint32_t, uint64_t>> folds;
            for (const kv::Fold& fold : self.folds(0, UINT32_MAX, {})) {
              folds.emplace_back(fold.pieces, fold.bytes);
            }
            return folds;
          },
          "(pieces, bytes of a piece) of every copy of one block.");
  module.def("kv_layout", &layout_of, nb::arg("pieces"), nb::arg("blocks"), nb::arg("row_blocks"),
             "Of pieces (address, block step, bytes, layer, tensor), in the order of the row.");
  nb::class_<HostRows>(module, "HostRows", "core/kv/rows.h")
      .def_prop_ro("row_bytes", &HostRows::row_bytes);
  module.def(
      "rows_by_address",
      [](uint64_t row_bytes, uint64_t first, uint64_t step) -> std::shared_ptr<HostRows> {
        return std::make_shared<kv::RowsByAddress>(row_bytes, kv::Seams{first, step});
      },
      nb::arg("row_bytes"), nb::arg("first"), nb::arg("step"),
      "No copy goes over an address that is a multiple of `step` away from `first`; 0: any may.");
  nb::class_<HostPool, HostRows>(module, "HostPool", "core/kv/pool.h")
      .def_prop_ro("counts",
                   [](const HostPool& self) {
                     const HostPool::PoolCounts counts = self.counts();
                     return std::tuple(counts.rows, counts.ready, counts.free, counts.leaving);
                   })
      .def("grow", &HostPool::grow, nb::arg("rows"), Unlocked())
      .def("shrink", &HostPool::shrink, nb::arg("keep"), Unlocked())
      .def(
          "wait_ready",
          [](HostPool& self, double timeout_s) {
            LockReleased released;
            self.wait_ready(released.within(timeout_s));
          },
          nb::arg("timeout_s"))
      .def("allocate", &allocate, nb::arg("count"), nb::arg("timeout_s"))
      .def(
          "free",
          [](HostPool& self, const Numbers& slots) {
            LockReleased released;
            self.free({slots.data(), slots.size()});
          },
          nb::arg("slots"))
      .def("row", &row, nb::arg("slot"))
      .def(
          "close",
          [](nb::handle_t<HostPool> self, double timeout_s) {
            HostPool* const here = if_here(self);
            LockReleased released;
            if (here != nullptr) here->close(released.within(timeout_s));
          },
          nb::arg("timeout_s"));
  module.def("open_host_pool", &open_host_pool, nb::arg("backend"), nb::arg("machine"),
             nb::arg("device"), nb::arg("block_bytes"), nb::arg("blocks"), nb::arg("chunk_bytes"),
             nb::arg("memory"), nb::arg("keep").none());
}

using Places = nb::ndarray<const uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

studies::Pages pages_of(const Places& dsts, const Places& srcs, uint64_t bytes) {
  return {{dsts.data(), dsts.size()}, {srcs.data(), srcs.size()}, bytes};
}

void bind_peers(nb::module_& module) {
  module.def(
      "copy_by_loop",
      [](const Places& dsts, const Places& srcs, uint64_t bytes, int device, uintptr_t stream) {
        LockReleased released;
        studies::copy_by_loop(pages_of(dsts, srcs, bytes), device, stream);
      },
      nb::arg("dsts"), nb::arg("srcs"), nb::arg("bytes"), nb::arg("device"), nb::arg("stream"),
      "What programs do that have no offcore: studies/driver_copies.h.");
  module.def(
      "copy_by_batch",
      [](const Places& dsts, const Places& srcs, uint64_t bytes, int device, uintptr_t stream,
         uint64_t call_pages) {
        LockReleased released;
        studies::copy_by_batch(pages_of(dsts, srcs, bytes), device, stream, call_pages);
      },
      nb::arg("dsts"), nb::arg("srcs"), nb::arg("bytes"), nb::arg("device"), nb::arg("stream"),
      nb::arg("call_pages") = UINT64_MAX);
  module.def(
      "copy_by_hand",
      [](const Places& dsts, const Places& srcs, uint64_t bytes) {
        LockReleased released;
        studies::copy_by_hand(pages_of(dsts, srcs, bytes));
      },
      nb::arg("dsts"), nb::arg("srcs"), nb::arg("bytes"));
}

void bind_jobs(nb::module_& module) {
  nb::class_<JobReport>(module, "KvReport", "What a job did: core/kv/job.h.")
      .def_ro("blocks", &JobReport::blocks)
      .def_ro("layers", &JobReport::layers)
      .def_ro("pages", &JobReport::pages)
      .def_ro("commands", &JobReport::commands)
      .def_ro("strided", &JobReport::strided)
      .def_ro("bytes", &JobReport::bytes)
      .def_ro("link_bytes", &JobReport::link_bytes)
      .def_ro("calls", &JobReport::calls)
      .def_ro("enqueue_ns", &JobReport::enqueue_ns)
      .def_ro("queued_ns", &JobReport::queued_ns)
      .def_ro("copy_ns", &JobReport::copy_ns)
      .def_ro("sms", &JobReport::sms)
      .def_ro("sm_ns", &JobReport::sm_ns)
      .def_ro("cancelled", &JobReport::cancelled);
  nb::class_<Started>(module, "KvJob", "core/kv/job.h")
      .def("done", [](const Started& self) { return self.job->done(); })
      .def(
          "wait",
          [](const Started& self, double timeout_s) {
            LockReleased released;
            self.transfer->wait(*self.job, released.within(timeout_s));
          },
          nb::arg("timeout_s"))
      .def(
          "wait_layer",
          [](const Started& self, uint32_t layer, double timeout_s) {
            LockReleased released;
            self.job->wait_layer(layer, released.within(timeout_s));
          },
          nb::arg("layer"), nb::arg("timeout_s"))
      .def(
          "enqueue_wait",
          [](const Started& self, uint32_t layer, uintptr_t stream, double timeout_s, bool gate) {
            LockReleased released;
            if (gate) return self.transfer->enqueue_gate(*self.job, layer, stream);
            self.transfer->enqueue_wait(*self.job, layer, stream, released.within(timeout_s));
          },
          nb::arg("layer"), nb::arg("stream"), nb::arg("timeout_s"), nb::arg("gate"))
      .def(
          "cancel", [](const Started& self) { self.job->cancel(); }, Unlocked())
      .def_prop_ro(
          "load",
          [](const Started& self) { return self.job->request().direction == Direction::load; })
      .def_prop_ro("asked", [](const Started& self) { return self.job->request().blocks.size(); })
      .def_prop_ro("layers", [](const Started& self) { return self.job->layers(); })
      .def_prop_ro("report", [](const Started& self) { return self.job->report(); });
  nb::class_<Transfer>(module, "Transfer", "core/kv/transfer.h")
      .def_prop_ro("adopted", &Transfer::adopted)
      .def("start", &start,  // without names of arguments, which take time
           nb::sig("def start(self, load: bool, blocks: object, slots: object, "
                   "how: tuple[object, object, object], after: tuple[()] | tuple[str, int], /) -> "
                   "KvJob | None"))
      .def(
          "close",
          [](nb::handle_t<Transfer> self, bool cancel, double timeout_s) {
            Transfer* const here = if_here(self);
            LockReleased released;
            if (here != nullptr) here->close(cancel, released.within(timeout_s));
          },
          nb::arg("cancel"), nb::arg("timeout_s"));
  module.def("open_transfer", &open_transfer, nb::arg("backend"), nb::arg("machine"),
             nb::arg("device"), nb::arg("layouts"), nb::arg("pools"), nb::arg("links"),
             nb::arg("pair"), nb::arg("link_bytes"), nb::arg("crossing_bytes"), nb::arg("keep"),
             nb::arg("ahead_bytes"), nb::arg("ahead_commands"), nb::arg("plain_from"),
             nb::arg("linger_s"), nb::arg("kernel"), nb::arg("flags"), nb::arg("pack"));
}

}  // namespace

void bind_kv(nb::module_& module) {
  bind_pools(module);
  bind_jobs(module);
  bind_peers(module);
}

}  // namespace offcore
