// Entry points for copies and fills. Pageable host memory behaves as documented: a small source is
// read before the call returns; otherwise the call returns when the copy is complete.
#include <algorithm>
#include <cstring>
#include <span>
#include <utility>

#include "tests/fakes/cuda/graph.h"
#include "tests/fakes/cuda/memory.h"
#include "tests/fakes/cuda/transfer.h"

namespace fakecuda {
namespace {

constexpr uint64_t kPitchMax = 2147483647;
constexpr uint64_t kStagedBytesMax = 64 << 10;

DevicePtr address_of(const void* host) { return reinterpret_cast<DevicePtr>(host); }

// A side that must be memory the driver knows.
Side known_side(DevicePtr address) {
  const Kind kind = addresses().facts(address).kind;
  require(kind == Kind::kMapped || kind == Kind::kRegistered, kInvalidValue);
  return {.address = address, .base = address};
}

// A side that may be any memory of the process: what the driver does not know is host memory.
Side any_side(DevicePtr address) {
  const Kind kind = addresses().facts(address).kind;
  require(address != 0 && kind != Kind::kReserved, kInvalidValue);
  return {.address = address, .base = address, .host = kind == Kind::kUnknown};
}

Side host_side(const void* host) {
  require(host != nullptr, kInvalidValue);
  const Side side = any_side(address_of(host));
  require(side.host || addresses().facts(side.address).kind == Kind::kRegistered, kInvalidValue);
  return side;
}

bool capturing(Stream& stream) {
  const std::lock_guard lock(capture_mutex());
  return stream.capturing.capture != nullptr;
}

// The source's bytes, read now; the transfer reads them from there.
std::shared_ptr<void> stage(Transfer& transfer) {
  const uint64_t rows = transfer.rows * transfer.slices;
  auto bytes = std::make_shared<std::vector<std::byte>>(rows * transfer.width);
  for (uint64_t slice = 0, at = 0; slice < transfer.slices; ++slice) {
    for (uint64_t row = 0; row < transfer.rows; ++row, at += transfer.width) {
      const uint64_t from =
          transfer.src.address + slice * transfer.src.slice_pitch + row * transfer.src.pitch;
      std::memcpy(bytes->data() + at, reinterpret_cast<const void*>(from), transfer.width);
    }
  }
  transfer.src = {.address = address_of(bytes->data()),
                  .pitch = transfer.width,
                  .slice_pitch = transfer.width * transfer.rows,
                  .host = true};
  return bytes;
}

// Host memory that is registered piece by piece is several, side by side as they may lie.
void check_registration(const Side& side, const Transfer& transfer) {
  const PointerFacts facts = addresses().facts(side.address);
  if (facts.kind != Kind::kRegistered || side.base != side.address) return;
  const DevicePtr end = side.address + (transfer.rows - 1) * side.pitch +
                        (transfer.slices - 1) * side.slice_pitch + transfer.width;
  require(end <= facts.start + facts.bytes, kInvalidValue);
}

void push_copies(Stream& stream, std::vector<Transfer> batch) {
  for (const Transfer& transfer : batch) {
    check_registration(transfer.dst, transfer);
    check_registration(transfer.src, transfer);
  }
  std::vector<std::shared_ptr<void>> staged;
  bool complete_first = false;
  if (!capturing(stream)) {
    for (Transfer& transfer : batch) {
      const uint64_t bytes = transfer.width * transfer.rows * transfer.slices;
      if (transfer.src.host && bytes <= kStagedBytesMax) {
        staged.push_back(stage(transfer));
      } else if (transfer.src.host) {
        complete_first = true;
      }
      complete_first = complete_first || transfer.dst.host;
    }
  }
  stream.push([staged = std::move(staged), copy = copy_work(std::move(batch))](Engine& engine) {
    return copy(engine);
  });
  if (complete_first) stream.synchronize();
}

void push_copy(StreamHandle handle, const Side& dst, const Side& src, size_t bytes) {
  const auto stream = stream_of(handle);
  if (bytes > 0) push_copies(*stream, {{.dst = dst, .src = src, .width = bytes}});
}

void copy_now(const Side& dst, const Side& src, size_t bytes) {
  const auto stream = current_context()->default_stream();
  refuse_unsafe();
  if (bytes > 0) push_copies(*stream, {{.dst = dst, .src = src, .width = bytes}});
  stream->synchronize();
  check_alive(*stream->context());
}

Side typed_side(int type, const void* host, DevicePtr device) {
  require(type == kMemoryHost || type == kMemoryDevice || type == kMemoryUnified,
          type == kMemoryArray ? kNotSupported : kInvalidValue);
  if (type == kMemoryHost) return host_side(host);
  return type == kMemoryDevice ? known_side(device) : any_side(device);
}

// A pitch of 0 says that rows lie densely.
uint64_t checked_pitch(uint64_t pitch, uint64_t row_bytes) {
  require(pitch == 0 || pitch >= row_bytes, kInvalidValue);
  require(pitch <= kPitchMax, kInvalidValue);
  return pitch == 0 ? row_bytes : pitch;
}

// A copy may be addressed from elsewhere, if memory of that kind goes on behind the base as rows do
// (H200, driver 580).
void check_base(const Transfer& transfer, const Side& side) {
  const PointerFacts base = addresses().facts(side.base);
  if (side.base == side.address || !base.allocation) return;
  const bool host = base.allocation->device() == kHost;
  const DevicePtr end = side.base + (transfer.rows - 1) * side.pitch +
                        (transfer.slices - 1) * side.slice_pitch + transfer.width;
  for (DevicePtr at = side.base; at < end;) {
    const PointerFacts facts = addresses().facts(at);
    require(facts.allocation && (facts.allocation->device() == kHost) == host, kInvalidValue);
    at = facts.start + facts.bytes;
  }
}

// A plain allocation cannot be left from row to row where the rows are written (H200, driver 580);
// memory that the caller mapped side by side can. A copy of one row may start from any base.
void check_rows(const Transfer& transfer) {
  const Side& dst = transfer.dst;
  const auto facts = [&](uint64_t row, uint64_t slice) {
    return addresses().facts(dst.address + row * dst.pitch + slice * dst.slice_pitch);
  };
  const PointerFacts first = facts(0, 0), last = facts(transfer.rows - 1, transfer.slices - 1);
  const bool mapped = first.origin == Origin::kMapped && last.origin == Origin::kMapped;
  require(mapped || first.allocation == last.allocation, kInvalidValue);
}

void push_fill(StreamHandle handle, DevicePtr dst, size_t count, uint32_t value, unsigned bytes) {
  const auto stream = stream_of(handle);
  require(dst % bytes == 0, kInvalidValue);
  known_side(dst);
  if (count > 0) stream->push(fill_work(dst, count, value, bytes));
}

struct Batch {
  const DevicePtr *dsts, *srcs;
  const size_t* sizes;
  size_t count;
  const CopyAttributes* attributes;
  const size_t* first;  // of the copies that each attribute is for
  size_t attributes_count;
};

void check_attributes(const Batch& batch) {
  require(batch.attributes != nullptr && batch.first != nullptr, kInvalidValue);
  require(batch.attributes_count > 0 && batch.attributes_count <= batch.count, kInvalidValue);
  require(batch.first[0] == 0, kInvalidValue);
  for (size_t i = 0; i < batch.attributes_count; ++i) {
    const CopyAttributes& attributes = batch.attributes[i];
    require(i == 0 || batch.first[i] > batch.first[i - 1], kInvalidValue);
    require(batch.first[i] < batch.count, kInvalidValue);
    require(attributes.src_order >= kOrderStream && attributes.src_order <= kOrderAny,
            kInvalidValue);
    require(attributes.flags <= kOverlapWithCompute, kInvalidValue);
  }
}

void push_batch(const Batch& batch, StreamHandle handle) {
  const auto stream = stream_of(handle);
  require(!stream->is_legacy(), kInvalidValue);
  require(!capturing(*stream), kCaptureUnsupported);  // and the capture goes on without it
  require(batch.count > 0 && batch.dsts && batch.srcs && batch.sizes, kInvalidValue);
  check_attributes(batch);
  std::vector<Transfer> transfers;
  std::vector<std::shared_ptr<void>> staged;
  for (size_t i = 0, attribute = 0; i < batch.count; ++i) {
    while (attribute + 1 < batch.attributes_count && batch.first[attribute + 1] <= i) ++attribute;
    Transfer transfer{.dst = any_side(batch.dsts[i]), .src = any_side(batch.srcs[i])};
    transfer.width = batch.sizes[i];
    require(transfer.width > 0, kInvalidValue);
    check_registration(transfer.dst, transfer);
    check_registration(transfer.src, transfer);
    const bool host = addresses().facts(transfer.src.address).kind != Kind::kMapped;
    if (host && batch.attributes[attribute].src_order != kOrderStream) {
      staged.push_back(stage(transfer));  // out of the stream's order, as the caller allowed
    }
    transfers.push_back(transfer);
  }
  const auto copy = copy_work(std::move(transfers));
  stream->push([staged = std::move(staged), copy](Engine& engine) { return copy(engine); });
}

}  // namespace

FAKE_API Result cuMemcpyAsync(DevicePtr dst, DevicePtr src, size_t bytes, StreamHandle stream) {
  return enter("cuMemcpyAsync", [&] {
    current_context();
    push_copy(stream, any_side(dst), any_side(src), bytes);
  });
}

FAKE_API Result cuMemcpyDtoDAsync_v2(DevicePtr dst, DevicePtr src, size_t bytes,
                                     StreamHandle stream) {
  return enter("cuMemcpyDtoDAsync", [&] {
    current_context();
    push_copy(stream, known_side(dst), known_side(src), bytes);
  });
}

FAKE_API Result cuMemcpyHtoDAsync_v2(DevicePtr dst, const void* src, size_t bytes,
                                     StreamHandle stream) {
  return enter("cuMemcpyHtoDAsync", [&] {
    current_context();
    push_copy(stream, known_side(dst), host_side(src), bytes);
  });
}

FAKE_API Result cuMemcpyDtoHAsync_v2(void* dst, DevicePtr src, size_t bytes, StreamHandle stream) {
  return enter("cuMemcpyDtoHAsync", [&] {
    current_context();
    push_copy(stream, host_side(dst), known_side(src), bytes);
  });
}

FAKE_API Result cuMemcpyDtoH_v2(void* dst, DevicePtr src, size_t bytes) {
  return enter("cuMemcpyDtoH", [&] {
    current_context();
    copy_now(host_side(dst), known_side(src), bytes);
  });
}

FAKE_API Result cuMemcpyHtoD_v2(DevicePtr dst, const void* src, size_t bytes) {
  return enter("cuMemcpyHtoD", [&] {
    current_context();
    copy_now(known_side(dst), host_side(src), bytes);
  });
}

FAKE_API Result cuMemcpy2DAsync_v2(const Memcpy2D* what, StreamHandle stream) {
  return enter("cuMemcpy2DAsync", [&] {
    current_context();
    require(what != nullptr, kInvalidValue);
    const auto& c = *what;
    const auto target = stream_of(stream);
    const uint64_t dst_pitch = checked_pitch(c.dst_pitch, c.width + c.dst_x);
    const uint64_t src_pitch = checked_pitch(c.src_pitch, c.width + c.src_x);
    if (c.width == 0 || c.height == 0) return;
    Transfer transfer{.dst = typed_side(c.dst_type, c.dst_host, c.dst_device),
                      .src = typed_side(c.src_type, c.src_host, c.src_device),
                      .width = c.width,
                      .rows = c.height};
    transfer.dst.pitch = dst_pitch;
    transfer.src.pitch = src_pitch;
    transfer.dst.address += c.dst_y * dst_pitch + c.dst_x;
    transfer.src.address += c.src_y * src_pitch + c.src_x;
    check_rows(transfer);
    check_base(transfer, transfer.dst);
    check_base(transfer, transfer.src);
    push_copies(*target, {transfer});
  });
}

FAKE_API Result cuMemcpy3DAsync_v2(const Memcpy3D* what, StreamHandle stream) {
  return enter("cuMemcpy3DAsync", [&] {
    current_context();
    require(what != nullptr, kInvalidValue);
    const auto& c = *what;
    const auto target = stream_of(stream);
    require(c.src_lod == 0 && c.dst_lod == 0 && !c.reserved0 && !c.reserved1, kInvalidValue);
    const uint64_t dst_pitch = checked_pitch(c.dst_pitch, c.width + c.dst_x);
    const uint64_t src_pitch = checked_pitch(c.src_pitch, c.width + c.src_x);
    const auto checked_height = [&](uint64_t height, uint64_t y) {
      require(height == 0 || height >= c.height + y, kInvalidValue);
      return height == 0 ? c.height + y : height;
    };
    const uint64_t dst_height = checked_height(c.dst_height, c.dst_y);
    const uint64_t src_height = checked_height(c.src_height, c.src_y);
    if (c.width == 0 || c.height == 0 || c.depth == 0) return;
    Transfer transfer{.dst = typed_side(c.dst_type, c.dst_host, c.dst_device),
                      .src = typed_side(c.src_type, c.src_host, c.src_device),
                      .width = c.width,
                      .rows = c.height,
                      .slices = c.depth};
    transfer.dst.pitch = dst_pitch;
    transfer.src.pitch = src_pitch;
    transfer.dst.slice_pitch = dst_pitch * dst_height;
    transfer.src.slice_pitch = src_pitch * src_height;
    transfer.dst.address += (c.dst_z * dst_height + c.dst_y) * dst_pitch + c.dst_x;
    transfer.src.address += (c.src_z * src_height + c.src_y) * src_pitch + c.src_x;
    check_rows(transfer);
    check_base(transfer, transfer.dst);
    check_base(transfer, transfer.src);
    push_copies(*target, {transfer});
  });
}

FAKE_API Result cuMemcpyBatchAsync(const DevicePtr* dsts, const DevicePtr* srcs,
                                   const size_t* sizes, size_t count,
                                   const CopyAttributes* attributes, const size_t* first,
                                   size_t attributes_count, size_t* fail_index,
                                   StreamHandle stream) {
  return enter("cuMemcpyBatchAsync", [&] {
    if (fail_index) *fail_index = SIZE_MAX;  // no copy in particular
    push_batch({dsts, srcs, sizes, count, attributes, first, attributes_count}, stream);
  });
}

FAKE_API Result cuMemcpyBatchAsync_v2(const DevicePtr* dsts, const DevicePtr* srcs,
                                      const size_t* sizes, size_t count,
                                      const CopyAttributes* attributes, const size_t* first,
                                      size_t attributes_count, StreamHandle stream) {
  return enter("cuMemcpyBatchAsync", [&] {
    push_batch({dsts, srcs, sizes, count, attributes, first, attributes_count}, stream);
  });
}

FAKE_API Result cuMemsetD8Async(DevicePtr dst, unsigned char value, size_t count,
                                StreamHandle stream) {
  return enter("cuMemsetD8Async", [&] { push_fill(stream, dst, count, value, 1); });
}

FAKE_API Result cuMemsetD32Async(DevicePtr dst, unsigned value, size_t count, StreamHandle stream) {
  return enter("cuMemsetD32Async", [&] { push_fill(stream, dst, count, value, 4); });
}

}  // namespace fakecuda
