// Where the words of a rank's requests lie: in its part of the control window, which engines write,
// and in host memory, which the proxy and the rank's kernels share.
#pragma once
#include "core/proxy/proxy.h"

namespace offcore::proxy {

inline constexpr uint64_t kTail = 0;
inline constexpr uint64_t kHead = 256;
inline constexpr uint64_t kStart = 512;
inline constexpr uint64_t kSent = kStart + 8 * kRanksMax;
inline constexpr uint64_t kFault = kSent + 8 * kRanksMax;
inline constexpr uint64_t kPort = kFault + 8 * kRanksMax;
inline constexpr uint64_t kReceived = 4096;
inline constexpr uint64_t kTaken = 0;
inline constexpr uint64_t kFaultHere = 64;
inline constexpr uint64_t kComplaints = 128;  // a 32-bit word a fault
inline constexpr uint64_t kTold = 192;        // exchanges: the last one that has ended; a fault
inline constexpr uint64_t kSlots = 4096;
inline constexpr double kDrainS = 10;  // that requests in flight get once the proxy is to end
static_assert(kPort + sizeof(RequestPort) <= kReceived);

// What has come from a rank, by buffer; behind the last rank lies the schedule.
inline uint64_t received_from(Rank rank) { return kReceived + uint64_t{rank} * kSignalStride * 8; }

// Throws invalid for a request that is none between these buffers.
void check_schedule(const ProxyOptions& options, const std::vector<BufferPlace>& buffers,
                    Rank ranks);

}  // namespace offcore::proxy
