// What the machine that the stand-in plays is like: from OFFCORE_FAKE_CUDA_* in the environment,
// read once (README.md beside this folder lists the variables).
#pragma once
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace fakecuda {

struct Fault {
  std::string name;   // of the entry point
  uint64_t call = 0;  // which call fails, from 1
  int code = 2;
};

struct Settings {
  std::vector<int> devices;  // physical numbers of the visible ones
  std::string name = "NVIDIA H200 (stand-in)";
  uint64_t memory_bytes = uint64_t{16} << 30;  // of each device
  uint64_t pinned_bytes = UINT64_MAX;          // of the host that can be registered
  int driver = 13000;
  bool mig = false;
  bool loose = false;                   // copies of one stream overtake each other
  uint64_t strided_right = UINT64_MAX;  // later strided copies across allocations do one row only
  bool all_peers = true;
  std::vector<std::pair<int, int>> no_peers;  // pairs of physical devices
  std::vector<Fault> faults;
  std::vector<std::string> lacks;  // entry points that are not there
  uint64_t seed = 1;               // 0: no delays, and everything in order
  bool serial_graphs = false;      // a graph's branches run one after the other, in any order
  size_t queue_depth = 1024;       // operations that a stream holds before its caller has to wait

  bool peers(int a, int b) const;  // physical numbers
};

const Settings& settings();

}  // namespace fakecuda
