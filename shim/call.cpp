#include "shim/call.h"

#include <array>

#include "shim/library.h"

namespace offcore::shim {
namespace {

constexpr uintptr_t kLegacyStream = 1;  // the driver's other name for the default stream

// By ncclDataType_t.
struct Type {
  uint64_t bytes;
  std::optional<DType> dtype;  // that reductions know
};
constexpr std::array<Type, 12> kTypes{{{1, DType::i8},
                                       {1, DType::u8},
                                       {4, DType::i32},
                                       {4, std::nullopt},
                                       {8, DType::i64},
                                       {8, std::nullopt},
                                       {2, DType::f16},
                                       {4, DType::f32},
                                       {8, DType::f64},
                                       {2, DType::bf16},
                                       {1, std::nullopt},
                                       {1, std::nullopt}}};

// By ncclRedOp_t: those whose results are NCCL's but for the order of sums.
constexpr std::array<std::optional<ReduceOp>, 5> kOps{ReduceOp::sum, std::nullopt, std::nullopt,
                                                      std::nullopt, ReduceOp::avg};

const Type* type_of(const Call& call) {
  const auto index = static_cast<size_t>(call.dtype);
  return call.dtype >= 0 && index < kTypes.size() ? &kTypes[index] : nullptr;
}

NcclResult missing(const char* name) {
  Library::of_process().find(name);  // says so
  return Library::of_process().loaded() ? kNcclInvalidUsage : kNcclSystemError;
}

}  // namespace

uint64_t element_bytes(const Call& call) {
  const Type* const type = type_of(call);
  return type == nullptr ? 0 : type->bytes;
}

uint64_t total_bytes(const Call& call, Rank ranks) {
  const bool whole =
      call.collective == Collective::all_reduce || call.collective == Collective::broadcast;
  return call.count * element_bytes(call) * (whole ? 1 : ranks);
}

std::optional<Reduction> reduction_of(const Call& call) {
  const Type* const type = type_of(call);
  if (type == nullptr || !type->dtype || call.op < 0) return std::nullopt;
  const auto index = static_cast<size_t>(call.op);
  if (index >= kOps.size() || !kOps[index]) return std::nullopt;
  return Reduction{.op = *kOps[index], .dtype = *type->dtype};
}

bool computable(const Call& call) {
  return reduces(call.collective) ? reduction_of(call).has_value() : element_bytes(call) > 0;
}

Request request_of(const Call& call, Rank rank, Rank ranks) {
  const Collective collective = call.collective;
  const uint64_t part = call.count * element_bytes(call);
  const auto root = static_cast<Rank>(call.root);
  const bool at_root = rank == root;
  const auto side = [](const void* data, uint64_t bytes) {
    return Operand{
        .data = static_cast<std::byte*>(const_cast<void*>(data)), .bytes = bytes, .given = true};
  };
  const bool gathers = collective == Collective::all_gather || collective == Collective::gather;
  const bool scatters =
      collective == Collective::reduce_scatter || collective == Collective::scatter;
  const bool to_all = collective == Collective::all_to_all;
  const bool rooted_out = collective == Collective::gather;
  const bool rooted_in = collective == Collective::scatter || collective == Collective::broadcast;
  const Operand out = side(call.out, gathers || to_all ? part * ranks : part);
  const Operand in = side(call.in, scatters || to_all ? part * ranks : part);
  const bool from_out = collective == Collective::broadcast && call.in == call.out;
  const uintptr_t stream = reinterpret_cast<uintptr_t>(call.stream);
  return {.collective = collective,
          .root = root,
          .reduction = reduction_of(call),
          .out = {rooted_out && !at_root ? Operand{} : out},
          .in = {(rooted_in && !at_root) || from_out ? Operand{} : in},
          .streams = {stream == 0 ? kLegacyStream : stream}};
}

bool rooted_in_place(const Call& call, Rank rank, Rank ranks) {
  const bool gathers = call.collective == Collective::gather;
  if (!gathers && call.collective != Collective::scatter) return false;
  const auto whole = reinterpret_cast<uintptr_t>(gathers ? call.out : call.in);
  const auto part = reinterpret_cast<uintptr_t>(gathers ? call.in : call.out);
  const uint64_t bytes = call.count * element_bytes(call);
  return rank == static_cast<Rank>(call.root) && part < whole + bytes * ranks &&
         whole < part + bytes;
}

NcclResult forward(const Call& call) {
  const Library& real = Library::of_process();
  const auto ask = [&](const char* name, auto* function, auto... arguments) {
    return function == nullptr ? missing(name) : function(arguments...);
  };
  const auto& [collective, in, out, count, dtype, op, root, comm, stream] = call;
  switch (collective) {
    case Collective::all_gather:
      return ask("ncclAllGather", real.AllGather, in, out, count, dtype, comm, stream);
    case Collective::all_to_all:
      return ask("ncclAlltoAll", real.AlltoAll, in, out, count, dtype, comm, stream);
    case Collective::broadcast:
      return ask("ncclBroadcast", real.Broadcast, in, out, count, dtype, root, comm, stream);
    case Collective::scatter:
      return ask("ncclScatter", real.Scatter, in, out, count, dtype, root, comm, stream);
    case Collective::gather:
      return ask("ncclGather", real.Gather, in, out, count, dtype, root, comm, stream);
    case Collective::reduce_scatter:
      return ask("ncclReduceScatter", real.ReduceScatter, in, out, count, dtype, op, comm, stream);
    case Collective::all_reduce:
      return ask("ncclAllReduce", real.AllReduce, in, out, count, dtype, op, comm, stream);
    case Collective::reduce:
      return ask("ncclReduce", real.Reduce, in, out, count, dtype, op, root, comm, stream);
  }
  return kNcclInternalError;
}

NcclResult result_of(const Error& error) {
  switch (error.code()) {
    case Code::invalid:
    case Code::unsupported:
      return kNcclInvalidArgument;
    case Code::mismatch:
      return kNcclInvalidUsage;
    case Code::driver:
    case Code::memory:
      return kNcclUnhandledCudaError;
    case Code::peer:
    case Code::cancelled:
      return kNcclRemoteError;
    case Code::timeout:
    case Code::unavailable:
      return kNcclSystemError;
    case Code::verify:
      break;
  }
  return kNcclInternalError;
}

}  // namespace offcore::shim
