#include "core/mcast/udp/node.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <sstream>
#include <utility>

#include "core/base/error.h"
#include "core/base/place.h"
#include "core/base/threads.h"

namespace offcore::mcast {
namespace {

constexpr int64_t kNapNs = 200'000;  // of a receiver that would be woken for single packets
constexpr int kCreditsMax = 256;     // a turn
constexpr uint16_t kPortFirst = 20'000;
constexpr uint16_t kPorts = 10'000;

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

std::string PeerAddress::text() const {
  return cat("udp2 ", place, " ", datagram_bytes, " ", buffer_bytes, " ", port, " ", credit_port,
             " ", host);
}

PeerAddress PeerAddress::parse(const std::string& text) {
  std::istringstream stream(text);
  std::string version;
  PeerAddress card;
  stream >> version >> card.place >> card.datagram_bytes >> card.buffer_bytes >> card.port >>
      card.credit_port >> card.host;
  if (!stream || version != "udp2" || card.datagram_bytes <= kHeadBytesMax) {
    fail(Code::mismatch, "'", text, "' is not the address of a multicast rank: the ranks run ",
         "different versions of offcore, or different transports");
  }
  return card;
}

UdpNode::UdpNode(const UdpOptions& options, Loops loops)
    : OfProcess("the multicast communicator"), options_(options), loops_(std::move(loops)) {
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

Endpoint& UdpNode::endpoint() {
  if (endpoint_ == nullptr) fail(Code::invalid, "the node has not been started: call start");
  return *endpoint_;
}

void UdpNode::start(const Group& group, const std::vector<std::string>& addresses) {
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
    loop_of(loops_.receive, subgroup).call([&] {
      loop_of(loops_.receive, subgroup).watch(sockets_[subgroup]->fd(), EPOLLIN, [this, subgroup] {
        receive(subgroup);
      });
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
    casters_.push_back(std::make_unique<Sender>(loop_of(loops_.send, subgroup), std::move(socket),
                                                group, window_bytes_,
                                                [this](const BlockPart& part) {
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
    Loop& loop = loop_of(loops_.receive, subgroup);
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
  Loop& loop = loop_of(loops_.receive, subgroup);
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

Loop& UdpNode::loop_of(const LoopList& workers, uint32_t subgroup) const {
  return workers.empty() ? *loops_.control : *workers[subgroup % workers.size()];
}

std::vector<std::pair<std::string, uint64_t>> UdpNode::counters() const {
  const auto sum = [](const auto& parts, auto count_of) {
    uint64_t all = 0;
    for (const auto& part : parts) all += count_of(*part);
    return all;
  };
  const auto of_sockets = [&](auto count) {
    return sum(casters_,
               [&](const Sender& one) -> uint64_t { return one.socket().counters().*count; });
  };
  const auto of_senders = [&](auto count) {
    return sum(casters_, [&](const Sender& one) -> uint64_t { return one.counters().*count; });
  };
  const auto received = [&](auto count) {
    return sum(sockets_,
               [&](const ReceiveSocket& one) -> uint64_t { return one.counters().*count; });
  };
  using Sent = SendSocket::SendCounters;
  using Senders = Sender::SenderCounters;
  using Received = ReceiveSocket::DatagramCounters;
  return {{"udp_sent_datagrams", of_sockets(&Sent::datagrams)},
          {"udp_sent_bytes", of_sockets(&Sent::bytes)},
          {"udp_send_calls", of_sockets(&Sent::calls)},
          {"udp_send_refused", of_sockets(&Sent::refused)},
          {"udp_send_failures", of_senders(&Senders::failures)},
          {"udp_gso_sockets", sum(casters_, [](const Sender& one) { return one.socket().gso(); })},
          {"udp_credit_waits", of_senders(&Senders::waits)},
          {"udp_credit_give_ups", of_senders(&Senders::give_ups)},
          {"udp_received_datagrams", received(&Received::datagrams)},
          {"udp_received_bytes", received(&Received::bytes)},
          {"udp_receive_calls", received(&Received::calls)},
          {"udp_receive_runs", received(&Received::runs)},
          {"udp_receive_failures", receive_failures_},
          {"udp_receive_placed",
           sum(receive_paths_,
               [](const ReceivePath& one) -> uint64_t { return one.counters().placed; })},
          {"udp_receive_dropped",
           sum(sockets_, [](const ReceiveSocket& one) { return one.dropped(); })},
          {"udp_gro_sockets", sum(sockets_, [](const ReceiveSocket& one) { return one.gro(); })},
          {"udp_receive_buffer_bytes",
           sum(sockets_, [](const ReceiveSocket& one) { return one.buffer_bytes(); })},
          {"tcp_connections", peers_->counters().connections},
          {"tcp_strangers", peers_->counters().strangers}};
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
