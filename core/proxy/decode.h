// What the words of a request ask for, between registered buffers.
#pragma once
#include <functional>
#include <vector>

#include "core/proxy/proxy.h"

namespace offcore::proxy {

// Throws invalid for what is no request between these buffers.
DecodedRequest decode(const Word (&words)[2], Rank rank, Rank ranks, uint64_t chunk_bytes,
                      const std::vector<BufferPlace>& buffers);

// The words of the schedule of the port's rank, by peer, whose places the port gets; `planned`
// hears what each asks for.
std::vector<Word> lay_table(RequestPort& port, const ProxyOptions& options,
                            const std::vector<BufferPlace>& buffers,
                            const std::function<void(const DecodedRequest&)>& planned);

// Whether the next copy continues the last one, which then has both. Also of phantom memory.
bool extend(RequestCopy& last, const RequestCopy& next);

}  // namespace offcore::proxy
