// Connects every two ranks of a job that have met, by the Unix sockets that their cards name.
//
// A rank calls the lower ones with a greeting, and each answers with a welcome. Both carry a code
// under the key of the meeting, so neither side takes a stranger for a peer, nor whoever took over
// the name of one that died.
#pragma once
#include <string>
#include <vector>

#include "core/base/clock.h"
#include "core/ir/command.h"
#include "core/window/bootstrap.h"
#include "core/window/socket.h"

namespace offcore {

// By rank; this rank's own is empty. What a peer said behind its greeting has been taken in.
// `where` they met is, for messages. Errors: peer (one died), timeout (names the silent).
std::vector<Connection> connect_ranks(int listener, const Roster& roster, Rank rank,
                                      const std::string& where, uint64_t payload_bytes_max,
                                      const Deadline& deadline);

}  // namespace offcore
