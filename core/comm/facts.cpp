// Names, and what follows from the facts that all ranks share.
#include <algorithm>
#include <sstream>

#include "core/base/names.h"
#include "core/comm/request.h"

namespace offcore {
namespace {

constexpr std::string_view kNames[] = {"all_gather", "all_to_all",     "broadcast",  "scatter",
                                       "gather",     "reduce_scatter", "all_reduce", "reduce"};
constexpr std::string_view kWanted[] = {"auto", "barrier", "credits", "eager", "promise", "view"};

// Whether in place or not is each rank's own affair: see shared().
bool own_form(const Facts& facts) {
  const auto& counts = facts.counts;
  return facts.collective == Collective::broadcast ||
         (facts.collective == Collective::all_gather &&
          std::find(counts.begin(), counts.end(), 0) != counts.end());
}

}  // namespace

std::string_view to_string(Collective collective) {
  return kNames[static_cast<size_t>(collective)];
}

bool proves_entry(Collective collective) {
  return collective == Collective::all_gather || collective == Collective::all_to_all ||
         reduces(collective);
}

bool reduces(Collective collective) { return collective >= Collective::reduce_scatter; }

std::string_view to_string(Wanted wanted) { return kWanted[static_cast<size_t>(wanted)]; }

Wanted parse_wanted(std::string_view text) {
  if (text == to_string(Wanted::view)) return Wanted::view;  // view calls ask for it, users do not
  return parse_name<Wanted>("protocol", text, std::span(kWanted).first<5>());
}

Collective parse_collective(std::string_view text) {
  return parse_name<Collective>("operation", text, kNames);
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
    default:
      fail(Code::invalid, to_string(facts.collective), " is no operation of moves alone");
  }
}

ReductionPlan reduction_of(const Facts& facts) {
  const bool parts = facts.collective == Collective::reduce_scatter;
  return {.op = std::string(to_string(facts.collective)),
          .parts = parts ? facts.counts : equal_parts(facts.total_bytes, facts.ranks),
          .root = facts.root,
          .in_place = facts.in_place,
          .reduction = *facts.reduction};
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
  if (facts.reduction) {
    append(facts.reduction->op);
    append(facts.reduction->dtype);
    append(facts.reduction->scale);
  }
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
      facts.collective == Collective::gather || facts.collective == Collective::reduce) {
    text << " root=" << facts.root;
  }
  if (facts.reduction) {
    text << ' ' << to_string(facts.reduction->op) << ' ' << to_string(facts.reduction->dtype);
    if (facts.reduction->op == ReduceOp::premul_sum) text << " scale=" << facts.reduction->scale;
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
