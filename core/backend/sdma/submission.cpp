#include "core/backend/sdma/submission.h"

#include <algorithm>
#include <cstring>

#include "core/backend/sdma/encode.h"
#include "core/backend/wakeup.h"

namespace offcore::sdma {
namespace {

class HostTask final : public exec::QueueTask {
 public:
  HostTask(SdmaSubmission& submission, uint32_t queue, SubmitPath& path)
      : QueueTask(queue), submission_(submission), path_(path) {}

  bool ended() const override { return released_ ? ticket_ == nullptr : at_ == size(); }
  size_t reached() const override { return at_; }
  void release() override { released_ = true; }

  bool advance() override {
    bool moved = false;
    while (!ended() && step()) moved = true;
    return moved;
  }

 private:
  const Queue& commands() const { return submission_.program->queues[queue()]; }
  uint32_t size() const { return static_cast<uint32_t>(commands().commands.size()); }

  bool step() {
    if (ticket_ != nullptr) {
      try {
        if (!ticket_->done()) return false;
      } catch (const Error&) {
        ticket_ = nullptr;
        throw;
      }
      ticket_ = nullptr;
      if (released_) return true;
      at_ = group_end_;
      return true;
    }
    const Command& command = commands().commands[at_];
    switch (command.op) {
      case Op::copy:
      case Op::swap:
        begin_group();
        return true;
      case Op::poll:
        if (!submission_.polled(command)) return false;
        break;
      case Op::signal:
        signal(command);
        break;
      case Op::timestamp:
        submission_.timestamps_ns[command.value] = now_ns() - submission_.launch_ns;
        break;
      case Op::reduce:  // no program with one is loaded
      case Op::fence:   // a group has ended before the next command begins
        break;
    }
    ++at_;
    return true;
  }

  void begin_group() {
    const std::vector<Command>& all = commands().commands;
    std::vector<BatchCopy> pieces;
    for (group_end_ = at_; group_end_ < size() && moves_data(all[group_end_].op); ++group_end_) {
      const Command& command = all[group_end_];
      for (uint32_t i = 0; i < command.rows; ++i) {
        const Slice dst = row_of(command.dst, command.dst_step, i, submission_.program->ranks);
        const Slice src = row_of(command.src, command.src_step, i, submission_.program->ranks);
        pieces.push_back({.dst = submission_.addresses.of(dst),
                          .src = submission_.addresses.of(src),
                          .bytes = command.bytes,
                          .dst_rank = submission_.place_of(dst),
                          .src_rank = submission_.place_of(src),
                          .swap = command.op == Op::swap});
      }
    }
    ticket_ = path_.copy(commands().rank, pieces);
  }

  void signal(const Command& command) const {
    for (uint32_t i = 0; i < command.rows; ++i) {
      const Slice word = row_of(command.dst, command.dst_step, i, submission_.program->ranks);
      submission_.word(word).store(submission_.launch.epoch + command.value,
                                   std::memory_order_release);
    }
  }

  SdmaSubmission& submission_;
  SubmitPath& path_;
  std::unique_ptr<Ticket> ticket_;
  uint32_t at_ = 0;
  uint32_t group_end_ = 0;
  bool released_ = false;
};

class PacketTask final : public RingTask {
 public:
  PacketTask(SdmaSubmission& submission, const EncodedQueue& stream, PacketRing& ring,
             std::byte* completed)
      : RingTask(stream.queue),
        submission_(submission),
        ring_(ring),
        completed_(*reinterpret_cast<uint32_t*>(completed)),
        dwords_(stream.dwords),
        starts_(stream.starts) {
    Encoder end;
    end.fence(reinterpret_cast<uint64_t>(completed), 1);
    end_ = end.dwords();
    dwords_.insert(dwords_.end(), end_.begin(), end_.end());
  }

  bool ended() const override { return completed_.load(std::memory_order_acquire) != 0; }
  bool sent() const override { return sent_ == dwords_.size(); }

  bool advance() override {
    bool moved = false;
    while (sent_ < dwords_.size()) {
      const std::span<const uint32_t> left = std::span(dwords_).subspan(sent_);
      const size_t part = ring_.part_of(left);
      if (!ring_.try_submit(left.first(part))) break;
      sent_ += part;
      parts_.push_back({*ring_.memory().wptr, sent_});
      moved = true;
    }
    return moved;
  }

  // By what the engine has fetched: of parts that it is past, all; of the next one, what is left.
  size_t reached() const override {
    const uint64_t rptr = std::atomic_ref(*ring_.memory().rptr).load(std::memory_order_acquire);
    size_t fetched = 0;
    for (const RingPart& part : parts_) {
      const uint64_t left = part.end > rptr ? (part.end - rptr) / 4 : 0;
      fetched = std::max<size_t>(fetched, part.sent - std::min<size_t>(part.sent, left));
    }
    const auto next = std::upper_bound(starts_.begin(), starts_.end(), fetched);
    return next == starts_.begin() ? 0 : static_cast<size_t>(next - starts_.begin() - 1);
  }

  // The engine gets to the end by itself once nothing that it polls is missing.
  void release() override {
    if (sent_ + end_.size() < dwords_.size()) {
      dwords_.resize(sent_);
      dwords_.insert(dwords_.end(), end_.begin(), end_.end());
    }
    for (const Command& command : submission_.program->queues[queue()].commands) {
      if (command.op != Op::poll) continue;
      for (uint32_t i = 0; i < command.rows; ++i) {
        const Slice word = row_of(command.dst, command.dst_step, i, submission_.program->ranks);
        const uint32_t value = submission_.launch.epoch + command.value;
        if (submission_.word(word).load() < value) submission_.word(word).store(value);
      }
    }
  }

 private:
  struct RingPart {
    uint64_t end;  // in the ring
    size_t sent;   // dwords, with this part
  };
  SdmaSubmission& submission_;
  PacketRing& ring_;
  std::atomic_ref<uint32_t> completed_;
  std::vector<uint32_t> dwords_;
  std::vector<uint32_t> starts_;
  std::vector<uint32_t> end_;
  size_t sent_ = 0;
  std::vector<RingPart> parts_;
};

}  // namespace

Report SdmaSubmission::report() const {
  Report report = Submission::report();  // the engines show nothing else
  report.native = native;
  report.way = way;
  return report;
}

std::unique_ptr<exec::QueueTask> make_host_task(SdmaSubmission& submission, uint32_t queue,
                                                SubmitPath& path) {
  return std::make_unique<HostTask>(submission, queue, path);
}

std::unique_ptr<RingTask> make_ring_task(SdmaSubmission& submission, const EncodedQueue& stream,
                                         PacketRing& ring, std::byte* completed) {
  return std::make_unique<PacketTask>(submission, stream, ring, completed);
}

}  // namespace offcore::sdma
