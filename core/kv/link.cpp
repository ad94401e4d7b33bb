#include "core/kv/link.h"

#include <algorithm>

#include "core/base/clock.h"

namespace offcore::kv {
namespace {

constexpr uint16_t kEngines = 2;  // of the own link, whose lanes have the first numbers
constexpr uint16_t kLanes = 2;    // of a neighbour's link, in each direction
constexpr double kNewest = 0.25;  // what the last measurement counts
constexpr double kGbpsMin = 0.1;
constexpr double kGbpsMax = 1000;
constexpr double kPlainNsMin = 100;
constexpr double kPlainNsMax = 2'000;  // a stall is none of its cost

}  // namespace

Link::Link(Backend& copies)
    : backend(&copies),
      gbps_(copies.machine().links.host_gbps),
      plain_ns_(std::max<double>(kPlainNsMin, copies.machine().batches.copy_ns)) {}

double Link::through_ns(uint64_t more, double gbps_min) const {
  uint64_t ahead = more;
  for (const LinkLane& lane : lanes) ahead += lane.bytes;
  const double gbps = idle() ? std::max(gbps_, gbps_min) : gbps_;
  const double hop_ns = staged() ? static_cast<double>(backend->machine().pages.hop_ns) : 0;
  return static_cast<double>(ahead) / gbps + hop_ns;
}

double Link::copy_ns(const Part& part, const LinkLane& lane) const {
  const Machine& machine = backend->machine();
  const double bytes_ns = static_cast<double>(part.bytes) / machine.links.host_gbps;
  if (lane.crossed) return bytes_ns;  // the engines' pauses are each other's time
  const uint64_t together = part.form.together;
  const uint64_t calls = part.strided + (part.copies - part.strided + together - 1) / together;
  return static_cast<double>(calls) * machine.cost.issue_ns + bytes_ns;
}

double Link::ahead_ns(int64_t now) const {
  double behind_ns = 0;  // the submissions that are copied now: it is all to do
  for (const LinkLane& lane : lanes) {
    if (!lane.submissions.empty()) behind_ns += lane.copy_ns - lane.submissions.front().copy_ns;
  }
  return std::max(until_ns_ - static_cast<double>(now), behind_ns);
}

bool Link::idle() const {
  return std::all_of(lanes.begin(), lanes.end(),
                     [](const LinkLane& lane) { return lane.submissions.empty(); });
}

LinkLane& Link::emptiest() {
  LinkLane* found = nullptr;
  for (size_t i = 1; i <= lanes.size(); ++i) {
    LinkLane& lane = lanes[(last_ + i) % lanes.size()];
    if (found == nullptr || lane.bytes < found->bytes) found = &lane;
  }
  return *found;
}

void Link::add(LinkLane& lane, EnqueuedPart submission, int64_t began_ns) {
  if (idle()) busy_since_ns_ = began_ns;
  last_ = static_cast<size_t>(&lane - lanes.data());
  until_ns_ = std::max(until_ns_, static_cast<double>(began_ns)) + submission.copy_ns;
  lane.copy_ns += submission.copy_ns;
  lane.bytes += submission.bytes;
  lane.commands += submission.commands;
  lane.submissions.push_back(std::move(submission));
}

EnqueuedPart Link::take(LinkLane& lane) {
  EnqueuedPart submission = std::move(lane.submissions.front());
  lane.submissions.pop_front();
  lane.bytes -= submission.bytes;
  lane.commands -= submission.commands;
  lane.copy_ns = lane.submissions.empty() ? 0 : lane.copy_ns - submission.copy_ns;
  return submission;
}

void Link::submitted(uint64_t copies, int64_t took_ns) {
  const double found = static_cast<double>(took_ns) / static_cast<double>(copies);
  plain_ns_ += kNewest * (std::clamp(found, kPlainNsMin, kPlainNsMax) - plain_ns_);
}

void Link::measured(uint64_t bytes) {
  const int64_t now = now_ns();
  const auto took_ns = static_cast<double>(std::max<int64_t>(1, now - busy_since_ns_));
  const double found = std::clamp(static_cast<double>(bytes) / took_ns, kGbpsMin, kGbpsMax);
  gbps_ += kNewest * (found - gbps_);
  busy_since_ns_ = now;
  double left_ns = 0;
  for (const LinkLane& lane : lanes) left_ns += lane.copy_ns;
  until_ns_ = std::min(until_ns_, static_cast<double>(now) + left_ns);
}

std::vector<Link> links_of(Backend& own, bool crosses, const Packing& packing,
                           const std::vector<Neighbour>& neighbours, Direction direction) {
  const auto side = static_cast<uint16_t>(direction);
  std::vector<Link> links{Link(own)};
  links[0].lanes.push_back({.number = side});
  // A lane is an engine: what both directions give it is in one order.
  if (crosses)
    links[0].lanes.push_back({.number = static_cast<uint16_t>(1 - side), .crossed = true});
  if (packing.any()) {
    Link& link = links.emplace_back(own);
    link.sms = packing.sms;
    link.stage_bytes = packing.lane_bytes;
    for (uint32_t lane = 0; lane < packing.lanes; ++lane) {
      const uint32_t place = side * packing.lanes + lane;
      auto* const times = reinterpret_cast<uint32_t*>(packing.times.data);
      link.lanes.push_back({.number = static_cast<uint16_t>(kEngines + place),
                            .stage = packing.stage.data + place * link.stage_bytes,
                            .times_ns = times + place * Packing::kTimesKept * packing.sms});
    }
  }
  for (size_t i = 0; i < neighbours.size(); ++i) {
    Link& link = links.emplace_back(*neighbours[i].backend);
    link.rank = kNeighbour;
    link.number = i + 1;
    link.stage_bytes = neighbours[i].stage.bytes / (2 * kLanes);
    link.lanes.resize(kLanes);
    for (uint16_t lane = 0; lane < kLanes; ++lane) {
      link.lanes[lane].number = side * kLanes + lane;
      link.lanes[lane].stage =
          neighbours[i].stage.data + link.lanes[lane].number * link.stage_bytes;
    }
  }
  return links;
}

}  // namespace offcore::kv
