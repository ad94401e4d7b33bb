// Encodes the commands of a program's queues into a stream, as few driver calls as can be.
//
//   copy       cuMemcpyAsync; several rows in steps: one strided copy; several in a group to other
//              GPUs: a batch, which engines share; within one GPU: by addresses that make it a copy
//              engine's, because a plain one would take SMs (engine_alias.h), a large one in parts
//              that several engines copy at once (spare_engines.h); many in a group
//              between the host and a GPU: a batch, which costs the host less; rows between those
//              two in a launch that is crossed: one strided copy by the engine of the other
//              direction (dual_engine.h)
//   poll       waits, consecutive ones as one batch; captured: and the words' reset
//   signal     a write-value, which the driver documents to fence all that came before it in its
//              stream. To several ranks: one write-value into a word of this GPU and one strided
//              copy of that word to all of them. With a signal table: that copy alone. To several
//              ranks beside copies that are not strided, and to any behind a batch: a write-value
//              to each
//              pages: a kernel (pack_kernel.h)
//   reduce     a kernel (reduce_kernel.h), several as one; the polls before one and the signals
//              behind it are the kernel's own, but for captured programs
//   fence      hands over what was collected: a stream is in order by itself
//
// A batch of copies cannot be captured: there its copies are plain ones. Where the driver refuses a
// strided copy or a batch, its rows or entries are copied one by one (SubmitStats::native).
//
// A signal that is only a copy relies on copies of one stream not to overtake each other where data
// goes before it. That is the signal form `copy_order`: it saves a step, and nobody promises it
// (see docs/cuda.md). Ahead of all data, as entry signals are, there is nothing to rely on.
#pragma once
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "core/backend/cuda/copy_kernel.h"
#include "core/backend/cuda/reduce_kernel.h"
#include "core/backend/cuda/signal_words.h"
#include "core/backend/page_table.h"
#include "core/machine/copy_forms.h"

namespace offcore::cuda {

enum class SignalForm : uint8_t { fenced, copy_order };

std::string_view to_string(SignalForm form);
SignalForm parse_signals(std::string_view text);  // throws invalid

// Mappings that stand in for others (see PeerMapping::blank), by the mapping that they stand in
// for.
using MappingTwins = std::map<const PeerMapping*, std::unique_ptr<PeerMapping>>;

struct EncodeOptions {
  SignalForm signals = SignalForm::fenced;
  bool spare_engines = false;   // for large copies within a GPU, beside the one for peers
  bool own_copy_on_sm = false;  // copies within a GPU may take SMs: faster, but not off the cores
  uint32_t call_min = UINT32_MAX;  // as Batches has it
  uint32_t sms = 12;               // that a reduction, or a copy of pages, takes at most
  bool armed = false;  // a stream of the GPU is, and copies that need not be stand still behind it
};

// What a queue's signals are copied from.
struct SignalSource {
  // Of the device's own words, for this stream alone (or for captured ones, which all write the
  // same value).
  CUdeviceptr word = 0;
  const PeerMapping& words;
  const SignalTable* signal_table = nullptr;  // null: signals are written
};

// A timestamp command's event.
struct TimestampEvent {
  uint16_t number;
  CudaEvent event;
};

// What is to be told of commands that were fed.
struct SubmitStats {
  std::vector<TimestampEvent> stamps;
  OwnCopy own_copy = OwnCopy::engine;
  Calls calls;
  uint32_t sms = 0;        // that reductions and copies of pages took
  bool native = true;      // false: the driver has refused a form, and another one was taken
  bool submitted = false;  // something is in a stream

  void add_to(Report& report) const {  // but the stamps
    report.own_copy = std::max(report.own_copy, own_copy);
    report.calls += calls;
    report.sms = std::max(report.sms, sms);
    report.native = report.native && native;
  }
};

// How many commands of a queue come before the end of those whose signals are worth a stream of
// their own: all before its last data, and no word twice in two streams. 0: none.
size_t signals_aside(std::span<const Command> queue);

class StreamEncoder {
 public:
  // `twins` may be null.
  StreamEncoder(const LocalGpu& device, CUstream stream, const SignalSource& source,
                const Program& program, const Launch& launch, const MappingTable& mappings,
                const EncodeOptions& options, const MappingTwins* twins, SubmitStats& stats);

  // What is to come: a stream takes 6 us from a strided copy to a plain one and as much back (4 x
  // H200), so that beside plain copies signals to several ranks are written one by one.
  void expect(std::span<const Command> commands);
  // What comes before the first wait of a launch: no data goes before it, so its signals may be
  // copies in either form. And flushes.
  void lead(std::span<const Command> commands);
  // Signals of commands before `end` go into this stream, each behind the data before it: a copy
  // that follows starts 2.5 us sooner than behind a signal (2 x H200).
  void send_aside(CUstream stream, const Command* end);
  // Spare engines take so many bytes of copies within the GPU, in these streams, two each. Nothing
  // else may come before those copies or behind them.
  void lend(std::vector<CUstream> streams, uint64_t bytes);
  void run(std::span<const Command> commands);  // and flushes
  void whole(std::span<const Command> queue);   // nothing else comes: expects it, and runs it
  void add(std::span<const Command> commands);  // the last ones may wait for a flush
  void run(const Command& command);
  void wait(CUdeviceptr word, uint32_t value) { add(kOpWait32, word, value); }
  void write(CUdeviceptr word, uint32_t value) { add(kOpWrite32, word, value); }
  void flush();  // what was collected goes to the driver

 private:
  struct MappedAddress {
    CUdeviceptr address = 0;
    const PeerMapping* mapping = nullptr;  // null: not in a window
  };

  MappedAddress place(const Slice& slice) const;
  CUdeviceptr address(const Slice& slice) const;
  bool walks(const Slice& slice, uint32_t rows, const PeerMapping* mapping) const;
  void add(uint32_t operation, CUdeviceptr address, uint32_t value, unsigned flags = 0);
  void poll(const Command& command);
  void signal(const Command& command);
  void signal_aside(const Command& command);
  void flush_aside();
  void linger();
  size_t reduce(std::span<const Command> commands);
  bool clashes(const ReduceKernelJob& job) const;
  CUdeviceptr polled_word(const Slice& word) const;
  void flush_jobs();
  bool one_command(const Command& signal) const;
  void copy(const Command& command);
  bool goes_plain(const Command& command) const;
  bool within(const Command& command) const;
  bool pitches(const Command& command, MappedAddress& dst, MappedAddress& src, uint64_t& dst_pitch,
               uint64_t& src_pitch) const;
  bool paged(const Command& command);
  void pack(const Command& command, const PageTable& table, bool scatters);
  void pages(const Command& command, const PageTable& table, bool scatters);
  bool gather(const StridedCopy& rows);
  bool strided(StridedCopy rows);
  bool takes_batches() const;
  void outside(const Slice& dst, const Slice& src, uint64_t bytes);
  void inside(CUdeviceptr dst, CUdeviceptr src, uint64_t bytes);
  uint64_t by_spare(size_t engine, CUdeviceptr dst, CUdeviceptr src, uint64_t bytes);
  void in_own_stream(CUdeviceptr dst, CUdeviceptr src, uint64_t bytes);
  uint64_t by_alias(const EngineAlias& alias, CUdeviceptr dst, CUdeviceptr src, uint64_t bytes,
                    CUstream stream);
  void plain(CUdeviceptr dst, CUdeviceptr src, uint64_t bytes);
  // Of a driver's call that enqueues: throws where it has failed.
  void submitted(CUresult result, const char* call);
  // The same of one with another form. False: it was refused, and the other form is to be taken.
  bool accepted(CUresult result, const char* call);
  void collect(CUdeviceptr dst, CUdeviceptr src, uint64_t bytes, unsigned flags, size_t most);
  void flush_copies();
  void flush_ops();

  const LocalGpu& device_;
  CUstream stream_;
  SignalSource source_;
  const Program& program_;
  const Launch& launch_;
  const MappingTable& mappings_;
  const EncodeOptions options_;
  const MappingTwins* twins_;
  SubmitStats& stats_;
  const bool batches_;  // of copies go into the stream
  const uint32_t call_min_;
  bool many_ = false;  // this group has many copies between the host and the GPU
  std::optional<KernelCopies> kernel_copies_;  // where a kernel copies between the host and the GPU
  bool strided_signals_ = true;
  bool leading_ = false;
  bool batched_ = false;      // several copies at once, which a copied flag might overtake
  bool signalled_ = false;    // by the last command
  CUstream aside_ = nullptr;  // where signals before aside_end_ go, behind `passed_`
  const Command* aside_end_ = nullptr;
  std::optional<CudaEvent> passed_;
  std::vector<CUstreamMemOp> aside_ops_;
  std::vector<CUstream> spare_streams_;
  uint64_t spare_bytes_ = 0;  // that they take still
  std::vector<ReduceKernelJob> jobs_;
  std::vector<CUstreamMemOp> ops_;
  unsigned flags_ = 0;                  // of the copies collected here
  std::optional<uint32_t> pages_left_;  // of a call, of pages that engines copy
  std::vector<CUdeviceptr> dsts_;
  std::vector<CUdeviceptr> srcs_;
  std::vector<size_t> sizes_;
};

}  // namespace offcore::cuda
