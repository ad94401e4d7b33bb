// The first call of a plan key, which all ranks make together: they compare keys, settle where the
// data lands, and plan. And how ranks that make different calls find out.
#include <utility>

#include "core/backend/wakeup.h"
#include "core/base/error.h"
#include "core/comm/kept.h"

namespace offcore {
namespace {

constexpr uint32_t kTracksMax = 64;  // of plans that have their own
constexpr std::string_view kOutside = "outside";
constexpr std::string_view kRing = "view ring";

bool stage_of(const Request& request, const Facts& facts, bool same_place) {
  if (request.protocol == "promise" || request.view() || facts.total_bytes == 0) return false;
  return request.protocol == "eager" || !same_place;
}

Protocol protocol_of(const Request& request, bool staged, bool full_exchange) {
  const std::string& name = request.protocol;
  if (name == "promise" || name == "view") return {.entry = false, .staged = false};
  if (name == "barrier") return {.entry = true, .staged = staged};
  return {.entry = !(staged && full_exchange), .staged = staged};
}

Choice variant_of(const Request& request, const Moves& moves, const Facts& facts,
                  const Machine& machine, const Protocol& protocol) {
  const bool chosen = request.variant == "auto";
  Choice choice = chosen ? choose(moves, facts.total_bytes, machine, protocol)
                         : Choice{.variant = parse_variant(request.variant)};
  if (!request.view() || !facts.in_place || !choice.variant.prelaunch) return choice;
  if (!chosen) {
    fail(Code::unsupported,
         "a prelaunched view has its slot before next_input() could hand it out;"
         " pass an input of your own");
  }
  choice.variant.prelaunch = false;
  return choice;
}

}  // namespace

// Where peers would write: the same part of the same window on every local rank, or outside.
std::string Communicator::place_of(const Request& request, const Facts& facts) const {
  if (request.view()) return std::string(kRing);
  if (facts.total_bytes == 0) return "none";
  const Operand& first = request.out[0];
  for (const Operand& operand : request.out) {
    if (!operand.window || operand.window != first.window || operand.offset != first.offset) {
      return std::string(kOutside);
    }
  }
  size_t index = 0;
  while (index < windows_.size() && windows_[index].lock() != first.window) ++index;
  if (index == windows_.size()) {
    fail(Code::invalid, "the window belongs to another communicator");
  }
  return cat("window ", index, "+", first.offset);
}

// A plan key's first call: every rank comes here together. Until they agree the call has not
// happened; from then on it has its number, also where planning it fails (on all ranks alike).
std::shared_ptr<Plan> Communicator::meet(const Request& request, const Facts& facts, Lane& lane,
                                         const std::string& place, const Deadline& deadline) {
  const Machine& machine = backend_->machine();
  const std::string text =
      cat(describe(facts), " variant=", request.variant, " protocol=", request.protocol,
          " lane=", lane.index, " machine=", machine.name,
          machine.tuned_version.empty() ? "" : " tuned=", machine.tuned_version);
  const Entry undecided{.key = digest(text), .text = cat(text, " out=", place)};
  publish(lane, undecided, deadline);
  const bool agreed = agree_on_place(lane, undecided, deadline);
  ++lane.sequence;
  const bool same_place = agreed && place != kOutside;
  if (request.protocol == "promise" && !same_place) {
    fail(Code::unsupported,
         "protocol promise needs the output at the same place of a window of "
         "every rank; allocate it with Communicator.window() or empty()");
  }
  const bool staged = stage_of(request, facts, same_place);

  auto plan = std::make_shared<Plan>();
  const Moves moves = moves_of(facts);
  const Protocol protocol = protocol_of(request, staged, moves.full_exchange);
  const Choice choice = variant_of(request, moves, facts, machine, protocol);
  plan->program = offcore::plan(moves, choice.variant, machine, protocol);
  const Counts counts = count(*plan->program);
  const bool armed = plan->program->mode == Mode::armed;
  const bool credits = request.protocol == "credits" && protocol.entry && !staged;
  if (credits) {
    if (armed) fail(Code::unsupported, "prelaunched operations have no protocol credits: barrier");
    Credited halves = split_credits(*plan->program);
    plan->program = std::move(halves.rest);
    plan->credits = all_or_none([&] { return backend_->load(std::move(halves.credits)); });
  }
  plan->loaded = all_or_none([&] { return backend_->load(plan->program); });
  plan->full_exchange = moves.full_exchange;
  plan->entry = {.key = undecided.key,
                 .plan = digest(cat(text, staged ? " staged" : place)),
                 .text = undecided.text};
  plan->views = request.view();
  equip(*plan, lane, armed || credits, deadline);
  Result result{.op = moves.op,
                .variant = plan->program->variant,
                .protocol = plan->views ? request.protocol : plan->program->protocol,
                .signals = std::string(backend_->signals()),
                .mode = plan->program->mode,
                .native = plan->program->native,
                .staged = staged,
                .tuned = choice.tuned,
                .in_place = facts.in_place,
                .total_bytes = facts.total_bytes,
                .counts = counts};
  plan->result = std::make_shared<const Result>(std::move(result));
  return plan;
}

// The words, slots and scratch that a plan's launches need.
void Communicator::equip(Plan& plan, Lane& lane, bool own_words, const Deadline& deadline) {
  if (own_words) {
    if (own_tracks_ >= kTracksMax) {
      fail(Code::unsupported, "more than ", kTracksMax,
           " operations that are prelaunched or take credits in a communicator; each has flag "
           "words of its own");
    }
    ++own_tracks_;
    plan.own_track = std::make_unique<Track>();
    plan.own_track->flags =
        Flags::create(*backend_, rendezvous_.get(), ranks_, lane.track.flags.words, deadline);
  }
  Track& track = plan.own_track ? *plan.own_track : lane.track;
  for (const Buffer& buffer : plan.program->buffers) {
    if (buffer.name == "slot") {
      track.slots.grow(*backend_, rendezvous_.get(), ranks_, buffer.bytes, deadline);
    } else if (buffer.name == "out" && plan.views) {
      track.views.grow(*backend_, rendezvous_.get(), ranks_, buffer.bytes, deadline);
    } else if (buffer.name == "scratch") {
      for (Rank rank : local_ranks_) {
        plan.scratch.push_back(all_or_none([&] { return backend_->allocate(rank, buffer.bytes); }));
      }
    }
  }
}

// Whether all ranks gave the same place; throws mismatch when one has another key, or has met this
// one already.
bool Communicator::agree_on_place(const Lane& lane, const Entry& mine, const Deadline& deadline) {
  if (alone()) return true;
  bool same = true;
  for (Rank peer = 0; peer < ranks_; ++peer) {
    if (peer == local_ranks_[0]) continue;
    const Entry theirs = wait_for_entry(lane, peer, mine, deadline);
    if (theirs.key != mine.key || theirs.decided()) {
      diverge(lane, peer, lane.sequence, mine, theirs);
    }
    same = same && digest(theirs.text) == digest(mine.text);
  }
  return same;
}

Entry Communicator::wait_for_entry(const Lane& lane, Rank peer, const Entry& mine,
                                   const Deadline& deadline) {
  const uint64_t sequence = lane.sequence;
  Wakeup& own = wakeup(local_ranks_[0]);
  for (;;) {
    if (auto entry = lane.journal.read(peer, sequence)) return *entry;
    check_alive();
    if (deadline.passed()) {
      fail(Code::timeout, "rank ", peer, " has not reached call ", sequence, " of lane ",
           lane.index, " (", mine.text, "); it has made ", lane.journal.published(peer),
           " calls there");
    }
    Sleeper sleeper(own);
    if (lane.journal.published(peer) <= sequence) sleeper.sleep(1'000'000);
  }
}

void Communicator::compare_with_peers(const Lane& lane, uint64_t sequence, const Entry& mine) {
  if (alone()) return;
  for (Rank peer = 0; peer < ranks_; ++peer) {
    if (peer == local_ranks_[0]) continue;
    const auto theirs = lane.journal.read(peer, sequence);
    if (!theirs) continue;
    const bool both_decided = theirs->decided() && mine.decided();
    if (theirs->key != mine.key || (both_decided && theirs->plan != mine.plan)) {
      diverge(lane, peer, sequence, mine, *theirs);
    }
  }
}

void Communicator::diverge(const Lane& lane, Rank peer, uint64_t sequence, const Entry& mine,
                           const Entry& theirs) {
  const Rank own = local_ranks_[0];
  abort();
  fail(Code::mismatch, "call ", sequence, " of lane ", lane.index, " differs: rank ", own,
       " makes ", mine.text, mine.decided() ? "" : " (for the first time)", ", rank ", peer,
       " makes ", theirs.text, theirs.decided() ? "" : " (for the first time)",
       ". All ranks must make the same calls in the same order, with buffers alike");
}

}  // namespace offcore
