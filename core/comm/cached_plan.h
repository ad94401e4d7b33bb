// What a communicator keeps for a plan key: the program, loaded for the local ranks, and what its
// launches need.
#pragma once
#include <memory>
#include <vector>

#include "core/comm/communicator.h"

namespace offcore {

struct CachedPlan {
  std::shared_ptr<const Entry> entry;
  uint32_t lane = 0;
  uint64_t landing = 0;  // the digest of where the data lands, whatever the entry adds to it
  std::shared_ptr<const Program> program;
  std::unique_ptr<Loaded> loaded;
  std::shared_ptr<const Result> result;
  bool proves_entry = false;
  // prelaunch, credits: words and slots that no other launch touches
  std::unique_ptr<LaneState> own_track;
  std::unique_ptr<Launch> armed;    // prelaunch: the next launch
  bool held = false;                // by the engines already
  std::unique_ptr<Loaded> credits;  // the entry signals, where they are sent apart
  bool credited = false;            // those of the next launch are sent
  uint64_t launches = 0;
  bool views = false;     // the output is a slot of the ring of views
  Slots::SlotPlace view;  // where that of the launch bound last lies
};

}  // namespace offcore
