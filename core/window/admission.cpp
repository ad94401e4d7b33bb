#include "core/window/admission.h"

#include <poll.h>

#include <algorithm>
#include <cerrno>

#include "core/base/error.h"

namespace offcore {
namespace {

constexpr int64_t kStepNs = 50'000'000;
constexpr int64_t kStrangerNs = 5'000'000'000;  // to prove to be a rank
constexpr int kAcceptsMax = 64;                 // a step

}  // namespace

Reception::Guest& Reception::seat(Descriptor socket, int door) {
  guests_.push_back({.connection = Connection(std::move(socket), said_bytes_max_), .door = door});
  return guests_.back();
}

void Reception::step(const Deadline& deadline) {
  std::vector<pollfd> entries;
  for (const int door : doors_) entries.push_back({.fd = door, .events = POLLIN, .revents = 0});
  for (const Guest& guest : guests_) {
    entries.push_back({.fd = guest.connection.fd(), .events = POLLIN, .revents = 0});
  }
  const int64_t wait_ns = std::min(deadline.nap_ns(), kStepNs);
  const int ready = poll(entries.data(), entries.size(), static_cast<int>(wait_ns / 1'000'000 + 1));
  deadline.listen();
  if (ready > 0) {
    // Those who have hung up go first, so that their ranks are free for newcomers.
    std::vector<std::pair<Guest*, ConnectionStatus>> talking;
    size_t at = doors_.size();
    for (Guest& guest : guests_) {
      if (entries[at++].revents != 0) talking.emplace_back(&guest, guest.connection.receive());
    }
    std::stable_partition(talking.begin(), talking.end(),
                          [](const auto& one) { return one.second != ConnectionStatus::ok; });
    for (const auto& [guest, status] : talking) attend(*guest, status);
    for (size_t door = 0; door < doors_.size(); ++door) {
      if (entries[door].revents != 0) admit(doors_[door]);
    }
  }
  const int64_t patient_ns = now_ns() - kStrangerNs;
  for (Guest& guest : guests_) guest.gone |= guest.stranger && guest.since_ns < patient_ns;
  std::erase_if(guests_, [](const Guest& guest) { return guest.gone; });
}

// What it said before it hung up counts.
void Reception::attend(Guest& guest, ConnectionStatus status) {
  ConnectionStatus frames = ConnectionStatus::ok;
  while (!guest.gone) {
    const std::optional<Frame> frame = guest.connection.next(frames);
    if (!frame) break;
    hear(guest, *frame);
  }
  if (guest.gone || (status == ConnectionStatus::ok && frames == ConnectionStatus::ok)) return;
  lose(guest);
  guest.gone = true;
}

void Reception::admit(int door) {
  for (int i = 0; i < kAcceptsMax; ++i) {
    Descriptor socket = accept_from(door);
    if (!socket) {
      const bool full = errno == EMFILE || errno == ENFILE;
      if (full && !turn_out_oldest()) fail_errno(Code::driver, "cannot accept");
      return;
    }
    if (!admits(socket.get(), door)) continue;
    const auto strangers =
        std::ranges::count_if(guests_, [](const Guest& guest) { return guest.stranger; });
    if (static_cast<size_t>(strangers) >= strangers_max_) turn_out_oldest();
    seat(std::move(socket), door);
  }
}

bool Reception::turn_out_oldest() {
  const auto oldest =
      std::ranges::find_if(guests_, [](const Guest& guest) { return guest.stranger; });
  if (oldest == guests_.end()) return false;
  guests_.erase(oldest);
  return true;
}

}  // namespace offcore
