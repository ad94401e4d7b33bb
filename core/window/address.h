// An all-gather of bytes at an address where rank 0 listens: "host:port" or "[v6]:port".
//
//   rank                                store (rank 0)
//    |--- knock: nonce, place, secret? --->|
//    |<-- challenge: nonce, place, secret?, Unix name
//    |--- hello: rank, ranks, port, card ->|
//    |<-- progress: the missing ranks      |  now and then
//    |<-- roster: cards                    |  once all have come; or refusal: code, message
//
// From the challenge on each frame ends with its code under the job's secret (proof.h), so each
// side has proved itself before it is believed. Without a secret nobody can prove anything over
// TCP: the challenge names a Unix socket then, where the rank knocks again, and both sides look
// whose process the other one is. Ranks on other hosts, or in other network namespaces, therefore
// need a secret. A rank that hangs up before all have come may come again.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "core/base/clock.h"

namespace offcore {

// Errors: timeout (names the missing ranks), mismatch (worlds of different sizes, secrets), invalid
// (two processes with one rank; strangers' rank 0; no secret where one is needed), peer (rank 0
// died), driver (the port is taken, somebody else's server). One that rank 0 finds reaches every
// rank that has come.
std::vector<std::string> all_gather_at(const std::string& address, uint32_t rank, uint32_t ranks,
                                       const std::string& card, const Deadline& deadline);

}  // namespace offcore
