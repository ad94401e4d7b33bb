#include "core/comm/request.h"

#include <algorithm>
#include <numeric>

#include "core/base/error.h"
#include "core/plan/variant.h"

namespace offcore {
namespace {

constexpr std::string_view kNames[] = {"all_gather", "all_to_all", "broadcast", "scatter",
                                       "gather"};
constexpr std::string_view kWanted[] = {"auto", "barrier", "credits", "eager", "promise", "view"};

struct OperandRange {
  const void* space;  // the window, or null for plain addresses
  uint64_t begin;
  uint64_t end;
};

OperandRange range_of(const Operand& operand) {
  const uint64_t begin = operand.window ? operand.offset : reinterpret_cast<uint64_t>(operand.data);
  return {operand.window.get(), begin, begin + operand.bytes};
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

// Whether in place or not is each rank's own affair: see shared().
bool own_form(const Facts& facts) {
  const auto& counts = facts.counts;
  return facts.collective == Collective::broadcast ||
         (facts.collective == Collective::all_gather &&
          std::find(counts.begin(), counts.end(), 0) != counts.end());
}

class Checker {
 public:
  Checker(Request& request, Rank ranks, const std::vector<Rank>& local_ranks)
      : request_(request), local_ranks_(local_ranks) {
    facts_ = {.collective = request.collective,
              .ranks = ranks,
              .in_place = request.in.empty(),
              .root = request.root,
              .counts = request.counts};
  }

  Facts run() {
    settle_names();
    if (request_.out.size() != local_ranks_.size() ||
        (!request_.in.empty() && request_.in.size() != local_ranks_.size())) {
      fail(Code::invalid, name(), ": pass one buffer for each of the ", local_ranks_.size(),
           " local ranks");
    }
    if (facts_.root >= facts_.ranks) {
      fail(Code::invalid, name(), ": root ", facts_.root, " is not below ", facts_.ranks, " ranks");
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
    variant = variant == "auto" ? default_variant() : to_string(parse_variant(variant));
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

  // Where rank's input must begin in its output for the operation to be the in-place one.
  uint64_t own_offset(Rank rank) const {
    return facts_.collective == Collective::all_gather ? sum(0, rank) : 0;
  }

  void settle_overlap() {
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

std::string_view to_string(Collective collective) {
  return kNames[static_cast<size_t>(collective)];
}

bool full_exchange(Collective collective) {
  return collective == Collective::all_gather || collective == Collective::all_to_all;
}

std::string_view to_string(Wanted wanted) { return kWanted[static_cast<size_t>(wanted)]; }

Wanted parse_wanted(std::string_view text) {
  for (size_t i = 0; i < std::size(kWanted); ++i) {
    if (kWanted[i] == text) return static_cast<Wanted>(i);
  }
  fail(Code::invalid, "unknown protocol '", text,
       "': known are auto, barrier, credits, promise, eager");
}

Collective parse_collective(std::string_view text) {
  for (size_t i = 0; i < std::size(kNames); ++i) {
    if (kNames[i] == text) return static_cast<Collective>(i);
  }
  fail(Code::invalid, "unknown operation '", text,
       "': known are all_gather, all_to_all, broadcast, scatter, gather");
}

Facts shared(const Facts& facts) {
  Facts all = facts;
  if (own_form(facts)) all.in_place = true;
  return all;
}

bool form_matters(const Facts& facts, const std::vector<Rank>& local_ranks) {
  return !own_form(facts) || std::any_of(local_ranks.begin(), local_ranks.end(), [&](Rank rank) {
    return facts.collective == Collective::broadcast ? rank == facts.root : facts.counts[rank] != 0;
  });
}

Facts facts_of(Request& request, Rank ranks, const std::vector<Rank>& local_ranks) {
  return Checker(request, ranks, local_ranks).run();
}

Moves moves_of(const Facts& facts) {
  switch (facts.collective) {
    case Collective::all_gather:
      return moves_all_gather(facts.counts, facts.in_place);
    case Collective::all_to_all:
      return moves_all_to_all(facts.ranks, facts.counts, facts.in_place);
    case Collective::broadcast:
      return moves_broadcast(facts.ranks, facts.root, facts.counts[0], facts.in_place);
    case Collective::scatter:
      return moves_scatter(facts.root, facts.counts);
    case Collective::gather:
      return moves_gather(facts.root, facts.counts);
  }
  fail(Code::invalid, "unknown operation");
}

std::string to_string(const Target& target) {
  if (target.window == Target::kNone) return "none";
  if (target.window == Target::kOutside) return "outside";
  if (target.window == Target::kRing) return "view ring";
  return cat("window ", target.window, "+", target.offset);
}

std::string cache_key(const Request& request, const Facts& facts, const Target& target) {
  std::string key;
  key.reserve(96 + facts.counts.size() * sizeof(uint64_t));
  const auto append = [&](const auto& value) {
    key.append(reinterpret_cast<const char*>(&value), sizeof value);
  };
  append(facts.collective);
  append(facts.in_place);
  append(request.capture != 0);
  append(facts.root);
  append(request.lane);
  append(target.window);
  append(target.offset);
  append(request.protocol);
  key += request.variant;
  key += '|';
  key.append(reinterpret_cast<const char*>(facts.counts.data()),
             facts.counts.size() * sizeof(uint64_t));
  return key;
}

std::string describe(const Facts& facts) {
  std::ostringstream text;
  text << to_string(facts.collective) << " ranks=" << facts.ranks;
  if (!own_form(facts)) text << " in_place=" << (facts.in_place ? "yes" : "no");
  if (facts.collective == Collective::broadcast || facts.collective == Collective::scatter ||
      facts.collective == Collective::gather) {
    text << " root=" << facts.root;
  }
  text << " counts=";
  const auto& counts = facts.counts;
  for (size_t i = 0; i < counts.size();) {
    size_t run = 1;
    while (i + run < counts.size() && counts[i + run] == counts[i]) ++run;
    text << (i == 0 ? "" : ",") << counts[i];
    if (run > 1) text << 'x' << run;
    i += run;
  }
  return text.str();
}

}  // namespace offcore
