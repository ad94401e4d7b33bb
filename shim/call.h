// A collective as NCCL's callers ask for it.
#pragma once
#include <optional>

#include "core/comm/request.h"
#include "shim/nccl.h"

namespace offcore::shim {

struct Call {
  Collective collective;
  const void* in;
  void* out;
  uint64_t count;  // as NCCL's function takes it
  int dtype;
  int op;  // ncclRedOp_t of those that reduce
  int root;
  Comm comm;
  Stream stream;
};

// Bytes of an element; 0: a type that is not known.
uint64_t element_bytes(const Call& call);
// S of nccl-tests: the whole array.
uint64_t total_bytes(const Call& call, Rank ranks);
// Whether the operation can be computed, by type and kind of reduction.
bool computable(const Call& call);
// Of those that reduce and are computable.
std::optional<Reduction> reduction_of(const Call& call);
// What a communicator is asked for. `rank` of `ranks` calls.
Request request_of(const Call& call, Rank rank, Rank ranks);
// Whether the rank is the root of a gather or scatter, and its own part lies in the whole: NCCL's
// form in place, which only the root sees.
bool rooted_in_place(const Call& call, Rank rank, Rank ranks);
// Calls the real library's function.
NcclResult forward(const Call& call);
// What NCCL would say of that error.
NcclResult result_of(const Error& error);

}  // namespace offcore::shim
