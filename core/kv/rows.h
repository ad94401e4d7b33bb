// Rows of host memory as jobs name them: by numbers of a pool's (pool.h), or by addresses.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "core/base/fork.h"
#include "core/kv/seams.h"

namespace offcore::kv {

// Where a slot lies.
struct Row {
  std::byte* at = nullptr;
  uint32_t chunk = 0;
  uint32_t place = 0;  // in its row, of several blocks
};

// How blocks share a row: their slots are row * blocks + place.
struct RowPlaces {
  uint32_t blocks = 1;
  uint64_t step = 0;  // from a place to the next, in bytes
};

// Calls `found` with each slot, its row and its place. A division takes as long as all else that is
// done for a slot: those that follow the one before in its row take none.
template <typename Found>
void each_place(std::span<const int64_t> slots, uint32_t blocks, const Found& found) {
  uint64_t row = 0;
  uint32_t place = blocks;
  uint64_t next = 0;
  for (int64_t slot : slots) {
    const auto number = static_cast<uint64_t>(slot);
    if (blocks == 1) {
      row = number;
      place = 0;
    } else if (number == next && place + 1 < blocks) {
      ++place;
    } else {
      row = number / blocks;
      place = static_cast<uint32_t>(number % blocks);
    }
    next = number + 1;
    found(slot, row, place);
  }
}

class HostRows : public std::enable_shared_from_this<HostRows>, public OfProcess {
 public:
  using OfProcess::OfProcess;
  virtual ~HostRows() = default;

  virtual uint64_t row_bytes() const = 0;
  // Whether jobs that meet are kept in order; else those who start them see to it.
  virtual bool orders() const { return true; }
  virtual Seams seams() const { return {}; }

  // For a job: puts into `rows` where its slots lie, and gives those to nobody else until unpin.
  // Throws invalid for slots that are none, and where `distinct` for those named twice.
  virtual void pin(std::span<const int64_t> slots, bool distinct, const RowPlaces& places,
                   std::vector<Row>& rows) = 0;
  virtual void unpin(std::span<const int64_t> slots, const RowPlaces& places) noexcept = 0;
};

// Rows that begin at any address of memory that others have registered: slots are address *
// RowPlaces::blocks + place. Their owner keeps the memory until the jobs have ended, and orders
// those that name the same bytes or blocks, by streams.
class RowsByAddress final : public HostRows {
 public:
  RowsByAddress(uint64_t row_bytes, Seams seams)
      : HostRows("the rows"), row_bytes_(row_bytes), seams_(seams) {}

  uint64_t row_bytes() const override { return row_bytes_; }
  bool orders() const override { return false; }
  Seams seams() const override { return seams_; }
  // Throws invalid, too, where `distinct` for rows that have bytes in common.
  void pin(std::span<const int64_t> slots, bool distinct, const RowPlaces& places,
           std::vector<Row>& rows) override;
  void unpin(std::span<const int64_t>, const RowPlaces&) noexcept override {}

 private:
  // Places of a row that follow each other.
  struct PlaceRun {
    uint64_t row = 0;
    uint32_t place = 0;
    uint32_t count = 0;
    auto operator<=>(const PlaceRun&) const = default;
  };

  void check_apart(std::vector<PlaceRun> runs, const RowPlaces& places) const;

  const uint64_t row_bytes_;
  const Seams seams_;
};

}  // namespace offcore::kv
