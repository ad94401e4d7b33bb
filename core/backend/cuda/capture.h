// Programs that were recorded into CUDA graphs, and the guard of their replays.
//
// Recording enqueues a program's local queues into streams that are being captured: one engine
// queue with the caller's commands, the others on streams of our own that join the capture by
// events. What a graph addresses stays mapped until it is gone, or until close().
//
// A graph is gone once the driver has let go of an object of ours that it was given to keep: CUDA
// copies the reference to whatever is instantiated from the graph, and holds it until what has been
// launched has run. So nothing of a graph that is gone runs, or ever will.
//
// A graph may run its branches one after the other, in any order. So no branch waits for what
// another one has yet to do: the entry signals come first, then the engine queues, and after all of
// them the waits for the peers. And all programs of a capture follow each other, whatever lanes and
// streams they come in: ranks that ran two of them in different orders would wait for ever.
//
// Nobody of ours waits for a replay. Once a program has been recorded, a thread looks at the poison
// word now and then, and when a rank has died or aborted it writes the words that recorded programs
// wait for, again and again, so that the streams that replay them run out.
#pragma once
#include <atomic>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "core/backend/cuda/submission.h"

namespace offcore::cuda {

class Captures {
 public:
  Captures(std::span<const std::shared_ptr<LocalGpu>> devices, const EncodeOptions& options,
           std::shared_ptr<MappingTable> mappings, std::shared_ptr<SignalWords> words);
  ~Captures();

  // The capture that the callers' streams are in; 0: none. Throws invalid where only some of them
  // are captured, or a capture is spoilt already.
  uint64_t capture_of(std::span<const uintptr_t> streams) const;
  // Throws invalid when the launch's streams are not being captured. What fails on the way spoils
  // the capture.
  std::shared_ptr<CudaSubmission> record(std::shared_ptr<const CudaProgram> compiled,
                                         const Launch& launch);
  // Whether the graphs that this capture made are gone. Those that nothing was recorded into are.
  bool gone(uint64_t capture);
  // Lets replays run out if a rank was poisoned, and then goes of the memory.
  void close();

 private:
  using Gone = std::shared_ptr<std::atomic<bool>>;
  // What a device has in one capture.
  struct DeviceCapture {
    std::vector<CUstream> engines;  // of ours, that have joined the capture
    CUstream last_stream = nullptr;
    std::shared_ptr<const CudaEvent> last_done;
  };
  struct Capture {
    std::vector<uint64_t> ids;  // of the streams, a local rank each
    std::vector<DeviceCapture> places;
    Gone gone;
  };
  // What a device copies its signals from: their values are those of a first launch, always.
  struct Signals {
    std::unique_ptr<SignalWord> word;
    std::unique_ptr<SignalTable> signal_table;
  };
  using Awaited = std::vector<std::set<CUdeviceptr>>;  // by device
  // What was recorded in one capture.
  struct RecordedCapture {
    Gone gone;
    std::vector<std::shared_ptr<CudaSubmission>> submissions;
    Awaited awaited;
  };

  Capture& capture(const Launch& launch);
  Gone tell_when_gone(const Launch& launch) const;
  void record(CudaSubmission& submission, const LocalProgram& local, DeviceCapture& place);
  void spoil(const Launch& launch) const;
  CUstream engine(DeviceCapture& place, uint32_t device, size_t index, const CudaEvent& here);
  void keep(const Capture& capture, const std::shared_ptr<CudaSubmission>& submission);
  std::vector<RecordedCapture> take_gone();
  bool poisoned() const;
  Awaited awaited() const;
  void watch();
  void release(const Awaited& awaited) const;
  bool untouched(const Awaited& awaited) const;
  void run_out();

  const std::vector<std::shared_ptr<LocalGpu>> devices_;
  const EncodeOptions& options_;  // the executor's
  const std::shared_ptr<MappingTable> mappings_;
  const std::shared_ptr<SignalWords> words_;
  std::vector<Signals> signals_;

  std::mutex mutex_;                      // of the two below
  std::map<uint64_t, Capture> captures_;  // by the first stream's capture
  std::vector<std::vector<std::unique_ptr<CudaStream>>>
      streams_;  // by device: used again and again

  std::mutex kept_mutex_;  // of all below; never held while the driver is called
  std::condition_variable wake_;
  std::map<uint64_t, RecordedCapture> kept_;  // as captures_
  bool closed_ = false;
  std::thread guard_;
};

}  // namespace offcore::cuda
