#include "core/kv/pool.h"

#include <unistd.h>

#include <algorithm>
#include <numeric>
#include <system_error>

#include "core/base/host_memory.h"
#include "core/base/threads.h"

namespace offcore::kv {
namespace {

constexpr uint64_t kRowsMax = uint64_t{1} << 32;
constexpr uint64_t kRowBytesMax = uint64_t{1} << 40;
constexpr uint64_t kHalvedMin = uint64_t{16} << 20;  // bytes of a chunk, after the driver refused

// Of chunks of others' memory. Pages are registered once: chunks meet where a page begins, or there
// is one.
uint64_t rows_step_of(const ForeignRows::RowMemory& part) {
  const auto page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  if (reinterpret_cast<uint64_t>(part.data) % page != 0) return kRowsMax;
  return page / std::gcd(part.row_step, page);
}

void check_row(uint64_t row_bytes) {
  if (row_bytes == 0 || row_bytes > kRowBytesMax) {
    fail(Code::invalid, "a block has ", row_bytes, " bytes: it must have 1 to 2^40");
  }
}

// Whether rows of both have bytes in common, the second of which begins no sooner.
bool overlap(const ForeignRows::RowMemory& part, const ForeignRows::RowMemory& later,
             uint64_t row_bytes) {
  const auto ahead = static_cast<uint64_t>(later.data - part.data);
  if (ahead >= part.bytes) return false;
  const uint64_t inside = ahead % part.row_step;  // where rows of both lie between each other
  return part.row_step != later.row_step || inside < row_bytes ||
         part.row_step - inside < row_bytes;
}

void check_apart(std::vector<ForeignRows::RowMemory> parts, uint64_t row_bytes) {
  std::sort(parts.begin(), parts.end(),
            [](const auto& part, const auto& other) { return part.data < other.data; });
  for (size_t i = 0; i < parts.size(); ++i) {
    for (size_t k = i + 1; k < parts.size() && parts[k].data < parts[i].data + parts[i].bytes;
         ++k) {
      if (!overlap(parts[i], parts[k], row_bytes)) continue;
      fail(Code::invalid, "two parts of the memory overlap: rows of one, ", parts[i].row_step,
           " bytes apart, begin ", parts[k].data - parts[i].data,
           " bytes before those of the other");
    }
  }
}

}  // namespace

HostPool::HostPool(std::shared_ptr<Backend> backend, uint64_t row_bytes,
                   std::vector<RowSource> sources, std::shared_ptr<void> keep)
    : HostRows("the host pool"),
      backend_(std::move(backend)),
      row_bytes_(row_bytes),
      keep_(std::move(keep)),
      sources_(std::move(sources)) {}

std::vector<HostPool::RowSource> HostPool::sources_of(std::vector<ForeignRows::RowMemory> parts,
                                                      uint64_t row_bytes, uint64_t chunk_bytes) {
  std::vector<RowSource> sources;
  uint64_t first = 0;
  for (ForeignRows::RowMemory& part : parts) {
    if (part.row_step < row_bytes || part.row_step > kRowBytesMax) {
      fail(Code::invalid, "rows of ", row_bytes, " bytes cannot lie ", part.row_step,
           " bytes apart: give a step of the row or more");
    }
    if (part.bytes < row_bytes) {
      fail(Code::invalid, "a part of the memory has ", part.bytes, " bytes, fewer than a row of ",
           row_bytes);
    }
    const uint64_t rows = (part.bytes - row_bytes) / part.row_step + 1;
    const uint64_t step = rows_step_of(part);
    const uint64_t wanted = std::max<uint64_t>(1, chunk_bytes / part.row_step);
    sources.push_back({.data = part.data,
                       .row_step = part.row_step,
                       .rows = rows,
                       .rows_chunk = (wanted + step - 1) / step * step,
                       .rows_step = step,
                       .first = first});
    first += rows;
    part.bytes = (rows - 1) * part.row_step + row_bytes;
  }
  check_apart(std::move(parts), row_bytes);
  return sources;
}

std::shared_ptr<HostPool> HostPool::create(std::shared_ptr<Backend> backend, uint64_t row_bytes,
                                           uint64_t chunk_bytes) {
  check_row(row_bytes);
  std::vector<RowSource> own{{.row_step = row_bytes,
                              .rows = kRowsMax,
                              .rows_chunk = std::max<uint64_t>(1, chunk_bytes / row_bytes)}};
  return owned_that_waits(std::unique_ptr<HostPool>(
      new HostPool(std::move(backend), row_bytes, std::move(own), nullptr)));
}

std::shared_ptr<HostPool> HostPool::create(std::shared_ptr<Backend> backend, uint64_t row_bytes,
                                           uint64_t chunk_bytes, ForeignRows memory) {
  check_row(row_bytes);
  std::vector<RowSource> sources = sources_of(memory.parts, row_bytes, chunk_bytes);
  return owned_that_waits(std::unique_ptr<HostPool>(
      new HostPool(std::move(backend), row_bytes, std::move(sources), std::move(memory.keep))));
}

HostPool::~HostPool() {
  PoolLock lock(mutex_);
  closed_ = true;
  end_thread(std::move(lock));
}

// The thread is taken over under the mutex, so that nobody else joins it too.
void HostPool::end_thread(PoolLock lock) {
  std::thread thread = std::move(thread_);
  lock.unlock();
  if (thread.joinable()) thread.join();
}

HostPool::PoolLock HostPool::enter() const {
  PoolLock lock(mutex_);
  if (closed_) fail(Code::cancelled, "the host pool is closed");
  return lock;
}

// Whether so many rows more can lie somewhere.
void HostPool::check_room(uint64_t rows) const {
  if (rows > kRowsMax - slots_.size()) {
    fail(Code::invalid, slots_.size(), " and ", rows, " rows are more than ", kRowsMax);
  }
  if (sources_.empty() || sources_.back().data != nullptr) {
    const uint64_t most = sources_.empty() ? 0 : sources_.back().first + sources_.back().rows;
    if (rows <= most - slots_.size()) return;
    fail(Code::invalid, "the memory has ", most, " rows of ", row_bytes_, " bytes, not ",
         slots_.size() + rows);
  }
  const HostMemory memory = host_memory();
  const uint64_t coming = slots_.size() - ready_ + rows;
  if (coming > memory.available_bytes / row_bytes_) {
    fail(Code::memory, "a host pool cannot get ", coming, " more rows of ", row_bytes_,
         " bytes: of the ", memory.total_bytes, " bytes that this process may use, ",
         memory.available_bytes, " are available");
  }
}

void HostPool::grow(uint64_t rows) {
  const PoolLock lock = enter();
  check_room(rows);
  const size_t chunks = chunks_.size();
  const uint64_t before = slots_.size();
  const auto undo = [&] {
    chunks_.resize(chunks);
    slots_.resize(before);
  };
  try {
    slots_.resize(before + rows);
    for (uint64_t first = before; first < slots_.size(); first += chunks_.back().rows) {
      const RowSource& source = source_of(first);
      const uint64_t left = std::min(slots_.size(), source.first + source.rows) - first;
      const uint64_t count = std::min(source.rows_chunk, left);
      chunks_.push_back({.first = first, .rows = count, .source = &source, .share = {}});
    }
    if (registering() && !running_) start_thread();
  } catch (const std::bad_alloc&) {
    undo();
    fail(Code::memory, "no memory is left to keep account of ", rows, " rows");
  } catch (const std::system_error& error) {
    undo();
    fail(Code::driver, "cannot start the thread that registers host memory: ", error.what());
  }
  failure_.reset();
}

// A former one has left the mutex for good, and is joined without a wait.
void HostPool::start_thread() {
  const SignalsBlocked blocked;
  if (thread_.joinable()) thread_.join();
  thread_ = std::thread([this] { register_chunks(); });
  running_ = true;
}

void HostPool::register_chunks() {
  PoolLock lock(mutex_);
  while (registering() && !closed_) {
    const size_t index = static_cast<size_t>(
        std::find_if(chunks_.begin(), chunks_.end(),
                     [](const Chunk& chunk) { return chunk.share.data == nullptr; }) -
        chunks_.begin());
    const RowSource& source = *chunks_[index].source;
    const uint64_t at = (chunks_[index].first - source.first) * source.row_step;
    const uint64_t bytes = (chunks_[index].rows - 1) * source.row_step + row_bytes_;
    busy_ = true;
    lock.unlock();
    Share share;
    std::optional<Error> failure;
    try {
      ForeignMemory* const others = backend_->capabilities().foreign_memory;
      if (source.data == nullptr) {
        share = backend_->allocate_host(bytes);
      } else if (others != nullptr) {
        share = others->register_host(source.data + at, bytes, keep_);
      } else {  // engines are threads, or simulated
        share = {.bytes = bytes, .data = source.data + at, .owner = keep_};
      }
    } catch (const Error& error) {
      failure = error;
    } catch (const std::exception& error) {  // an exception that leaves a thread ends the process
      failure.emplace(Code::memory, error.what());
    }
    lock.lock();
    busy_ = false;
    if (failure && halve(index)) continue;
    if (failure) {
      slots_.resize(ready_);
      chunks_.resize(index);
      failure_ = Error(failure->code(), cat("the host pool has ", ready_,
                                            " rows and gets no more: ", failure->message(), " (",
                                            locked_memory_limits(), ")"));
    } else {
      Chunk& chunk = chunks_[index];
      chunk.share = std::move(share);
      ready_ += chunk.rows;
      give(chunk.first, chunk.rows);
    }
    changed_.notify_all();
  }
  running_ = false;
}

// A driver that does not register a chunk may do a part of it: what a limit leaves.
bool HostPool::halve(size_t index) {
  Chunk rest = chunks_[index];
  const uint64_t step = rest.source->rows_step;
  const uint64_t rows = rest.rows / 2 / step * step;
  if (rows * rest.source->row_step < kHalvedMin) return false;
  rest.first += rows;
  rest.rows -= rows;
  try {
    chunks_.insert(chunks_.begin() + static_cast<std::ptrdiff_t>(index) + 1, std::move(rest));
  } catch (const std::bad_alloc&) {
    return false;
  }
  chunks_[index].rows = rows;
  return true;
}

uint64_t HostPool::shrink(uint64_t keep) {
  std::vector<Chunk> gone;  // freed without the mutex
  const PoolLock lock = enter();
  while (!chunks_.empty() && chunks_.back().first >= keep) {
    const Chunk& last = chunks_.back();
    if (last.share.data == nullptr) {
      if (busy_ && last.first == ready_) break;  // under way
    } else {
      const auto run = runs_.find(last.first);
      if (run == runs_.end() || run->second != last.rows) break;
      remove(last.first, last.rows);
      ready_ -= last.rows;
    }
    slots_.resize(last.first);
    gone.push_back(std::move(chunks_.back()));
    chunks_.pop_back();
  }
  changed_.notify_all();
  return slots_.size();
}

HostPool::PoolCounts HostPool::counts() const {
  const PoolLock lock = enter();
  return {.rows = slots_.size(), .ready = ready_, .free = free_, .leaving = leaving_};
}

void HostPool::wait_ready(const Deadline& deadline) {
  PoolLock lock = enter();
  sleep_until(changed_, lock, deadline, [&] { return closed_ || !registering(); });
  if (failure_) throw *failure_;
  if (closed_) fail(Code::cancelled, "the host pool is closed");
  if (!registering()) return;
  fail(Code::timeout, ready_, " of ", slots_.size(), " rows of the host pool were ready within ",
       shown_s(deadline.wait_ns()), " s");
}

void HostPool::fail_exhausted(uint64_t count) const {
  fail(Code::memory, "cannot allocate ", count, " rows of ", row_bytes_, " bytes: ", free_, " of ",
       slots_.size(), " are free, ", slots_.size() - ready_, " are not registered yet, ", leaving_,
       " are free once their jobs have ended",
       failure_ ? "; " + failure_->message() : std::string("; free some, wait, or grow the pool"));
}

std::vector<int64_t> HostPool::allocate(uint64_t count, const Deadline& deadline) {
  PoolLock lock = enter();
  if (count > slots_.size()) fail_exhausted(count);
  sleep_until(changed_, lock, deadline,
              [&] { return closed_ || free_ >= count || count > slots_.size(); });
  if (closed_) fail(Code::cancelled, "the host pool is closed");
  if (free_ < count) fail_exhausted(count);
  std::vector<int64_t> slots;
  slots.reserve(count);
  while (slots.size() < count) {
    const uint64_t missing = count - slots.size();
    auto best = by_count_.lower_bound({missing, 0});
    if (best == by_count_.end()) best = std::prev(best);
    const auto [run, first] = *best;
    const uint64_t taken = std::min(run, missing);
    remove(first, run);
    if (taken < run) give(first + taken, run - taken);
    for (uint64_t slot = first; slot < first + taken; ++slot) {
      slots_[slot].taken = true;
      slots.push_back(static_cast<int64_t>(slot));
    }
  }
  std::sort(slots.begin(), slots.end());
  return slots;
}

void HostPool::free(std::span<const int64_t> slots) {
  const PoolLock lock = enter();
  check(slots, true, 1);
  for (int64_t number : slots) {
    Slot& slot = slots_[static_cast<size_t>(number)];
    slot.leaving = slot.users > 0;
    leaving_ += slot.leaving;
    if (!slot.leaving) release(static_cast<uint64_t>(number));
  }
  changed_.notify_all();
}

std::pair<std::byte*, std::shared_ptr<void>> HostPool::row(int64_t slot) const {
  const PoolLock lock = enter();
  check_taken(slot, static_cast<uint64_t>(slot), 1);
  const Chunk& chunk = chunk_of(static_cast<uint64_t>(slot));
  return {chunk.at(static_cast<uint64_t>(slot)), chunk.share.owner};
}

void HostPool::pin(std::span<const int64_t> slots, bool distinct, const RowPlaces& places,
                   std::vector<Row>& rows) {
  const PoolLock lock = enter();
  check(slots, distinct, places.blocks);
  rows.clear();
  rows.reserve(slots.size());
  const Chunk* chunk = nullptr;
  each_place(slots, places.blocks, [&](int64_t, uint64_t slot, uint32_t place) {
    if (chunk == nullptr || slot - chunk->first >= chunk->rows) chunk = &chunk_of(slot);
    rows.push_back({.at = chunk->at(slot) + place * places.step,
                    .chunk = static_cast<uint32_t>(chunk - chunks_.data()),
                    .place = place});
    pinned_ += slots_[slot].users++ == 0;
  });
}

void HostPool::unpin(std::span<const int64_t> slots, const RowPlaces& places) noexcept {
  const PoolLock lock(mutex_);
  each_place(slots, places.blocks, [&](int64_t, uint64_t row, uint32_t) {
    Slot& slot = slots_[row];
    if (--slot.users > 0) return;
    --pinned_;
    if (!slot.leaving) return;
    slot.leaving = false;
    --leaving_;
    release(row);
  });
  changed_.notify_all();
}

void HostPool::close(const Deadline& deadline) {
  std::vector<Chunk> gone;  // freed without the mutex
  if (!here()) return;
  {
    PoolLock lock(mutex_);
    if (!sleep_until(changed_, lock, deadline, [&] { return pinned_ == 0; })) {
      fail(Code::timeout, "jobs still use ", pinned_, " rows of the host pool after ",
           shown_s(deadline.wait_ns()), " s: close their BlockTransfer first");
    }
    closed_ = true;
    changed_.notify_all();
    end_thread(std::move(lock));
  }
  const PoolLock lock(mutex_);
  if (!running_) gone.swap(chunks_);  // else another close() waits for the thread, and frees them
}

void HostPool::check_taken(int64_t number, uint64_t row, uint32_t row_blocks) const {
  if (number < 0 || row >= slots_.size()) {
    fail(Code::invalid, "slot ", number, " is not one of the host pool's ",
         slots_.size() * row_blocks);
  }
  const Slot& slot = slots_[row];
  if (!slot.taken || slot.leaving) {
    fail(Code::invalid, "slot ", number, " is not allocated", slot.leaving ? " any more" : "",
         ": it was freed, or never allocated");
  }
}

void HostPool::check(std::span<const int64_t> slots, bool distinct, uint32_t row_blocks) {
  each_place(slots, row_blocks,
             [&](int64_t number, uint64_t row, uint32_t) { check_taken(number, row, row_blocks); });
  if (!distinct) return;
  listed_.hold(slots_.size() * row_blocks);
  if (const std::optional<int64_t> slot = listed_.twice(slots)) {
    fail(Code::invalid, "slot ", *slot, " is listed twice");
  }
}

const HostPool::Chunk& HostPool::chunk_of(uint64_t slot) const {
  const auto after =
      std::upper_bound(chunks_.begin(), chunks_.end(), slot,
                       [](uint64_t wanted, const Chunk& chunk) { return wanted < chunk.first; });
  return *std::prev(after);
}

const HostPool::RowSource& HostPool::source_of(uint64_t row) const {
  const auto after = std::upper_bound(
      sources_.begin(), sources_.end(), row,
      [](uint64_t wanted, const RowSource& source) { return wanted < source.first; });
  return *std::prev(after);
}

// Where no memory is left to keep account of them, they are lost until the pool is closed.
void HostPool::give(uint64_t first, uint64_t count) noexcept {
  free_ += count;
  try {
    runs_[first] = count;
    by_count_.insert({count, first});
  } catch (const std::bad_alloc&) {
    remove(first, count);
  }
}

void HostPool::remove(uint64_t first, uint64_t count) {
  free_ -= count;
  runs_.erase(first);
  by_count_.erase({count, first});
}

// A slot that nobody has any more: joined to its free neighbours of the same chunk.
void HostPool::release(uint64_t slot) {
  slots_[slot].taken = false;
  const Chunk& chunk = chunk_of(slot);
  uint64_t first = slot;
  uint64_t count = 1;
  if (const auto next = runs_.find(slot + 1);
      next != runs_.end() && next->first < chunk.first + chunk.rows) {
    count += next->second;
    remove(next->first, uint64_t{next->second});
  }
  auto before = runs_.lower_bound(slot);
  if (before != runs_.begin() && (--before)->first + before->second == slot &&
      before->first >= chunk.first) {
    first = before->first;
    count += before->second;
    remove(first, uint64_t{before->second});
  }
  give(first, count);
}

}  // namespace offcore::kv
