#include "core/backend/cuda/facts.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <fstream>
#include <sstream>

#include "core/backend/cuda/driver.h"

namespace offcore::cuda {
namespace {

constexpr int kPreferred = 1;  // MPOL_PREFERRED
constexpr int kNodesMax = 1024;

std::string first_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

// "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  ...": the word of numbers.
std::string version_in(const std::string& line) {
  std::istringstream words(line);
  for (std::string word; words >> word;) {
    const bool numbers = word.find_first_not_of("0123456789.") == std::string::npos;
    if (numbers && word.find('.') != std::string::npos) return word;
  }
  return "";
}

std::string driver_version() {
  const std::string version = version_in(first_line("/sys/module/nvidia/version"));
  return !version.empty() ? version : version_in(first_line("/proc/driver/nvidia/version"));
}

CUdevice device_of(int ordinal) {
  CUdevice device = 0;
  check(Driver::get().cuDeviceGet(&device, ordinal), "cuDeviceGet");
  return device;
}

}  // namespace

std::string pci_address(int ordinal) {
  char text[32] = "";
  check(Driver::get().cuDeviceGetPCIBusId(text, sizeof text, device_of(ordinal)),
        "cuDeviceGetPCIBusId");
  std::string address = text;
  std::transform(address.begin(), address.end(), address.begin(),
                 [](unsigned char letter) { return std::tolower(letter); });
  return address;
}

int numa_node(const std::string& pci, const std::string& folder) {
  std::ifstream file(folder + "/" + pci + "/numa_node");
  int node = -1;
  return file >> node && node >= 0 && node < kNodesMax ? node : -1;
}

int prefer_node(void* memory, size_t bytes, int node) {
  constexpr int kBits = 8 * sizeof(unsigned long);
  unsigned long nodes[kNodesMax / kBits] = {};
  if (node < 0 || node >= kNodesMax) return EINVAL;
  nodes[node / kBits] = 1ul << (node % kBits);
  const long result = syscall(SYS_mbind, memory, bytes, kPreferred, nodes, kNodesMax + 1, 0);
  return result == 0 ? 0 : errno;
}

int try_node(int node) {
  const auto bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  void* page = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (page == MAP_FAILED) return errno;
  const int refusal = prefer_node(page, bytes, node);
  munmap(page, bytes);
  return refusal;
}

DriverFacts driver_facts() {
  const Driver& driver = Driver::open();
  DriverFacts facts{.version = driver_version(), .cuda = driver.version()};
  for (int ordinal = 0; ordinal < driver.devices(); ++ordinal) {
    GpuFacts gpu{.ordinal = ordinal, .name = device_name(ordinal), .pci = pci_address(ordinal)};
    gpu.node = numa_node(gpu.pci);
    if (gpu.node >= 0) gpu.refusal = try_node(gpu.node);
    for (int peer = 0; peer < driver.devices(); ++peer) {
      int can = 0;
      if (peer == ordinal) continue;
      check(driver.cuDeviceCanAccessPeer(&can, device_of(ordinal), device_of(peer)),
            "cuDeviceCanAccessPeer");
      if (can != 0) gpu.peers.push_back(peer);
    }
    facts.gpus.push_back(std::move(gpu));
  }
  return facts;
}

}  // namespace offcore::cuda
