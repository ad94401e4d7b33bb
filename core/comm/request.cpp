#include "core/comm/request.h"

#include <algorithm>
#include <numeric>

#include "core/base/error.h"
#include "core/plan/variant.h"

namespace offcore {
namespace {

struct OperandRange {
  const void* space;  // the window of phantom memory, or null for addresses
  uint64_t begin;
  uint64_t end;
};

OperandRange range_of(const Operand& operand) {
  const bool phantom = operand.data == nullptr;
  const uint64_t begin = phantom ? operand.offset : reinterpret_cast<uint64_t>(operand.data);
  return {phantom ? operand.window.get() : nullptr, begin, begin + operand.bytes};
}

bool overlap(const Operand& a, const Operand& b) {
  const OperandRange x = range_of(a);
  const OperandRange y = range_of(b);
  return x.space == y.space && x.begin < y.end && y.begin < x.end;
}

bool begins_at(const Operand& part, const Operand& whole, uint64_t offset) {
  const OperandRange x = range_of(part);
  const OperandRange y = range_of(whole);
  return x.space == y.space && x.begin == y.begin + offset;
}

class Checker {
 public:
  Checker(Request& request, Rank ranks, const std::vector<Rank>& local_ranks)
      : request_(request), local_ranks_(local_ranks) {
    facts_ = {.collective = request.collective,
              .ranks = ranks,
              .in_place = request.in.empty(),
              .root = request.root,
              .counts = request.counts,
              .reduction = request.reduction};
  }

  Facts run() {
    settle_names();
    if (request_.out.size() != local_ranks_.size() ||
        (!request_.in.empty() && request_.in.size() != local_ranks_.size())) {
      fail(Code::invalid, name(), ": pass one buffer for each of the ", local_ranks_.size(),
           " local ranks");
    }
    if (facts_.root >= facts_.ranks) {
      fail(Code::invalid, name(), ": root is ", facts_.root, "; it must lie in 0..",
           facts_.ranks - 1);
    }
    uneven_ = !request_.counts.empty();
    switch (facts_.collective) {
      case Collective::all_gather:
        all_gather();
        break;
      case Collective::all_to_all:
        all_to_all();
        break;
      case Collective::broadcast:
        broadcast();
        break;
      case Collective::scatter:
      case Collective::gather:
        rooted();
        break;
      case Collective::reduce_scatter:
        reduce_scatter();
        break;
      case Collective::all_reduce:
      case Collective::reduce:
        reduce_whole();
        break;
    }
    settle_overlap();
    check_apart();
    return facts_;
  }

 private:
  std::string_view name() const { return to_string(facts_.collective); }
  uint64_t sum(size_t first, size_t count) const {
    const auto begin = facts_.counts.begin() + static_cast<std::ptrdiff_t>(first);
    return std::accumulate(begin, begin + static_cast<std::ptrdiff_t>(count), uint64_t{0});
  }

  // The variant is part of the plan key: the one that the environment names, spelled the one way.
  void settle_names() {
    std::string& variant = request_.variant;
    if (reduces(facts_.collective)) return settle_reduction();
    variant = variant == "auto" ? default_variant() : to_string(parse_variant(variant));
  }

  void settle_reduction() {
    const Wanted protocol = request_.protocol;
    if (protocol == Wanted::credits || protocol == Wanted::view) {
      fail(Code::unsupported, name(), " has no protocol ", to_string(protocol),
           ": it enters through slots, which is always safe");
    }
    if (!facts_.reduction) fail(Code::invalid, name(), ": no reduction is given");
    check(*facts_.reduction, name());
  }

  void need_elements(std::string_view what, Rank rank, uint64_t bytes) const {
    const uint64_t size = size_of(facts_.reduction->dtype);
    if (bytes % size == 0) return;
    fail(Code::invalid, name(), ": ", what, " of rank ", rank, " has ", bytes,
         " bytes, not a whole number of ", to_string(facts_.reduction->dtype), " elements");
  }

  void reduce_scatter() {
    if (facts_.in_place) {
      fail(Code::unsupported, name(),
           " needs an input: in place, the output is the rank's own part "
           "of it");
    }
    if (!uneven_) facts_.counts.assign(facts_.ranks, request_.out[0].bytes);
    need_counts(facts_.ranks);
    facts_.total_bytes = sum(0, facts_.ranks);
    for (size_t i = 0; i < local_ranks_.size(); ++i) {
      const Rank rank = local_ranks_[i];
      need(request_.out, i, "the output", facts_.counts[rank]);
      need(request_.in, i, "the input", facts_.total_bytes);
      need_elements("the part", rank, facts_.counts[rank]);
    }
  }

  // all_reduce and reduce.
  void reduce_whole() {
    const bool rooted = facts_.collective == Collective::reduce;
    if (uneven_) need_counts(1);
    if (!uneven_) {
      facts_.counts = {facts_.in_place ? request_.out[0].bytes : request_.in[0].bytes};
    }
    facts_.total_bytes = facts_.counts[0];
    if (rooted && facts_.in_place) {
      fail(Code::unsupported, name(), " needs an input; the root may pass it as its output too");
    }
    for (size_t i = 0; i < local_ranks_.size(); ++i) {
      const Rank rank = local_ranks_[i];
      if (!facts_.in_place) need(request_.in, i, "the input", facts_.total_bytes);
      if (!rooted || rank == facts_.root) need(request_.out, i, "the output", facts_.total_bytes);
      need_elements("the array", rank, facts_.total_bytes);
    }
  }

  void need_counts(size_t expected) {
    if (facts_.counts.size() != expected) {
      fail(Code::invalid, name(), "_v: ", facts_.counts.size(), " counts given, ", expected,
           " needed");
    }
  }

  // The buffer's size must be right: exactly with equal parts, at least so with counts.
  void need(const std::vector<Operand>& side, size_t i, const char* what, uint64_t bytes) {
    const uint64_t has = side[i].bytes;
    if (uneven_ ? has >= bytes : has == bytes) return;
    fail(Code::invalid, name(), ": ", what, " of rank ", local_ranks_[i], " has ", has, " bytes, ",
         uneven_ ? "at least " : "", bytes, " needed");
  }

  uint64_t divided(uint64_t bytes) const {
    if (bytes % facts_.ranks == 0) return bytes / facts_.ranks;
    fail(facts_.in_place && facts_.collective == Collective::all_to_all ? Code::unsupported
                                                                        : Code::invalid,
         name(), ": ", bytes, " bytes do not divide into ", facts_.ranks, " equal parts; use ",
         name(), "_v with counts");
  }

  void all_gather() {
    const Rank ranks = facts_.ranks;
    if (!uneven_) {
      facts_.counts.assign(ranks,
                           facts_.in_place ? divided(request_.out[0].bytes) : request_.in[0].bytes);
    }
    need_counts(ranks);
    facts_.total_bytes = sum(0, ranks);
    for (size_t i = 0; i < local_ranks_.size(); ++i) {
      if (!facts_.in_place) need(request_.in, i, "the input", facts_.counts[local_ranks_[i]]);
      need(request_.out, i, "the output", facts_.total_bytes);
    }
  }

  void all_to_all() {
    const size_t ranks = facts_.ranks;
    if (!uneven_) facts_.counts.assign(ranks * ranks, divided(request_.out[0].bytes));
    need_counts(ranks * ranks);
    for (size_t i = 0; i < local_ranks_.size(); ++i) {
      const size_t rank = local_ranks_[i];
      uint64_t received = 0;
      for (size_t peer = 0; peer < ranks; ++peer) received += facts_.counts[peer * ranks + rank];
      if (!facts_.in_place) need(request_.in, i, "the input", sum(rank * ranks, ranks));
      need(request_.out, i, "the output", received);
    }
    // Every rank holds an array; S is the largest one sent.
    for (size_t rank = 0; rank < ranks; ++rank) {
      facts_.total_bytes = std::max(facts_.total_bytes, sum(rank * ranks, ranks));
    }
  }

  void broadcast() {
    if (uneven_) need_counts(1);
    if (!uneven_) facts_.counts = {request_.out[0].bytes};
    facts_.total_bytes = facts_.counts[0];
    for (size_t i = 0; i < local_ranks_.size(); ++i) {
      need(request_.out, i, "the buffer", facts_.total_bytes);
      if (facts_.in_place || local_ranks_[i] != facts_.root) continue;
      facts_.in_place = !request_.in[i].given;
      if (!facts_.in_place) need(request_.in, i, "the input", facts_.total_bytes);
    }
    if (facts_.in_place) request_.in.clear();
  }

  void rooted() {
    const bool scatter = facts_.collective == Collective::scatter;
    request_.in.resize(local_ranks_.size());
    facts_.in_place = false;
    for (size_t i = 0; i < local_ranks_.size(); ++i) {
      if (request_.in[i].given || !uses(false, local_ranks_[i])) continue;
      fail(Code::unsupported, name(), " in place is not supported; pass an input and an output");
    }
    const auto& leaf = scatter ? request_.out : request_.in;
    const auto& root = scatter ? request_.in : request_.out;
    if (!uneven_) facts_.counts.assign(facts_.ranks, leaf[0].bytes);
    need_counts(facts_.ranks);
    facts_.total_bytes = sum(0, facts_.ranks);
    for (size_t i = 0; i < local_ranks_.size(); ++i) {
      need(leaf, i, scatter ? "the output" : "the input", facts_.counts[local_ranks_[i]]);
      if (local_ranks_[i] == facts_.root) {
        need(root, i, scatter ? "the input" : "the output", facts_.total_bytes);
      }
    }
  }

  // In place where every local rank's input is its output.
  void settle_all_reduce() {
    if (request_.in.empty()) return;
    size_t same = 0;
    for (size_t i = 0; i < local_ranks_.size(); ++i) {
      same += begins_at(request_.in[i], request_.out[i], 0);
    }
    if (same == 0 || facts_.total_bytes == 0) return;
    if (same < local_ranks_.size()) {
      fail(Code::invalid, name(), ": some local ranks are in place and some are not");
    }
    facts_.in_place = true;
    request_.in.clear();
  }

  // Where rank's input must begin in its output for the operation to be the in-place one.
  uint64_t own_offset(Rank rank) const {
    return facts_.collective == Collective::all_gather ? sum(0, rank) : 0;
  }

  // An output may be its own part of the input, or all of it: what is read of it has been read
  // before it is written.
  void check_reduced_overlap() const {
    for (size_t i = 0; i < local_ranks_.size() && !request_.in.empty(); ++i) {
      const Rank rank = local_ranks_[i];
      const Operand& in = request_.in[i];
      const Operand& out = request_.out[i];
      if (!uses(true, rank) || out.bytes == 0 || in.bytes == 0 || !overlap(in, out)) continue;
      const bool part = facts_.collective == Collective::reduce_scatter;
      if (begins_at(out, in, part ? sum(0, rank) : 0)) continue;
      fail(Code::invalid, name(), ": input and output of rank ", rank,
           " overlap; pass separate buffers, or ",
           part ? "the output as the rank's own part of the input" : "the same one twice");
    }
  }

  void settle_overlap() {
    if (facts_.collective == Collective::all_reduce) settle_all_reduce();
    if (reduces(facts_.collective)) return check_reduced_overlap();
    if (request_.in.empty()) return;
    size_t in_place = 0;
    size_t apart = 0;  // a rank without an input is neither
    for (size_t i = 0; i < local_ranks_.size(); ++i) {
      const Operand& in = request_.in[i];
      const Operand& out = request_.out[i];
      if (in.bytes == 0 || !uses(false, local_ranks_[i])) continue;
      if (out.bytes == 0 || !overlap(in, out)) {
        ++apart;
        continue;
      }
      const bool gathers = facts_.collective == Collective::all_gather;
      const bool can = request_.view() ? gathers
                                       : facts_.collective != Collective::scatter &&
                                             facts_.collective != Collective::gather;
      const bool fits = can && begins_at(in, out, own_offset(local_ranks_[i]));
      if (!fits && request_.view()) {
        fail(Code::invalid, name(), "_view: the input of rank ", local_ranks_[i],
             " lies in the slot that this call writes: it is part of a view that has expired",
             gathers ? ", or not all of what next_input() gave" : "");
      }
      if (!fits) {
        fail(Code::invalid, name(), ": input and output of rank ", local_ranks_[i],
             " overlap; pass separate buffers, or the input as its own part of the output");
      }
      ++in_place;
    }
    if (in_place == 0) return;
    if (apart != 0) {
      fail(Code::invalid, name(), ": some local ranks are in place and some are not");
    }
    facts_.in_place = true;
    request_.in.clear();
  }

  // Whether the operation touches that side of the rank.
  bool uses(bool output, Rank rank) const {
    switch (facts_.collective) {
      case Collective::broadcast:
      case Collective::scatter:
        return output || rank == facts_.root;
      case Collective::gather:
      case Collective::reduce:
        return !output || rank == facts_.root;
      default:
        return true;
    }
  }

  // What one local rank's operation writes, no other local rank's may touch.
  void check_apart() const {
    if (local_ranks_.size() < 2) return;
    struct OperandPart {
      uint64_t begin, end;
      size_t i;
      bool output;
    };
    std::vector<OperandPart> parts;
    for (const bool output : {true, false}) {
      const auto& side = output ? request_.out : request_.in;
      for (size_t i = 0; i < side.size(); ++i) {
        const auto begin = reinterpret_cast<uint64_t>(side[i].data);
        if (begin == 0 || side[i].bytes == 0 || !uses(output, local_ranks_[i])) continue;
        parts.push_back({begin, begin + side[i].bytes, i, output});
      }
    }
    std::sort(parts.begin(), parts.end(),
              [](const OperandPart& a, const OperandPart& b) { return a.begin < b.begin; });
    const OperandPart* written = nullptr;  // of those so far, the one that reaches farthest
    const OperandPart* touched = nullptr;
    for (const OperandPart& part : parts) {
      const OperandPart* before = part.output ? touched : written;
      if (before != nullptr && before->end > part.begin && before->i != part.i) {
        fail(Code::invalid, name(), ": buffers of ranks ",
             local_ranks_[std::min(before->i, part.i)], " and ",
             local_ranks_[std::max(before->i, part.i)],
             " overlap, and one of them is written; give each rank its own");
      }
      const auto farthest = [&](const OperandPart* other) {
        return other == nullptr || part.end > other->end ? &part : other;
      };
      touched = farthest(touched);
      if (part.output) written = farthest(written);
    }
  }

  Request& request_;
  const std::vector<Rank>& local_ranks_;
  Facts facts_;
  bool uneven_ = false;
};

}  // namespace

Facts facts_of(Request& request, Rank ranks, const std::vector<Rank>& local_ranks) {
  return Checker(request, ranks, local_ranks).run();
}

}  // namespace offcore
