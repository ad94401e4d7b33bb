// The first call of a plan key, which all ranks make together: they compare keys, settle where the
// data lands, and plan. And how ranks that make different calls find out.
#include <algorithm>
#include <chrono>
#include <optional>
#include <thread>
#include <utility>

#include "core/backend/wakeup.h"
#include "core/base/digest.h"
#include "core/base/error.h"
#include "core/comm/cached_plan.h"
#include "core/window/socket.h"

namespace offcore {
namespace {

constexpr uint32_t kTracksMax = 64;  // of plans that have their own
constexpr size_t kGraphsMax = 256;
constexpr uint32_t kGoneLooks = 20;  // the same on every rank
constexpr auto kGoneLook = std::chrono::milliseconds(5);
const uint64_t kOutsidePlace = digest(to_string(Target{.window = Target::kOutside}));

bool stages(const Request& request, const Facts& facts, bool same_place, const Machine& machine) {
  if (facts.total_bytes == 0) return false;
  switch (request.protocol) {
    case Wanted::promise:
    case Wanted::view:
      return false;
    case Wanted::eager:
      return true;
    default:
      break;
  }
  if (!same_place) return true;
  if (reduces(request.collective)) return false;
  const bool free =
      request.protocol == Wanted::automatic && request.variant == "auto" && request.capture == 0;
  return free && slots_win(moves_of(shared(facts)), facts.total_bytes, machine);
}

// The one decision of a first call: how ranks enter, and whether through slots.
ProtocolForm decide(const Request& request, const Facts& facts, bool same_place,
                    const Machine& machine) {
  const Wanted wanted = request.protocol;
  if (wanted == Wanted::promise && !same_place) {
    fail(Code::unsupported,
         "protocol promise needs the output at the same place of a window of "
         "every rank; allocate it with Communicator.window() or empty()");
  }
  const bool staged = stages(request, facts, same_place, machine);
  if (request.capture != 0) return {.entry = true, .staged = staged, .captured = true};
  if (wanted == Wanted::promise || wanted == Wanted::view) return {.entry = false};
  if (reduces(request.collective)) return {.entry = false, .staged = staged};
  // Whoever has everyone's data has seen everyone enter: slots then need no round of their own.
  const bool round = wanted == Wanted::barrier || !proves_entry(facts.collective);
  return {.entry = round || !staged, .staged = staged};
}

// A plan key, as it is told to the peers and to users.
std::string text_of(const Request& request, const Facts& facts, const Machine& machine) {
  return cat(describe(facts), " variant=", request.variant,
             " protocol=", to_string(request.protocol), " lane=", request.lane,
             " machine=", machine.name,
             machine.tuned_version.empty() ? "" : " tuned=", machine.tuned_version);
}

// The machine where peers' memory lies at no constant stride: no command goes to several ranks.
Machine without_rows(Machine machine) {
  machine.native.strided = false;
  machine.native.bcst_rows = 1;
  std::erase_if(machine.tuned, [](const TunedRow& row) {
    if (row.variant == "one_shot") return false;  // of reductions, which write no rows
    const Variant::Shape shape = parse_variant(row.variant).kind;
    return shape == Variant::Shape::fan || shape == Variant::Shape::bcst;
  });
  return machine;
}

// Whether ranks write into each other's outputs.
bool written(const Program& program) {
  return std::any_of(program.buffers.begin(), program.buffers.end(), [](const Buffer& buffer) {
    return buffer.role == Role::output && buffer.kind == Buffer::Home::window;
  });
}

Choice variant_of(const Request& request, const Facts& facts, const Machine& machine,
                  const ProtocolForm& form, const Deadline& deadline) {
  const bool chosen = request.variant == "auto";
  Choice choice = chosen
                      ? choose(moves_of(shared(facts)), facts.total_bytes, machine, form, deadline)
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

uint64_t slot_bytes_of(const Program& program) {
  for (const Buffer& buffer : program.buffers) {
    if (buffer.role == Role::slot) return buffer.bytes;
  }
  return 0;
}

}  // namespace

// Ranks that plan for other costs or limits would plan other programs.
void Communicator::settle_with_peers(std::string_view asked, const Deadline& deadline) {
  const Capabilities able = backend_->capabilities();
  Machine machine = backend_->machine();
  machine.signals.clear();  // not settled yet
  const std::string loaded = cat(machine.name, ", content ", std::hex, digest(machine));
  const Rank own = local_ranks_[0];
  const std::vector<std::string> said = rendezvous_->all_gather_bytes(
      "settle", Packer().text(asked).text(loaded).text(able.signals).bytes(), deadline);
  for (Rank peer = 0; peer < ranks_; ++peer) {
    Unpacker unpacker(said[peer]);
    if (const std::string_view theirs = unpacker.text(); theirs != asked) {
      fail(Code::mismatch, "ranks request different signal forms: rank ", own, " for ", asked,
           ", rank ", peer, " for ", theirs, ". Pass the same signals= on all ranks");
    }
    if (const std::string_view theirs = unpacker.text(); theirs != loaded) {
      fail(Code::mismatch, "rank ", own, " loaded machine ", loaded, "; rank ", peer,
           " loaded machine ", theirs,
           ". All ranks need the same sms=, machine file and tuned table: name one by its path, or "
           "let OFFCORE_MACHINES name one folder on all of them");
    }
    if (peer == 0 && able.signal_choice != nullptr) able.signal_choice->settle(unpacker.text());
  }
}

// Where peers would write: the same part of the same window on every local rank, or outside.
Target Communicator::target_of(const Request& request, const Facts& facts) const {
  if (request.view()) return {.window = Target::kRing};
  // What is scattered each rank's own cores write.
  if (facts.total_bytes == 0 || facts.collective == Collective::reduce_scatter)
    return {.window = Target::kNone};
  const Operand& first = request.out[0];
  for (const Operand& operand : request.out) {
    if (!operand.window || operand.window != first.window || operand.offset != first.offset) {
      return {.window = Target::kOutside};
    }
  }
  const auto made = std::find_if(windows_.begin(), windows_.end(), [&](const Numbered& candidate) {
    return candidate.window.lock() == first.window;
  });
  if (made == windows_.end()) fail(Code::invalid, "the window belongs to another communicator");
  return {.window = made->number, .offset = first.offset};
}

std::string Communicator::calls_elsewhere(const std::string& own) const {
  constexpr uint32_t kListed = 4;
  std::string text;
  uint32_t others = 0;
  for (Rank peer = 0; peer < ranks_; ++peer) {
    const uint64_t begun = calls_.published(peer);
    if (peer == local_ranks_[0] || begun == 0) continue;
    const auto latest = calls_.read(peer, begun - 1);
    if (!latest || latest->key == digest(own) || ++others > kListed) continue;
    text += cat("; rank ", peer, " began last: ", latest->text);
  }
  return text.empty() ? "" : cat("; this rank began: ", own, text);
}

std::shared_ptr<CachedPlan> Communicator::first_call(const Request& request, const Lookup& lookup,
                                                     LaneLock& turn) {
  const std::string text = text_of(request, lookup.facts, backend_->machine());
  return together(text, [&] {
    Lane& lane = this->lane(request.lane, turn);
    return request.capture != 0 ? meet_in_graph(request, lookup, text, lane, turn)
                                : first_call(request, lookup, text, lane, turn);
  });
}

// A plan key's first call: every rank comes here together, or those that have no plan while the
// others go on. Until they agree the call has not happened; from then on it has its number, also
// where planning it fails (on all ranks alike).
std::shared_ptr<CachedPlan> Communicator::first_call(const Request& request, const Lookup& lookup,
                                                     const std::string& text, Lane& lane,
                                                     LaneLock& turn) {
  const Target& target = lookup.target;
  Entry mine{.key = digest(text),
             .place = digest(to_string(target)),
             .text = cat(text, " out=", to_string(target))};
  const Settled settled = agree(lane, mine, lookup.facts, turn);
  auto known = settled.before ? kept_plan(lane, mine, settled.place, lookup.facts) : nullptr;
  if (known != nullptr) {
    plans_.keep(lookup.key, known, false);
    return known;
  }
  const bool same_place = settled.place == mine.place && target.window != Target::kOutside;
  const ProtocolForm form = decide(request, lookup.facts, same_place, backend_->machine());
  std::shared_ptr<CachedPlan> plan = make_plan(request, lookup.facts, form, turn.deadline());
  equip(*plan, lane, turn);
  mine.decided = true;
  if (form.staged) mine.place = kOutsidePlace;
  plan->landing = mine.place;
  if (plan->own_track) mine.place = digest(cat(mine.place, " of call ", lane.sequence));
  plan->entry = std::make_shared<const Entry>(std::move(mine));
  plan->lane = lane.index;
  plans_.keep(lookup.key, plan, plan->own_track != nullptr);
  tell(*plan);
  return plan;
}

std::shared_ptr<CachedPlan> Communicator::meet_in_graph(const Request& request,
                                                        const Lookup& lookup,
                                                        const std::string& text, Lane& lane,
                                                        LaneLock& turn) {
  const Graph* known = lane.find(request.capture);
  const std::string captured =
      cat(text, " mode=capture graph=", known != nullptr ? known->number : lane.captured);
  const Entry mine{.key = digest(captured),
                   .place = digest(to_string(lookup.target)),
                   .text = cat(captured, " out=", to_string(lookup.target))};
  const bool same_place = agree(lane, mine, lookup.facts, turn).place == mine.place &&
                          lookup.target.window != Target::kOutside;
  const ProtocolForm form = decide(request, lookup.facts, same_place, backend_->machine());
  Graph& graph = this->graph(lane, request.capture, turn);
  const Target target = form.staged ? Target{.window = Target::kOutside} : lookup.target;
  const std::string key = cache_key(request, lookup.facts, target);
  std::shared_ptr<CachedPlan> plan = plans_.find(key);
  if (plan == nullptr) {
    plan = make_plan(request, lookup.facts, form, turn.deadline());
    plans_.keep(key, plan, false);
  }
  plan->entry = std::make_shared<const Entry>(mine);
  equip(*plan->program, graph.track, false, turn);
  tell(*plan);
  return plan;
}

// What was chosen, for the log.
void Communicator::tell(const CachedPlan& plan) const {
  const Result& result = *plan.result;
  log_.info("new: ", plan.entry->text, ": ", result.variant, ", ", result.protocol, ", ",
            result.signals, result.staged ? ", staged" : "", result.tuned ? ", tuned" : "",
            result.native ? "" : ", not native", plan.program->only ? ", of a known shape" : "",
            "; ", result.counts.commands, " commands, ", result.counts.engines, " engines, ",
            result.counts.syncs, " syncs");
}

// Where the ranks' data lands. The call has its number then.
Communicator::Settled Communicator::agree(Lane& lane, const Entry& mine, const Facts& facts,
                                          LaneLock& turn) {
  publish(lane, mine, turn);
  const Settled settled = negotiate(lane, mine, facts, turn);
  ++lane.sequence;
  return settled;
}

std::shared_ptr<CachedPlan> Communicator::make_plan(const Request& request, const Facts& facts,
                                                    const ProtocolForm& form,
                                                    const Deadline& deadline) {
  const std::shared_ptr<Window>& landing = request.out[0].window;
  std::optional<Machine> by_rank;
  if (landing != nullptr && !form.staged && !landing->strided()) {
    by_rank = without_rows(backend_->machine());
  }
  const Machine& machine = by_rank ? *by_rank : backend_->machine();
  auto plan = std::make_shared<CachedPlan>();
  Choice choice;
  PlanShape shape;
  ScaleRange range;
  std::optional<KnownPart> known;
  in_time([&] {
    if (reduces(facts.collective)) {
      const ReductionPlan reduction = reduction_of(facts);
      choice.tuned = request.variant == "auto" && !tuned_variant(reduction, machine, form).empty();
      plan->program = plan_reduction(reduction, request.variant, machine, form, deadline);
      return;
    }
    choice = variant_of(request, facts, machine, form, deadline);
    if (local_ranks_.size() == 1 && ranks_ >= KnownShapes::kRanksMin) {
      shape = shape_of(request, facts, choice.variant, form, machine);
    }
    if (shape.unit != 0) known = shapes_.find(shape);
    range = ScaleRange(shape.unit);
    plan->program = known ? known->program
                          : offcore::plan(moves_of(facts), choice.variant, machine, form, deadline,
                                          shape.unit != 0 ? &range : nullptr);
  });
  // Of a known shape, this rank's part.
  const std::shared_ptr<const Program> whole = plan->program;
  const bool direct = form.entry && !form.staged && !form.captured;
  if (request.protocol == Wanted::credits && direct) {
    if (whole->mode == Mode::armed) {
      fail(Code::unsupported, "prelaunched operations have no protocol credits: barrier");
    }
    Credited halves = split_credits(*whole);
    plan->program = std::move(halves.rest);
    plan->credits = all_or_none([&] { return backend_->load(std::move(halves.credits)); });
  }
  plan->loaded = all_or_none([&] { return backend_->load(plan->program); });
  plan->proves_entry = proves_entry(facts.collective);
  plan->views = request.view();
  const bool own = std::any_of(local_ranks_.begin(), local_ranks_.end(),
                               [&](Rank rank) { return copies_within(*whole, rank); });
  Result result{.op = whole->op,
                .variant = whole->variant,
                .protocol = std::string(plan->views ? to_string(request.protocol)
                                                    : to_string(plan->program->protocol)),
                .signals = std::string(backend_->capabilities().signals),
                .mode = whole->mode,
                .native = known ? known->native : whole->native && plan->loaded->native(),
                .staged = form.staged,
                .registered = landing != nullptr && landing->registered() && written(*whole),
                .tuned = choice.tuned,
                .in_place = facts.in_place,
                .own_copy = own ? "engine" : "none",
                .total_bytes = facts.total_bytes,
                .slot_bytes = slot_bytes_of(*whole),
                .counts = known ? known->counts : count(*whole)};
  if (!known) shapes_.keep(shape, range, *whole, local_ranks_[0], result.counts, result.native);
  plan->result = std::make_shared<const Result>(std::move(result));
  return plan;
}

// What the lane owns of the graph that is being captured. The graphs of a lane have their words in
// one window: they are many and small.
Graph& Communicator::graph(Lane& lane, uint64_t capture, LaneLock& turn) {
  if (Graph* known = lane.find(capture)) return *known;
  Graph* graph = take_over(lane, turn);
  if (graph == nullptr) {
    if (lane.graphs.size() == kGraphsMax) {
      fail(Code::unsupported, "more than ", kGraphsMax,
           " captured graphs on a lane: each has flag ",
           "words until it and its instances are destroyed on every rank (or for good, if the ",
           "driver does not report it); destroy some, or use another lane");
    }
    const uint64_t words = lane.track.flags.words;
    if (lane.graphs.empty()) {
      lane.graph_flags = Flags::create(*backend_, turn.ranks_together(), ranks_, kGraphsMax * words,
                                       turn.deadline());
    }
    auto made = std::make_unique<Graph>();
    made->track.flags = lane.graph_flags.part(lane.graphs.size(), words);
    lane.graphs.push_back(std::move(made));
    graph = lane.graphs.back().get();
  }
  graph->capture = capture;
  graph->number = lane.captured++;
  return *graph;
}

// What a graph had that is gone on every rank; null: none is. A rank may be told later than it has
// destroyed one. While there is room, others are made rather than waited for.
Graph* Communicator::take_over(const Lane& lane, LaneLock& turn) const {
  const auto& graphs = lane.graphs;
  if (graphs.empty()) return nullptr;
  Graphs& captures = *backend_->capabilities().graphs;
  for (uint32_t look = 0; look < kGoneLooks; ++look) {
    std::string mine;
    for (const auto& graph : graphs) mine += captures.gone(graph->capture) ? '+' : '-';
    const std::vector<std::string> told =
        alone() ? std::vector{mine} : turn.all_gather_bytes("graphs", mine, turn.deadline());
    for (size_t i = 0; i < graphs.size(); ++i) {
      const auto gone = [&](const std::string& ranks) { return ranks[i] == '+'; };
      if (std::all_of(told.begin(), told.end(), gone)) return graphs[i].get();
    }
    if (graphs.size() < kGraphsMax) break;
    turn.unlocked([] { std::this_thread::sleep_for(kGoneLook); });
  }
  return nullptr;
}

// The words, slots and scratch that a plan's launches need.
void Communicator::equip(CachedPlan& plan, Lane& lane, LaneLock& turn) {
  if (plan.program->mode == Mode::armed || plan.credits) {
    if (lane.own_tracks >= kTracksMax) {
      fail(Code::unsupported, "more than ", kTracksMax,
           " operations that are prelaunched or take credits on a lane; each has flag words of its "
           "own");
    }
    ++lane.own_tracks;
    plan.own_track = std::make_unique<LaneState>();
    plan.own_track->flags = Flags::create(*backend_, turn.ranks_together(), ranks_,
                                          lane.track.flags.words, turn.deadline());
  }
  equip(*plan.program, plan.own_track ? *plan.own_track : lane.track, plan.views, turn);
}

void Communicator::equip(const Program& program, LaneState& track, bool views, LaneLock& turn) {
  Rendezvous* others = turn.ranks_together();
  for (const Buffer& buffer : program.buffers) {
    if (buffer.role == Role::slot) {
      track.slots.grow(*backend_, others, ranks_, buffer.bytes, turn.deadline());
    } else if (buffer.role == Role::output && views) {
      track.views.grow(*backend_, others, ranks_, buffer.bytes, turn.deadline());
    } else if (buffer.role == Role::scratch) {
      if (!track.scratch.empty() && track.scratch[0].bytes >= buffer.bytes) continue;
      std::vector<Share> scratch;  // launches under way keep the old one
      for (Rank rank : local_ranks_) {
        scratch.push_back(all_or_none([&] { return backend_->allocate(rank, buffer.bytes); }));
      }
      track.scratch = std::move(scratch);
    }
  }
}

// The place that the ranks which have the plan have settled; else the one that all propose, or
// outside. Throws mismatch where a rank has another key, or where this rank cannot take part in
// what the others do already.
Communicator::Settled Communicator::negotiate(const Lane& lane, const Entry& mine,
                                              const Facts& facts, LaneLock& turn) {
  Settled settled{.place = mine.place};
  if (alone()) return settled;
  bool alike = true;
  for (Rank peer = 0; peer < ranks_; ++peer) {
    if (peer == local_ranks_[0]) continue;
    const Entry theirs = wait_for_entry(lane, peer, mine, turn);
    bool possible = theirs.key == mine.key;
    if (theirs.decided) {
      possible = possible && (!settled.before || theirs.place == settled.place) &&
                 (theirs.place == mine.place || theirs.place == kOutsidePlace ||
                  kept_plan(lane, mine, theirs.place, facts) != nullptr);
      settled = {.place = theirs.place, .before = true};
    }
    if (!possible) diverge(lane, peer, lane.sequence, mine, theirs);
    alike = alike && theirs.place == mine.place;
  }
  if (!settled.before && !alike) settled.place = kOutsidePlace;
  return settled;
}

// This rank's plan of that key and place, kept under another cache key: one that binds the output
// of this call as it should.
std::shared_ptr<CachedPlan> Communicator::kept_plan(const Lane& lane, const Entry& mine,
                                                    uint64_t place, const Facts& facts) const {
  const bool any_form = !form_matters(facts, local_ranks_);
  return plans_.find_if([&](const CachedPlan& plan) {
    const Entry& entry = *plan.entry;
    return plan.lane == lane.index && entry.decided && entry.key == mine.key &&
           entry.place == place && (plan.landing == kOutsidePlace || plan.landing == mine.place) &&
           (any_form || plan.result->in_place == facts.in_place);
  });
}

Entry Communicator::wait_for_entry(const Lane& lane, Rank peer, const Entry& mine, LaneLock& turn) {
  const uint64_t sequence = lane.sequence;
  Wakeup& own = wakeup(local_ranks_[0]);
  for (;;) {
    if (auto entry = lane.journal.read(peer, sequence)) return *entry;
    check_alive();
    if (turn.deadline().passed()) {
      fail(Code::timeout, "rank ", peer, " has not reached call ", sequence, " of lane ",
           lane.index, " (", mine.text, "); it has made ", lane.journal.published(peer),
           " calls there");
    }
    turn.unlocked([&] {
      {
        Sleeper sleeper(own);
        if (lane.journal.published(peer) <= sequence) sleeper.sleep(1'000'000);
      }
      turn.deadline().listen();
    });
  }
}

void Communicator::compare_with_peers(const Lane& lane, uint64_t sequence, const Entry& mine) {
  if (alone()) return;
  for (Rank peer = 0; peer < ranks_; ++peer) {
    if (peer == local_ranks_[0]) continue;
    if (!lane.journal.contradicts(peer, sequence, mine)) continue;
    if (const auto theirs = lane.journal.read(peer, sequence)) {
      diverge(lane, peer, sequence, mine, *theirs);
    }
  }
}

void Communicator::diverge(const Lane& lane, Rank peer, uint64_t sequence, const Entry& mine,
                           const Entry& theirs) {
  const Rank own = local_ranks_[0];
  abort();
  fail(Code::mismatch, "call ", sequence, " of lane ", lane.index, " differs: rank ", own,
       " makes ", mine.text, mine.decided ? "" : " (for the first time)", ", rank ", peer,
       " makes ", theirs.text, theirs.decided ? "" : " (for the first time)",
       ". All ranks must make the same calls in the same order, with buffers alike",
       mine.key != theirs.key ? ""
                              : "; where the operation is prelaunched or takes credits, pass an "
                                "input on all ranks or on none");
}

}  // namespace offcore
