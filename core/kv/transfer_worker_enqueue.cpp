// A worker enqueues: which job's next part, over which link, and how large.
#include <algorithm>
#include <new>

#include "core/kv/submit.h"
#include "core/kv/transfer_worker.h"

namespace offcore::kv {
namespace {

constexpr size_t kPartsMin = 2;  // so that one is enqueued while another is copied
// Copies to the host of whoever else uses the GPU may have to wait until a stream has none left: an
// engine that makes ours has a pause after each part, while the other one copies.
constexpr size_t kPartsToHost = 1;
constexpr uint64_t kSharesOfLink = 3;  // of what is left of a job, over several links
constexpr double kSlowestOfFastest = 8;
constexpr uint64_t kPlainMany = 16;  // of which one's time is measured
constexpr uint64_t kShareMin = uint64_t{1} << 20;
// Of a part where both engines copy: what waits for an engine waits for Pages::both_part_bytes or a
// block. The own one's may be larger, and have pages that are submitted one by one among them.
constexpr uint64_t kCrossedBlocks = 8;
constexpr uint64_t kOwnParts = 2;
constexpr uint64_t kFewBlocks = 2;
constexpr uint64_t kPartsOfRest = 4;  // of the blocks that are left
// Of a part that is packed. A store's first one is packed, and a load's last one unpacked, while
// the link is idle; but there are to be few: a thread submits one as long as a link copies a MiB.
constexpr uint64_t kPackedBegin = uint64_t{1} << 19;  // by a caller, while the thread wakes
constexpr uint64_t kPackedFirst = uint64_t{3} << 19;
constexpr uint64_t kPackedGrowth = 2;  // a part is larger by this share of all before it
constexpr uint64_t kPackedRest = 2;    // of a load's bytes that are left
constexpr uint64_t kPackedBlocks = 512;

// An engine keeps to a stream until that has nothing more for it: others' copies in its direction,
// unless they are tiny, would come after all that is enqueued in time. A change of streams costs
// microseconds.
constexpr uint64_t kGiveWayBytes = uint64_t{16} << 20;

SubmitTarget target(const Link& link, const LinkLane& lane, const TransferRequest& request) {
  return {.backend = *link.backend,
          .direction = request.direction,
          .rank = link.rank,
          .lane = lane.number,
          .gives_way = !link.staged() && lane.unbroken >= kGiveWayBytes,
          .crossed = lane.crossed,
          .stage = lane.stage,
          .stage_bytes = link.stage_bytes,
          .after = request.after.get()};
}

Link& packing_link(std::vector<Link>& links) {
  return *std::find_if(links.begin(), links.end(), [](const Link& link) { return link.packs(); });
}

}  // namespace

bool TransferWorker::submit(DirectionQueue& direction, uint32_t plain_max, bool goes_on) {
  const std::shared_ptr<Job> job = pick(direction);
  if (job == nullptr) return false;
  Link* link = &direction.links[0];
  LinkLane* lane = nullptr;
  PartBudget budget{{.strided = std::max(1U, pace_.ahead_commands / kPartsOfPace),
                     .plain = std::max(1U, plain_max)},
                    crosses(*job)};
  const bool urgent = job->builder_->layer_group() < job->urgent_;
  budget.submitted_soonest = budget.apart || urgent;
  if (budget.apart) {
    lane = engine_for(*link, *job);
    if (lane == nullptr) return false;
    budget.bytes = share_of_engine(*lane, *job, goes_on);
  } else if (job->packed_) {
    link = &packing_link(direction.links);
    lane = &link->emptiest();
    if (lane->submissions.size() >= kPartsMin && !urgent) return false;
    // A block takes a plain copy, of its row.
    const uint64_t begin = std::min(kPackedBegin, plain_max * job->builder_->block_bytes());
    budget.bytes = goes_on ? share_of_packing(*job) : begin;
  } else {
    budget.bytes = share_of(direction, *job);
    link = choose(direction, *job, budget.bytes);
    if (link == nullptr) return false;
    lane = link->staged() ? &link->emptiest() : &link->lanes[0];
  }
  // An engine that has nothing to do takes what is submitted soonest.
  const bool soon = urgent || lane->crossed || (budget.apart && lane->submissions.empty());
  if (!link->staged() && !soon) budget.in_time = plain_in_time(*link, plain_max);
  try {
    enqueue(*link, *lane, job, budget);
  } catch (const Error& error) {
    refuse(*link, *lane, job, error);
  } catch (const std::bad_alloc&) {
    refuse(*link, *lane, job, Error(Code::memory, "no memory is left to enqueue a job's copies"));
  }
  return true;
}

// Some of a part may be enqueued, and is copied all the same: an empty one behind it tells when the
// job's blocks and slots are out of use.
void TransferWorker::refuse(Link& link, LinkLane& lane, const std::shared_ptr<Job>& job,
                            const Error& failure) {
  const TransferRequest& request = job->request_;
  if (failure.code() == Code::driver) {
    link.lost = link.staged();
    refused_ = refused_ || lane.crossed;
  }
  try {
    EnqueuedPart submission{.job = job};
    submission.run =
        kv::submit(target(link, lane, request), *groups_[request.group].layout, {}, keep_, false);
    link.add(lane, std::move(submission), now_ns());
    ++job->parts_ahead_;
  } catch (const std::exception&) {  // the GPU has failed, or no memory is left: nothing would tell
  }
  stop(job, failure);
}

bool TransferWorker::is_to_be_packed(const Job& job) const {
  const auto direction = static_cast<size_t>(job.request_.direction);
  if (!packing_.any() || !packing_.pays[job.request_.group][direction]) return false;
  if (packing_.always || job.builder_->ended()) return packing_.always;
  const PageCopies copies = job.builder_->page_copies();
  return packing_pays(copies.commands, copies.rows, copies.bytes, backend_->machine());
}

// Whether it is copied in the order in which its parts are enqueued, among others that are too.
bool TransferWorker::in_order(const Job& job) const {
  return neighbours_.empty() && !may_cross(job) && !job.packed_;
}

// Whether both engines may copy some of it. One that is held would hold the other direction up.
bool TransferWorker::may_cross(const Job& job) const {
  return crossing_.any() && !job.packed_ && !job.request_.held &&
         crossing_.groups[job.request_.group] && job.together_ == job.layers_;
}

// Whether both engines are to copy the job's next blocks: while the other direction has nothing on
// its way, which would have to wait, and the blocks are no run for which a copy a layer is fewer.
bool TransferWorker::crosses(const Job& job) const {
  if (refused_ || !may_cross(job) || !job.builder_->apart()) return false;
  const Direction other =
      job.request_.direction == Direction::load ? Direction::store : Direction::load;
  const std::vector<Link>& links = directions_[static_cast<size_t>(other)].links;
  return std::all_of(links.begin(), links.end(), [](const Link& link) { return link.idle(); });
}

// The engine that gets the job's next part, where both copy; null: they have enough. The one that
// is made for it begins.
LinkLane* TransferWorker::engine_for(Link& link, const Job& job) const {
  LinkLane& own = link.lanes[0];
  LinkLane& other = link.lanes[1];
  if (job.began_ns_ < 0 && link.idle()) return &own;
  const auto has_room = [](const LinkLane& lane) {
    return lane.submissions.size() < (lane.to_host() ? kPartsToHost : kPartsMin);
  };
  // What a stream waits for goes past the bounds of its own engine: nobody else is to wait for it.
  const bool first = job.builder_->layer_group() < job.urgent_ || has_room(own);
  const bool second = has_room(other);
  if (first && second) return &link.emptiest();
  return first ? &own : second ? &other : nullptr;
}

bool TransferWorker::has_room(Link& link) const {
  const LinkLane& lane = link.staged() ? link.emptiest() : link.lanes[0];
  if (lane.submissions.size() < kPartsMin) return true;
  return !link.staged() && lane.bytes < pace_.ahead_bytes && lane.commands < pace_.ahead_commands;
}

// The bytes of the job's next part. Over several links they become less towards its end, so that
// all are through at about the same time.
uint64_t TransferWorker::share_of(const DirectionQueue& direction, const Job& job) const {
  if (neighbours_.empty()) return std::max<uint64_t>(1, pace_.ahead_bytes / kPartsMin);
  const uint64_t most = std::max<uint64_t>(1, pace_.ahead_bytes / kPartsOfPace);
  if (job.together_ < job.layers_) return most;
  const uint64_t share = job.builder_->left_bytes() / (kSharesOfLink * direction.links.size());
  const uint64_t row = groups_[job.request_.group].layout->block_bytes();
  return std::max(row, std::clamp(share, std::min(most, kShareMin), most));
}

// The same where it is packed: as large as can be packed while the one before is copied.
uint64_t TransferWorker::share_of_packing(const Job& job) const {
  const uint64_t most = std::max<uint64_t>(1, pace_.ahead_bytes / kPartsOfPace);
  const uint64_t before = job.report_.bytes;
  const uint64_t share = std::min(most, kPackedFirst + before / kPackedGrowth);
  if (job.request_.direction == Direction::store) return share;
  const uint64_t row = groups_[job.request_.group].layout->block_bytes();
  const uint64_t left = job.request_.blocks.size() * row - before;
  return std::min(share, std::max(kPackedFirst, left / kPackedRest));
}

// The same where both engines copy: little at a job's begin, so that both have some soon, and
// towards its end.
uint64_t TransferWorker::share_of_engine(const LinkLane& lane, const Job& job, bool goes_on) const {
  const uint64_t row = groups_[job.request_.group].layout->block_bytes();
  const uint64_t left = job.builder_->left_bytes() / row;
  const uint64_t before = job.request_.blocks.size() - left;
  const uint64_t parts = lane.crossed ? 1 : kOwnParts;
  const uint64_t part_bytes = backend_->machine().pages.both_part_bytes;
  const uint64_t bytes = std::min(parts * part_bytes, pace_.ahead_bytes / kPartsOfPace);
  const uint64_t most = std::min(parts * kCrossedBlocks, bytes / row);
  const uint64_t begin = goes_on ? std::max(kFewBlocks, before / 2) : most;
  const uint64_t end = std::max(left / kPartsOfRest, std::min(kFewBlocks, (left + 1) / 2));
  return std::max<uint64_t>(1, std::min({most, begin, end})) * row;
}

// The link over which that many bytes are expected to be through first; null: it is to be waited
// for.
Link* TransferWorker::choose(DirectionQueue& direction, const Job& job, uint64_t bytes) const {
  Link* best = &direction.links[0];
  const bool lent = !neighbours_.empty() && job.together_ == job.layers_;
  if (lent) {
    double fastest = 0;
    for (const Link& link : direction.links) fastest = std::max(fastest, link.gbps());
    const auto through = [&](const Link& link) {
      return link.through_ns(bytes, fastest / kSlowestOfFastest);
    };
    for (Link& link : direction.links) {
      if (!link.lost && through(link) < through(*best)) best = &link;
    }
  }
  if (has_room(*best) || job.builder_->layer_group() < job.urgent_) return best;
  for (Link& link : direction.links) {
    if (lent && !link.lost && link.idle()) return &link;
  }
  return nullptr;
}

// The plain copies that can be submitted before an engine that has jobs runs dry. The other
// direction's may not be allowed to begin: they count once copies are on their way.
uint32_t TransferWorker::plain_in_time(const Link& link, uint32_t plain_max) const {
  const int64_t now = now_ns();
  double left_ns = link.plain_ns() * plain_max;
  for (const DirectionQueue& direction : directions_) {
    if (direction.jobs.empty()) continue;
    const bool own = &direction.links[0] == &link;
    for (const Link& other : direction.links) {
      const bool fed = own && (&other == &link || other.rank == kNeighbour);
      if (!other.lost && (fed || !other.idle())) left_ns = std::min(left_ns, other.ahead_ns(now));
    }
  }
  return static_cast<uint32_t>(std::max(0.0, left_ns / link.plain_ns()));
}

Part TransferWorker::next_part(const Link& link, LinkLane& lane, Job& job,
                               const PartBudget& budget) const {
  CommandBuilder& builder = *job.builder_;
  if (!link.staged()) return builder.next(budget);
  const uint64_t bytes = std::min(budget.bytes, link.stage_bytes);
  const uint64_t blocks = std::max<uint64_t>(1, bytes / builder.block_bytes());
  if (!link.packs()) return builder.next_staged(blocks);
  Part part =
      builder.next_packed(std::min(blocks, kPackedBlocks), packing_.pieces_of(job.request_.group));
  part.pages_at->spent_ns = lane.times_ns + lane.times++ % Packing::kTimesKept * link.sms;
  return part;
}

void TransferWorker::enqueue(Link& link, LinkLane& lane, const std::shared_ptr<Job>& job,
                             const PartBudget& budget) {
  const TransferRequest& request = job->request_;
  const uint32_t layer_group = job->builder_->layer_group();
  Part part = next_part(link, lane, *job, budget);
  EnqueuedPart submission{.job = job,
                          .bytes = part.bytes,
                          .commands = part.copies,
                          .copy_ns = link.copy_ns(part, lane),
                          .layer_group = layer_group,
                          .times_ns = part.pages_at ? part.pages_at->spent_ns : nullptr};
  JobReport& report = job->report_;
  const uint64_t pages = part.pages;
  const uint64_t strided = part.strided;
  report.sms = std::max(report.sms, link.sms * static_cast<uint32_t>(link.lanes.size()));
  const bool ends_layer_group = part.ends_layer_group;
  if (job->began_ns_ < 0) {
    job->began_ns_ = backend_->now_ns();
    report.queued_ns = job->began_ns_ - job->called_ns_;
  }
  if (lane.submissions.empty()) lane.unbroken = 0;
  const int64_t began_ns = now_ns();
  submission.run = kv::submit(target(link, lane, request), *groups_[request.group].layout,
                              std::move(part), keep_, checked_);
  const int64_t took_ns = now_ns() - began_ns;
  if (strided == 0 && submission.commands >= kPlainMany)
    link.submitted(submission.commands, took_ns);
  report.enqueue_ns += took_ns;
  report.pages += pages;
  report.strided += strided;
  report.commands += submission.commands;
  report.bytes += submission.bytes;
  report.link_bytes[link.number] += submission.bytes;
  report.blocks = job->builder_->copied();
  job->last_[{link.number, lane.number}] = submission.run;
  ++job->layer_groups_ahead_[layer_group];
  std::shared_ptr<Gate> gate;
  if (ends_layer_group) {
    const std::scoped_lock lock(queue_->mutex);
    for (const auto& [where, run] : job->last_) job->layer_groups_[layer_group].push_back(run);
    job->enqueued_ = layer_group + 1;
    report.layers = std::min(job->layers_, (layer_group + 1) * job->together_);
    gate = job->gates_[layer_group];
    queue_->changed.notify_all();
  }
  ++job->parts_ahead_;
  if (lane.unbroken >= kGiveWayBytes) lane.unbroken = 0;
  lane.unbroken += submission.bytes;
  link.add(lane, std::move(submission), began_ns);
  if (job->builder_->ended()) {
    std::erase(directions_[static_cast<size_t>(request.direction)].jobs, job);
  }
  if (gate == nullptr) return;
  Streams& streams = *backend_->capabilities().streams;
  streams.open_behind(*gate, job->layer_groups_[layer_group]);
}

}  // namespace offcore::kv
