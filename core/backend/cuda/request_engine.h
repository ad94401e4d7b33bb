// Requests on NVIDIA's copy engines: a non-blocking stream for each peer, and one for words that
// are written beside them. Copies of a submission are one call, the words behind them another: a
// write-value, which is documented to fence all that came before it in its stream.
//
// Nothing here allocates, records events or touches a stream of the caller's while requests are
// answered: a kernel may be waiting. How far a stream has come is a word in host memory that it
// writes itself.
//
// Of a parked submission two commands are between the kernel and its peer: the copy, and the signal
// behind it. A signal is a write-value, or in copy order (stream_encoder.h) a copy of a word of the
// own GPU that was written ahead of the gate. The wait is a batch of its own: as a plain wait, or
// in one batch with the words of the submission before, it starts the copy 3 us later (2 x H200).
// They go through twins of the windows that they write (as armed programs do), so that they can be
// let run out without effect.
#pragma once
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "core/backend/cuda/executor.h"
#include "core/backend/cuda/ptx_kernel.h"

namespace offcore::cuda {

class CudaRequestEngine final : public RequestEngine {
 public:
  // Throws unsupported or driver.
  CudaRequestEngine(std::shared_ptr<CudaExecutor> executor, std::shared_ptr<LocalGpu> device);
  ~CudaRequestEngine() override;

  uint64_t room(Rank peer) override;
  void submit(Rank peer, std::span<const RequestCopy> copies,
              std::span<const RequestWord> words) override;
  void store(std::span<const RequestWord> words) override;
  bool idle() override;
  void prepare_parking(std::span<std::byte* const> windows) override;
  void park(Rank peer, const ParkedRequest& request) override;
  void recall(uint64_t held, uint64_t closed, const std::function<bool()>& is_under_way) override;
  bool launches() const override { return true; }
  void prepare_launches(std::shared_ptr<void> reached) override;
  void launch(uintptr_t stream, void* arguments) override;

 private:
  struct PeerStream {
    std::unique_ptr<CudaStream> stream;
    uint64_t submitted = 0;
    std::byte* gate = nullptr;         // of what is parked
    std::unique_ptr<SignalWord> word;  // that its signals are copied from
  };

  void enter();
  static bool done(const std::unique_ptr<CudaStream>& stream);
  bool quiet();
  void write_gates(uint64_t value);
  CUdeviceptr target(const std::byte* address) const;
  void copy(CUstream stream, std::span<const RequestCopy> copies);
  uint64_t ended(Rank peer) const;
  void tell(Rank peer);
  void operate(CUstream stream);

  const std::shared_ptr<CudaExecutor> executor_;
  const std::shared_ptr<LocalGpu> device_;
  const std::shared_ptr<void> told_;  // how far each peer's stream has come
  std::vector<PeerStream> streams_;   // by peer
  std::unique_ptr<CudaStream> words_;
  MappingTwins twins_;
  std::unique_ptr<PtxKernel> exchange_;
  std::unique_ptr<CudaStream> launches_;
  std::optional<CudaEvent> launched_;  // behind the last one
  std::shared_ptr<void> reached_;      // by launches
  size_t armed_ = 0;                   // streams that are counted as armed
  bool entered_ = false;
  std::vector<CUstreamMemOp> ops_;
  std::vector<CUdeviceptr> dsts_;
  std::vector<CUdeviceptr> srcs_;
  std::vector<size_t> sizes_;
};

}  // namespace offcore::cuda
