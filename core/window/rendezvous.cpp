#include "core/window/rendezvous.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <algorithm>
#include <condition_variable>
#include <map>
#include <mutex>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>

#include "core/base/error.h"
#include "core/base/place.h"
#include "core/base/threads.h"
#include "core/window/greetings.h"
#include "core/window/socket.h"

namespace offcore {
namespace {

constexpr uint64_t kTagBytesMax = 4096;
constexpr size_t kInboxMax = 4096;           // parcels a peer may be ahead
constexpr int64_t kGoodbyeNs = 200'000'000;  // a peer that reads nothing gets none

using PeerKey = std::pair<std::string, uint64_t>;  // tag, sequence

struct Peer {
  enum class PeerState : uint8_t { here, left, lost };
  Connection connection;
  std::mutex sending;
  PeerState state = PeerState::here;  // from here on guarded by the mesh's mutex
  bool announced = false;             // its loss, to the callback
  std::optional<Rank> saw_die;        // before it left
  std::map<PeerKey, Parcel> inbox;
};

// One connected socket per peer, and a thread that reads them all.
class Mesh final : public Rendezvous {
 public:
  Mesh(const Bootstrap& bootstrap, const Deadline& deadline);
  ~Mesh() override { close(); }

  Rank rank() const override { return rank_; }
  Rank ranks() const override { return ranks_; }
  std::vector<Parcel> exchange(std::string_view tag, std::string_view blob, int fd,
                               const Deadline& deadline) override;
  void on_peer_loss(std::function<void(Rank)> callback) override;
  void close() override;

 private:
  void post(Rank peer, const PeerKey& key, std::string_view blob, int fd, const Deadline& deadline);
  std::vector<Rank> missing(const PeerKey& key) const;
  std::optional<Rank> first_gone(const std::vector<Rank>& ranks) const;
  void watch();
  void read(Rank peer, ConnectionStatus received);
  void take(Rank peer, Frame& frame);
  void lose(Rank peer, Peer::PeerState state);
  void announce();
  std::string last_word();
  void poke() const { eventfd_write(poke_.get(), 1); }

  const std::string where_;
  const Rank rank_;
  const Rank ranks_;
  std::vector<Peer> peers_;  // by rank; this rank's own is unused
  Descriptor poke_;          // makes the watcher look up
  std::thread watcher_;

  std::mutex mutex_;
  std::condition_variable arrived_;
  std::map<std::string, uint64_t, std::less<>> sequences_;
  bool closing_ = false;

  std::mutex callback_mutex_;  // held while the callback runs; taken before mutex_
  std::function<void(Rank)> callback_;
};

Mesh::Mesh(const Bootstrap& bootstrap, const Deadline& deadline)
    : where_(bootstrap.where()),
      rank_(static_cast<Rank>(bootstrap.rank())),
      ranks_(static_cast<Rank>(bootstrap.ranks())),
      peers_(ranks_) {
  std::string name;
  const Descriptor listener = listen_unix(name);
  const std::string card = Packer().number(place_here()).text(name).bytes();
  Roster roster = bootstrap.meet(card, deadline);
  for (Rank peer = 0; peer < ranks_; ++peer) {
    Unpacker unpacker(roster.cards[peer]);
    if (unpacker.number<uint64_t>() != place_here()) {
      fail(Code::invalid, "rank ", peer, " came to ", where_, " from another host or network ",
           "namespace than rank ", rank_, ": the ranks of a communicator share one");
    }
    roster.cards[peer] = std::string(unpacker.text());
  }
  std::vector<Connection> connections = connect_ranks(listener.get(), roster, rank_, where_,
                                                      kBlobBytesMax + 2 * kTagBytesMax, deadline);
  for (Rank peer = 0; peer < ranks_; ++peer) peers_[peer].connection = std::move(connections[peer]);
  poke_ = Descriptor(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!poke_) fail_errno(Code::driver, "cannot make an event descriptor");
  try {
    watcher_ = std::thread([this] { watch(); });
  } catch (const std::system_error& error) {
    fail(Code::driver, "cannot start the thread that watches the peers: ", error.what());
  }
}

std::vector<Rank> Mesh::missing(const PeerKey& key) const {
  std::vector<Rank> missing;
  for (Rank peer = 0; peer < ranks_; ++peer) {
    if (peer != rank_ && !peers_[peer].inbox.contains(key)) missing.push_back(peer);
  }
  return missing;
}

// Of those that are gone; one that died before one that left, perhaps because of the first.
std::optional<Rank> Mesh::first_gone(const std::vector<Rank>& ranks) const {
  for (const Peer::PeerState state : {Peer::PeerState::lost, Peer::PeerState::left}) {
    for (Rank peer : ranks) {
      if (peers_[peer].state == state) return peer;
    }
  }
  return std::nullopt;
}

void Mesh::post(Rank peer, const PeerKey& key, std::string_view blob, int fd,
                const Deadline& deadline) {
  const std::string payload = Packer().number(key.second).text(key.first).text(blob).bytes();
  Peer& to = peers_[peer];
  const std::lock_guard sending(to.sending);
  {
    const std::lock_guard lock(mutex_);
    if (to.state != Peer::PeerState::here) return;  // the wait for its parcel reports it
  }
  const ConnectionStatus status = to.connection.send(FrameKind::parcel, payload, fd, deadline);
  // Half a frame may be under way: nothing more can be said on this stream. The watcher sees it.
  if (status != ConnectionStatus::ok) shutdown(to.connection.fd(), SHUT_RDWR);
}

std::vector<Parcel> Mesh::exchange(std::string_view tag, std::string_view blob, int fd,
                                   const Deadline& deadline) {
  if (tag.size() > kTagBytesMax || blob.size() > kBlobBytesMax) {
    fail(Code::invalid, "a tag of ", tag.size(), " and a blob of ", blob.size(),
         " bytes exceed the limits of ", kTagBytesMax, " and ", kBlobBytesMax);
  }
  PeerKey key{tag, 0};
  {
    const std::lock_guard lock(mutex_);
    if (closing_) fail(Code::cancelled, "this rank has left the rendezvous at ", where_);
    key.second = sequences_[key.first]++;
  }
  for (Rank peer = 0; peer < ranks_; ++peer) {
    if (peer != rank_) post(peer, key, blob, fd, deadline);
  }
  std::unique_lock lock(mutex_);
  std::vector<Rank> absent;
  while (!(absent = missing(key)).empty()) {
    if (const auto gone = first_gone(absent)) {
      const Peer& peer = peers_[*gone];
      if (peer.saw_die) {
        fail(Code::peer, "rank ", *peer.saw_die, " died before '", tag, "', said rank ", *gone,
             ", and left");
      }
      fail(Code::peer, "rank ", *gone, peer.state == Peer::PeerState::lost ? " died" : " left",
           " before '", tag, "'");
    }
    if (closing_) fail(Code::cancelled, "this rank left the rendezvous during '", tag, "'");
    if (deadline.passed()) {
      fail(Code::timeout, rank_list(absent), " did not arrive at '", tag, "' (", where_,
           ") within ", shown_s(deadline.wait_ns()), " s");
    }
    sleep(arrived_, lock, deadline);
  }
  std::vector<Parcel> parcels(ranks_);
  parcels[rank_].blob = blob;
  for (Rank peer = 0; peer < ranks_; ++peer) {
    if (peer != rank_) parcels[peer] = std::move(peers_[peer].inbox.extract(key).mapped());
  }
  return parcels;
}

void Mesh::watch() {
  // What came right behind a greeting has been taken in with it.
  for (Rank peer = 0; peer < ranks_; ++peer) {
    if (peer != rank_) read(peer, ConnectionStatus::ok);
  }
  while (true) {
    std::vector<pollfd> entries{{.fd = poke_.get(), .events = POLLIN, .revents = 0}};
    std::vector<Rank> ranks;
    {
      const std::lock_guard lock(mutex_);
      if (closing_) return;
      for (Rank peer = 0; peer < ranks_; ++peer) {
        if (peer == rank_ || peers_[peer].state != Peer::PeerState::here) continue;
        entries.push_back({.fd = peers_[peer].connection.fd(), .events = POLLIN, .revents = 0});
        ranks.push_back(peer);
      }
    }
    if (poll(entries.data(), entries.size(), -1) < 0) continue;
    eventfd_t count = 0;
    if (entries[0].revents != 0) eventfd_read(poke_.get(), &count);
    for (size_t i = 0; i < ranks.size(); ++i) {
      if (entries[i + 1].revents == 0) continue;
      read(ranks[i], peers_[ranks[i]].connection.receive());
    }
    announce();
  }
}

void Mesh::read(Rank peer, ConnectionStatus received) {
  Connection& connection = peers_[peer].connection;
  ConnectionStatus status = ConnectionStatus::ok;
  while (std::optional<Frame> frame = connection.next(status)) {
    if (frame->kind == FrameKind::goodbye) {
      Unpacker unpacker(frame->payload);
      const auto died = unpacker.number<Rank>();
      if (unpacker.ok()) {
        const std::lock_guard lock(mutex_);
        peers_[peer].saw_die = died;
      }
      return lose(peer, Peer::PeerState::left);
    }
    take(peer, *frame);
  }
  if (received != ConnectionStatus::ok || status != ConnectionStatus::ok)
    lose(peer, Peer::PeerState::lost);
}

void Mesh::take(Rank peer, Frame& frame) {
  Unpacker unpacker(frame.payload);
  const auto sequence = unpacker.number<uint64_t>();
  const std::string tag(unpacker.text());
  Parcel parcel{.blob = std::string(unpacker.text()), .fd = std::move(frame.fd)};
  if (frame.kind != FrameKind::parcel || !unpacker.ok()) return lose(peer, Peer::PeerState::lost);
  bool full = false;
  {
    const std::lock_guard lock(mutex_);
    std::map<PeerKey, Parcel>& inbox = peers_[peer].inbox;
    // What this rank stopped waiting for at a timeout is dropped when the next one comes.
    while (!inbox.empty()) {
      const auto stale = inbox.lower_bound({tag, 0});
      if (stale == inbox.end() || stale->first.first != tag) break;
      if (stale->first.second + 1 >= sequences_[tag]) break;
      inbox.erase(stale);
    }
    full = inbox.size() >= kInboxMax;
    if (!full) inbox.insert_or_assign({tag, sequence}, std::move(parcel));
  }
  if (full) return lose(peer, Peer::PeerState::lost);
  arrived_.notify_all();
}

void Mesh::lose(Rank peer, Peer::PeerState state) {
  const std::lock_guard lock(mutex_);
  if (peers_[peer].state != Peer::PeerState::here) return;
  peers_[peer].state = state;
  shutdown(peers_[peer].connection.fd(), SHUT_RDWR);
  arrived_.notify_all();
}

void Mesh::announce() {
  const std::lock_guard calling(callback_mutex_);
  if (callback_ == nullptr) return;
  for (Rank peer = 0; peer < ranks_; ++peer) {
    {
      const std::lock_guard lock(mutex_);
      Peer& gone = peers_[peer];
      if (gone.state != Peer::PeerState::lost || std::exchange(gone.announced, true)) continue;
    }
    callback_(peer);
  }
}

void Mesh::on_peer_loss(std::function<void(Rank)> callback) {
  {
    const std::lock_guard calling(callback_mutex_);
    callback_ = std::move(callback);
    const std::lock_guard lock(mutex_);
    for (Peer& peer : peers_) peer.announced = false;
  }
  poke();
}

// The rank that this one has seen die, perhaps why it leaves; nothing: all live.
std::string Mesh::last_word() {
  const std::lock_guard lock(mutex_);
  Packer packer;
  for (Rank peer = 0; peer < ranks_ && packer.bytes().empty(); ++peer) {
    if (peers_[peer].state == Peer::PeerState::lost) packer.number(peer);
  }
  return packer.bytes();
}

void Mesh::close() {
  {
    const std::lock_guard lock(mutex_);
    if (std::exchange(closing_, true)) return;
  }
  arrived_.notify_all();
  if (watcher_.joinable()) {
    poke();
    watcher_.join();
  }
  const std::string word = last_word();
  for (Peer& peer : peers_) {
    if (peer.connection.fd() < 0) continue;
    const std::lock_guard sending(peer.sending);
    const Deadline deadline = Deadline::after_ns(kGoodbyeNs);
    peer.connection.send(FrameKind::goodbye, word, -1, deadline);
    shutdown(peer.connection.fd(), SHUT_WR);
  }
}

}  // namespace

std::shared_ptr<Rendezvous> Rendezvous::join(const Bootstrap& bootstrap, const Deadline& deadline) {
  return owned_by_process(std::make_unique<Mesh>(bootstrap, deadline));
}

std::vector<std::string> Rendezvous::all_gather_bytes(std::string_view tag, std::string_view blob,
                                                      const Deadline& deadline) {
  std::vector<std::string> blobs;
  for (Parcel& parcel : exchange(tag, blob, -1, deadline)) blobs.push_back(std::move(parcel.blob));
  return blobs;
}

std::vector<Descriptor> Rendezvous::exchange_fds(std::string_view tag, int fd,
                                                 const Deadline& deadline) {
  std::vector<Descriptor> fds;
  for (Parcel& parcel : exchange(tag, "", fd, deadline)) {
    if (!parcel.fd && fds.size() != rank()) {
      fail(Code::mismatch, "rank ", fds.size(), " sent no descriptor at '", tag, "'");
    }
    fds.push_back(std::move(parcel.fd));
  }
  return fds;
}

void Rendezvous::barrier(std::string_view tag, const Deadline& deadline) {
  exchange(tag, "", -1, deadline);
}

}  // namespace offcore
