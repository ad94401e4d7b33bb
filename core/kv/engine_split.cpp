#include "core/kv/engine_split.h"

#include <algorithm>
#include <cstring>

#include "core/kv/submit.h"

namespace offcore::kv {
namespace {

constexpr int kTrials = 3;  // somebody may write the cache meanwhile
constexpr double kTrialS = 5;

uint64_t span(const Fold& fold, uint64_t step) { return (fold.pieces + uint64_t{1}) * step; }

// A group whose blocks might go by both engines.
struct Candidate {
  size_t group = 0;
  std::shared_ptr<const std::vector<LayerGroup>> layer_groups;

  // How far apart its rows are for what a copy of them takes.
  double bytes_a_ns(const Machine& machine) const {
    double most = 0;
    for (const Fold& fold : layer_groups->front().folds) {
      const auto bytes = static_cast<double>(span(fold, fold.step));
      const uint64_t ns = strided_ns(fold.pieces, fold.bytes, machine);
      most = std::max(most, bytes / static_cast<double>(ns));
    }
    return most;
  }
};

Reach reach_of(const Machine& machine, const std::vector<Candidate>& candidates, uint64_t budget) {
  Reach reach{.room = budget, .submit_ns = UINT64_MAX};
  for (const Candidate& candidate : candidates) {
    for (const Fold& fold : candidate.layer_groups->front().folds) {
      reach.step = std::max(reach.step, fold.step);
      reach.bytes = std::max(reach.bytes, span(fold, fold.step));
      reach.host_bytes = std::max(reach.host_bytes, span(fold, fold.row_step));
      // Where submitting takes longer by more, one engine would be as fast.
      reach.submit_ns = std::min(reach.submit_ns, strided_ns(fold.pieces, fold.bytes, machine));
    }
  }
  return reach;
}

// Stores the first and the last block both ways, as often as they fill whole rows. Loads are tried
// by the backend: here they would write what somebody may be using.
class EngineTrial {
 public:
  EngineTrial(Backend& backend, const CacheGroup& group,
              std::shared_ptr<const std::vector<LayerGroup>> layer_groups)
      : backend_(backend), group_(group), layer_groups_(std::move(layer_groups)) {
    const Layout& layout = *group.layout;
    if (layout.blocks() > 1) blocks_.push_back(static_cast<int64_t>(layout.blocks()) - 1);
    for (size_t i = 0; blocks_.size() % layout.row_blocks() != 0; ++i) {
      blocks_.push_back(blocks_[i]);
    }
  }
  uint64_t bytes() const { return 2 * half(); }  // of the host's

  bool brings_the_same(const Share& rows) const {
    std::byte* const straight = rows.data;
    std::byte* const crossed = straight + half();
    for (int trial = 0; trial < kTrials; ++trial) {
      store(rows, straight, false);
      std::transform(straight, crossed, crossed, [](std::byte byte) { return ~byte; });
      const Calls calls = store(rows, crossed, true);
      if (calls.crossed == 0 || calls.crossed != calls.strided) return false;
      if (std::memcmp(straight, crossed, half()) == 0) return true;
    }
    return false;
  }

 private:
  uint64_t half() const { return blocks_.size() * group_.layout->block_bytes(); }

  Calls store(const Share& keep, std::byte* to, bool crossed) const {
    const Layout& layout = *group_.layout;
    std::vector<Row> rows;  // not in the blocks' order, in which they could be a run
    for (size_t i = blocks_.size(); i-- > 0;) {
      std::byte* const row = to + i / layout.row_blocks() * layout.row_bytes();
      rows.push_back({.at = row + i % layout.row_blocks() * layout.place_step()});
    }
    CommandBuilder builder(Direction::store, {}, group_.layout, layer_groups_, blocks_,
                           std::move(rows));
    const SubmitTarget target{.backend = backend_,
                              .direction = Direction::store,
                              .lane = static_cast<uint16_t>(Direction::store),
                              .crossed = crossed};
    Part part = builder.next({{.bytes = half(), .strided = UINT32_MAX, .plain = UINT32_MAX}});
    const auto run =
        submit(target, *group_.layout, std::move(part), std::make_shared<Share>(keep), false);
    run->wait(Deadline::after_s(kTrialS));
    return run->report().calls;
  }

  Backend& backend_;
  const CacheGroup& group_;
  const std::shared_ptr<const std::vector<LayerGroup>> layer_groups_;
  std::vector<int64_t> blocks_ = {0};
};

}  // namespace

bool EngineSplit::any() const {
  return std::find(groups.begin(), groups.end(), true) != groups.end();
}

EngineSplit crossing_of(Backend& backend, const std::vector<CacheGroup>& groups,
                        const std::vector<std::vector<uint64_t>>& memories, uint64_t bytes) {
  CrossedCopies* crossed_copies = backend.capabilities().crossed_copies;
  if (crossed_copies == nullptr || bytes == 0) return {};
  std::vector<Candidate> candidates;
  for (size_t i = 0; i < groups.size(); ++i) {
    const Layout& layout = *groups[i].layout;
    auto layer_groups = std::make_shared<const std::vector<LayerGroup>>(
        layer_groups_of(layout, layout.layers(), memories[i]));
    const std::vector<Fold>& folds = layer_groups->front().folds;
    const bool pays = std::all_of(folds.begin(), folds.end(), [&](const Fold& fold) {
      return both_engines_pay(fold.pieces, fold.bytes, backend.machine());
    });
    if (pays && EngineTrial(backend, groups[i], layer_groups).bytes() <= bytes) {
      candidates.push_back({i, std::move(layer_groups)});
    }
  }
  // Where not all can, those go that are far apart for what they take.
  std::sort(candidates.begin(), candidates.end(), [&](const Candidate& a, const Candidate& b) {
    return a.bytes_a_ns(backend.machine()) < b.bytes_a_ns(backend.machine());
  });
  while (!candidates.empty() &&
         !crossed_copies->enable(kOwner, reach_of(backend.machine(), candidates, bytes))) {
    candidates.pop_back();
  }
  if (candidates.empty()) return {};
  EngineSplit crossing{.groups = std::vector<bool>(groups.size())};
  try {
    std::vector<EngineTrial> trials;
    uint64_t tried_bytes = 0;
    for (const Candidate& candidate : candidates) {
      trials.emplace_back(backend, groups[candidate.group], candidate.layer_groups);
      tried_bytes = std::max(tried_bytes, trials.back().bytes());
    }
    crossing.tried = backend.allocate_host(tried_bytes);
    for (size_t i = 0; i < candidates.size(); ++i) {
      crossing.groups[candidates[i].group] = trials[i].brings_the_same(crossing.tried);
    }
  } catch (const Error& error) {  // the GPU does not take such copies, or no memory is left
    crossing.groups.clear();
    if (error.code() == Code::timeout) return {};  // one is under way
  }
  if (crossing.any()) return crossing;
  crossed_copies->disable(kOwner);
  return {};
}

}  // namespace offcore::kv
