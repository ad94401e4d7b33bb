#include "core/mcast/udp/caster.h"

#include <algorithm>
#include <utility>

#include "core/base/error.h"

namespace offcore::mcast {

Caster::Caster(Loop& loop, std::unique_ptr<SendSocket> socket, const Group& group,
               std::function<void(const Part&)> sent)
    : loop_(loop),
      socket_(std::move(socket)),
      group_(group),
      sent_(std::move(sent)),
      heads_(kSliceChunks) {}

void Caster::push(const Part& part) {
  loop_.post([this, part] {
    if (stopped_) return;
    parts_.push_back(part);
    if (!std::exchange(working_, true)) work();
  });
}

void Caster::work() {
  if (stopped_) return;
  bool room = true;
  try {
    room = send_slice();
  } catch (const Error&) {  // the fetch ring delivers what is not sent
    failures_.add(1);
    next_ = parts_.front().chunks;
  }
  if (!room) {
    loop_.watch(socket_->fd(), EPOLLOUT, [this] {
      loop_.unwatch(socket_->fd());
      work();
    });
    return;
  }
  if (next_ == parts_.front().chunks) {
    const Part part = parts_.front();
    parts_.pop_front();
    next_ = 0;
    sent_(part);
  }
  working_ = !parts_.empty();
  if (working_) loop_.post([this] { work(); });
}

bool Caster::send_slice() {
  const Part& part = parts_.front();
  const uint32_t count = std::min<uint32_t>(part.chunks - next_, kSliceChunks);
  const uint32_t head = head_bytes(group_);
  slice_.clear();
  for (uint32_t i = 0; i < count; ++i) {
    const uint32_t index = next_ + i;
    write_head(group_, part, index, heads_[i].data());
    slice_.push_back({std::span(heads_[i]).first(head),
                      {part.data + part.offset(index, group_.chunk_bytes),
                       part.chunk_size(index, group_.chunk_bytes)}});
  }
  const size_t sent = socket_->send(slice_);
  next_ += static_cast<uint32_t>(sent);
  return sent == count;
}

void Caster::stop() {
  loop_.call([this] {
    stopped_ = true;
    parts_.clear();
    loop_.unwatch(socket_->fd());
  });
}

}  // namespace offcore::mcast
