// Gates: words of pinned memory that callers' streams wait for, each with the next value of its
// word.
//
// A gate is opened by a stream that waits for the runs before it, or by the host, where these do
// not come. That stream copies nothing: in one that has copied, the driver makes writes by an
// engine, behind what that has of other streams.
//
// A stream that stands before a gate holds a channel, as armed programs do: the same bounds hold.
#pragma once
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "core/backend/cuda/executor.h"

namespace offcore::cuda {

// Of a backend of one local GPU.
class Gates : public std::enable_shared_from_this<Gates> {
 public:
  explicit Gates(std::shared_ptr<CudaExecutor> executor);

  // As Streams::gate. Throws memory or driver.
  std::shared_ptr<Gate> gate(uint32_t line);

 private:
  friend class CudaGate;
  static constexpr size_t kWords = 4096;

  struct GateWord {
    uint32_t* at = nullptr;
    uint32_t value = 0;  // that opens it
  };
  GateWord take();
  // A stream may stand before one gate more, or one less.
  void enter(uintptr_t stream);
  void leave(uintptr_t stream);

  const std::shared_ptr<CudaExecutor> executor_;
  const LocalGpu& device_;
  // The driver takes it back when the whole device is idle: no stream has yet to come to a wait.
  const std::shared_ptr<void> memory_;
  std::mutex mutex_;  // of all below
  // What opens the last gate of each word, which nobody writes any more once it has that value.
  // Whoever comes to an old gate late finds that, or a later one.
  std::vector<uint32_t> values_ = std::vector<uint32_t>(kWords);
  size_t next_ = 0;
  std::map<uint32_t, std::unique_ptr<CudaStream>> lines_;
  std::map<uintptr_t, size_t> standing_;  // gates before which a stream may stand
};

class CudaGate final : public Gate {
 public:
  CudaGate(std::shared_ptr<Gates> of, CUstream line);
  ~CudaGate() override;

  void enqueue_wait(uintptr_t stream) override;
  void open() override;
  // By its line, behind what that waits for.
  void open_in_line();
  CUstream line() const { return line_; }

 private:
  void operate(CUstream stream, CUstreamMemOp op) const;

  const std::shared_ptr<Gates> of_;
  const CUstream line_;
  const Gates::GateWord word_;
  bool opening_ = false;  // or open
  std::mutex mutex_;      // of what is below
  std::vector<uintptr_t> standing_;
};

}  // namespace offcore::cuda
