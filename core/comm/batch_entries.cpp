// What is found out about a batch's entries before anything is planned.
#include <algorithm>
#include <limits>
#include <optional>
#include <set>

#include "core/backend/registry.h"
#include "core/base/error.h"
#include "core/comm/batch_executor.h"

namespace offcore {
namespace {

const char* kind_of(int32_t dst_home, int32_t src_home) {
  if (dst_home == kHostHome) return src_home == kHostHome ? "h2h" : "d2h";
  return src_home == kHostHome ? "h2d" : "d2d";
}

void check_place(uint64_t at, uint64_t bytes, const char* side, size_t index) {
  if (at == 0) fail(Code::invalid, "entry ", index, ": its ", side, " is null");
  if (bytes > UINT64_MAX - at) {
    fail(Code::invalid, "entry ", index, ": its ", side, " leaves all memory");
  }
}

// The lowest place and the end of all, of one memory.
struct Stretch {
  uint64_t begin = std::numeric_limits<uint64_t>::max();
  uint64_t end = 0;

  void add(uint64_t at, uint64_t bytes) {
    begin = std::min(begin, at);
    end = std::max(end, at + bytes);
  }
};

}  // namespace

void locate_on_gpus(BatchEntries& entries, int gpu) {
  const std::unique_ptr<PointerLookup> pointers = open_pointers(gpu);
  std::set<int> gpus;
  const size_t count = entries.sizes.size();
  entries.dst_homes.assign(count, kHostHome);
  entries.src_homes.assign(count, kHostHome);
  for (size_t i = 0; i < count; ++i) {
    if (entries.sizes[i] == 0) continue;
    check_place(entries.dsts[i], entries.sizes[i], "destination", i);
    check_place(entries.srcs[i], entries.sizes[i], "source", i);
    const int dst = pointers->home(entries.dsts[i], entries.sizes[i], "destination", i);
    const int src = pointers->home(entries.srcs[i], entries.sizes[i], "source", i);
    if (dst == kHostMemory && src == kHostMemory) {
      fail(
          Code::unsupported, "entry ", i, " goes from host memory to host memory, for which the ",
          "driver would make the caller wait: make a batch of such entries, with backend=\"host\"");
    }
    entries.dst_homes[i] = dst;
    entries.src_homes[i] = src;
    for (const int home : {dst, src}) {
      if (home != kHostMemory) gpus.insert(home);
    }
  }
  if (gpus.empty()) gpus.insert(gpu);
  entries.gpus.assign(gpus.begin(), gpus.end());
  entries.ranks = static_cast<Rank>(gpus.size());
  const auto rank_of = [&](int owner) {
    if (owner == kHostMemory) return kHostHome;
    const auto at = std::lower_bound(entries.gpus.begin(), entries.gpus.end(), owner);
    return static_cast<int32_t>(at - entries.gpus.begin());
  };
  for (auto* homes : {&entries.dst_homes, &entries.src_homes}) {
    for (int32_t& home : *homes) home = rank_of(home);
  }
  for (const auto& [begin, owner] : pointers->ranges())
    entries.seams.emplace_back(begin, rank_of(owner));
}

void check_reach_of_cpus(const BatchEntries& entries, const std::string& machine) {
  for (const auto& [places, side] :
       {std::pair(&entries.dsts, "destination"), std::pair(&entries.srcs, "source")}) {
    const std::optional<size_t> found = first_on_gpu(*places, entries.sizes);
    if (!found) continue;
    fail(Code::invalid, "entry ", *found, ": its ", side, " is memory of a GPU, which the CPUs ",
         "that copy for machine ", machine, " cannot access: leave out backend and machine");
  }
}

void check_kind(const BatchEntries& entries, const std::string& kind) {
  if (kind == "auto") return;
  if (kind != "h2d" && kind != "d2h" && kind != "d2d" && kind != "h2h") {
    fail(Code::invalid, "unknown kind '", kind, "': auto, h2d, d2h, d2d or h2h");
  }
  for (size_t i = 0; i < entries.sizes.size(); ++i) {
    const std::string_view own = kind_of(entries.dst_homes[i], entries.src_homes[i]);
    if (entries.sizes[i] == 0 || own == kind) continue;
    fail(Code::invalid, "entry ", i, " is ", own, ", not ", kind);
  }
}

Moves moves_of(const BatchEntries& entries, bool phantom, BatchBases& bases,
               std::vector<Slice>& seams) {
  std::vector<Stretch> device(entries.ranks);
  Stretch host;
  const size_t count = entries.sizes.size();
  const auto range_of = [&](int32_t home) -> Stretch& {
    return home == kHostHome ? host : device[static_cast<size_t>(home)];
  };
  for (size_t i = 0; i < count; ++i) {
    if (entries.sizes[i] == 0) continue;
    if (!phantom) {
      check_place(entries.dsts[i], entries.sizes[i], "destination", i);
      check_place(entries.srcs[i], entries.sizes[i], "source", i);
    }
    for (const int32_t home : {entries.dst_homes[i], entries.src_homes[i]}) {
      if (home == kHostHome || (home >= 0 && home < entries.ranks)) continue;
      fail(Code::invalid, "entry ", i, ": there is no rank ", home, " of ", entries.ranks);
    }
    range_of(entries.dst_homes[i]).add(entries.dsts[i], entries.sizes[i]);
    range_of(entries.src_homes[i]).add(entries.srcs[i], entries.sizes[i]);
  }
  uint64_t device_bytes = 0;
  for (Stretch& range : device) {
    if (range.end == 0 || phantom) range.begin = 0;
    bases.device.push_back(range.begin);
    device_bytes = std::max(device_bytes, range.end - range.begin);
  }
  if (host.end == 0 || phantom) host.begin = 0;
  bases.host = host.begin;
  std::vector<Buffer> buffers{
      {.name = "device",
       .kind = entries.ranks > 1 ? Buffer::Home::window : Buffer::Home::local,
       .bytes = device_bytes}};
  if (host.end > 0) {
    buffers.push_back({.name = "host", .kind = Buffer::Home::host, .bytes = host.end - host.begin});
  }
  std::vector<Move> moves(count);
  const auto slice_of = [&](uint64_t at, int32_t home) -> Slice {
    if (home == kHostHome) return {at - bases.host, kHostRank, 2};
    return {at - bases.device[static_cast<size_t>(home)], static_cast<Rank>(home), 1};
  };
  for (size_t i = 0; i < count; ++i) {
    if (entries.sizes[i] == 0) {
      moves[i] = {.dst = {0, 0, 1}, .src = {0, 0, 1}};
    } else {
      moves[i] = {.dst = slice_of(entries.dsts[i], entries.dst_homes[i]),
                  .src = slice_of(entries.srcs[i], entries.src_homes[i]),
                  .bytes = entries.sizes[i]};
    }
  }
  for (const auto& [at, home] : entries.seams) {
    const Stretch& range = range_of(home);
    if (at > range.begin && at < range.end) seams.push_back(slice_of(at, home));
  }
  return moves_listed(entries.ranks, std::move(buffers), std::move(moves));
}

}  // namespace offcore
