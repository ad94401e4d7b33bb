// The shapes of the programs that this rank has planned and verified whole. At other sizes of the
// same shape it takes its own part of the program, scaled, rather than plan for all ranks again.
//
// A shape is all that decides a program but the unit of its counts; where sizes decide anything,
// its range says for which units (core/plan/scale.h). Of shapes, those used last are kept.
#pragma once
#include <cstdint>
#include <list>
#include <memory>
#include <optional>
#include <string>

#include "core/comm/request.h"
#include "core/plan/plan.h"

namespace offcore {

// What decides the program of an operation of moves, and how large it is.
struct PlanShape {
  std::string text;
  uint64_t unit = 0;  // divides all counts; 0: there are no bytes
};

PlanShape shape_of(const Request& request, const Facts& facts, const Variant& variant,
                   const ProtocolForm& form, const Machine& machine);

// A rank's part of a program, and what its plan tells of all ranks.
struct KnownPart {
  std::shared_ptr<const Program> program;
  Counts counts;
  bool native = false;  // also as it is loaded
};

class KnownShapes {
 public:
  static constexpr size_t kMost = 64;
  // Communicators of fewer ranks plan whole programs, in a fraction of a millisecond.
  static constexpr Rank kRanksMin = 16;

  // Counts as a use. Nothing: the whole has to be planned.
  std::optional<KnownPart> find(const PlanShape& shape);
  // A rank's part of a program that was planned whole, unless it is of that size alone.
  void keep(const PlanShape& shape, const ScaleRange& range, const Program& whole, Rank rank,
            const Counts& counts, bool native);

 private:
  struct KnownShape {
    std::string text;
    ScaleRange range;
    KnownPart part;  // for the range's unit
  };
  std::list<KnownShape> shapes_;  // the one used last comes first
};

}  // namespace offcore
