#include "core/mcast/udp/sender.h"

#include <algorithm>
#include <utility>

#include "core/base/clock.h"
#include "core/base/error.h"

namespace offcore::mcast {
Sender::Sender(Loop& loop, std::unique_ptr<SendSocket> socket, const Group& group,
               uint64_t window_bytes, std::function<void(const BlockPart&)> sent)
    : loop_(loop),
      socket_(std::move(socket)),
      group_(group),
      sent_(std::move(sent)),
      window_(group_, window_bytes),
      heads_(kSliceChunks) {}

void Sender::push(const BlockPart& part) {
  loop_.post([this, part] {
    if (stopped_) return;
    parts_.push_back(part);
    if (std::exchange(working_, true)) return;
    window_.begin(part);
    work();
  });
}

void Sender::take(const Credit& credit) {
  if (!loop_.here()) return loop_.post([this, credit] { take(credit); });
  if (stopped_) return;
  window_.take(credit);
  if (!waiting_ || held_up()) return;
  // Leaves that answer late were not run for so long: patience for some times that.
  const int64_t waited_ns = now_ns() - waiting_ns_;
  patience_ns_ =
      std::clamp(patience_ns_ - patience_ns_ / 8 + waited_ns, kPatienceMinNs, kPatienceMaxNs);
  work();
}

void Sender::work() {
  if (stopped_) return;
  waiting_ = false;
  const uint32_t chunks = parts_.front().chunks;
  bool room = true;
  try {
    room = send_slice();
  } catch (const Error&) {  // the fetch ring delivers what is not sent
    counters_.failures.add(1);
    next_ = chunks;
  }
  if (!room) {
    loop_.watch(socket_->fd(), EPOLLOUT, [this] {
      loop_.unwatch(socket_->fd());
      work();
    });
    return;
  }
  if (held_up()) return wait();
  if (next_ == chunks) {
    const BlockPart part = parts_.front();
    parts_.pop_front();
    next_ = 0;
    loop_.set_timer(this, INT64_MAX, nullptr);
    sent_(part);
    working_ = !parts_.empty();
    if (!working_) return;
    window_.begin(parts_.front());
  }
  loop_.post([this] { work(); });
}

bool Sender::held_up() const {
  return next_ == parts_.front().chunks ? !window_.ended() : next_ == window_.limit();
}

// For credits, but not for long.
void Sender::wait() {
  waiting_ = true;
  waiting_ns_ = now_ns();
  counters_.waits.add(1);
  loop_.set_timer(this, waiting_ns_ + patience_ns_, [this] {
    if (!waiting_) return;
    counters_.give_ups.add(1);
    patience_ns_ = std::min(2 * patience_ns_, kPatienceMaxNs);
    window_.give_up();
    work();
  });
}

bool Sender::send_slice() {
  const BlockPart& part = parts_.front();
  const uint32_t count = std::min<uint32_t>(window_.limit() - next_, kSliceChunks);
  const uint32_t head = head_bytes(group_);
  slice_.clear();
  for (uint32_t i = 0; i < count; ++i) {
    const uint32_t index = next_ + i;
    write_head(group_, part, index, heads_[i].data());
    if (window_.asks(index)) ask_for_credit(heads_[i].data());
    slice_.push_back({std::span(heads_[i]).first(head),
                      {part.data + part.offset(index, group_.chunk_bytes),
                       part.chunk_size(index, group_.chunk_bytes)}});
  }
  const size_t sent = socket_->send(slice_);
  next_ += static_cast<uint32_t>(sent);
  return sent == count;
}

void Sender::stop() {
  loop_.call([this] {
    stopped_ = true;
    parts_.clear();
    loop_.unwatch(socket_->fd());
    loop_.set_timer(this, INT64_MAX, nullptr);
  });
}

}  // namespace offcore::mcast
