#include "core/window/window.h"

#include <algorithm>
#include <exception>
#include <utility>

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

// A window's shares, and whether they lie at a constant stride.
struct SharedOut {
  std::vector<Share> shares;
  bool strided = true;
};

// What a rank offers the others of its share.
struct Offer {
  uint64_t bytes = 0;
  std::string report;
  std::string layout = {};  // of memory that others have allocated
  uint32_t parts = 0;       // descriptors to come
};

std::string packed(const Offer& offer) {
  return Packer()
      .number(offer.bytes)
      .text(offer.report)
      .text(offer.layout)
      .number(offer.parts)
      .bytes();
}

Offer unpacked(std::string_view bytes) {
  Unpacker unpacker(bytes);
  Offer offer;
  offer.bytes = unpacker.number<uint64_t>();
  offer.report = unpacker.text();
  offer.layout = unpacker.text();
  offer.parts = unpacker.number<uint32_t>();
  return offer;
}

// The parts of memory that others have allocated are many: they go round one after the other. What
// the last ones failed by is the result; before, all ranks hear of it in the next round.
std::optional<Error> import_parts(ForeignMemory& foreign, Rendezvous& rendezvous,
                                  std::vector<Share>& shares, const std::vector<Offer>& offers,
                                  std::optional<Error> error, const Deadline& deadline) {
  const Rank self = rendezvous.rank();
  uint32_t most = 0;
  for (const Offer& offer : offers) most = std::max(most, offer.parts);
  for (uint32_t part = 0; part < most; ++part) {
    Descriptor own;
    if (!error && part < offers[self].parts) {
      error = attempt([&] { own = shares[self].held->export_part(part); });
    }
    std::vector<Parcel> parcels =
        rendezvous.exchange("window part", report(error), own.get(), deadline);
    std::vector<std::string_view> reports;
    for (const Parcel& parcel : parcels) reports.push_back(parcel.blob);
    agree(reports);
    error = attempt([&] {
      for (Rank rank = 0; rank < shares.size(); ++rank) {
        if (rank == self || part >= offers[rank].parts) continue;
        foreign.import_part(shares[rank], std::move(parcels[rank].fd));
      }
    });
  }
  return error;
}

// `take`: makes this rank's share. `foreign`: null for memory that the backend allocates.
template <typename Take>
SharedOut share_all(Memory& memory, ForeignMemory* foreign, Rendezvous& rendezvous, uint64_t bytes,
                    const Take& take, const Deadline& deadline) {
  const Rank self = rendezvous.rank();
  const Rank ranks = rendezvous.ranks();
  SharedOut out{.shares = std::vector<Share>(ranks)};
  std::vector<Share>& shares = out.shares;
  Offer offer{.bytes = bytes};
  std::optional<Error> error = attempt([&] {
    shares[self] = take(self);
    if (const auto& held = shares[self].held) {
      offer.layout = held->layout();
      offer.parts = held->parts();
    } else if (shares[self].fd < 0 && ranks > 1) {
      shares[self] = {};
      fail(Code::unsupported, "this backend's memory cannot be mapped by another process: ",
           "run all ranks in one process, or use backend host");
    }
  });
  offer.report = report(error);
  std::vector<Parcel> parcels =
      rendezvous.exchange("window", packed(offer), shares[self].fd, deadline);
  std::vector<Offer> offers;
  std::vector<uint64_t> sizes;
  std::vector<std::string_view> reports;
  for (const Parcel& parcel : parcels) offers.push_back(unpacked(parcel.blob));
  for (const Offer& theirs : offers) {
    sizes.push_back(theirs.bytes);
    reports.push_back(theirs.report);
  }
  agree(reports);
  check_sizes(sizes);
  error = attempt([&] {
    for (Rank rank = 0; rank < ranks; ++rank) {
      if (rank == self) continue;
      shares[rank] = foreign != nullptr ? foreign->import_held(rank, bytes, offers[rank].layout)
                                        : memory.import(rank, bytes, parcels[rank].fd.release());
    }
  });
  if (foreign != nullptr) {
    error = import_parts(*foreign, rendezvous, shares, offers, std::move(error), deadline);
  }
  if (!error) error = attempt([&] { out.strided = memory.map(shares); });
  const std::vector<std::string> imported =
      rendezvous.all_gather_bytes("window imported", report(error), deadline);
  agree({imported.begin(), imported.end()});
  return out;
}

template <typename Take>
SharedOut share_out(Memory& memory, ForeignMemory* foreign, Rendezvous* rendezvous, Rank ranks,
                    uint64_t bytes, const Take& take, const Deadline& deadline) {
  if (rendezvous != nullptr && rendezvous->ranks() != ranks) {
    fail(Code::invalid, "a window of ", ranks, " ranks needs a rendezvous of as many, not of ",
         rendezvous->ranks());
  }
  if (rendezvous != nullptr) return share_all(memory, foreign, *rendezvous, bytes, take, deadline);
  SharedOut out;
  for (Rank rank = 0; rank < ranks; ++rank) out.shares.push_back(take(rank));
  out.strided = memory.map(out.shares);
  return out;
}

}  // namespace

std::shared_ptr<Window> Window::create(Memory& memory, Rendezvous* rendezvous, Rank ranks,
                                       uint64_t bytes, const Deadline& deadline) {
  const auto take = [&](Rank rank) { return memory.allocate(rank, bytes); };
  SharedOut out = share_out(memory, nullptr, rendezvous, ranks, bytes, take, deadline);
  return owned_by_process(std::unique_ptr<Window>(
      new Window(bytes, std::move(out.shares), memory.host_visible(), out.strided)));
}

std::shared_ptr<Window> Window::hold(Backend& backend, Rendezvous* rendezvous, Rank ranks,
                                     const std::vector<GivenMemory>& given,
                                     const std::shared_ptr<void>& keep, const Deadline& deadline) {
  ForeignMemory* foreign = backend.capabilities().foreign_memory;
  if (foreign == nullptr) {
    fail(Code::unsupported,
         "only backend cuda registers memory that others have allocated: take "
         "that of empty() or window()");
  }
  if (rendezvous == nullptr) {
    std::vector<uint64_t> sizes;
    for (const GivenMemory& one : given) sizes.push_back(one.bytes);
    check_sizes(sizes);
  }
  const auto take = [&](Rank rank) {
    const GivenMemory& own = given[rendezvous == nullptr ? rank : 0];
    if (!own.refusal.empty()) fail(Code::invalid, own.refusal);
    return foreign->hold(rank, own.data, own.bytes, keep);
  };
  const uint64_t bytes = given[0].bytes;
  SharedOut out = share_out(backend, foreign, rendezvous, ranks, bytes, take, deadline);
  return owned_by_process(std::unique_ptr<Window>(
      new Window(bytes, std::move(out.shares), backend.host_visible(), out.strided)));
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
    fail(Code::unsupported, "phantom memory has no bytes to read or write: leave phantom out");
  }
  if (!host_visible_ && share.port == nullptr) {
    fail(Code::invalid, "rank ", rank, " is not local: only its own process can access its memory");
  }
  return share;
}

std::optional<uint64_t> Window::contains(Rank rank, const void* pointer, uint64_t bytes) const {
  const Share& share = shares_[rank];
  const std::byte* first = share.held != nullptr ? share.held->address() : share.data;
  const auto begin = reinterpret_cast<uintptr_t>(first);
  const auto at = reinterpret_cast<uintptr_t>(pointer);
  if (begin == 0 || at < begin || at - begin > bytes_ || bytes > bytes_ - (at - begin)) {
    return std::nullopt;
  }
  const uint64_t offset = at - begin;
  if (share.held != nullptr && !share.held->intact(offset, bytes)) return std::nullopt;
  return offset;
}

}  // namespace offcore
