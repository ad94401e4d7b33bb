// The text form of a program: prints and parses back to the identical value.
//
//   program put machine=h4 ranks=4 variant=fan mode=eager protocol=eager native=yes flags=9 span=2
//   buffer in local 1024
//   buffer out window 4096
//   queue 0.0
//     poll flag[0]:1 >= 1 rows=3 step=1
//     copy out[1]+0 <- in[0]+0 bytes=1024 rows=3 dst_step=rank src_step=0
//     signal flag[1]:5 = 2 rows=3 step=rank
//     timestamp 3
//     fence
//   queue 0.caller
//     poll flag[host]:6 >= 2
//
// A program that reduces has a line `reduction sum bfloat16` after the first (`reduction premul_sum
// float32 scale=0.25`), and in its callers' queues commands such as
//
//     reduce out[0]+0 <- slot[0]+0 bytes=64 rows=4 src_step=64 own=0 in[0]+0
//
// One command a line; `#` starts a comment; rows and steps are printed only where rows > 1; offsets
// and bytes are decimal, or hexadecimal with 0x when parsed. Buffers other than the flags are
// declared in the order of their ids (the first is id 1), queues in theirs (caller last).
#pragma once
#include <string>
#include <string_view>

#include "core/ir/program.h"

namespace offcore {

inline constexpr Rank kRanksMax = 1024;

// What may name an operation, machine, variant or buffer: [A-Za-z0-9_.:-]+
bool is_name(std::string_view text);

std::string print(const Program& program);
std::string print(const Command& command, const Program& program);

// Throws invalid with "line L, column C: ..." for malformed text.
Program parse(std::string_view text);

}  // namespace offcore
