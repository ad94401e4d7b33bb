#include "core/mcast/udp/receive_path.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/mcast/udp/credit.h"

namespace offcore::mcast {
namespace {

constexpr int kTakesMax = 4;    // rings full of datagrams a turn
constexpr int kRunsTaken = 32;  // scattered runs a turn
constexpr size_t kRunBytes = 65536;
constexpr size_t kDatagramsTaken = 64;       // of a run
constexpr uint64_t kLittleBytes = 16 << 10;  // in a turn
constexpr uint64_t kMuchBytes = 256 << 10;   // still to come

}  // namespace

ReceivePath::ReceivePath(ReceiveSocket& socket, Receiver& receiver, const Group& group,
                         std::function<void(const std::byte* head)> answer)
    : socket_(socket),
      receiver_(receiver),
      head_bytes_(head_bytes(group)),
      chunk_bytes_(group.chunk_bytes),
      answer_(std::move(answer)),
      heads_(kDatagramsTaken * head_bytes_),
      places_(std::clamp<size_t>(kRunBytes / (head_bytes_ + chunk_bytes_), 1, kDatagramsTaken)),
      rest_(socket.gro() ? kRunBytes : 0),
      linear_(rest_.size()),
      question_(head_bytes_) {
  for (size_t i = 0; i < places_.size(); ++i) {
    parts_.push_back({&heads_[i * head_bytes_], head_bytes_});
    parts_.push_back({nullptr, chunk_bytes_});
  }
  parts_.push_back({});
}

bool ReceivePath::turn() {
  const uint64_t before = socket_.counters().bytes;
  Receiver::ReceiveVisit batch(receiver_);
  if (socket_.gro()) {
    for (int i = 0; i < kRunsTaken && take_scattered(batch); ++i) continue;
  } else {
    const auto each = [&](std::span<std::byte> datagram) {
      take(batch, datagram, static_cast<uint32_t>(datagram.size()));
    };
    for (int i = 0; i < kTakesMax && socket_.receive(each) > 0; ++i) continue;
  }
  const uint64_t bytes = socket_.counters().bytes - before;
  return bytes > 0 && bytes < kLittleBytes && batch.missing() * chunk_bytes_ > kMuchBytes;
}

void ReceivePath::note_question(std::byte* head) {
  if (!take_question(head)) return;
  std::memcpy(question_.data(), head, head_bytes_);
  asked_ = true;
}

void ReceivePath::take(Receiver::ReceiveVisit& batch, std::span<std::byte> run,
                       uint32_t segment_bytes) {
  for (size_t at = 0; at + head_bytes_ <= run.size(); at += segment_bytes) note_question(&run[at]);
  batch.take(run, segment_bytes);
  if (std::exchange(asked_, false)) answer_(question_.data());
}

// False: nothing has come.
bool ReceivePath::take_scattered(Receiver::ReceiveVisit& batch) {
  places_now_ = batch.next_places(std::span(places_).first(offered_));
  for (size_t i = 0; i < places_now_; ++i) parts_[2 * i + 1].iov_base = places_[i];
  const iovec held = std::exchange(parts_[2 * places_now_], {rest_.data(), rest_.size()});
  const ReceiveSocket::DatagramRun run =
      socket_.receive_run(std::span(parts_).first(2 * places_now_ + 1));
  parts_[2 * places_now_] = held;
  if (run.bytes == 0) return run.more;
  const uint32_t datagram_bytes = head_bytes_ + chunk_bytes_;
  offered_ = std::clamp<size_t>(2 * run.bytes / datagram_bytes, 1, places_.size());
  size_t placed = 0;
  if (run.segment_bytes == datagram_bytes && places_now_ > 0) {
    const size_t whole = std::min(places_now_, run.bytes / datagram_bytes);
    for (size_t i = 0; i < whole; ++i) note_question(&heads_[i * head_bytes_]);
    placed = batch.take_placed(heads_, std::span(places_).first(whole));
    counters_.placed.add(placed);
  }
  if (placed * datagram_bytes < run.bytes) {
    take(batch, gathered(placed, run.bytes), run.segment_bytes);
  } else if (std::exchange(asked_, false)) {
    answer_(question_.data());
  }
  return true;
}

// The run from its `first` datagram on, in one piece.
std::span<std::byte> ReceivePath::gathered(size_t first, size_t run_bytes) {
  const size_t datagram_bytes = head_bytes_ + chunk_bytes_;
  const size_t scattered = places_now_ * datagram_bytes;
  if (first == places_now_) return std::span(rest_).first(run_bytes - scattered);
  size_t left = run_bytes - first * datagram_bytes;
  std::byte* to = linear_.data();
  for (size_t part = 2 * first; left > 0; ++part) {
    const bool rest = part == 2 * places_now_;
    const iovec& from = rest ? iovec{rest_.data(), rest_.size()} : parts_[part];
    const size_t bytes = std::min(left, from.iov_len);
    std::memcpy(to, from.iov_base, bytes);
    to += bytes;
    left -= bytes;
  }
  return {linear_.data(), to};
}

}  // namespace offcore::mcast
