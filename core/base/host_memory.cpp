#include "core/base/host_memory.h"

#include <sys/resource.h>

#include <algorithm>
#include <fstream>
#include <limits>
#include <optional>
#include <sstream>
#include <vector>

#include "core/base/error.h"

namespace offcore {
namespace {

constexpr uint64_t kUnlimited = std::numeric_limits<uint64_t>::max();

struct Version {
  const char* kind;  // of file system
  const char* limit;
  const char* used;
  const char* active_file;  // in memory.stat, with groups below
  const char* inactive_file;
};
constexpr Version kVersions[] = {
    {"cgroup2", "memory.max", "memory.current", "active_file", "inactive_file"},
    {"cgroup", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_active_file",
     "total_inactive_file"},
};

// The number after `name` in a file of "name number" lines.
std::optional<uint64_t> number_after(const std::string& path, const std::string& name) {
  std::ifstream file(path);
  for (std::string word; file >> word;) {
    uint64_t number = 0;
    if (word == name && file >> number) return number;
  }
  return std::nullopt;
}

std::optional<uint64_t> number_in(const std::string& path) {
  std::ifstream file(path);
  uint64_t number = 0;
  return file >> number ? std::optional(number) : std::nullopt;  // "max" is none
}

bool lists(const std::string& names, const std::string& name) {
  return ("," + names + ",").find("," + name + ",") != std::string::npos;
}

// The process's group in the hierarchy that limits memory; none: it is in no such.
std::optional<std::string> group_of(const Version& version, const std::string& root) {
  const bool unified = &version == &kVersions[0];
  std::ifstream file(root + "/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {  // number:controllers:path
    std::istringstream fields(line);
    std::string number;
    std::string controllers;
    std::string path;
    std::getline(fields, number, ':');
    std::getline(fields, controllers, ':');
    std::getline(fields, path);
    if (unified ? controllers.empty() : lists(controllers, "memory")) return path;
  }
  return std::nullopt;
}

// Its folder where that hierarchy is mounted, and those of the groups above it that can be seen.
std::vector<std::string> folders_of(const Version& version, const std::string& root) {
  const std::optional<std::string> group = group_of(version, root);
  std::vector<std::string> folders;
  std::ifstream file(root + "/proc/self/mountinfo");
  for (std::string line; group && folders.empty() && std::getline(file, line);) {
    std::istringstream fields(line);
    std::string word;
    std::string top;  // the group that is mounted
    std::string mount;
    std::string kind;
    std::string options;
    fields >> word >> word >> word >> top >> mount;
    while (fields >> word && word != "-") continue;
    fields >> kind >> word >> options;
    const bool unified = &version == &kVersions[0];
    if (kind != version.kind || !(unified || lists(options, "memory"))) continue;
    if (top == "/") top.clear();
    // Where it is mounted by a name that does not lead to the group, that is the group itself.
    std::string path = group->starts_with(top + "/") ? group->substr(top.size()) : "";
    for (; path.size() > 1; path.resize(path.rfind('/'))) {
      folders.push_back(root + mount + path);
    }
    folders.push_back(root + mount);
  }
  return folders;
}

// What of a group's use the kernel gives up for who asks for more.
uint64_t cached_in(const Version& version, const std::string& folder) {
  const std::string stat = folder + "/memory.stat";
  return number_after(stat, version.active_file).value_or(0) +
         number_after(stat, version.inactive_file).value_or(0);
}

}  // namespace

HostMemory host_memory(const std::string& root) {
  const auto told = [&](const char* name) {
    const std::optional<uint64_t> kib = number_after(root + "/proc/meminfo", name);
    return kib ? *kib * 1024 : kUnlimited;
  };
  HostMemory memory{.total_bytes = told("MemTotal:"), .available_bytes = told("MemAvailable:")};
  for (const Version& version : kVersions) {
    for (const std::string& folder : folders_of(version, root)) {
      const std::optional<uint64_t> limit = number_in(folder + "/" + version.limit);
      const std::optional<uint64_t> used = number_in(folder + "/" + version.used);
      if (!limit || !used) continue;
      const uint64_t held = *used - std::min(*used, cached_in(version, folder));
      memory.total_bytes = std::min(memory.total_bytes, *limit);
      memory.available_bytes = std::min(memory.available_bytes, *limit - std::min(*limit, held));
    }
  }
  return memory;
}

std::string locked_memory_limits() {
  rlimit locked{};
  getrlimit(RLIMIT_MEMLOCK, &locked);
  const HostMemory memory = host_memory();
  return cat("RLIMIT_MEMLOCK (ulimit -l) is ",
             locked.rlim_cur == RLIM_INFINITY ? "unlimited" : cat(locked.rlim_cur, " bytes"),
             "; of ", memory.total_bytes, " bytes of memory, ", memory.available_bytes,
             " are available");
}

}  // namespace offcore
