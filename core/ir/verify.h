// Checks a program against the rules that make it safe on every backend, all ranks at once.
//
//   bounds    every row of every slice lies inside its buffer; ranks and queues exist; words exist
//   shape     rows >= 1, bytes >= 1, step meanings, one queue per (rank, index), buffers seen only
//             by those who may (a local buffer by its own rank's queues)
//   words     signals of one word have distinct values and are ordered; values lie in 1..span
//   unmatched a poll that no signal can satisfy
//   deadlock  queues that wait for each other for ever (or a prelaunched queue never started)
//   hazard    two unordered data commands, in one group or on two queues, that touch the same
//             bytes, one of them writing (happens-before through signals and polls, over all ranks)
//   entry     protocol barrier: a remote write into a window that its owner's caller has not
//             released by a signal
#pragma once
#include "core/ir/program.h"

namespace offcore {

// Throws verify: "<rule>: queue 0.1, command 3 (copy ...): <reason>", with both sides of a hazard.
void verify(const Program& program);

}  // namespace offcore
