// The backends by name. A backend joins by one row in registry.cpp.
#pragma once
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/backend/backend.h"
#include "core/backend/options.h"
#include "core/backend/pointers.h"

namespace offcore {

struct BackendRow {
  const char* name;
  Probe (*probe)();
  std::unique_ptr<Backend> (*open)(const Machine&, Rank, std::vector<Rank>, BackendOptions);
};

// Looks for drivers and devices: the first call of a process may take long.
std::vector<Probe> probe_backends();

// A backend that drives the given local ranks of a group of `ranks` on this machine.
// Throws unavailable with the probe's reason, invalid for an unknown name, and unsupported for
// options of one backend given to another.
std::unique_ptr<Backend> open_backend(const std::string& name, const Machine& machine, Rank ranks,
                                      std::vector<Rank> local_ranks, BackendOptions options = {});

// One more that opens by its name, though nobody is told of it: how tests try a backend that is not
// part of the library. Before it is opened; the row is not copied.
void add_backend(const BackendRow& row);

// Where memory lies that the callers' addresses name, as the driver of GPU `device` tells. Throws
// unavailable where there is no driver that does.
std::unique_ptr<PointerLookup> open_pointers(int device);
// The first of so many bytes, not 0, that CPUs cannot reach, as far as a driver tells that the
// process has loaded.
std::optional<size_t> first_on_gpu(std::span<const uint64_t> addresses,
                                   std::span<const uint64_t> bytes);

}  // namespace offcore
