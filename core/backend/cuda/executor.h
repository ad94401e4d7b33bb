// The local GPUs at work: the streams of every lane, and what is under way on them.
//
// Everything that a caller queue does goes into the caller's stream, and one engine queue with it;
// further engine queues have streams of their own, forked from the caller's and joined to it by
// events. Launches of a lane are in order whatever streams they come in.
//
// A GPU waits for a word for ever, whoever has died. So a launch that is poisoned is released: its
// awaited words are written, from a stream of its own, until all its streams are through. What was
// queued behind the waits runs then; the memory stays mapped until it has.
#pragma once
#include <atomic>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/backend/cuda/capture.h"
#include "core/backend/cuda/signal_words.h"
#include "core/backend/exec/executor.h"

namespace offcore::cuda {

// Work of the driver's streams that a launch may come after.
class CudaMark : public Mark {
 public:
  virtual void enqueue_wait(CUstream stream) const = 0;
};

// A stream and a word of its own.
class OrderedStream {
 public:
  OrderedStream(const std::shared_ptr<const LocalGpu>& device,
                const std::shared_ptr<SignalWords>& words)
      : word_(device, words), stream_(device->stream()) {}
  CUstream stream() const { return stream_->handle(); }
  CUdeviceptr word() const { return word_.address(); }

 private:
  SignalWord word_;
  std::unique_ptr<CudaStream> stream_;
};

// An armed program's own streams, and mappings that its armed commands go through.
struct ArmedStreams {
  struct ArmedStream {
    std::unique_ptr<OrderedStream> line;
    std::unique_ptr<SignalWord> gate;
  };
  std::vector<std::vector<ArmedStream>> queues;  // by local program, then engine queue
  uint32_t turn = 0;
  MappingTwins twins;
  std::vector<std::unique_ptr<PeerMapping>> retired;  // twins of windows that were replaced
  uint32_t recalls = 0;
  size_t lines = 0;  // of a device, that it takes from the room for armed ones
};

constexpr double kGraceS = 2.0;    // what is under way may still end by itself
constexpr double kRunOutS = 10.0;  // what is let run out does

class CudaExecutor final : public exec::Executor {
 public:
  CudaExecutor(Rank ranks, std::vector<std::shared_ptr<LocalGpu>> devices, EncodeOptions options);

  const std::vector<std::shared_ptr<LocalGpu>>& devices() const { return devices_; }
  const std::shared_ptr<MappingTable>& mappings() const { return mappings_; }
  const std::shared_ptr<SignalWords>& signal_words() const { return words_; }
  Rank ranks() const { return ranks_; }
  const EncodeOptions& options() const { return options_; }
  void set_signals(SignalForm signals) { options_.signals = signals; }  // before the first launch

  // Tries one strided copy to all ranks in a new mapping, the first of its kind, and tells the
  // mapping. Not where the memory is not zero: what was found out before counts there.
  void try_strided(PeerMapping& mapping, bool zero);
  // Lets copy engines copy within the local GPUs, if the mapping has memory of another one. The
  // first window's tells; it comes before all launches.
  void alias_copies(const PeerMapping& mapping);
  // False once that has failed: such commands are done row by row.
  bool strided() const { return strided_works_; }

  // Throws invalid for host memory that engines cannot reach.
  void check_places(const CudaProgram& compiled, const Launch& launch);
  void submit(const std::shared_ptr<exec::Submission>& submission, exec::Freed& freed) override;
  uint64_t capture_of(std::span<const uintptr_t> streams) const {
    return captures_.capture_of(streams);
  }
  bool gone(uint64_t capture) { return captures_.gone(capture); }
  // Into the captures that the launch's streams are in (see capture.h).
  std::shared_ptr<CudaSubmission> record(std::shared_ptr<const CudaProgram> compiled,
                                         const Launch& launch) {
    return captures_.record(std::move(compiled), launch);
  }
  // Enqueues a launch ahead, behind gates. Null where the program cannot be, or enough of them are
  // armed already.
  std::shared_ptr<CudaSubmission> park(const std::shared_ptr<const CudaProgram>& compiled,
                                       const Launch& launch, ArmedStreams& armed_streams);
  using ArmedSubmissions = std::deque<std::shared_ptr<exec::Submission>>;
  // Lets what is armed run out without effect.
  void dismiss(const CudaProgram& compiled, const ArmedSubmissions& armed,
               ArmedStreams& armed_streams);
  // As dismiss, while the communicator lives on: waits for launches of the program before.
  void recall(const CudaProgram& compiled, const ArmedSubmissions& armed,
              ArmedStreams& armed_streams);
  // Throws unsupported where streams share channels sooner than they must.
  void check_channels(const char* why) const;
  // Streams of a device that hold parked commands besides programs'. Throws unsupported where there
  // is no room for so many more.
  void take_armed(const LocalGpu& device, size_t streams);
  void give_armed(const LocalGpu& device, size_t streams);
  // Makes a stream wait for the launch's end.
  void enqueue_wait(const CudaSubmission& submission, uintptr_t stream) const;
  // Ends what is under way; nothing can be launched afterwards.
  void close() override;

 private:
  using OrderedStreams = std::vector<std::unique_ptr<OrderedStream>>;
  struct LaneStreams {
    std::unique_ptr<OrderedStream> caller;
    std::unique_ptr<SignalTable> signal_table;
    // Made when needed. Signals have streams of their own: in one that has copied they would wait
    // until the engine has emptied its other streams (seen on driver 580).
    OrderedStreams engines, spares, asides;
    CUstream last_stream = nullptr;
    std::shared_ptr<const CudaEvent> last_done;
  };
  // One local rank's part of a launch that is being enqueued.
  struct RankSubmission {
    const LocalProgram* local;
    const LocalGpu* device;
    LaneStreams* lane;
    CUstream stream;  // where the caller queue goes
    CUstream named;   // the caller's, where that is the per-thread default stream; else null
    CudaSubmission::RankPart* part;
    std::unique_ptr<StreamEncoder> own;  // into the caller's stream
    std::vector<CudaEvent> joins;
  };

  LaneStreams& lane(uint32_t index, uint32_t device);
  OrderedStream& ordered(OrderedStreams& streams, uint32_t device, size_t index);
  void enqueue_ranks(CudaSubmission& submission, std::vector<RankSubmission>& turns);
  bool untouched(const CudaSubmission& submission) const;
  void abandon(CudaSubmission& submission, std::vector<RankSubmission>& turns);
  RankSubmission begin(CudaSubmission& submission, const LocalProgram& local);
  void fork(RankSubmission& turn);
  void engines(CudaSubmission& submission, RankSubmission& turn);
  void join(RankSubmission& turn, CUstream stream);
  std::vector<CUstream> lend(RankSubmission& turn, size_t index, StreamEncoder& encoder,
                             CUstream forked);
  void serial(CudaSubmission& submission, std::vector<RankSubmission>& turns);
  void resume(CudaSubmission& submission, RankSubmission& turn, size_t index);
  void end(RankSubmission& turn);
  StreamEncoder encoder(const CudaSubmission& submission, const RankSubmission& turn,
                        CUstream stream, CUdeviceptr word) const;
  void attend(exec::Submission& submission, const Deadline& deadline) override;
  void finish(exec::Submission& submission, exec::Freed& freed) override;
  void retire(exec::Submission& submission, exec::Freed& freed) override;
  void reap(const CudaSubmission& next, exec::Freed& freed);
  void release(exec::Freed& freed);
  void release_poisoned();
  using Submissions = std::vector<std::shared_ptr<CudaSubmission>>;
  template <typename Wanted>
  Submissions in_flight(const Wanted& wanted) const {
    Submissions found;
    for (const auto& [key, lane] : lanes_) {
      for (const std::shared_ptr<exec::Submission>& submission : lane) {
        auto own = std::static_pointer_cast<CudaSubmission>(submission);
        if (wanted(*own)) found.push_back(std::move(own));
      }
    }
    return found;
  }
  Submissions in_flight_of(const CudaProgram& compiled);
  // Whether they end, or are poisoned, within that time.
  bool end_within(const Submissions& submissions, double wait_s) const;
  void end_all(const Submissions& submissions);  // poisons those that do not end by themselves
  void run_out(const CudaProgram& compiled, const ArmedSubmissions& armed,
               ArmedStreams& armed_streams);
  bool make_bays(const CudaProgram& compiled, ArmedStreams& armed_streams);
  void make_twins(const CudaProgram& compiled, const Launch& launch, ArmedStreams& armed_streams);

  const Rank ranks_;
  const std::vector<std::shared_ptr<LocalGpu>> devices_;
  EncodeOptions options_;
  const std::string channels_;  // of a GPU: the driver asks when it starts
  const std::shared_ptr<MappingTable> mappings_;
  const std::shared_ptr<SignalWords> words_;
  Captures captures_;
  // Guarded by the executor's mutex:
  std::map<std::pair<uint32_t, uint32_t>, LaneStreams> streams_;  // by lane, device
  std::optional<bool> tried_[2];  // by whether the stride is within the pitch limit
  bool aliased_ = false;
  size_t armed_lines_ = 0;
  std::map<int, size_t> armed_besides_;  // by device
  uint64_t launches_ = 0;
  std::atomic<bool> strided_works_{true};
  static constexpr size_t kKnown = 64;
  std::atomic<const std::byte*> known_[kKnown] = {};  // some addresses that are GPUs'
};

}  // namespace offcore::cuda
