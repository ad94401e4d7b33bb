#include "core/backend/cuda/foreign_memory.h"

#include <cstring>
#include <random>
#include <string>
#include <utility>

#include "core/backend/cuda/pointer_info.h"

namespace offcore::cuda {
namespace {

constexpr std::string_view kRemedy =
    "; take the tensor from memory_pool() or empty(), or have torch allocate it with "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True";

// What peers hear of a share. VMM memory: its allocations' sizes follow.
struct ForeignLayout {
  uint64_t head = 0;     // from where the allocation begins
  uint64_t process = 0;  // whose it is
  CUdeviceptr plain = 0;
  int64_t ordinal = -1;
  CUipcMemHandle handle = {};
};

// No other process's: processes of several containers may have one number.
uint64_t this_process() {
  static const uint64_t value = [] {
    std::random_device random;
    return uint64_t{random()} << 32 | random();
  }();
  return value;
}

[[noreturn]] void refuse(std::string_view what) {
  fail(Code::unsupported, "cannot register ", what, kRemedy);
}

class ForeignShare final : public HeldMemory {
 public:
  ForeignShare(std::shared_ptr<const GpuContext> gpu, CUdeviceptr data, uint64_t bytes,
               std::shared_ptr<void> keep, bool exported)
      : gpu_(std::move(gpu)), data_(data), keep_(std::move(keep)) {
    const ContextGuard current = gpu_->current();
    check_memory(bytes);
    if (attribute_of<int>(data_, kPointerPeers).value_or(0) != 0) {
      take_plain(bytes, exported);
    } else {
      take_allocations(bytes);
    }
  }

  std::byte* address() const override { return reinterpret_cast<std::byte*>(data_); }

  bool intact(uint64_t offset, uint64_t bytes) const override {
    const ContextGuard current = gpu_->current();
    if (memory_.allocations.empty()) {
      return attribute_of<uint64_t>(data_ + offset, kPointerBufferId).value_or(0) == buffer_;
    }
    CUdeviceptr at = data_ - memory_.head;
    for (const auto& allocation : memory_.allocations) {
      const CUdeviceptr end = at + allocation->bytes();
      const bool touched = at < data_ + offset + bytes && data_ + offset < end;
      if (touched && !allocation->lies_at(std::max(at, data_ + offset))) return false;
      at = end;
    }
    return true;
  }

  std::string layout() const override {
    std::string text(reinterpret_cast<const char*>(&layout_), sizeof layout_);
    for (const auto& allocation : memory_.allocations) {
      const uint64_t bytes = allocation->bytes();
      text.append(reinterpret_cast<const char*>(&bytes), sizeof bytes);
    }
    return text;
  }

  uint32_t parts() const override { return static_cast<uint32_t>(memory_.allocations.size()); }
  Descriptor export_part(uint32_t part) const override {
    return memory_.allocations[part]->shared();
  }

  std::shared_ptr<ShareMemory> share() const {
    auto owner = std::make_shared<ShareMemory>();
    owner->memory = memory_;
    owner->plain = layout_.plain;
    owner->ordinal = gpu_->device();
    return owner;
  }

 private:
  void check_memory(uint64_t bytes) const {
    if (bytes == 0) fail(Code::invalid, "cannot register a tensor of no bytes");
    const int type = attribute_of<int>(data_, kPointerMemoryType).value_or(0);
    if (type == 0 || type == kHostMemoryType) {
      refuse(type == 0 ? "ordinary host memory"
                       : "pinned host memory, which needs no registration "
                         "as an input");
    }
    if (attribute_of<unsigned>(data_, kPointerManaged).value_or(0) != 0) {
      refuse("managed memory, which may lie on any GPU or on the host");
    }
    const int ordinal = attribute_of<int>(data_, kPointerOrdinal).value_or(0);
    if (ordinal == gpu_->device()) return;
    fail(Code::invalid, "the tensor lies on GPU ", ordinal, ", its rank on GPU ", gpu_->device());
  }

  [[noreturn]] static void leaves_by(uint64_t bytes) {
    fail(Code::invalid, "the tensor leaves its memory by ", bytes, " bytes");
  }

  void take_allocations(uint64_t bytes) {
    memory_ = RankMemory::mapped_at(*gpu_, data_, bytes);
    if (memory_.allocations.empty()) {
      refuse("memory that no other GPU can open, such as that of cudaMallocAsync");
    }
    const uint64_t mapped = memory_.bytes() - memory_.head;
    if (mapped < bytes) leaves_by(bytes - mapped);
    layout_.head = memory_.head;
  }

  void take_plain(uint64_t bytes, bool exported) {
    const Driver& driver = Driver::get();
    CUdeviceptr begin = 0;
    size_t whole = 0;
    check(driver.cuMemGetAddressRange(&begin, &whole, data_), "cuMemGetAddressRange");
    layout_ = {.head = data_ - begin,
               .process = this_process(),
               .plain = data_,
               .ordinal = gpu_->device()};
    if (layout_.head + bytes > whole) leaves_by(layout_.head + bytes - whole);
    check(driver.cuPointerGetAttribute(&buffer_, kPointerBufferId, data_),
          "cuPointerGetAttribute of a buffer's number");
    if (!exported) return;
    check(driver.cuIpcGetMemHandle(&layout_.handle, begin), "cuIpcGetMemHandle");
  }

  std::shared_ptr<const GpuContext> gpu_;
  CUdeviceptr data_;
  std::shared_ptr<void> keep_;
  RankMemory memory_;
  ForeignLayout layout_;
  uint64_t buffer_ = 0;
};

std::shared_ptr<void> open_by_ipc(const GpuContext& gpu, const CUipcMemHandle& handle,
                                  CUdeviceptr& begin) {
  const ContextGuard current = gpu.current();
  check(Driver::get().cuIpcOpenMemHandle(&begin, handle, kIpcPeerAccess), "cuIpcOpenMemHandle");
  return {reinterpret_cast<void*>(begin), [context = gpu.context()](void* opened) {
            const ContextGuard guard(context->handle());
            Driver::get().cuIpcCloseMemHandle(reinterpret_cast<CUdeviceptr>(opened));
          }};
}

const ShareMemory& memory_of(const Share& share) {
  return *std::static_pointer_cast<ShareMemory>(share.owner);
}

}  // namespace

RankMemory RankMemory::mapped_at(const GpuContext& gpu, CUdeviceptr data, uint64_t bytes) {
  RankMemory memory;
  for (CUdeviceptr at = data; at < data + bytes;) {
    CUdeviceptr begin = 0;
    const auto allocation = Allocation::find(gpu, at, begin);
    if (allocation == nullptr) break;
    if (memory.allocations.empty()) memory.head = at - begin;
    at = begin + allocation->bytes();
    memory.allocations.push_back(allocation);
  }
  return memory;
}

CUdeviceptr ShareMemory::map(std::span<const std::shared_ptr<LocalGpu>> local) {
  if (plain != 0) {
    for (const auto& device : local) {
      const bool peer = ordinal >= 0 && ordinal != device->ordinal();
      if (peer) device->gpu().reach(*GpuContext::of(ordinal));
    }
    return plain;
  }
  range = std::make_unique<AddressRange>(local.front()->gpu().context(), memory.bytes());
  range->map(0, memory);
  range->open(local);
  return range->base() + memory.head;
}

Share hold_foreign(Rank rank, const std::shared_ptr<const GpuContext>& gpu, std::byte* data,
                   uint64_t bytes, std::shared_ptr<void> keep, bool exported) {
  const auto held = std::make_shared<const ForeignShare>(gpu, reinterpret_cast<CUdeviceptr>(data),
                                                         bytes, std::move(keep), exported);
  return {.rank = rank, .bytes = bytes, .owner = held->share(), .port = gpu, .held = held};
}

Share import_foreign(Rank rank, const GpuContext& gpu, uint64_t bytes, std::string_view text) {
  ForeignLayout layout;
  std::memcpy(&layout, text.data(), sizeof layout);
  auto owner = std::make_shared<ShareMemory>();
  owner->memory.head = layout.head;
  text.remove_prefix(sizeof layout);
  owner->sizes.resize(text.size() / sizeof(uint64_t));
  std::memcpy(owner->sizes.data(), text.data(), owner->sizes.size() * sizeof(uint64_t));
  if (layout.plain != 0 && layout.process == this_process()) {
    owner->plain = layout.plain;
    owner->ordinal = static_cast<int>(layout.ordinal);
  } else if (layout.plain != 0) {
    CUdeviceptr begin = 0;
    owner->opened = open_by_ipc(gpu, layout.handle, begin);
    owner->plain = begin + layout.head;
  }
  return {.rank = rank, .bytes = bytes, .owner = owner};
}

void import_foreign_part(Share& share, const GpuContext& gpu, Descriptor part) {
  auto& owner = *std::static_pointer_cast<ShareMemory>(share.owner);
  auto& allocations = owner.memory.allocations;
  allocations.push_back(
      Allocation::import(gpu.context(), owner.sizes.at(allocations.size()), part.release()));
}

bool strided(std::span<const Share> shares) {
  std::vector<RankMemory> parts;
  for (const Share& share : shares) {
    if (memory_of(share).plain != 0) return false;
    parts.push_back(memory_of(share).memory);
  }
  const StrideLayout layout = StrideLayout::of(parts);
  return layout.possible && layout.extent <= kPitchMax;
}

}  // namespace offcore::cuda
