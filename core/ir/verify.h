// Checks a program against the rules that make it safe on every backend, seeing all ranks at once.
// What passes also prints and parses back to the identical value.
//
//   bounds    every row of every slice lies inside its buffer; ranks and queues exist; words exist
//   shape     rows >= 1, bytes >= 1, step meanings, one queue per (rank, index), buffers seen only
//             by those who may (a local buffer by its own rank's queues); fields that the text
//             does not show are 0; an armed engine queue starts with a poll; at most 2^23 rows;
//             a reduce is a caller's, of its own rank's memory and of whole elements
//   words     signals of one word have distinct values and are ordered, where each row of a signal
//             is an event of its own; values lie in 1..span
//   unmatched a poll that no signal can satisfy
//   deadlock  queues that wait for each other for ever, or an armed queue whose first poll is not
//             released by its own rank's caller
//   hazard    two unordered data commands, in one group or on two queues, that touch the same
//             bytes, one of them writing (happens-before through signals and polls, over all ranks)
//   entry     protocol barrier: a remote write into a window, or read of one, that its owner's
//             caller has not released by a signal
//   exit      a remote write into a window, or read of one, that may still go on when all queues
//             of the window's owner have ended
//   replay    mode capture: what the next replay, or another captured program on the same words,
//             would trip over. A word is signalled once, with 1, and polled once, by its own rank.
//             One that a caller signals is polled before that caller's rank ends; one that an
//             engine queue signals, it signals only once the polling rank's caller has signalled.
//             Either way the word is 0 again before it can be signalled anew. The protocol is
//             barrier.
#pragma once
#include "core/base/clock.h"
#include "core/ir/program.h"

namespace offcore {

// Throws verify: "<rule>: queue 0.1, command 3 (copy ...): <reason>". A hazard names both sides, a
// deadlock every stuck queue; commands count from 0. Throws timeout.
void verify(const Program& program, const Deadline& deadline = Deadline::never());

// Only bounds, shape and the values of words: the rules that ask one command at a time.
void verify_form(const Program& program);

}  // namespace offcore
