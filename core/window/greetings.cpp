#include "core/window/greetings.h"

#include <cerrno>
#include <cstring>
#include <utility>

#include "core/base/error.h"
#include "core/window/admission.h"
#include "core/window/proof.h"

namespace offcore {
namespace {

constexpr uint64_t kGreetingBytesMax = 256;

class Greetings final : Reception {
 public:
  Greetings(int listener, const Roster& roster, Rank rank, const std::string& where)
      : Reception(kGreetingBytesMax, roster.cards.size()),
        roster_(roster),
        rank_(rank),
        where_(where),
        connections_(roster.cards.size()) {
    open(listener);
  }

  std::vector<Connection> connect_all(const Deadline& deadline) {
    // That needs nobody to accept, so no order can lock up.
    for (Rank peer = 0; peer < rank_; ++peer) call(peer, deadline);
    while (!unconnected().empty()) {
      if (deadline.passed()) {
        fail(Code::timeout, rank_list(unconnected()), " came to ", where_,
             " but did not connect within ", shown_s(deadline.wait_ns()), " s");
      }
      step(deadline);
    }
    return std::move(connections_);
  }

 private:
  Seal seal() const { return {roster_.key, ""}; }

  void call(Rank peer, const Deadline& deadline) {
    Descriptor socket = connect_unix(roster_.cards[peer], deadline);
    if (!socket) fail_unreachable(peer, std::strerror(errno));
    const std::string stranger = stranger_at(socket.get(), roster_.secret);
    if (!stranger.empty()) fail_unreachable(peer, "at its Unix socket is " + stranger);
    Guest& guest = seat(std::move(socket), -1);
    guest.stranger = false;
    guest.rank = peer;
    const std::string said = Packer().number(rank_).number(peer).bytes();
    const std::string greeting = seal().closed(FrameKind::greeting, said);
    if (guest.connection.send(FrameKind::greeting, greeting, -1, deadline) !=
        ConnectionStatus::ok) {
      lose(guest);
    }
  }

  [[noreturn]] void fail_unreachable(Rank peer, const std::string& reason) const {
    fail(Code::peer, "rank ", peer, " met rank ", rank_, " at ", where_, " but cannot be reached (",
         reason, "): it died");
  }

  std::vector<Rank> unconnected() const {
    std::vector<Rank> ranks;
    for (Rank peer = 0; peer < connections_.size(); ++peer) {
      if (peer != rank_ && connections_[peer].fd() < 0) ranks.push_back(peer);
    }
    return ranks;
  }

  bool admits(int fd, int) override { return stranger_at(fd, roster_.secret).empty(); }

  void lose(Guest& guest) override {
    guest.gone = true;
    if (!guest.rank) return;
    fail(Code::peer, "rank ", *guest.rank, " hung up while the ranks met at ", where_);
  }

  void hear(Guest& guest, const Frame& frame) override {
    const FrameKind expected = guest.rank ? FrameKind::welcome : FrameKind::greeting;
    const std::optional<std::string_view> said = seal().opened(frame);
    if (frame.kind != expected || !said) return lose(guest);
    Unpacker unpacker(*said);
    const auto from = unpacker.number<Rank>();
    const auto to = unpacker.number<Rank>();
    const bool fits = unpacker.ok() && to == rank_ && from < connections_.size() && from != rank_ &&
                      guest.rank.value_or(from) == from && connections_[from].fd() < 0;
    if (!fits) return lose(guest);
    if (!guest.rank) {
      const std::string answer = Packer().number(rank_).number(from).bytes();
      const std::string welcome = seal().closed(FrameKind::welcome, answer);
      guest.connection.send(FrameKind::welcome, welcome, -1, Deadline::after_ns(0));
    }
    connections_[from] = std::move(guest.connection);
    guest.gone = true;
  }

  const Roster& roster_;
  const Rank rank_;
  const std::string& where_;
  std::vector<Connection> connections_;
};

}  // namespace

std::vector<Connection> connect_ranks(int listener, const Roster& roster, Rank rank,
                                      const std::string& where, uint64_t payload_bytes_max,
                                      const Deadline& deadline) {
  std::vector<Connection> connections =
      Greetings(listener, roster, rank, where).connect_all(deadline);
  for (Connection& connection : connections) connection.trust(payload_bytes_max);
  return connections;
}

}  // namespace offcore
