// How ranks meet at the store: rank 0 listens, the others say hello and are told who has arrived.
// Ends with every rank knowing the job's key and the name of every rank's Unix socket.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "core/base/clock.h"
#include "core/ir/command.h"

namespace offcore {

struct Roster {
  uint64_t key = 0;
  std::vector<std::string> names;  // by rank: its Unix socket's
};

// Errors are those of Rendezvous::join; one that rank 0 finds reaches every rank that has arrived.
Roster meet(const std::string& store, Rank rank, Rank ranks, const std::string& name,
            const Deadline& deadline);

// "rank 2", "ranks 2, 5"
std::string rank_list(const std::vector<Rank>& ranks);

}  // namespace offcore
