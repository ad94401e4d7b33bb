// A program at other sizes, and one rank's part of it.
//
// Where all counts of an operation are multiples of a unit of bytes, so are the offsets, lengths
// and steps of its program, and the sizes of its buffers. With another unit the program is the same
// one with all of these in proportion, unless the planner decides something by comparing a size
// with a constant: it then asks a ScaleRange, which notes the units that have the same answer.
//
// `verify` compares bytes only with bytes, and otherwise follows queues, rows and words, which
// stay. What it says of one of these programs holds for all. A rank thus needs only its own part.
#pragma once
#include <algorithm>
#include <cstdint>

#include "core/ir/program.h"
#include "core/machine/machine.h"

namespace offcore {

// The units that a program is the same for, but for its scale.
class ScaleRange {
 public:
  explicit ScaleRange(uint64_t unit = 1) : unit_(std::max<uint64_t>(unit, 1)) {}

  uint64_t unit() const { return unit_; }
  bool holds(uint64_t unit) const { return least_ <= unit && unit <= most_ && unit % align_ == 0; }
  // Whether bytes <= most. Not a multiple of the unit: no other unit holds.
  bool at_most(uint64_t bytes, uint64_t most);
  // Whether all multiples of the unit are aligned so.
  bool aligned(uint64_t align);
  // Something else depends on a size.
  void none() { most_ = 0; }

 private:
  uint64_t unit_;
  uint64_t least_ = 1;
  uint64_t most_ = UINT64_MAX;
  uint64_t align_ = 1;
};

// What legalize decides by sizes in that program.
void note_limits(const Program& program, const Machine& machine, ScaleRange& range);
// The rest: that all of a legalized program is in units, and that a rank can run its part alone.
void note_whole(const Program& program, ScaleRange& range);

// The queues of one rank (Program::only).
Program part_of(const Program& program, Rank rank);

// The program for another unit, which the range of its plan holds. Throws verify where a command
// by itself breaks a rule.
Program scaled(Program program, uint64_t from, uint64_t to);

}  // namespace offcore
