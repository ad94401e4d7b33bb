#include "core/kv/staging.h"

#include <algorithm>
#include <cstring>

#include "core/kv/submit.h"

namespace offcore::kv {
namespace {

constexpr uint64_t kPageMax = uint64_t{32} << 10;  // larger ones come as fast by themselves
constexpr uint32_t kPiecesMin = 8;                 // of a fold, else a block takes many copies
// Of pieces: nearer ones lie too many steps from where they are addressed, and a copy of two
// dimensions has no larger pitch.
constexpr uint64_t kStepMin = uint64_t{64} << 10;
constexpr uint64_t kStepMax = (uint64_t{1} << 31) - 1;
constexpr size_t kBlocksMin = 2;  // that a lane has room for
constexpr int kTrials = 3;        // somebody may write the cache meanwhile
constexpr double kTrialS = 5;

// What it could be good for. The wider step is to be the cache's, which says whose engine gathers.
bool has_small_pages(const std::vector<Fold>& folds) {
  return std::all_of(folds.begin(), folds.end(), [](const Fold& fold) {
    return fold.bytes <= kPageMax && fold.pieces >= kPiecesMin && fold.step >= kStepMin &&
           fold.step <= kStepMax && fold.row_step < fold.step;
  });
}

// Stores the first and the last block by a lane's room, and straight to the host.
class Trial {
 public:
  Trial(Backend& backend, const Group& group, std::shared_ptr<const std::vector<Stage>> stages)
      : backend_(backend), group_(group), stages_(std::move(stages)) {
    if (group.layout->blocks() > 1)
      blocks_.push_back(static_cast<int64_t>(group.layout->blocks()) - 1);
  }
  uint64_t bytes() const { return 2 * half(); }  // of the host's

  bool brings_the_same(const Staging& staging) const {
    std::byte* straight = staging.tried.data;
    std::byte* staged = straight + half();
    for (int trial = 0; trial < kTrials; ++trial) {
      store(staging, straight, false);
      std::transform(straight, staged, staged, [](std::byte byte) { return ~byte; });
      if (store(staging, staged, true) != OwnCopy::engine) return false;
      if (std::memcmp(straight, staged, half()) == 0) return true;
    }
    return false;
  }

 private:
  uint64_t half() const { return blocks_.size() * group_.layout->row_bytes(); }

  OwnCopy store(const Staging& staging, std::byte* to, bool staged) const {
    std::vector<Row> rows;  // not in the blocks' order, in which they could be a run
    for (size_t i = blocks_.size(); i-- > 0;) {
      rows.push_back({.at = to + i * group_.layout->row_bytes()});
    }
    Cursor cursor(Direction::store, {}, group_.layout, stages_, blocks_, std::move(rows));
    Course course{.backend = backend_,
                  .direction = Direction::store,
                  .lane = static_cast<uint16_t>(Direction::store)};
    Part part;
    if (staged) {
      course.lane = Staging::kFirstLane;
      course.stage = staging.room.data;
      course.stage_bytes = staging.lane_bytes;
      part = cursor.next_staged(kOwner, blocks_.size());
      spoil(part);
    } else {
      part = cursor.next({.bytes = half(), .strided = UINT32_MAX, .plain = UINT32_MAX});
    }
    const auto keep = std::make_shared<std::pair<Share, Share>>(staging.room, staging.tried);
    const auto run = submit(course, *group_.layout, std::move(part), keep, false);
    run->wait(Deadline::after_s(kTrialS));
    return run->report().own_copy;
  }

  // What the rows have now goes to the stage first, so that each byte has to come from the cache.
  static void spoil(Part& part) {
    std::vector<Command> commands;
    for (const Command& command : part.commands) {
      if (command.op != Op::copy || command.dst.buffer != kRows) continue;
      commands.push_back(
          {.dst = command.src, .src = command.dst, .bytes = command.bytes, .op = Op::copy});
    }
    commands.push_back({.op = Op::fence});
    part.commands.insert(part.commands.begin(), commands.begin(), commands.end());
  }

  Backend& backend_;
  const Group& group_;
  const std::shared_ptr<const std::vector<Stage>> stages_;
  std::vector<int64_t> blocks_ = {0};
};

}  // namespace

Staging staging_of(Backend& backend, const std::vector<Group>& groups,
                   const std::vector<std::vector<uint64_t>>& memories, uint64_t bytes) {
  Staging staging{.groups = std::vector<bool>(groups.size())};
  std::vector<Trial> trials;
  const std::byte* first = nullptr;  // of all caches
  uint64_t reach = 0;
  uint64_t row_bytes = 0;
  uint64_t tried_bytes = 0;
  for (size_t i = 0; i < groups.size(); ++i) {
    const Layout& layout = *groups[i].layout;
    const auto stages =
        std::make_shared<const std::vector<Stage>>(stages_of(layout, layout.layers(), memories[i]));
    const std::vector<Fold>& folds = stages->front().folds;
    trials.emplace_back(backend, groups[i], stages);
    staging.groups[i] =
        has_small_pages(folds) && bytes / Staging::kLanes >= kBlocksMin * layout.row_bytes();
    if (!staging.groups[i]) continue;
    first = first == nullptr ? layout.base() : std::min<const std::byte*>(first, layout.base());
    for (const Fold& fold : folds) {
      reach = std::max(reach, (fold.pieces + uint64_t{1}) * fold.step);
    }
    row_bytes = std::max(row_bytes, layout.row_bytes());
    tried_bytes = std::max(tried_bytes, trials.back().bytes());
  }
  if (reach == 0) return {};
  staging.lane_bytes = std::min(bytes / Staging::kLanes, Staging::kBlocks * row_bytes);
  try {
    staging.room =
        backend.allocate_stage(kOwner, Staging::kLanes * staging.lane_bytes, first, reach);
    if (staging.room.data == nullptr) return {};
    staging.tried = backend.allocate_host(tried_bytes);
    for (size_t i = 0; i < groups.size(); ++i) {
      staging.groups[i] = staging.groups[i] && trials[i].brings_the_same(staging);
    }
  } catch (const Error&) {  // the GPU does not take such copies, or no memory is left
    return {};
  }
  const bool any =
      std::find(staging.groups.begin(), staging.groups.end(), true) != staging.groups.end();
  return any ? staging : Staging{};
}

}  // namespace offcore::kv
