// Calls on tensors as nearly all are, of offcore.torch and of torch.distributed's groups: to the
// core without further frames of Python, each of which costs 5 us between a step's kernels.
// Whatever else a call may bring goes the long way, by python/offcore.
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "core/base/reduction.h"
#include "core/comm/communicator.h"
#include "keep.h"
#include "module.h"
#include "process.h"
#include "region.h"
#include "released.h"
#include "tensors.h"

namespace offcore {
namespace {

constexpr uintptr_t kLegacyStream = 1;  // the driver's other name for the default stream, 0

struct OptionNames {
  Name async_op{"asyncOp"};
  Name timeout{"timeout"};
  Name total_seconds{"total_seconds"};
  Name reduce_op{"reduceOp"};
  Name op{"op"};
  Name dtype{"dtype"};
};

const OptionNames& names() {
  static const OptionNames* const all = new OptionNames();  // the interpreter may end before
  return *all;
}

// The tensor, or the only one of a list; else nothing.
nb::object only(nb::handle given) {
  if (!nb::isinstance<nb::list>(given)) return nb::borrow(given);
  return nb::len(given) == 1 ? nb::object(given[0]) : nb::none();
}

std::unique_ptr<Pending> started(Communicator& comm, Request request, double limit_s) {
  LockReleased released;
  return comm.start(std::move(request), released.within(limit_s));
}

// One local rank's operand; nothing: it is none that the core reads by itself.
std::optional<Operand> operand(nb::handle given, Rank rank, int device) {
  if (nb::isinstance<Region>(given)) return nb::cast<const Region&>(given).operand(rank);
  return is_plain(given, device) ? std::optional(operand_of(given)) : std::nullopt;
}

// False: it is none of Python's own, or out of range.
template <typename Number>
bool number(nb::handle given, Number& result) {
  return PyLong_CheckExact(given.ptr()) && nb::try_cast(given, result, false);
}

// `call`: (output, input, counts, root, variant, protocol, lane, perhaps reduction), as
// Communicator._start has them. None: it goes the long way.
nb::object start_plain(const char* op, Communicator& self, const nb::tuple& call, int device,
                       uintptr_t stream, bool keeps, double timeout_s) {
  Released::drop();
  const nb::handle out = call[0], in = call[1];
  const bool in_place = in.is_none();
  Request request{.collective = parse_collective(op)};
  if (!nb::handle(call[2]).is_none() || self.local_ranks().size() != 1 ||
      !number(call[3], request.root) || !number(call[6], request.lane) ||
      !nb::isinstance<nb::str>(call[4]) || !nb::isinstance<nb::str>(call[5])) {
    return nb::none();
  }
  const Rank rank = self.local_ranks()[0];
  std::optional<Operand> output = operand(out, rank, device);
  std::optional<Operand> input = in_place ? Operand() : operand(in, rank, device);
  if (!output || !input) return nb::none();
  const bool typed = is_tensor(out);
  if (typed && is_tensor(in) && !names().dtype.of(out).is(names().dtype.of(in))) return nb::none();
  if (reduces(request.collective)) {
    const nb::tuple reduction = call[7];
    const nb::handle array = typed ? out : in;
    const auto dtype = is_tensor(array) ? reduced_dtype(array) : std::nullopt;
    if (!dtype || !nb::handle(reduction[1]).is_none()) return nb::none();
    request.reduction = {.op = parse_reduce_op(nb::cast<const char*>(reduction[0])),
                         .dtype = *dtype,
                         .scale = nb::cast<double>(reduction[2])};
  }
  request.variant = nb::cast<const char*>(call[4]);
  request.protocol = parse_wanted(nb::cast<const char*>(call[5]));
  request.out.push_back(std::move(*output));
  if (!in_place) request.in.push_back(std::move(*input));
  request.streams = {stream};
  if (keeps) request.keep = keep_alive(in_place ? nb::borrow(out) : nb::make_tuple(out, in));
  return nb::cast(started(self, std::move(request), timeout_s));
}

class GroupCalls {
 public:
  // stream: the group's own, for calls that do not wait. timeout_s: of calls that name none.
  // `ops`: what is reduced, by torch's numbers.
  GroupCalls(Communicator& comm, int device, uintptr_t stream, double timeout_s,
             const nb::dict& ops)
      : comm_(comm.shared_from_this()), device_(device), stream_(stream), timeout_s_(timeout_s) {
    for (const auto& [number, name] : ops) {
      ops_.emplace_back(nb::cast<int>(number), parse_reduce_op(nb::cast<std::string>(name)));
    }
  }

  // `args`: what the group's method is given. (Pending, seconds, stream), or None: it goes another
  // way. Throws as Communicator::start.
  nb::object start(const char* op, const nb::tuple& args, uintptr_t current) {
    comm_->check_here();
    Released::drop();
    Request request{.collective = parse_collective(op)};
    const bool in_place = request.collective == Collective::all_reduce;
    const size_t tensors = in_place ? 1 : 2;
    if (args.size() != tensors + 1) return nb::none();
    const nb::handle opts = args[tensors];  // whatever a caller passes in their place has no such
    const nb::object asynchronous = names().async_op.find(opts);
    if (asynchronous.is_none()) return nb::none();
    const nb::object out = only(args[0]);
    const nb::object in = in_place ? nb::none() : only(args[1]);
    if (!is_plain(out, device_) || (!in_place && !is_plain(in, device_))) return nb::none();
    if (!in_place && !names().dtype.of(out).is(names().dtype.of(in))) return nb::none();
    if (reduces(request.collective)) {
      request.reduction = reduction_of(opts, out);
      if (!request.reduction) return nb::none();
    }
    if (current == 0) current = kLegacyStream;
    if (comm_->backend().capture_of({&current, 1}) != 0) return nb::none();
    request.uncaptured = true;
    const bool late = asynchronous.is(nb::handle(Py_True));
    request.streams = {late ? stream_ : current};
    if (late) {
      request.behind = current;
      // In a stream of its own it needs its tensors until it has ended; in the caller's they last
      // by the order of the stream, like a kernel's.
      request.keep = keep_alive(in_place ? out : nb::make_tuple(out, in));
    }
    const double limit_s = limit_of(opts);
    request.out.push_back(operand_of(out));
    if (!in_place) request.in.push_back(operand_of(in));
    return nb::make_tuple(started(*comm_, std::move(request), limit_s), limit_s,
                          late ? stream_ : current);
  }

 private:
  std::optional<Reduction> reduction_of(nb::handle opts, nb::handle tensor) const {
    const nb::object given = names().reduce_op.of(opts);
    const int number = nb::cast<int>(nb::int_(names().op.of(given)));
    const auto op = std::find_if(ops_.begin(), ops_.end(),
                                 [&](const auto& known) { return known.first == number; });
    const std::optional<DType> dtype = reduced_dtype(tensor);
    if (op == ops_.end() || !dtype) return std::nullopt;
    return Reduction{.op = op->second, .dtype = *dtype};
  }

  double limit_of(nb::handle opts) const {
    const nb::object timeout = names().timeout.of(opts);
    const double given_s = nb::cast<double>(names().total_seconds.call_of(timeout));
    return given_s > 0 ? given_s : timeout_s_;  // torch says -1 ms or 0 for none
  }

  const std::shared_ptr<Communicator> comm_;
  const int device_;
  const uintptr_t stream_;
  const double timeout_s_;
  std::vector<std::pair<int, ReduceOp>> ops_;
};

}  // namespace

void bind_plain_calls(nb::module_& module) {
  module.def(
      "start_plain", &start_plain, nb::arg("op"), nb::arg("comm"), nb::arg("call"),
      nb::arg("device"), nb::arg("stream"), nb::arg("keeps"), nb::arg("timeout_s"),
      nb::sig("def start_plain(op: str, comm: Communicator, call: tuple[object, ...], device: int, "
              "stream: int, keeps: bool, timeout_s: float) -> Pending | None"),
      "Starts an operation of plain tensors of the one local rank's GPU, or regions, in that\n"
      "stream; keeps: the tensors, until it has ended. None: it goes the long way.");
  nb::class_<GroupCalls>(module, "GroupCalls")
      .def(nb::init<Communicator&, int, uintptr_t, double, const nb::dict&>(), nb::arg("comm"),
           nb::arg("device"), nb::arg("stream"), nb::arg("timeout_s"), nb::arg("ops"))
      .def(
          "start", &GroupCalls::start, nb::arg("op"), nb::arg("args"), nb::arg("current"),
          nb::sig("def start(self, op: str, args: tuple[object, ...], current: int) -> "
                  "tuple[Pending, float, int] | None"),
          "Starts a call that a group's method is given, its tensors being plain ones of the GPU:\n"
          "in stream `current`, or behind it in the group's own. None: it goes another way.");
}

}  // namespace offcore
