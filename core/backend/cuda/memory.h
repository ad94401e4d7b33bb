// Window memory: physical allocations of VMM, mapped by every rank at a constant stride. Of what
// windows allocate a rank's part is one allocation; memory that others have allocated may have
// many.
//
// A mapping is one range of addresses in which the ranks' parts lie at a constant stride, twice in
// a row: from every rank the following ranks are an arithmetic progression, so that one strided
// copy reaches them all. Each local rank's own part is mapped once more, `ranks` times at the same
// stride: the source of a one-command broadcast. What programs read and write by themselves lies
// in the first lap; the other mappings are only sources and destinations of strided copies.
#pragma once
#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <shared_mutex>
#include <span>
#include <vector>

#include "core/backend/backend.h"
#include "core/backend/cuda/local_gpu.h"
#include "core/base/descriptor.h"

namespace offcore::cuda {

// Up to whole units, one at least.
constexpr uint64_t rounded(uint64_t bytes, uint64_t unit) {
  return std::max<uint64_t>(1, (bytes + unit - 1) / unit) * unit;
}

// Physical memory: one rank's, or of the host.
class Allocation {
 public:
  // Allocates on the device. Throws memory, naming the free bytes.
  static std::shared_ptr<Allocation> create(const GpuContext& gpu, uint64_t bytes, bool exported);
  // Of the host, on the NUMA node that the device is nearest to.
  static std::shared_ptr<Allocation> create_host(const GpuContext& gpu, uint64_t bytes);
  // Owns fd from here on, also when it throws.
  static std::shared_ptr<Allocation> import(std::shared_ptr<const PrimaryContext> context,
                                            uint64_t bytes, int fd);
  // What is mapped at the address, and where that mapping begins. Null: no VMM memory is.
  static std::shared_ptr<Allocation> find(const GpuContext& gpu, CUdeviceptr address,
                                          CUdeviceptr& begin);
  ~Allocation();
  // Whether it is mapped at the address.
  bool lies_at(CUdeviceptr address) const;
  // A descriptor of its own. Throws unsupported for memory that was made without.
  Descriptor shared() const;

  CUmemHandle handle() const { return handle_; }
  uint64_t bytes() const { return bytes_; }  // whole granules
  int fd() const { return fd_.get(); }       // -1 unless exported or imported

 private:
  Allocation(std::shared_ptr<const PrimaryContext> context, uint64_t bytes)
      : context_(std::move(context)), bytes_(bytes) {}

  std::shared_ptr<const PrimaryContext> context_;
  CUmemHandle handle_ = 0;
  uint64_t bytes_;
  Descriptor fd_;
};

// One rank's memory of a window: allocations side by side, and where in them it begins.
struct RankMemory {
  std::vector<std::shared_ptr<const Allocation>> allocations;
  uint64_t head = 0;

  // What is mapped from there on. None: that is no VMM memory; fewer bytes: it ends before.
  static RankMemory mapped_at(const GpuContext& gpu, CUdeviceptr data, uint64_t bytes);

  uint64_t bytes() const;  // of all allocations
  friend bool operator==(const RankMemory&, const RankMemory&) = default;
};

// A reserved range of addresses and what is mapped in it.
class AddressRange {
 public:
  AddressRange(std::shared_ptr<const PrimaryContext> context, uint64_t bytes);
  ~AddressRange();
  AddressRange(const AddressRange&) = delete;
  AddressRange& operator=(const AddressRange&) = delete;

  CUdeviceptr base() const { return base_; }
  void map(uint64_t offset, std::shared_ptr<const Allocation> part);
  void map(uint64_t offset, const RankMemory& memory);  // one after the other
  // All that is mapped from there on may be read and written by these devices.
  void open(std::span<const int> ordinals, uint64_t from = 0);
  void open(std::span<const std::shared_ptr<LocalGpu>> devices);
  void unmap();
  void unmap(uint64_t offset);
  // The first place where nothing is mapped for so many bytes; nothing: there is none.
  std::optional<uint64_t> room(uint64_t bytes) const;

 private:
  std::shared_ptr<const PrimaryContext> context_;
  CUdeviceptr base_ = 0;
  uint64_t bytes_;
  std::map<uint64_t, std::shared_ptr<const Allocation>> mapped_;  // by offset
};

// How ranks' memory is laid out at a constant stride. Allocations lie at whole granules, so where
// the ranks' memory begins at different places within one there is no such stride.
struct StrideLayout {
  uint64_t lead = 0;    // from each rank's place to its memory
  uint64_t extent = 0;  // of a rank's place
  bool possible = true;

  uint64_t stride() const { return extent <= kPitchMax ? extent : rounded(extent, kSlice); }
  static StrideLayout of(std::span<const RankMemory> parts);
};

class PeerMapping {
 public:
  // `parts`: one a rank, of a possible layout. `local`: the devices of this process's ranks.
  PeerMapping(std::vector<RankMemory> parts, std::span<const std::shared_ptr<LocalGpu>> local);

  Rank ranks() const { return static_cast<Rank>(parts_.size()); }
  uint64_t stride() const { return stride_; }
  uint64_t bytes() const { return 2 * ranks() * stride_; }
  CUdeviceptr base() const { return laps_.base(); }
  CUdeviceptr part(uint32_t rank) const {  // of two laps
    return laps_.base() + rank * stride_ + layout_.lead;
  }
  // The first of the repeated mappings of a local rank's part; 0 for other ranks.
  CUdeviceptr repeated(Rank rank) const;
  const std::vector<RankMemory>& parts() const { return parts_; }
  // A part that lies on another GPU; null: there is none, or the driver does not tell.
  std::shared_ptr<const Allocation> part_elsewhere(int ordinal) const;
  // Whether one strided copy may go to all ranks: no document says that it works across the
  // memory of several GPUs, so it is tried first. True until told.
  bool strided() const { return strided_; }
  void set_strided(bool works) { strided_ = works; }
  // Tries it, from each local device, in memory that nobody uses yet and that is zero; it is again
  // afterwards. Throws driver.
  bool try_strided(std::span<const std::shared_ptr<LocalGpu>> local) const;
  // Puts other memory behind all addresses: what still writes there changes nothing any more.
  void blank(std::span<const std::shared_ptr<LocalGpu>> local);

 private:
  void map(std::span<const std::shared_ptr<LocalGpu>> local);

  std::vector<RankMemory> parts_;
  StrideLayout layout_;
  uint64_t stride_;
  AddressRange laps_;
  std::map<Rank, std::unique_ptr<AddressRange>> repeated_;
  std::vector<int> ordinals_;  // where the parts lie, as this process counts; -1: not told
  bool strided_ = true;
};

// Finds the mapping that an address belongs to.
class MappingTable {
 public:
  void add(const PeerMapping& mapping);
  void remove(const PeerMapping& mapping);
  const PeerMapping* find(const void* address) const;  // null: not window memory

 private:
  mutable std::shared_mutex mutex_;
  std::map<CUdeviceptr, const PeerMapping*> mappings_;  // by base
};

// Host memory, all zero, that every local device reaches, on the NUMA node of the context's GPU if
// possible.
std::shared_ptr<void> allocate_pinned(std::shared_ptr<const PrimaryContext> context,
                                      uint64_t bytes);

// The same of memory that others have allocated; `keep` keeps it until the driver has let go of it.
// What its owner has registered stays so. Throws memory or driver.
std::shared_ptr<void> register_pinned(std::shared_ptr<const PrimaryContext> context,
                                      std::byte* data, uint64_t bytes, std::shared_ptr<void> keep);

// While programs are armed no host memory is given back to the driver, which would wait for the
// whole device: it is kept for whoever asks for as much.
void keep_pinned(bool more);  // one program more is armed; false: one less

}  // namespace offcore::cuda
