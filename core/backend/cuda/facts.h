// What `offcore doctor` tells of the GPUs, and the NUMA node that a GPU is nearest to.
#pragma once
#include <cstddef>
#include <string>
#include <vector>

namespace offcore::cuda {

struct GpuFacts {
  int ordinal = 0;
  std::string name;
  std::string pci;  // its address, "0000:1b:00.0"
  int node = -1;    // its NUMA node; -1: one node only, or not told
  int refusal = 0;  // errno with which the kernel refuses memory on that node; 0: it does not
  std::vector<int> peers;  // the other visible GPUs whose memory it reaches
};

struct DriverFacts {
  std::string version;  // of the driver, "580.95.05"; empty where the kernel does not tell
  int cuda = 0;         // the newest CUDA that it speaks, 13000 for 13.0
  std::vector<GpuFacts> gpus;
};

// Opens the driver. Throws unavailable.
DriverFacts driver_facts();

// The PCI address of a GPU. Throws driver.
std::string pci_address(int ordinal);

// The node of a PCI device by the kernel's files, which lie in `folder`; -1: not told.
int numa_node(const std::string& pci, const std::string& folder = "/sys/bus/pci/devices");

// Asks the kernel to put memory that has not been touched yet on a node, or elsewhere where that
// is full. Returns the errno of a refusal (containers may forbid it), or 0.
int prefer_node(void* memory, size_t bytes, int node);
int try_node(int node);  // the same, of a page that is given back

}  // namespace offcore::cuda
