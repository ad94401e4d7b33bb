// Does a flag ever overtake the data before it? The question that decides the signal form.
//
// On each GPU a kernel polls every peer's flag and at once reads the peer's chunk from its last
// word on, while the copy engines push chunk after chunk with the commands that operations push
// them with (stream_encoder.h). A word of an earlier operation is a wrong word. A planted fault,
// flags sent before their data, has to be seen: otherwise the kernels were too slow to see
// anything.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "core/backend/cuda/executor.h"
#include "studies/proof/resident.h"

namespace offcore::cuda {

struct StressTrial {
  SignalForm signals = SignalForm::fenced;
  // How the data goes out: one strided copy of one source (bcst) or of several (fan), or a copy
  // to each peer (pcpy).
  std::string shape = "bcst";
  bool planted = false;      // flags before data
  uint64_t chunk_bytes = 0;  // a multiple of 4, at most kChunkBytesMax
  uint32_t operations = 0;
};

struct StressOutcome {
  uint64_t operations = 0;
  uint64_t wrong_words = 0;
  bool stuck = false;  // a flag did not come; the trial ended there
  int64_t time_ns = 0;
};

class Stress : public OfProcess {
 public:
  static constexpr uint64_t kChunkBytesMax = 256 << 10;

  // A rank on each of these devices, at least two. Throws memory or driver.
  explicit Stress(const std::vector<int>& ordinals);
  ~Stress();
  Stress(const Stress&) = delete;
  Stress& operator=(const Stress&) = delete;

  bool strided() const { return mapping_->strided(); }  // one copy reaches all peers
  // Throws invalid, and driver when a GPU does not let go of what it was given.
  StressOutcome run(const StressTrial& trial, const Deadline& deadline);

 private:
  // A rank's GPU.
  struct StressGpu {
    std::shared_ptr<LocalGpu> device;
    std::unique_ptr<CudaStream> copies;
    std::unique_ptr<CudaStream> kernel;
    std::unique_ptr<CudaStream> noise;
    std::unique_ptr<SignalWord> word;           // signals are copied from it,
    std::unique_ptr<SignalTable> signal_table;  // or from here
    std::unique_ptr<SignalWord> gate;  // holds `copies` until every rank's commands are enqueued
    std::unique_ptr<SignalWord> outcome;
    std::unique_ptr<Kernels> kernels;
  };
  struct Round {
    const StressTrial& trial;
    const std::vector<Program>& programs;  // by rank
    uint32_t count;                        // operations
  };

  uint64_t chunks_at() const;
  uint64_t banks_at() const;
  CUdeviceptr flag(Rank at, uint32_t word) const;
  Program program(const StressTrial& trial, Rank rank) const;
  Launch launch(uint32_t value, uint64_t bank_bytes) const;
  void fill(const StressTrial& trial);
  void start(const Round& round);
  bool finish(const Deadline& deadline);
  void let_go(uint32_t value);

  std::vector<StressGpu> seats_;
  std::vector<std::shared_ptr<LocalGpu>> devices_;
  std::shared_ptr<SignalWords> words_;
  std::shared_ptr<PeerMapping> mapping_;
  MappingTable mappings_;
  uint32_t value_ = 0;  // of the last operation's flags
  uint32_t turn_ = 0;   // of the gates
  bool lost_ = false;   // a GPU still works on it
};

}  // namespace offcore::cuda
