// A machine as data: its engines, links, native commands, limits and costs. Read from
// machines/NAME.json (see python/offcore/machines.py for the file's form and its checks).
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "core/ir/command.h"

namespace offcore {

// How the ranks are joined. Bandwidth is shared fairly between the copies on a link.
enum class Topology : uint8_t {
  full,      // a link each way between every two ranks
  switched,  // every rank has one port into a switch, each way
  shared,    // one memory system for all (host)
};

// Where the words live that tell that a queue has delivered.
enum class FlagHome : uint8_t {
  host,  // one word a queue in host memory, read by all who wait (the paper's prototype)
  peer,  // a word in each reader's own memory, written across the link
};

struct Native {
  bool strided = false;    // copies of several rows (2-D copies, rectangular packets)
  uint32_t bcst_rows = 1;  // destinations that one broadcast command reaches; 1: none
  bool swap = false;
  bool strided_flags = false;  // signals and polls of several rows
  bool signals_aside = false;  // amid a queue's data, they do not hold it up
};

struct Limits {
  uint64_t copy_bytes_max = UINT64_MAX;   // one copy's bytes (one row's)
  uint64_t pitch_bytes_max = UINT64_MAX;  // a strided copy's step
  uint32_t rows_max = UINT32_MAX;
  uint32_t swap_align = 1;                // bytes; both addresses
  uint32_t bcst_align = 1;                // destinations agree modulo this
  uint64_t swap_scratch_bytes = 1 << 20;  // where swap is expanded; more for more than 1024 pieces
};

// Bandwidths in 1e9 bytes a second, one direction.
struct Links {
  double link_gbps = 0;     // between two ranks (full), or a rank's port (switched, shared)
  double egress_gbps = 0;   // out of a rank, all links together
  double ingress_gbps = 0;  // into a rank
  double host_gbps = 0;     // between a rank and host memory
  double local_gbps = 0;    // a copy inside one rank's memory
  double engine_gbps = 0;   // one engine
  double strided_gbps = 0;  // one engine, copies of several rows
  double bcst_gbps = 0;     // one engine, bytes written by a broadcast
  double swap_gbps = 0;     // one engine, bytes written by a swap
};

// Costs in nanoseconds (DMA-Latte section 3.2).
struct Cost {
  double control_ns = 0;       // the host creates one command
  double doorbell_ns = 0;      // the host rings one queue
  double doorbell_growth = 0;  // each further queue of one call costs this share more than the last
  double wake_ns = 0;          // from the doorbell until the engine starts to fetch
  double fetch_ns = 0;         // the engine fetches and decodes one command
  double setup_ns = 0;         // a copy's first byte: translation, the read's and write's latency
  double issue_ns = 0;         // between the starts of two overlapped copies of one queue (b2b)
  uint32_t overlap = 1;        // copies of one group in flight on one engine
  double sync_ns = 0;          // a signal, from the end of the data until it is visible
  double poll_ns = 0;          // from a word's change until the poll passes
  double host_poll_ns = 0;     // the caller notices one word
  double trigger_ns = 0;       // the caller writes one word
  double launch_ns = 0;  // from a kernel's launch until it runs, where one takes a caller's part
  double reduce_gbps = 900;  // of sources that a caller's cores read when they reduce
  double push_gbps = 0;      // of what the same cores write to peers; 0: they do not
  double step_ns = 0;        // what ranks that send in step lose from chunk to chunk
};

// How batches of copies are best handed to the engines (DMA-Latte section 6).
struct Batches {
  uint64_t b2b_bytes_max = UINT64_MAX;  // up to this many bytes, all of it: one engine
  uint32_t call_min = UINT32_MAX;       // copies to or from the host, fewer go one by one
  uint32_t sub_batch = 0;               // handed over at once, while more are prepared; 0: all
  uint32_t sub_batch_max = UINT32_MAX;  // the same while engines have enough to do
  uint32_t copy_ns = 0;                 // that one takes whoever hands it over
};

// How pages between a rank and the host are copied (core/plan/pages.h).
struct Pages {
  uint32_t sub_batch_first = UINT32_MAX;  // handed over by the first call, of pages not small
  uint32_t sub_batch_apart = UINT32_MAX;  // by each, of pages that do not fold
  uint64_t small_bytes = 0;  // smaller ones may be copied by a CPU while a queue has nothing to do
  uint32_t small_first = 0;  // of these by the first call
  uint64_t small_first_bytes = 0;   // or as many as have so many bytes
  uint64_t both_bytes_max = 0;      // of a page that both engines of a link may copy
  uint64_t both_part_bytes = 0;     // that one of them is given at once
  uint64_t hop_ns = 0;              // that a way over a neighbour takes longer
  uint64_t pack_plain_below = 0;    // pages that cores may lay side by side, where each is a copy
  uint64_t pack_strided_below = 0;  // the same where one copy takes several of them
};

// What requests of running kernels cost (core/proxy), in nanoseconds; beside it Cost and Batches.
struct RequestCosts {
  double push_ns = -1;     // a push takes its thread, or lanes of a warp; below 0: nothing is known
  double reach_ns = 0;     // from then until the engine's thread has seen it; as long back
  double take_ns = 0;      // the engine's thread takes one
  double see_ns = 0;       // a thread of a GPU sees a word of its own memory
  double event_ns = 0;     // from a kernel's end until a stream that waits for its event goes on
  uint32_t overlap = 1;    // copies of one submission under way at once
  double store_gbps = 1;   // a thread of the host copies from GPU to GPU by loads and stores
  double device_gbps = 1;  // an external engine copies between two ranks, its reads included
  double device_trip_ns = 0;    // a read by it across the link, to and fro
  uint32_t device_overlap = 1;  // requests that it has under way at once
};

// A measured choice: for this operation and range of total bytes, this variant was the fastest.
struct TunedRow {
  std::string op;
  Rank ranks = 0;
  bool in_place = false;
  uint64_t bytes_min = 0;
  uint64_t bytes_max = 0;  // inclusive
  std::string variant;
  std::string signals;  // the form of signals it was measured with; empty: there is but one
  bool entry = true;    // measured with an entry round
  bool staged = false;  // measured through slots
  uint64_t bytes = 0;   // measured at this size
  double time_us = 0;
};

struct Machine {
  std::string name;
  std::string vendor;
  Rank ranks = 0;
  uint16_t engines_peer = 0;  // engines a rank has for copies to ranks
  uint16_t engines_host = 0;  // further engines for copies to and from the host
  Topology topology = Topology::shared;
  FlagHome flags = FlagHome::peer;
  Native native;
  Limits limits;
  Links links;
  Cost cost;
  Batches batches;
  Pages pages;
  RequestCosts requests;
  std::vector<TunedRow> tuned;
  std::string signals;        // the form that runs; rows measured with another count less
  std::string tuned_version;  // part of the plan key; empty without a table
};

// Throws invalid when a field makes no sense (no ranks, a bandwidth of zero, ...).
void check(const Machine& machine);

// A digest of all of it but the name: ranks must plan for the same machine.
uint64_t digest(const Machine& machine);

// The rates a copy is bound by: every resource it occupies, as an index into capacities_gbps().
// Both the cost model and the simulator share links by these.
//
// Resources: 0..R*R-1 links r*R+q, then R egress, R ingress, R host links out, R host links in,
// R local; R = ranks.
struct Resources {
  explicit Resources(const Machine& machine, Rank ranks);
  const std::vector<double>& capacities_gbps() const { return capacities_gbps_; }
  // The resources that bytes flowing src -> dst occupy (kHostRank for the host): at most 3.
  struct Path {
    uint32_t count = 0;
    uint32_t index[3] = {0, 0, 0};
  };
  Path path(Rank src, Rank dst) const;

 private:
  Rank ranks_;
  Topology topology_;
  std::vector<double> capacities_gbps_;
};

}  // namespace offcore
