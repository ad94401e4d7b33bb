// How copies of one direction go between the host and the GPU of a cache: over that GPU's own link,
// by one of its engines, by both, or packed (packing.h), and over those of neighbours that lend
// theirs. A neighbour's bytes cross its link to or from memory of its own, and the link between the
// two GPUs from there.
#pragma once
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "core/backend/backend.h"
#include "core/kv/packing.h"

namespace offcore::kv {

class Job;

// A part of a job on its way.
struct EnqueuedPart {
  std::shared_ptr<Job> job;
  std::shared_ptr<Run> run;
  uint64_t bytes = 0;
  uint64_t commands = 0;
  double copy_ns = 0;                  // that its copies take, at least
  uint32_t layer_group = 0;            // of the job
  const uint32_t* times_ns = nullptr;  // that SMs took, once it has ended; null: none
};

// A queue of a link, whose submissions are copied one after the other.
struct LinkLane {
  uint16_t number = 0;           // of the backend's
  bool crossed = false;          // by the other direction's engine
  std::byte* stage = nullptr;    // memory for this lane alone
  uint32_t* times_ns = nullptr;  // Packing::kTimesKept times those of its SMs
  uint32_t times = 0;            // that were used
  std::deque<EnqueuedPart> submissions;
  uint64_t bytes = 0;     // of the submissions
  uint64_t unbroken = 0;  // bytes since the last submission that gives way
  uint64_t commands = 0;
  double copy_ns = 0;

  // Of the own link's, which are engines: the one that is for copies to the host.
  bool to_host() const { return number == static_cast<uint16_t>(Direction::store); }
};

// The own link has a lane for each engine that copies in its direction. Where parts are staged
// there are several lanes: while one's bytes cross the link, others' go to or from the cache.
struct Link {
  explicit Link(Backend& copies);

  Backend* backend = nullptr;
  Rank rank = kOwner;        // who copies
  size_t number = 0;         // 0: the GPU's own
  uint32_t sms = 0;          // that pack a part; 0: it is not packed
  uint64_t stage_bytes = 0;  // of a lane; 0: parts go straight
  std::vector<LinkLane> lanes;
  bool lost = false;  // it has failed: nothing goes over it any more

  bool staged() const { return stage_bytes > 0; }
  bool packs() const { return sms > 0; }
  double gbps() const { return gbps_; }  // as measured
  double copy_ns(const Part& part,
                 const LinkLane& lane) const;  // by what the machine says, at least
  // For which the engine has something to do, at least; about, where both copy.
  double ahead_ns(int64_t now) const;
  // When so many bytes more would be through, from now on, by that speed. An idle link is taken to
  // have at least `gbps_min`: else one that was slow once would never be measured again.
  double through_ns(uint64_t more, double gbps_min) const;
  bool idle() const;
  LinkLane& emptiest();  // of several the one that has waited for longest
  void add(LinkLane& lane, EnqueuedPart submission,
           int64_t began_ns);  // when it began to be enqueued
  // So many plain copies were, in that time.
  void submitted(uint64_t copies, int64_t took_ns);
  double plain_ns() const { return plain_ns_; }  // that one takes to submit
  EnqueuedPart take(LinkLane& lane);             // the first one, which has ended
  void measured(uint64_t bytes);                 // so many have come through since it was busy

 private:
  double gbps_;                // as the machine says, until it is measured
  double plain_ns_;            // the same
  size_t last_ = 0;            // lane that something was added to
  int64_t busy_since_ns_ = 0;  // or since it was measured
  double until_ns_ = 0;        // it has something to do, at least
};

// A GPU whose link is used too: kNeighbour, the one local rank of a group of two.
struct Neighbour {
  std::shared_ptr<Backend> backend;
  Share stage;  // the room that it lends
};

// The links of one direction: the own one, whose lanes are an engine each, the same one for what is
// packed, where something is, and the neighbours'.
std::vector<Link> links_of(Backend& own, bool crosses, const Packing& packing,
                           const std::vector<Neighbour>& neighbours, Direction direction);

}  // namespace offcore::kv
