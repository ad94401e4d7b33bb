// A courier enqueues: which job's next part, over which link, and how large.
#include <algorithm>
#include <new>

#include "core/kv/courier.h"
#include "core/kv/submit.h"

namespace offcore::kv {
namespace {

constexpr size_t kFlightsMin = 2;      // so that one is enqueued while another is copied
constexpr uint64_t kSharesOfLink = 3;  // of what is left of a job, over several links
constexpr double kSlowestOfFastest = 8;
constexpr uint64_t kPlainMany = 16;  // of which one's time is measured
constexpr uint64_t kShareMin = uint64_t{1} << 20;
constexpr uint64_t kHeadStart = uint64_t{3} << 19;  // a link's, until the first rows are gathered

Course course(const Link& link, const Lane& lane, Direction direction) {
  return {.backend = *link.backend,
          .direction = direction,
          .rank = link.rank,
          .lane = lane.number,
          .stage = lane.stage,
          .stage_bytes = link.stage_bytes};
}

}  // namespace

bool Courier::submit(Way& way, uint32_t plain_max) {
  const std::shared_ptr<Job> job = pick(way);
  if (job == nullptr) return false;
  const uint64_t bytes = share_of(way, *job);
  Link* link = choose(way, *job, bytes);
  if (link == nullptr) return false;
  Lane& lane = link->emptiest();
  try {
    enqueue(*link, lane, job, bytes, plain_max);
  } catch (const Error& error) {
    refuse(*link, lane, job, error);
  } catch (const std::bad_alloc&) {
    refuse(*link, lane, job, Error(Code::memory, "no memory is left to enqueue a job's copies"));
  }
  return true;
}

// Some of a part may be enqueued, and is copied all the same: an empty one behind it tells when the
// job's blocks and slots are out of use.
void Courier::refuse(Link& link, Lane& lane, const std::shared_ptr<Job>& job,
                     const Error& failure) {
  const Request& request = job->request_;
  link.lost = link.staged() && failure.code() == Code::driver;
  try {
    Flight flight{.job = job};
    flight.run = kv::submit(course(link, lane, request.direction), *groups_[request.group].layout,
                            {}, keep_, false);
    link.add(lane, std::move(flight), now_ns());
    ++job->parts_ahead_;
  } catch (const std::exception&) {  // the GPU has failed, or no memory is left: nothing would tell
  }
  stop(job, failure);
}

bool Courier::has_room(Link& link) const {
  const Lane& lane = link.emptiest();
  if (lane.flights.size() < kFlightsMin) return true;
  return !link.staged() && lane.bytes < pace_.ahead_bytes && lane.commands < pace_.ahead_commands;
}

// The bytes of the job's next part. Over several links they become less towards its end, so that
// all are through at about the same time.
uint64_t Courier::share_of(const Way& way, const Job& job) const {
  const uint64_t most = std::max<uint64_t>(1, pace_.ahead_bytes / kPartsOfPace);
  if (neighbours_.empty() || job.together_ < job.layers_) return most;
  const uint64_t share = job.cursor_->left_bytes() / (kSharesOfLink * way.links.size());
  const uint64_t row = groups_[job.request_.group].layout->row_bytes();
  return std::max(row, std::clamp(share, std::min(most, kShareMin), most));
}

// The link over which that many bytes are expected to be through first; null: it is to be waited
// for.
Link* Courier::choose(Way& way, const Job& job, uint64_t bytes) const {
  Link* best = &way.links[0];
  const bool lent = !neighbours_.empty() && job.together_ == job.layers_;
  if (Link* own = by_own_memory(way, job); own != nullptr) {
    // A first part goes straight: so the link has something to carry while others are gathered.
    const bool first = job.began_ns_ < 0 && best->idle() && own->idle();
    if (!first) best = own;
  } else if (lent) {
    double fastest = 0;
    for (const Link& link : way.links) fastest = std::max(fastest, link.gbps());
    const auto through = [&](const Link& link) {
      return link.through_ns(bytes, fastest / kSlowestOfFastest);
    };
    for (Link& link : way.links) {
      if (!link.lost && through(link) < through(*best)) best = &link;
    }
  }
  if (has_room(*best) || job.cursor_->stage() < job.urgent_) return best;
  for (Link& link : way.links) {
    if (lent && !link.lost && link.idle()) return &link;
  }
  return nullptr;
}

// The link by memory of the GPU's own, if the job's next blocks are to go over it. Where loads are
// under way the engine that would gather has these to do.
Link* Courier::by_own_memory(Way& way, const Job& job) const {
  const bool stores = job.request_.direction == Direction::store;
  if (!stores || staging_.room.data == nullptr) return nullptr;
  if (!ways_[static_cast<size_t>(Direction::load)].links[0].idle()) return nullptr;
  Link& link = way.links[1];
  const bool goes = !link.lost && staging_.groups[job.request_.group] &&
                    job.together_ == job.layers_ &&
                    job.cursor_->apart(Staging::kBlocks) == Staging::kBlocks;
  return goes ? &link : nullptr;
}

// The plain copies that the driver can be told of before an engine that has jobs runs dry. The
// other direction's may not be allowed to begin: they count once copies are on their way.
uint32_t Courier::plain_in_time(const Link& link, uint32_t plain_max) const {
  const int64_t now = now_ns();
  double left_ns = link.plain_ns() * plain_max;
  for (const Way& way : ways_) {
    if (way.jobs.empty()) continue;
    const bool own = &way.links[0] == &link;
    for (const Link& other : way.links) {
      const bool fed = own && (&other == &link || other.rank == kNeighbour);
      if (!other.lost && (fed || !other.idle())) left_ns = std::min(left_ns, other.ahead_ns(now));
    }
  }
  return static_cast<uint32_t>(std::max(0.0, left_ns / link.plain_ns()));
}

void Courier::enqueue(Link& link, Lane& lane, const std::shared_ptr<Job>& job, uint64_t bytes,
                      uint32_t plain_max) {
  const Request& request = job->request_;
  const uint32_t stage = job->cursor_->stage();
  const bool rest_staged =
      !link.staged() && by_own_memory(ways_[static_cast<size_t>(request.direction)], *job);
  const uint64_t row_bytes = groups_[request.group].layout->row_bytes();
  const uint64_t head_start = std::min(bytes, Staging::kBlocks * row_bytes + kHeadStart);
  const uint64_t room = std::max<uint64_t>(1, std::min(bytes, link.stage_bytes) / row_bytes);
  const uint64_t staged_rows = link.rank == kOwner ? std::min(room, Staging::kBlocks) : room;
  Part part = link.staged()
                  ? job->cursor_->next_staged(link.rank, staged_rows)
                  : job->cursor_->next(
                        {.bytes = rest_staged ? head_start : bytes,
                         .strided = std::max(1U, pace_.ahead_commands / kPartsOfPace),
                         .plain = std::max(1U, plain_max),
                         .in_time = stage < job->urgent_ ? 0 : plain_in_time(link, plain_max)});
  Flight flight{.job = job,
                .bytes = part.bytes,
                .commands = part.copies,
                .copy_ns = link.copy_ns(part),
                .stage = stage};
  JobReport& report = job->report_;
  const uint64_t pages = part.pages;
  const uint64_t strided = part.strided;
  const bool ends_stage = part.ends_stage;
  if (job->began_ns_ < 0) {
    job->began_ns_ = backend_->now_ns();
    report.queued_ns = job->began_ns_ - job->called_ns_;
  }
  const int64_t began_ns = now_ns();
  flight.run = kv::submit(course(link, lane, request.direction), *groups_[request.group].layout,
                          std::move(part), keep_, checked_);
  const int64_t took_ns = now_ns() - began_ns;
  if (strided == 0 && flight.commands >= kPlainMany) link.told(flight.commands, took_ns);
  report.enqueue_ns += took_ns;
  report.pages += pages;
  report.strided += strided;
  report.commands += flight.commands;
  report.bytes += flight.bytes;
  report.link_bytes[link.number] += flight.bytes;
  if (link.staged() && link.number == 0) report.staged_bytes += flight.bytes;
  report.blocks = job->cursor_->copied();
  job->last_[{link.number, lane.number}] = flight.run;
  ++job->stages_ahead_[stage];
  if (ends_stage) {
    const std::scoped_lock lock(board_->mutex);
    for (auto& [where, run] : job->last_) job->stages_[stage].push_back(std::move(run));
    job->last_.clear();
    job->enqueued_ = stage + 1;
    report.layers = std::min(job->layers_, (stage + 1) * job->together_);
    board_->changed.notify_all();
  }
  ++job->parts_ahead_;
  link.add(lane, std::move(flight), began_ns);
  if (job->cursor_->ended()) {
    std::erase(ways_[static_cast<size_t>(request.direction)].jobs, job);
  }
}

}  // namespace offcore::kv
