#include "core/window/address.h"

#include <sys/socket.h>

#include <algorithm>
#include <optional>
#include <thread>

#include "core/base/env.h"
#include "core/base/error.h"
#include "core/base/place.h"
#include "core/window/admission.h"
#include "core/window/bootstrap.h"
#include "core/window/proof.h"
#include "core/window/socket.h"

namespace offcore {
namespace {

using Cards = std::vector<std::string>;

constexpr uint64_t kSaidBytesMax = kCardBytesMax + 256;  // a hello, the longest that a rank says
constexpr int64_t kRetryNs = 10'000'000;
constexpr int64_t kReplyNs = 1'000'000'000;  // a small frame into a fresh socket: never this long
constexpr int64_t kProgressNs = 100'000'000;

[[noreturn]] void fail_missing(const std::vector<uint32_t>& missing, const std::string& address,
                               const Deadline& deadline, const std::string& reason) {
  fail(Code::timeout, rank_list(missing), " did not arrive at ", address, " within ",
       shown_s(deadline.wait_ns()), " s", reason.empty() ? "" : " (" + reason + ")",
       ": has every rank been started, with this address?");
}

// Rank 0's side.
class Store final : Reception {
 public:
  Store(const std::string& address, uint32_t ranks, const std::string& card)
      : Reception(kSaidBytesMax, ranks),
        address_(address),
        ranks_(ranks),
        secret_(env("OFFCORE_JOB_SECRET")),
        tcp_(listen_at(address)),
        cards_(ranks),
        came_(ranks) {
    cards_[0] = card;
    came_[0] = true;
    open(tcp_.get());
    if (!secret_.empty()) return;
    unix_ = listen_unix(unix_name_);
    open(unix_.get());
  }

  Cards serve(const Deadline& deadline) {
    try {
      while (!missing().empty()) {
        if (deadline.stopped()) fail(Code::cancelled, "rank 0 was interrupted at ", address_);
        if (deadline.passed()) give_up(deadline);
        step(deadline);
        tell_progress();
      }
      hand_out();
    } catch (const Error& error) {
      const std::string refusal =
          Packer().number(static_cast<uint8_t>(error.code())).text(error.message()).bytes();
      for (Guest& guest : guests_) {
        if (!guest.stranger) send(guest, FrameKind::refusal, refusal);
      }
      throw;
    }
    Cards cards;
    for (std::optional<std::string>& card : cards_) cards.push_back(std::move(*card));
    return cards;
  }

 private:
  std::vector<uint32_t> missing() const {
    std::vector<uint32_t> missing;
    for (uint32_t rank = 0; rank < ranks_; ++rank) {
      if (!cards_[rank]) missing.push_back(rank);
    }
    return missing;
  }

  // Those who came and gave up a moment earlier are not the ones to look for.
  std::vector<uint32_t> never_came() const {
    std::vector<uint32_t> never = missing();
    std::erase_if(never, [this](uint32_t rank) { return came_[rank]; });
    return never;
  }

  [[noreturn]] void give_up(const Deadline& deadline) const {
    const std::vector<uint32_t> never = never_came();
    if (!never.empty()) fail_missing(never, address_, deadline, turned_away_);
    fail(Code::timeout, rank_list(missing()), " reached ", address_,
         " but left before all ranks had");
  }

  bool send(Guest& guest, FrameKind kind, const std::string& payload) {
    const Deadline deadline = Deadline::after_ns(kReplyNs);
    if (guest.connection.send(kind, guest.seal->closed(kind, payload), -1, deadline) ==
        ConnectionStatus::ok) {
      return true;
    }
    lose(guest);
    return false;
  }

  bool admits(int fd, int door) override {
    if (door == tcp_.get()) return true;
    const std::string stranger = stranger_at(fd, secret_);
    if (!stranger.empty()) turned_away_ = "turned away: " + stranger;
    return stranger.empty();
  }

  // Its rank may come again: a process that failed early and was started anew.
  void lose(Guest& guest) override {
    guest.gone = true;
    if (!guest.rank) return;
    cards_[*guest.rank].reset();
    guest.rank.reset();
    news_ = true;
  }

  void hear(Guest& guest, const Frame& frame) override {
    if (!guest.seal && frame.kind == FrameKind::knock) return challenge(guest, frame);
    if (!guest.seal || guest.rank || frame.kind != FrameKind::hello) return lose(guest);
    const std::optional<std::string_view> hello = guest.seal->opened(frame);
    if (!hello) {
      turned_away_ = "turned away: a process that has another OFFCORE_JOB_SECRET";
      return lose(guest);
    }
    enter(guest, *hello);
  }

  void challenge(Guest& guest, const Frame& frame) {
    Unpacker unpacker(frame.payload);
    const std::string nonce(unpacker.text());
    const auto place = unpacker.number<uint64_t>();
    const bool secret = unpacker.number<uint8_t>() != 0;
    if (!unpacker.ok() || nonce.size() != Seal::kNonceBytes) return lose(guest);
    if (secret != !secret_.empty()) {
      turned_away_ = cat("turned away: a process with", secret ? "" : "out",
                         " OFFCORE_JOB_SECRET, which rank 0 has", secret ? " not" : "");
    } else if (!secret && place != place_) {
      turned_away_ =
          "turned away: a process on another host or in another network namespace, "
          "where ranks need an OFFCORE_JOB_SECRET";
    }
    const std::string own_nonce = random_bytes(Seal::kNonceBytes);
    guest.seal = Seal(secret_, nonce + own_nonce);
    const bool asked_in = secret_.empty() && guest.door == tcp_.get();
    const auto has_secret = static_cast<uint8_t>(!secret_.empty());
    send(guest, FrameKind::challenge,
         Packer()
             .text(own_nonce)
             .number(place_)
             .number(has_secret)
             .text(asked_in ? unix_name_ : "")
             .bytes());
    guest.gone |= asked_in;
  }

  void enter(Guest& guest, std::string_view hello) {
    Unpacker unpacker(hello);
    const auto rank = unpacker.number<uint32_t>();
    const auto ranks = unpacker.number<uint32_t>();
    const auto port = unpacker.number<uint16_t>();
    const std::string card(unpacker.text());
    // By a Unix socket whoever holds a port can send the ranks of one job to another's store.
    const bool astray = guest.door == unix_.get() && port != port_of(address_);
    if (!unpacker.ok() || astray) return lose(guest);
    guest.stranger = false;  // so it hears why, if it gets no place
    if (ranks != ranks_) {
      fail(Code::mismatch, "rank ", rank, " expects ", ranks, " ranks at ", address_,
           ", rank 0 expects ", ranks_, ": give every rank the same world size");
    }
    if (rank >= ranks_ || cards_[rank]) {
      fail(Code::invalid, "two processes claim to be rank ", rank, " at ", address_,
           ": give every process its own rank");
    }
    guest.rank = rank;
    cards_[rank] = card;
    came_[rank] = true;
    news_ = true;
    send(guest, FrameKind::progress, progress());
  }

  std::string progress() const {
    std::vector<uint32_t> ranks = never_came();
    if (ranks.empty()) ranks = missing();
    Packer packer;
    packer.number(static_cast<uint32_t>(ranks.size()));
    for (const uint32_t rank : ranks) packer.number(rank);
    return packer.bytes();
  }

  // Not at each arrival: there may be hundreds, and each would be told of each.
  void tell_progress() {
    if (!news_ || now_ns() - told_ns_ < kProgressNs || missing().empty()) return;
    news_ = false;
    told_ns_ = now_ns();
    const std::string said = progress();
    for (Guest& guest : guests_) {
      if (guest.rank) send(guest, FrameKind::progress, said);
    }
  }

  void hand_out() {
    Packer packer;
    for (const std::optional<std::string>& card : cards_) packer.text(*card);
    for (Guest& guest : guests_) {
      const std::optional<uint32_t> rank = guest.rank;
      if (rank && !send(guest, FrameKind::roster, packer.bytes())) {
        fail(Code::peer, "rank ", *rank, " died while the ranks met at ", address_);
      }
    }
  }

  const std::string address_;
  const uint32_t ranks_;
  const std::string secret_;
  const uint64_t place_ = place_here();
  const Descriptor tcp_;  // lets anybody in
  Descriptor unix_;       // lets this user's processes in; none where there is a secret
  std::string unix_name_;
  std::vector<std::optional<std::string>> cards_;
  std::vector<bool> came_;
  std::string turned_away_;  // who last
  bool news_ = false;
  int64_t told_ns_ = 0;
};

// The other ranks' side.
class Visitor {
 public:
  Visitor(const std::string& address, uint32_t rank, uint32_t ranks, const std::string& card)
      : address_(address),
        rank_(rank),
        ranks_(ranks),
        card_(card),
        secret_(env("OFFCORE_JOB_SECRET")) {}

  Cards visit(const Deadline& deadline) {
    while (true) {
      Descriptor socket = connect_to(address_, deadline, reason_);
      if (socket) {
        if (std::optional<Cards> cards = talk(std::move(socket), deadline)) return *cards;
      }
      // Silence from somebody who did answer means that others are missing.
      if (deadline.passed()) {
        fail_missing(missing_.empty() ? std::vector<uint32_t>{0} : missing_, address_, deadline,
                     reason_);
      }
      std::this_thread::sleep_for(std::chrono::nanoseconds(std::min(kRetryNs, deadline.left_ns())));
      deadline.listen();
    }
  }

 private:
  struct Challenge {
    Seal seal;
    std::string unix_name;
  };

  // Nothing: late, or the store of an earlier meeting hung up before it knew us, so try again.
  std::optional<Cards> talk(Descriptor socket, const Deadline& deadline) {
    Connection connection(std::move(socket), ranks_ * (kCardBytesMax + 4) + 4096);
    std::optional<Challenge> challenge = knock(connection, deadline);
    if (challenge && !challenge->unix_name.empty()) {
      Descriptor inside = connect_unix(challenge->unix_name, deadline);
      if (!inside) return {};
      const std::string stranger = stranger_at(inside.get(), secret_);
      if (!stranger.empty()) fail(Code::invalid, "at ", address_, " listens ", stranger);
      connection = Connection(std::move(inside), ranks_ * (kCardBytesMax + 4) + 4096);
      challenge = knock(connection, deadline);
    }
    if (!challenge) return {};
    const std::string hello =
        Packer().number(rank_).number(ranks_).number(port_of(address_)).text(card_).bytes();
    send(connection, FrameKind::hello, challenge->seal.closed(FrameKind::hello, hello), deadline);
    while (true) {
      Frame frame;
      if (!wait_for(connection, frame, deadline)) return {};
      const std::optional<std::string_view> payload = challenge->seal.opened(frame);
      if (!payload) fail_stranger();
      known_ = true;
      if (std::optional<Cards> cards = hear(frame.kind, *payload)) return cards;
    }
  }

  void send(Connection& connection, FrameKind kind, const std::string& payload,
            const Deadline& deadline) {
    connection.send(kind, payload, -1, deadline);  // the wait for the answer tells of a failure
  }

  std::optional<Challenge> knock(Connection& connection, const Deadline& deadline) {
    const std::string nonce = random_bytes(Seal::kNonceBytes);
    const auto has_secret = static_cast<uint8_t>(!secret_.empty());
    send(connection, FrameKind::knock,
         Packer().text(nonce).number(place_).number(has_secret).bytes(), deadline);
    Frame frame;
    if (!wait_for(connection, frame, deadline)) return {};
    Unpacker unpacker(frame.payload);
    const std::string their_nonce(unpacker.text());
    const auto place = unpacker.number<uint64_t>();
    const bool secret = unpacker.number<uint8_t>() != 0;
    const std::string unix_name(unpacker.text());
    if (frame.kind != FrameKind::challenge || !unpacker.ok()) {
      fail(Code::driver, "rank 0 at ", address_,
           " runs another version of offcore: install one version on all ranks");
    }
    if (secret != !secret_.empty()) {
      fail(Code::mismatch, "rank 0 at ", address_, " has ", secret ? "an" : "no",
           " OFFCORE_JOB_SECRET, rank ", rank_, " has ", secret ? "none" : "one",
           ": give all ranks the same");
    }
    if (!secret && place != place_) {
      fail(Code::invalid, "rank 0 at ", address_, " is on another host or in another network ",
           "namespace, so ranks need a secret to be recognised: set ",
           "OFFCORE_JOB_SECRET to the same random text at all ranks (docs/security.md)");
    }
    Seal seal(secret_, nonce + their_nonce);
    if (!seal.opened(frame)) fail_stranger();
    return Challenge{.seal = std::move(seal), .unix_name = unix_name};
  }

  // False: late, or hung up on.
  bool wait_for(Connection& connection, Frame& frame, const Deadline& deadline) {
    switch (connection.wait_frame(frame, deadline)) {
      case ConnectionStatus::ok:
        reason_.clear();
        return true;
      case ConnectionStatus::late:
        if (!known_) reason_ = "the server there does not answer";
        return false;
      case ConnectionStatus::closed:
        if (known_) fail(Code::peer, "rank 0 died while the ranks met at ", address_);
        reason_ = "the server there hangs up";
        return false;
      case ConnectionStatus::garbage:
        break;
    }
    fail(Code::driver, "the server at ", address_,
         " is not an offcore rank 0: choose another port");
  }

  [[noreturn]] void fail_stranger() const {
    fail(Code::mismatch, "the server at ", address_, " has another OFFCORE_JOB_SECRET than ",
         "rank ", rank_, ": give all ranks the same, and every job its own port");
  }

  std::optional<Cards> hear(FrameKind kind, std::string_view payload) {
    Unpacker unpacker(payload);
    if (kind == FrameKind::refusal) {
      const auto code = static_cast<Code>(unpacker.number<uint8_t>());
      const std::string message(unpacker.text());
      if (unpacker.ok() && code <= Code::peer) throw Error(code, message);
    }
    if (kind == FrameKind::progress) {
      missing_.resize(std::min(unpacker.number<uint32_t>(), ranks_));
      for (uint32_t& rank : missing_) rank = unpacker.number<uint32_t>();
      if (unpacker.ok()) return std::nullopt;
    }
    Cards cards;
    for (uint32_t rank = 0; rank < ranks_; ++rank) cards.emplace_back(unpacker.text());
    if (kind == FrameKind::roster && unpacker.ok()) return cards;
    fail(Code::driver, "rank 0 at ", address_,
         " runs another version of offcore: install one version on all ranks");
  }

  const std::string address_;
  const uint32_t rank_;
  const uint32_t ranks_;
  const std::string card_;
  const std::string secret_;
  const uint64_t place_ = place_here();
  std::string reason_;
  bool known_ = false;  // rank 0 has let us in
  std::vector<uint32_t> missing_;
};

}  // namespace

std::vector<std::string> all_gather_at(const std::string& address, uint32_t rank, uint32_t ranks,
                                       const std::string& card, const Deadline& deadline) {
  if (rank == 0) return Store(address, ranks, card).serve(deadline);
  return Visitor(address, rank, ranks, card).visit(deadline);
}

}  // namespace offcore
