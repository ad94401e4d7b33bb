// Programs that reduce: engines exchange, callers' cores add up, engines gather.
//
//   pipelined  The array is cut into parts, one a rank. Every rank pushes its share of each part,
//              in chunks, into a slot of the part's owner, whose caller reduces a chunk once all
//              ranks' shares of it have come. all_reduce and reduce then push reduced chunks on:
//              into the peers' outputs where these lie in a window (whoever has everyone's data
//              knows that all have entered, and read what is overwritten), else into slots, out of
//              which the callers copy. A slot is a ring of kRingDepth chunks a peer; callers signal
//              when one is free again.
//   one_shot   Every rank pushes its whole array to all others, in chunks, too, and reduces all of
//              them itself: one step instead of two, for small arrays (all_reduce only).
//
// Engines work a chunk ahead of the cores, so that a reduction takes about as long as its data are
// on the wire. Programs enter as protocol eager; captured ones, whose words have to be 0 again
// before they repeat, by an entry round. They have one chunk: a graph's commands are one chain, of
// which chunks would only be more.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "core/plan/plan.h"

namespace offcore {

struct ReductionPlan {
  std::string op;               // "reduce_scatter", "all_reduce" or "reduce"
  std::vector<uint64_t> parts;  // bytes that each rank reduces, one after another in the array
  Rank root = 0;                // of a reduce
  bool in_place = false;        // the array is the output (all_reduce, reduce)
  Reduction reduction;
};

// all_reduce and reduce: an array of so many bytes in parts that are aligned alike.
std::vector<uint64_t> equal_parts(uint64_t bytes, Rank ranks);

// Whether one_shot may be chosen: for arrays that are not too large for so many ranks.
bool one_shot_fits(const ReductionPlan& plan);

// The tuned table's variant, or an empty string.
std::string tuned_variant(const ReductionPlan& plan, const Machine& machine,
                          const ProtocolForm& form);

// Lowers, legalizes, verifies. variant: "auto" (the tuned table's, else the cheapest by the cost
// model), "pipelined" or "one_shot". form.staged: outputs are in no window, and what peers send
// goes by way of slots. Throws unsupported for another variant, and timeout.
std::shared_ptr<const Program> plan_reduction(const ReductionPlan& plan, const std::string& variant,
                                              const Machine& machine, const ProtocolForm& form,
                                              const Deadline& deadline = Deadline::never());

}  // namespace offcore
