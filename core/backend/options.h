// What a backend may be asked for when it is opened, as data: each looks at its own options only.
#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "core/ir/command.h"

namespace offcore {

struct Machine;
struct Program;

namespace sim {

// What the simulated machine is to do wrong.
struct Fault {
  enum class Kind : uint8_t {
    slow_engine,   // everything that the queue's engine does takes `factor` times as long
    late_signal,   // the nth signal of the queue is seen `ns` later
    lost_signal,   // the nth signal of the queue never arrives
    flipped_byte,  // the nth copy or swap of the queue leaves one wrong byte
    dead_rank,     // the rank stops for ever, `ns` after the backend was made
  };
  Kind kind = Kind::slow_engine;
  Rank rank = 0;
  uint16_t queue = 0;  // kCallerQueue: the caller's
  uint32_t nth = 0;    // counted from 0, over all launches
  double factor = 1;
  int64_t ns = 0;
};

struct SimOptions {
  bool phantom = false;  // shares have no bytes, so that gigabytes cost no memory
  uint64_t seed = 0;
  std::vector<Fault> faults;
  // What engines fetch in place of a program: by machine, by the program as it is loaded, by the
  // epoch of a launch. So its way through a device's own format can be tried; none: the program.
  using Fetched = std::function<Program(uint32_t epoch)>;
  using FetchPath = std::function<Fetched(const Program&)>;
  std::function<FetchPath(const Machine&)> fetch_path = nullptr;
};

}  // namespace sim

// What copies within a GPU may be asked to use: see cuda/spare_engines.h for the first.
inline constexpr std::string_view kOwnCopies[] = {"engines", "engine", "sm"};

struct CudaOptions {
  std::vector<int> devices;          // one a local rank; none: rank r on device r
  std::string signals = "auto";      // or "fenced", "copy_order": see cuda/stream_encoder.h
  std::string proven = "fenced";     // what "auto" is: the form that the stress has passed here
  std::string own_copy = "engines";  // of kOwnCopies
  uint32_t sms = 12;                 // that a reduction, or a copy of pages, takes at most
  bool packs = false;                // kernels copy pages, before others' that wait for an SM too
  bool gather = false;  // a kernel copies between the host and a GPU: see cuda/copy_kernel.h
  // GPUs whose memory goes to and from the local ones also where others have allocated it.
  std::vector<int> peers;

  friend bool operator==(const CudaOptions&, const CudaOptions&) = default;
};

struct BackendOptions {
  sim::SimOptions sim;
  CudaOptions cuda;

  // What tells apart the backends that batches share.
  std::string key() const {
    std::string text = cuda.own_copy + (sim.phantom ? " phantom" : "");
    for (const int device : cuda.devices) text += ' ' + std::to_string(device);
    return text;
  }
};

}  // namespace offcore
