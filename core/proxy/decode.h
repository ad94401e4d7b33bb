// What the words of a request ask for, between registered buffers.
#pragma once
#include <vector>

#include "core/proxy/proxy.h"

namespace offcore::proxy {

// Throws invalid for what is no request between these buffers.
DecodedRequest decode(const Word (&words)[2], Rank rank, Rank ranks, uint64_t chunk_bytes,
                      const std::vector<BufferPlace>& buffers);

}  // namespace offcore::proxy
