// What a caller asks for, checked, and reduced to the facts that all ranks must share.
#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/plan/moves.h"
#include "core/plan/reduction.h"
#include "core/window/window.h"

namespace offcore {

enum class Collective : uint8_t {
  all_gather,
  all_to_all,
  broadcast,
  scatter,
  gather,
  reduce_scatter,
  all_reduce,
  reduce,
};

std::string_view to_string(Collective collective);
Collective parse_collective(std::string_view text);

// Whether a rank that has ended knows that all others have entered (the slot rule): it has heard
// from each, by a full exchange or as a reduction's shares came.
bool proves_entry(Collective collective);
bool reduces(Collective collective);

// The protocol that a caller asks for: one of a program's, or
enum class Wanted : uint8_t {
  automatic,  // "auto": as the memory and the tuned table allow
  barrier,
  credits,
  eager,
  promise,
  view,  // the output is the next slot of the lane's ring of views, not one of the caller's
};

std::string_view to_string(Wanted wanted);
Wanted parse_wanted(std::string_view text);

// One local rank's buffer: any memory, or a part of a window. Not given where a rank has none (the
// output of a gather's leaf).
struct Operand {
  std::byte* data = nullptr;  // null for phantom memory
  uint64_t bytes = 0;
  std::shared_ptr<Window> window;  // null: memory outside any window
  uint64_t offset = 0;             // in the window
  bool given = false;              // by the caller; also where it has no bytes
};

struct Request {
  Collective collective = Collective::all_gather;
  // Bytes, as moves_* take them (the _v forms; reduce_scatter_v: of each rank's part); empty: equal
  // parts.
  std::vector<uint64_t> counts;
  Rank root = 0;
  std::string variant = "auto";
  Wanted protocol = Wanted::automatic;
  std::optional<Reduction> reduction;  // of those that reduce
  uint32_t lane = 0;
  std::vector<Operand> out;        // one a local rank
  std::vector<Operand> in;         // likewise, or empty: in place
  std::vector<uintptr_t> streams;  // GPUs: see Launch
  uintptr_t behind = 0;            // likewise, of one local rank
  bool uncaptured = false;         // the caller has looked: neither of these is being captured
  uint64_t capture = 0;  // what the streams are captured in (the communicator asks); 0: nothing
  // Keeps operands alive until the operation has ended, but for windows, which it does itself.
  std::shared_ptr<void> keep;

  bool view() const { return protocol == Wanted::view; }
};

// The collective facts: a function of these alone is what every rank plans.
struct Facts {
  Collective collective = Collective::all_gather;
  Rank ranks = 0;
  bool in_place = false;
  Rank root = 0;
  std::vector<uint64_t> counts;
  std::optional<Reduction> reduction;
  uint64_t total_bytes = 0;  // S of nccl-tests: the whole array
};

// Checks names, sizes and overlap, settles the variant that the environment names, and turns a
// request whose input is the right part of its output into an in-place one. Throws invalid, naming
// the rank and both sizes, or unsupported.
Facts facts_of(Request& request, Rank ranks, const std::vector<Rank>& local_ranks);

Moves moves_of(const Facts& facts);
ReductionPlan reduction_of(const Facts& facts);  // of those that reduce

// Where peers would write.
struct Target {
  static constexpr uint32_t kNone = UINT32_MAX;         // nowhere: there are no bytes
  static constexpr uint32_t kOutside = UINT32_MAX - 1;  // not one place of one window
  static constexpr uint32_t kRing = UINT32_MAX - 2;     // into the slots that views show
  uint32_t window = kNone;                              // its number, by creation
  uint64_t offset = 0;                                  // in it
};

std::string to_string(const Target& target);  // "window 1+4096", "outside", "view ring", "none"

// What makes two calls share a plan, as bytes: cheap to build at every call.
std::string cache_key(const Request& request, const Facts& facts, const Target& target);

// Where a rank may contribute nothing (a broadcast's leaf, a part of no bytes) it cannot tell
// whether the others are in place. What they tell each other is the same then: only copies within a
// rank differ. So each rank plans for its own form, and all of them choose for this one.
Facts shared(const Facts& facts);
// Whether in place or not makes a difference to what these ranks do.
bool form_matters(const Facts& facts, const std::vector<Rank>& local_ranks);

// "all_gather ranks=2 in_place=no counts=4096x2", without the form where each rank has its own
std::string describe(const Facts& facts);

}  // namespace offcore
