#include "core/window/window.h"

#include <exception>

#include "core/base/error.h"
#include "core/window/socket.h"

namespace offcore {
namespace {

// What a rank tells the others about its part: nothing, or the error that stopped it.
std::string report(const std::optional<Error>& error) {
  if (!error) return {};
  return Packer().number(static_cast<uint8_t>(error->code())).text(error->message()).bytes();
}

// Throws the first rank's error, the same at every rank.
void agree(const std::vector<std::string_view>& reports) {
  for (size_t rank = 0; rank < reports.size(); ++rank) {
    if (reports[rank].empty()) continue;
    Unpacker unpacker(reports[rank]);
    const auto code = static_cast<Code>(unpacker.number<uint8_t>());
    const std::string message(unpacker.text());
    fail(unpacker.ok() ? code : Code::peer, "rank ", rank, ": ", message);
  }
}

template <typename Step>
std::optional<Error> attempt(const Step& step) {
  try {
    step();
  } catch (const Error& error) {
    return error;
  } catch (const std::exception& error) {
    return Error(Code::driver, error.what());
  }
  return std::nullopt;
}

void check_sizes(const std::vector<uint64_t>& sizes) {
  for (size_t rank = 1; rank < sizes.size(); ++rank) {
    if (sizes[rank] == sizes[0]) continue;
    fail(Code::mismatch, "ranks create one window with different sizes: rank 0 of ", sizes[0],
         " bytes, rank ", rank, " of ", sizes[rank], " bytes");
  }
}

std::vector<Share> share_all(Memory& memory, Rendezvous& rendezvous, uint64_t bytes,
                             const Deadline& deadline) {
  const Rank self = rendezvous.rank();
  const Rank ranks = rendezvous.ranks();
  std::vector<Share> shares(ranks);
  std::optional<Error> error = attempt([&] {
    shares[self] = memory.allocate(self, bytes);
    if (shares[self].fd >= 0 || ranks == 1) return;
    shares[self] = {};
    fail(Code::unsupported, "this backend's memory cannot be mapped by another process: ",
         "run all ranks in one process, or use backend host");
  });
  const std::string offer = Packer().number(bytes).text(report(error)).bytes();
  std::vector<Parcel> parcels = rendezvous.exchange("window", offer, shares[self].fd, deadline);
  std::vector<uint64_t> sizes;
  std::vector<std::string_view> reports;
  for (const Parcel& parcel : parcels) {
    Unpacker unpacker(parcel.blob);
    sizes.push_back(unpacker.number<uint64_t>());
    reports.push_back(unpacker.text());
  }
  check_sizes(sizes);
  agree(reports);
  error = attempt([&] {
    for (Rank rank = 0; rank < ranks; ++rank) {
      if (rank != self) shares[rank] = memory.import(rank, bytes, parcels[rank].fd.release());
    }
    memory.map(shares);
  });
  const std::vector<std::string> imported =
      rendezvous.all_gather_bytes("window imported", report(error), deadline);
  agree({imported.begin(), imported.end()});
  return shares;
}

}  // namespace

std::shared_ptr<Window> Window::create(Memory& memory, Rendezvous* rendezvous, Rank ranks,
                                       uint64_t bytes, const Deadline& deadline) {
  std::vector<Share> shares;
  if (rendezvous != nullptr) {
    if (rendezvous->ranks() != ranks) {
      fail(Code::invalid, "a window of ", ranks, " ranks needs a rendezvous of as many, not of ",
           rendezvous->ranks());
    }
    shares = share_all(memory, *rendezvous, bytes, deadline);
  } else {
    for (Rank rank = 0; rank < ranks; ++rank) shares.push_back(memory.allocate(rank, bytes));
    memory.map(shares);
  }
  return owned_by_process(
      std::unique_ptr<Window>(new Window(bytes, std::move(shares), memory.host_visible())));
}

void Window::read(void* dst, Rank rank, uint64_t offset, uint64_t bytes) const {
  const Share& share = reachable(rank, offset, bytes);
  if (bytes > 0) share.copy(dst, share.data + offset, bytes);
}

void Window::write(Rank rank, uint64_t offset, const void* src, uint64_t bytes) const {
  const Share& share = reachable(rank, offset, bytes);
  if (bytes > 0) share.copy(share.data + offset, src, bytes);
}

const Share& Window::reachable(Rank rank, uint64_t offset, uint64_t bytes) const {
  if (rank >= ranks()) fail(Code::invalid, "rank ", rank, " is not in this window");
  const Share& share = shares_[rank];
  if (offset > bytes_ || bytes > bytes_ - offset) {
    fail(Code::invalid, "bytes ", offset, "+", bytes, " lie outside a window of ", bytes_);
  }
  if (share.data == nullptr) {
    fail(Code::unsupported, "phantom memory has sizes but no bytes");
  }
  if (!host_visible_ && share.port == nullptr) {
    fail(Code::invalid, "rank ", rank, " is not local: only its own process can access its memory");
  }
  return share;
}

std::optional<uint64_t> Window::contains(Rank rank, const void* pointer, uint64_t bytes) const {
  const auto begin = reinterpret_cast<uintptr_t>(shares_[rank].data);
  const auto at = reinterpret_cast<uintptr_t>(pointer);
  if (begin == 0 || at < begin || at - begin > bytes_ || bytes > bytes_ - (at - begin)) {
    return std::nullopt;
  }
  return at - begin;
}

}  // namespace offcore
