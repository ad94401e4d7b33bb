#include "core/kv/staging.h"

#include <algorithm>
#include <cstring>

#include "core/kv/submit.h"

namespace offcore::kv {
namespace {

constexpr uint64_t kPageMax = uint64_t{32} << 10;  // larger ones come as fast by themselves
constexpr uint32_t kPiecesMin = 8;                 // of a fold, else a block takes many copies
constexpr size_t kBlocksMin = 2;                   // that a lane has room for
constexpr int kTrials = 3;                         // somebody may write the cache meanwhile
constexpr double kTrialS = 5;

// Which it could be good for.
bool has_small_pages(const std::vector<Fold>& folds) {
  return std::all_of(folds.begin(), folds.end(), [](const Fold& fold) {
    return fold.bytes <= kPageMax && fold.pieces >= kPiecesMin;
  });
}

uint64_t reach_of(const std::vector<Fold>& folds) {
  uint64_t reach = 0;
  for (const Fold& fold : folds) reach = std::max(reach, (fold.pieces + uint64_t{1}) * fold.step);
  return reach;
}

// The first and the last block by that room, and straight to the host.
bool brings_the_same(Backend& backend, const Group& group,
                     const std::shared_ptr<const std::vector<Stage>>& stages, const Share& room,
                     uint64_t lane_bytes) {
  const uint64_t row_bytes = group.layout->row_bytes();
  std::vector<int64_t> blocks = {0};
  if (group.layout->blocks() > 1)
    blocks.push_back(static_cast<int64_t>(group.layout->blocks()) - 1);
  const uint64_t bytes = blocks.size() * row_bytes;
  const Share host = backend.allocate_host(2 * bytes);
  const auto keep = std::make_shared<std::pair<Share, Share>>(room, host);
  const auto store = [&](std::byte* to, bool staged) {
    std::vector<Row> rows;  // not in the blocks' order: they are to be apart
    for (size_t i = blocks.size(); i-- > 0;) rows.push_back({.at = to + i * row_bytes});
    Cursor cursor(Direction::store, {}, group.layout, stages, blocks, std::move(rows));
    Course course{.backend = backend,
                  .direction = Direction::store,
                  .lane = static_cast<uint16_t>(Direction::store)};
    if (staged) {
      course.lane = Staging::kFirstLane;
      course.stage = room.data;
      course.stage_bytes = lane_bytes;
    }
    Part part = staged ? cursor.next_staged(kOwner, blocks.size())
                       : cursor.next({.bytes = bytes, .strided = UINT32_MAX, .plain = UINT32_MAX});
    const auto run = submit(course, *group.layout, std::move(part), keep, false);
    run->wait(Deadline::after_s(kTrialS));
    return run->report().own_copy;
  };
  std::byte* straight = host.data;
  std::byte* staged = host.data + bytes;
  for (int trial = 0; trial < kTrials; ++trial) {
    store(straight, false);
    std::transform(straight, straight + bytes, staged, [](std::byte byte) { return ~byte; });
    for (size_t i = 0; i < blocks.size(); ++i) {  // so that each byte has to come
      room.copy(room.data + i * row_bytes, staged + bytes - (i + 1) * row_bytes, row_bytes);
    }
    if (store(staged, true) != OwnCopy::engine) return false;
    if (std::memcmp(straight, staged, bytes) == 0) return true;
  }
  return false;
}

}  // namespace

Staging staging_of(Backend& backend, const std::vector<Group>& groups,
                   const std::vector<std::vector<uint64_t>>& memories, uint64_t bytes) {
  Staging staging{.groups = std::vector<bool>(groups.size())};
  std::vector<std::shared_ptr<const std::vector<Stage>>> stages;
  uint64_t reach = 0;
  uint64_t row_bytes = 0;
  for (size_t i = 0; i < groups.size(); ++i) {
    const Layout& layout = *groups[i].layout;
    stages.push_back(std::make_shared<const std::vector<Stage>>(
        stages_of(layout, layout.layers(), memories[i])));
    const std::vector<Fold>& folds = stages.back()->front().folds;
    staging.groups[i] =
        has_small_pages(folds) && bytes / Staging::kLanes >= kBlocksMin * layout.row_bytes();
    if (!staging.groups[i]) continue;
    reach = std::max(reach, reach_of(folds));
    row_bytes = std::max(row_bytes, layout.row_bytes());
  }
  if (reach == 0) return staging;
  const uint64_t lane_bytes = std::min(bytes / Staging::kLanes, Staging::kBlocks * row_bytes);
  Share room;
  try {
    if (!backend.anchor(kOwner, reach)) return staging;
    room = backend.allocate(kOwner, Staging::kLanes * lane_bytes);
    for (size_t i = 0; i < groups.size(); ++i) {
      staging.groups[i] =
          staging.groups[i] && brings_the_same(backend, groups[i], stages[i], room, lane_bytes);
    }
  } catch (const Error&) {  // the GPU does not take such copies, or has no room
    return staging;
  }
  if (std::find(staging.groups.begin(), staging.groups.end(), true) == staging.groups.end()) {
    return staging;
  }
  staging.room = std::move(room);
  staging.lane_bytes = lane_bytes;
  return staging;
}

}  // namespace offcore::kv
