#include "core/window/meeting.h"

#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>

#include <algorithm>
#include <optional>
#include <thread>

#include "core/base/error.h"
#include "core/window/socket.h"

namespace offcore {
namespace {

constexpr uint64_t kPayloadBytesMax = 256 << 10;
constexpr size_t kStrangersMax = 256;  // connections that have not said who they are
constexpr int64_t kRetryNs = 10'000'000;
constexpr int64_t kReplyNs = 1'000'000'000;  // a small frame into a fresh socket: never this long

using Status = Connection::Status;

uint64_t random_key() {
  uint64_t key = 0;
  if (getrandom(&key, sizeof(key), 0) != sizeof(key)) {
    fail_errno(Code::driver, "cannot get random bytes");
  }
  return key;
}

[[noreturn]] void fail_missing(const std::vector<Rank>& missing, const std::string& store,
                               int64_t wait_ns, const std::string& reason) {
  fail(Code::timeout, rank_list(missing), " did not arrive at ", store, " within ",
       shown_s(wait_ns), " s", reason.empty() ? "" : " (" + reason + ")");
}

// Rank 0's side.
class Store {
 public:
  Store(const std::string& address, Rank ranks, const std::string& name)
      : address_(address),
        ranks_(ranks),
        listener_(listen_at(address)),
        roster_{.key = random_key(), .names = std::vector<std::string>(ranks)},
        came_(ranks) {
    roster_.names[0] = name;
  }

  Roster serve(const Deadline& deadline) {
    const int64_t wait_ns = deadline.left_ns();
    try {
      while (!missing().empty()) {
        if (deadline.stopped()) fail(Code::cancelled, "rank 0 was interrupted at ", address_);
        if (deadline.passed()) give_up(wait_ns);
        step(deadline);
      }
    } catch (const Error& error) {
      const std::string refusal =
          Packer().number(static_cast<uint8_t>(error.code())).text(error.message()).bytes();
      for (Guest& guest : guests_) send(guest, FrameKind::refusal, refusal);
      throw;
    }
    return roster_;
  }

 private:
  struct Guest {
    Connection connection;
    std::optional<Rank> rank;
    bool gone = false;
  };

  std::vector<Rank> missing() const {
    std::vector<Rank> missing;
    for (Rank rank = 0; rank < ranks_; ++rank) {
      if (roster_.names[rank].empty()) missing.push_back(rank);
    }
    return missing;
  }

  // Those who came and gave up a moment earlier are not the ones to look for.
  [[noreturn]] void give_up(int64_t wait_ns) const {
    std::vector<Rank> never = missing();
    std::erase_if(never, [this](Rank rank) { return came_[rank]; });
    if (!never.empty()) fail_missing(never, address_, wait_ns, "");
    fail(Code::timeout, rank_list(missing()), " came to ", address_, " but left before all had");
  }

  void send(Guest& guest, FrameKind kind, const std::string& payload) {
    if (guest.connection.send(kind, payload, -1, Deadline::after_ns(kReplyNs)) != Status::ok) {
      dismiss(guest);
    }
  }

  // Its rank may come again: a process that failed early and was started anew.
  void dismiss(Guest& guest) {
    guest.gone = true;
    if (guest.rank) roster_.names[*guest.rank].clear();
    guest.rank.reset();
  }

  void announce() {
    const bool complete = missing().empty();
    Packer packer;
    packer.number(roster_.key).number(ranks_).number(static_cast<uint8_t>(complete));
    for (const std::string& name : roster_.names) packer.text(name);
    for (Guest& guest : guests_) {
      if (guest.rank) send(guest, FrameKind::roster, packer.bytes());
    }
  }

  void hear(Guest& guest, const Frame& frame) {
    Unpacker unpacker(frame.payload);
    const auto rank = unpacker.number<Rank>();
    const auto ranks = unpacker.number<Rank>();
    const std::string name(unpacker.text());
    if (frame.kind != FrameKind::hello || !unpacker.ok() || name.empty() || guest.rank) {
      return dismiss(guest);
    }
    guest.rank = rank;
    if (ranks != ranks_) {
      guest.rank.reset();  // it has no place, but hears why
      fail(Code::mismatch, "rank ", rank, " expects ", ranks, " ranks at ", address_,
           ", rank 0 expects ", ranks_, ": give every rank the same world size");
    }
    const bool out_of_range = rank == 0 || rank >= ranks_;
    if (out_of_range || !roster_.names[rank].empty()) {
      guest.rank.reset();
      fail(Code::invalid, "two processes claim to be rank ", rank, " at ", address_,
           ": give every process its own rank");
    }
    roster_.names[rank] = name;
    came_[rank] = true;
    announce();
  }

  void step(const Deadline& deadline) {
    std::vector<pollfd> entries{{.fd = listener_.get(), .events = POLLIN, .revents = 0}};
    for (const Guest& guest : guests_) {
      entries.push_back({.fd = guest.connection.fd(), .events = POLLIN, .revents = 0});
    }
    const auto nap_ms = static_cast<int>(deadline.nap_ns() / 1'000'000 + 1);
    const int count = poll(entries.data(), entries.size(), nap_ms);
    deadline.listen();
    if (count <= 0) return;
    // Those who have hung up go first, so that their ranks are free for newcomers.
    std::vector<Status> states(guests_.size(), Status::ok);
    for (size_t i = 0; i < guests_.size(); ++i) {
      if (entries[i + 1].revents == 0) continue;
      states[i] = guests_[i].connection.receive();
      if (states[i] != Status::ok) dismiss(guests_[i]);
    }
    for (size_t i = 0; i < states.size(); ++i) {
      Status status = states[i];
      if (status != Status::ok) continue;
      if (const std::optional<Frame> frame = guests_[i].connection.next(status)) {
        hear(guests_[i], *frame);
      } else if (status == Status::garbage) {
        dismiss(guests_[i]);
      }
    }
    std::erase_if(guests_, [](const Guest& guest) { return guest.gone; });
    if (entries[0].revents != 0) admit();
  }

  void admit() {
    Descriptor accepted = accept_from(listener_.get(), Deadline::after_ns(0));
    if (!accepted) return;
    const auto strangers =
        std::count_if(guests_.begin(), guests_.end(), [](const Guest& g) { return !g.rank; });
    if (static_cast<size_t>(strangers) >= kStrangersMax) {
      guests_.erase(std::find_if(guests_.begin(), guests_.end(),
                                 [](const Guest& guest) { return !guest.rank; }));
    }
    guests_.push_back({.connection = Connection(std::move(accepted), kPayloadBytesMax),
                       .rank = std::nullopt,
                       .gone = false});
  }

  std::string address_;
  Rank ranks_;
  Descriptor listener_;
  Roster roster_;
  std::vector<bool> came_;
  std::vector<Guest> guests_;
};

// The other ranks' side.
class Visitor {
 public:
  Visitor(const std::string& address, Rank rank, Rank ranks, const std::string& name)
      : address_(address), rank_(rank), ranks_(ranks), name_(name) {}

  Roster visit(const Deadline& deadline) {
    const int64_t wait_ns = deadline.left_ns();
    while (true) {
      Descriptor socket = connect_to(address_, deadline, reason_);
      if (socket) {
        if (std::optional<Roster> roster = talk(std::move(socket), deadline)) return *roster;
      }
      // Silence from somebody who did answer means that others are missing.
      if (deadline.passed()) {
        fail_missing(missing_.empty() ? std::vector<Rank>{0} : missing_, address_, wait_ns,
                     reason_);
      }
      std::this_thread::sleep_for(std::chrono::nanoseconds(std::min(kRetryNs, deadline.left_ns())));
      deadline.listen();
    }
  }

 private:
  // Nothing: late, or the store of an earlier meeting hung up before it knew us, so try again.
  std::optional<Roster> talk(Descriptor socket, const Deadline& deadline) {
    Connection connection(std::move(socket), kPayloadBytesMax);
    const std::string hello = Packer().number(rank_).number(ranks_).text(name_).bytes();
    if (connection.send(FrameKind::hello, hello, -1, deadline) != Status::ok) return {};
    bool known = false;
    while (true) {
      Frame frame;
      switch (connection.wait_frame(frame, deadline)) {
        case Status::ok:
          break;
        case Status::late:
          if (!known) reason_ = "whoever listens there does not answer";
          return {};
        case Status::closed:
          if (known) fail(Code::peer, "rank 0 died while the ranks met at ", address_);
          reason_ = "whoever listens there hangs up";
          return {};
        case Status::garbage:
          fail(Code::driver, "what listens at ", address_, " is no offcore rank 0: choose another ",
               "port");
      }
      known = true;
      reason_.clear();
      if (std::optional<Roster> roster = hear(frame)) return roster;
    }
  }

  std::optional<Roster> hear(const Frame& frame) {
    Unpacker unpacker(frame.payload);
    if (frame.kind == FrameKind::refusal) {
      const auto code = static_cast<Code>(unpacker.number<uint8_t>());
      const std::string message(unpacker.text());
      if (unpacker.ok() && code <= Code::peer) throw Error(code, message);
    }
    Roster roster;
    roster.key = unpacker.number<uint64_t>();
    const auto ranks = unpacker.number<Rank>();
    const bool complete = unpacker.number<uint8_t>() != 0;
    if (frame.kind != FrameKind::roster || !unpacker.ok() || ranks != ranks_) {
      fail(Code::driver, "rank 0 at ", address_, " speaks another version: use one everywhere");
    }
    missing_.clear();
    for (Rank rank = 0; rank < ranks_; ++rank) {
      roster.names.emplace_back(unpacker.text());
      if (roster.names.back().empty()) missing_.push_back(rank);
    }
    return complete && unpacker.ok() ? std::optional(roster) : std::nullopt;
  }

  std::string address_;
  Rank rank_;
  Rank ranks_;
  std::string name_;
  std::string reason_;
  std::vector<Rank> missing_;
};

}  // namespace

std::string rank_list(const std::vector<Rank>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) text += cat(i == 0 ? "" : ", ", ranks[i]);
  return text;
}

Roster meet(const std::string& store, Rank rank, Rank ranks, const std::string& name,
            const Deadline& deadline) {
  if (rank == 0) return Store(store, ranks, name).serve(deadline);
  return Visitor(store, rank, ranks, name).visit(deadline);
}

}  // namespace offcore
