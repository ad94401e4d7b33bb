// Requests in virtual time, of one local rank.
#pragma once
#include <nanobind/nanobind.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "core/comm/communicator.h"
#include "core/proxy/virtual.h"

namespace offcore {

namespace nb = nanobind;

// Of a call in Python. 0: the port's own.
inline proxy::Word limit_ns(double limit_s) {
  return limit_s > 0 ? static_cast<proxy::Word>(std::min(limit_s, 1e6) * 1e9) : 0;
}

struct VirtualProxy {
  std::shared_ptr<proxy::VirtualRequests> all;
  Rank rank;
};

// Of all ranks, which share one simulation.
std::vector<VirtualProxy> virtual_proxies(const std::shared_ptr<Communicator>& comm,
                                          std::vector<proxy::BufferPlace> buffers,
                                          const proxy::ProxyOptions& options,
                                          proxy::VirtualEngine engine);

void bind_virtual_requests(nb::module_& module);

}  // namespace offcore
