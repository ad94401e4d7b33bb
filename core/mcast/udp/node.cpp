#include "core/mcast/udp/node.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <sstream>
#include <utility>

#include "core/base/error.h"
#include "core/base/fork.h"
#include "core/base/place.h"
#include "core/base/threads.h"
#include "core/mcast/endpoint.h"
#include "core/mcast/udp/peers.h"
#include "core/mcast/udp/receive_path.h"
#include "core/mcast/udp/sender.h"

namespace offcore::mcast {
namespace {

constexpr int64_t kNapNs = 200'000;  // of a receiver that would be woken for single packets
constexpr int kCreditsMax = 256;     // a turn
constexpr uint16_t kPortFirst = 20'000;
constexpr uint16_t kPorts = 10'000;

// What a rank tells the others, as text.
struct PeerAddress {
  uint64_t place = 0;           // who shares it gets multicast only by looping it back
  uint32_t datagram_bytes = 0;  // the largest that it sends or receives
  uint32_t buffer_bytes = 0;    // of a receiving socket
  uint16_t port = 0;            // TCP
  uint16_t credit_port = 0;     // UDP
  std::string host;

  std::string text() const {
    return cat("udp1 ", place, " ", datagram_bytes, " ", buffer_bytes, " ", port, " ", credit_port,
               " ", host);
  }
  static PeerAddress parse(const std::string& text) {
    std::istringstream stream(text);
    std::string version;
    PeerAddress card;
    stream >> version >> card.place >> card.datagram_bytes >> card.buffer_bytes >> card.port >>
        card.credit_port >> card.host;
    if (!stream || version != "udp1" || card.datagram_bytes <= kHeadBytesMax) {
      fail(Code::mismatch, "'", text, "' is no address of a multicast rank: the ranks run ",
           "different versions of offcore, or different transports");
    }
    return card;
  }
};

Address first_group(const UdpOptions& options, const GroupKey& key) {
  const uint64_t tag = key.tag;
  const auto port =
      options.port != 0 ? options.port : static_cast<uint16_t>(kPortFirst + tag % kPorts);
  if (!options.multicast_group.empty()) return Address::of(options.multicast_group, port);
  // Of those for private use in a site; the tag keeps communicators apart. Room for subgroups.
  const uint32_t number = static_cast<uint32_t>(tag >> 32) & 0x3fff00;
  return Address::of(options.ipv6 ? "ff15::4f43:0:0" : "239.192.0.0", port).next_group(number);
}

}  // namespace

Loops Loops::start(uint32_t receive_workers, uint32_t send_workers, int64_t spin_ns) {
  const auto loop = [&] { return owned_by_process(std::make_unique<Loop>(spin_ns)); };
  Loops loops;
  loops.control = loop();
  for (uint32_t i = 0; i < receive_workers; ++i) loops.receive.push_back(loop());
  for (uint32_t i = 0; i < send_workers; ++i) loops.send.push_back(loop());
  return loops;
}

namespace {

class UdpNode final : public EndpointNode, Transport, PeerListener {
 public:
  UdpNode(const UdpOptions& options, Loops loops);
  ~UdpNode() override { close(); }

  std::string address() const override { return card_.text(); }
  void start(const Group& group, const std::vector<std::string>& addresses,
             const Deadline& deadline) override;
  Endpoint& endpoint() override {
    if (endpoint_ == nullptr) fail(Code::invalid, "the node has not been started: call start");
    return *endpoint_;
  }
  void close() override;
  std::vector<std::pair<std::string, uint64_t>> counters() const override;

 private:
  // Transport
  void send(GroupRank to, const Message& message) override { peers_->send(to, message); }
  void send(GroupRank to, const Message& reply, std::span<const std::byte> data) override {
    peers_->send(to, reply, data);
  }
  bool holds_data(GroupRank to) const override { return peers_->holds_data(to); }
  void multicast(const BlockPart& part) override { casters_[part.subgroup]->push(part); }
  void wake() override;
  void stop() override;
  // Ears
  std::span<std::byte> place_of(GroupRank from, const Message& reply) override {
    return endpoint_->place_of(from, reply);
  }
  void on_message(GroupRank from, const Message& message) override {
    endpoint_->on_message(from, message, now_ns());
    look_later();
  }
  void on_lost(GroupRank rank, const std::string& reason) override {
    endpoint_->on_peer_lost(rank, reason, now_ns());
    look_later();
  }

  void open_subgroups(const Group& group, bool loop);
  void look();
  void look_later();
  void receive(uint32_t subgroup);
  void on_credits();
  void answer(const std::byte* asked);
  Loop& receive_loop(uint32_t subgroup) const;
  Loop& send_loop(uint32_t subgroup) const;

  const UdpOptions options_;
  const Loops loops_;
  Descriptor namespace_;
  Interface interface_;
  PeerAddress card_;
  std::unique_ptr<Peers> peers_;
  Descriptor credits_;  // UDP: to roots, and from leaves
  std::vector<Address> credit_addresses_;
  std::vector<std::unique_ptr<ReceiveSocket>> sockets_;  // by subgroup
  std::vector<std::unique_ptr<ReceivePath>> receive_paths_;
  std::vector<std::unique_ptr<Sender>> casters_;
  std::unique_ptr<Endpoint> endpoint_;
  uint32_t window_bytes_ = UINT32_MAX;
  std::atomic<uint64_t> receive_failures_{0};
  std::atomic<bool> woken_{false};
  bool stopped_ = false;
};

UdpNode::UdpNode(const UdpOptions& options, Loops loops)
    : options_(options), loops_(std::move(loops)) {
  if (options.namespace_fd >= 0) {
    namespace_ = Descriptor(fcntl(options.namespace_fd, F_DUPFD_CLOEXEC, 0));
    if (!namespace_) fail_errno(Code::invalid, "the network namespace's descriptor is of no use");
  }
  in_namespace(namespace_.get(), [&] {
    interface_ = find_interface(options.interface, options.ipv6 ? AF_INET6 : AF_INET);
    card_.place = place_here();
  });
  const uint32_t fits = interface_.datagram_bytes();
  card_.datagram_bytes =
      options.datagram_bytes == 0 ? fits : std::min(fits, options.datagram_bytes);
  in_namespace(namespace_.get(), [&] {
    credits_ = open_datagrams(interface_.address);
    card_.buffer_bytes = receive_buffer_bytes(interface_.address.family(), options.buffer_bytes);
  });
  card_.credit_port = Address::bound_to(credits_.get()).port();
  peers_ = std::make_unique<Peers>(*loops_.control, interface_.address, namespace_.get(),
                                   static_cast<PeerListener&>(*this));
  card_.port = peers_->address().port();
  card_.host = peers_->address().host();
}

void UdpNode::start(const Group& group, const std::vector<std::string>& addresses,
                    const Deadline&) {
  if (endpoint_ != nullptr) fail(Code::invalid, "the node has been started already");
  if (addresses.size() != group.ranks || group.rank >= group.ranks) {
    fail(Code::invalid, addresses.size(), " addresses for rank ", group.rank, " of ", group.ranks);
  }
  if (group.chunk_bytes + head_bytes(group) > card_.datagram_bytes) {
    fail(Code::invalid, "chunks of ", group.chunk_bytes, " bytes do not fit the datagrams of ",
         card_.datagram_bytes, " bytes that ", interface_.name, " takes; see chunk_bytes_for");
  }
  std::vector<Address> peers;
  bool loop = false;
  for (GroupRank rank = 0; rank < group.ranks; ++rank) {
    const PeerAddress card = PeerAddress::parse(addresses[rank]);
    peers.push_back(Address::of(card.host, card.port).scoped_to(interface_));
    credit_addresses_.push_back(peers.back().with_port(card.credit_port));
    window_bytes_ = std::min(window_bytes_, card.buffer_bytes);
    loop = loop || (rank != group.rank && card.place == card_.place);
  }
  in_namespace(namespace_.get(), [&] { open_subgroups(group, loop); });
  endpoint_ = std::make_unique<Endpoint>(group, static_cast<Transport&>(*this));
  for (uint32_t subgroup = 0; subgroup < sockets_.size(); ++subgroup) {
    receive_paths_.push_back(
        std::make_unique<ReceivePath>(*sockets_[subgroup], endpoint_->receiver(subgroup), group,
                                      [this](const std::byte* head) { answer(head); }));
  }
  for (uint32_t subgroup = 0; subgroup < sockets_.size(); ++subgroup) {
    receive_loop(subgroup).call([&] {
      receive_loop(subgroup).watch(sockets_[subgroup]->fd(), EPOLLIN,
                                   [this, subgroup] { receive(subgroup); });
    });
  }
  // Last: peers may say at once that all is over, and then nothing may be watched any more.
  loops_.control->call([&] {
    loops_.control->watch(credits_.get(), EPOLLIN, [this] { on_credits(); });
    peers_->start(group, std::move(peers));
  });
  wake();
}

void UdpNode::open_subgroups(const Group& group, bool loop) {
  if (!group.multicast || group.ranks == 1) return;
  const Address first = first_group(options_, group.key);
  for (uint32_t subgroup = 0; subgroup < group.subgroups; ++subgroup) {
    const Address at = first.next_group(subgroup);
    auto socket = std::make_unique<SendSocket>(interface_, at,
                                               SendOptions{.hops = options_.hops,
                                                           .loop = loop,
                                                           .gso = options_.gso,
                                                           .buffer_bytes = options_.buffer_bytes});
    sockets_.push_back(std::make_unique<ReceiveSocket>(
        interface_, at,
        ReceiveOptions{.gro = options_.gro,
                       .buffer_bytes = options_.buffer_bytes,
                       .datagram_bytes = group.chunk_bytes + head_bytes(group)}));
    if (loop) sockets_.back()->ignore(socket->source());
    casters_.push_back(std::make_unique<Sender>(send_loop(subgroup), std::move(socket), group,
                                                window_bytes_, [this](const BlockPart& part) {
                                                  loops_.control->post([this, part] {
                                                    if (stopped_) return;
                                                    endpoint_->on_sent(part, now_ns());
                                                    look_later();
                                                  });
                                                }));
  }
}

void UdpNode::close() {
  if (!here()) return;
  if (endpoint_ != nullptr) endpoint_->close();
  loops_.control->call([this] {
    if (endpoint_ != nullptr) endpoint_->on_time(now_ns());
    stop();
  });
  peers_->wait_stopped();
  // After what was posted meanwhile, which may still look at what goes now.
  for (const auto& loop : loops_.send) loop->call([] {});
  loops_.control->call([] {});
}

// On the control thread, also from inside the endpoint's calls. Workers wait for nobody, so waiting
// for their loops is short.
void UdpNode::stop() {
  if (std::exchange(stopped_, true)) return;
  for (uint32_t subgroup = 0; subgroup < sockets_.size(); ++subgroup) {
    Loop& loop = receive_loop(subgroup);
    loop.call([&] {
      loop.unwatch(sockets_[subgroup]->fd());
      loop.set_timer(receive_paths_[subgroup].get(), INT64_MAX, nullptr);
    });
  }
  loops_.control->unwatch(credits_.get());
  for (const auto& sender : casters_) sender->stop();
  peers_->stop();
  loops_.control->set_timer(this, INT64_MAX, nullptr);
}

// Where the socket fails nothing more comes from it, and the ring brings everything.
void UdpNode::receive(uint32_t subgroup) {
  Loop& loop = receive_loop(subgroup);
  const int fd = sockets_[subgroup]->fd();
  try {
    if (!receive_paths_[subgroup]->turn()) return;
    // Where packets come one by one, to wake this thread for each costs more than to send it.
    loop.rewatch(fd, 0);
    loop.set_timer(receive_paths_[subgroup].get(), now_ns() + kNapNs,
                   [&loop, fd] { loop.rewatch(fd, EPOLLIN); });
  } catch (const Error&) {
    loop.unwatch(fd);
    receive_failures_ += 1;
  }
}

void UdpNode::wake() {
  if (woken_.exchange(true)) return;
  loops_.control->post([this] {
    woken_ = false;
    look();
  });
}

void UdpNode::look() {
  if (stopped_) return;
  endpoint_->on_time(now_ns());
  look_later();
}

void UdpNode::look_later() {
  if (stopped_) return;
  loops_.control->set_timer(this, endpoint_->next_time(), [this] { look(); });
}

// It may be lost, or find no room: then the root waits in vain, and goes on.
void UdpNode::answer(const std::byte* asked) {
  const Group& group = endpoint_->group();
  const DatagramHead head = read_head(asked);
  if (head.tag != group.key.tag || head.source >= group.ranks) return;
  if (!answers(group, group.rank, head.source)) return;
  std::array<std::byte, kCreditBytes> credit;
  write_credit(head, group.rank, credit.data());
  const Address& to = credit_addresses_[head.source];
  sendto(credits_.get(), credit.data(), credit.size(), MSG_DONTWAIT | MSG_NOSIGNAL, to.raw(),
         to.bytes);
}

void UdpNode::on_credits() {
  std::array<std::byte, kCreditBytes + 1> bytes;
  for (int i = 0; i < kCreditsMax; ++i) {
    const ssize_t got = recv(credits_.get(), bytes.data(), bytes.size(), MSG_DONTWAIT);
    if (got < 0) return;
    const std::optional<Credit> credit =
        read_credit(endpoint_->group(), std::span(bytes).first(static_cast<size_t>(got)));
    if (credit && credit->subgroup < casters_.size()) casters_[credit->subgroup]->take(*credit);
  }
}

Loop& UdpNode::receive_loop(uint32_t subgroup) const {
  const auto& loops = loops_.receive;
  return loops.empty() ? *loops_.control : *loops[subgroup % loops.size()];
}

Loop& UdpNode::send_loop(uint32_t subgroup) const {
  const auto& loops = loops_.send;
  return loops.empty() ? *loops_.control : *loops[subgroup % loops.size()];
}

std::vector<std::pair<std::string, uint64_t>> UdpNode::counters() const {
  uint64_t sent = 0, sent_bytes = 0, send_calls = 0, refused = 0, failures = 0, gso = 0;
  uint64_t waits = 0, give_ups = 0;
  for (const auto& sender : casters_) {
    const SendSocket::SendCounters& counted = sender->socket().counters();
    sent += counted.datagrams;
    sent_bytes += counted.bytes;
    send_calls += counted.calls;
    refused += counted.refused;
    failures += sender->counters().failures;
    waits += sender->counters().waits;
    give_ups += sender->counters().give_ups;
    gso += sender->socket().gso();
  }
  uint64_t received = 0, received_bytes = 0, receive_calls = 0, runs = 0, dropped = 0, gro = 0;
  uint64_t buffer_bytes = 0;
  for (const auto& socket : sockets_) {
    const ReceiveSocket::DatagramCounters& counted = socket->counters();
    received += counted.datagrams;
    received_bytes += counted.bytes;
    receive_calls += counted.calls;
    runs += counted.runs;
    dropped += socket->dropped();
    gro += socket->gro();
    buffer_bytes += socket->buffer_bytes();
  }
  uint64_t placed = 0;
  for (const auto& receive_path : receive_paths_) placed += receive_path->counters().placed;
  return {{"udp_sent_datagrams", sent},
          {"udp_sent_bytes", sent_bytes},
          {"udp_send_calls", send_calls},
          {"udp_send_refused", refused},
          {"udp_send_failures", failures},
          {"udp_gso_sockets", gso},
          {"udp_credit_waits", waits},
          {"udp_credit_give_ups", give_ups},
          {"udp_received_datagrams", received},
          {"udp_received_bytes", received_bytes},
          {"udp_receive_calls", receive_calls},
          {"udp_receive_runs", runs},
          {"udp_receive_failures", receive_failures_},
          {"udp_receive_placed", placed},
          {"udp_receive_dropped", dropped},
          {"udp_gro_sockets", gro},
          {"udp_receive_buffer_bytes", buffer_bytes},
          {"tcp_connections", peers_->counters().connections},
          {"tcp_strangers", peers_->counters().strangers}};
}

}  // namespace

std::unique_ptr<EndpointNode> open_udp_node(const UdpOptions& options, Loops loops) {
  return std::make_unique<UdpNode>(options, std::move(loops));
}

uint32_t chunk_bytes_for(const std::vector<std::string>& addresses, bool sealed) {
  uint32_t fits = UINT32_MAX;
  for (const std::string& address : addresses) {
    fits = std::min(fits, PeerAddress::parse(address).datagram_bytes);
  }
  Group group;
  group.sealed = sealed;
  return std::min(fits - head_bytes(group), kChunkBytesMax);
}

}  // namespace offcore::mcast
