// Which engine makes copies within a GPU, and what it costs copies that leave the GPU.
//
//   nvcc -std=c++17 -O2 -o local_engines local_engines.cu -lcuda
//   CUDA_DEVICE_MAX_CONNECTIONS=32 ./local_engines [MIB]
//
// Each form addresses a copy within GPU 0 by another base (see docs/internals/cuda.md, Base
// addresses). It is timed alone, then while another stream pushes to GPU 1, while GPU 1 pushes to
// GPU 0, and while both do. Every copy is compared.
#include <cuda.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

#define CHECK(call)                                                                   \
  do {                                                                                \
    CUresult result_ = (call);                                                        \
    if (result_ != CUDA_SUCCESS) {                                                    \
      const char* name_ = "?";                                                        \
      cuGetErrorName(result_, &name_);                                                \
      std::printf("%s:%d: %s: %s\n", __FILE__, __LINE__, #call, name_);              \
      std::exit(1);                                                                   \
    }                                                                                 \
  } while (0)

static const size_t kPitch = size_t{1} << 30;
static const size_t kBehind = size_t{64} << 20;
static CUcontext contexts[2];

// One piece of memory at `location`, mapped again and again over kBehind bytes.
static CUdeviceptr mapped(CUmemLocationType type, int id) {
  CUmemAllocationProp prop = {};
  prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  prop.location.type = type;
  prop.location.id = id;
  size_t piece = 0;
  CHECK(cuMemGetAllocationGranularity(&piece, &prop, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED));
  CUmemGenericAllocationHandle handle;
  CHECK(cuMemCreate(&handle, piece, &prop, 0));
  CUdeviceptr base;
  CHECK(cuMemAddressReserve(&base, kBehind, 0, 0, 0));
  for (size_t at = 0; at < kBehind; at += piece) CHECK(cuMemMap(base + at, piece, 0, handle, 0));
  CUmemAccessDesc access = {};
  access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  access.location.id = 0;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  CHECK(cuMemSetAccess(base, kBehind, &access, 1));
  return base;
}

struct Form {
  const char* name;
  CUdeviceptr dst_base;  // 0: the address itself
  CUdeviceptr src_base;
  bool plain;
};

static CUresult copy_once(const Form& form, CUdeviceptr dst, CUdeviceptr src, size_t bytes,
                          CUstream stream) {
  if (form.plain) return cuMemcpyAsync(dst, src, bytes, stream);
  CUDA_MEMCPY2D c = {};
  const auto side = [&](CUdeviceptr base, CUdeviceptr at, CUdeviceptr& device, size_t& x, size_t& y,
                        size_t& pitch, CUmemorytype& type) {
    type = CU_MEMORYTYPE_UNIFIED;
    pitch = kPitch;
    device = base != 0 ? base : at;
    const size_t distance = base != 0 ? at - base : 0;
    x = distance % kPitch;
    y = distance / kPitch;
  };
  CUmemorytype type;
  side(form.dst_base, dst, c.dstDevice, c.dstXInBytes, c.dstY, c.dstPitch, type);
  c.dstMemoryType = type;
  side(form.src_base, src, c.srcDevice, c.srcXInBytes, c.srcY, c.srcPitch, type);
  c.srcMemoryType = type;
  c.WidthInBytes = bytes;
  c.Height = 1;
  return cuMemcpy2DAsync(&c, stream);
}

// In pieces that do not cross a pitch of either side.
static CUresult copy(const Form& form, CUdeviceptr dst, CUdeviceptr src, size_t bytes,
                     CUstream stream) {
  while (bytes > 0) {
    size_t piece = bytes < kBehind ? bytes : kBehind;
    if (!form.plain) {
      for (const auto& [base, at] : {std::pair{form.dst_base, dst}, std::pair{form.src_base, src}}) {
        if (base == 0) continue;
        const size_t room = kPitch - (at - base) % kPitch;
        if (room < piece) piece = room;
      }
    }
    const CUresult result = copy_once(form, dst, src, piece, stream);
    if (result != CUDA_SUCCESS) return result;
    dst += piece;
    src += piece;
    bytes -= piece;
  }
  return CUDA_SUCCESS;
}

int main(int argc, char** argv) {
  const size_t bytes = size_t(argc > 1 ? std::atoi(argv[1]) : 64) << 20;
  CHECK(cuInit(0));
  int devices = 0;
  CHECK(cuDeviceGetCount(&devices));
  if (devices < 2) return std::printf("two GPUs are needed\n"), 1;
  char name[100];
  CHECK(cuDeviceGetName(name, 100, 0));
  int driver = 0;
  CHECK(cuDriverGetVersion(&driver));
  for (int d = 0; d < 2; ++d) CHECK(cuDevicePrimaryCtxRetain(&contexts[d], d));
  for (int d = 0; d < 2; ++d) {
    CHECK(cuCtxSetCurrent(contexts[d]));
    CHECK(cuCtxEnablePeerAccess(contexts[1 - d], 0));
  }
  CHECK(cuCtxSetCurrent(contexts[1]));
  CUdeviceptr far_a, far_b;
  CUstream incoming;
  CHECK(cuMemAlloc(&far_a, bytes));
  CHECK(cuMemAlloc(&far_b, bytes));
  CHECK(cuStreamCreate(&incoming, CU_STREAM_NON_BLOCKING));
  CHECK(cuCtxSetCurrent(contexts[0]));
  CUdeviceptr a, b, c, d;
  CUstream own, outgoing;
  for (CUdeviceptr* p : {&a, &b, &c, &d}) CHECK(cuMemAlloc(p, bytes));
  CHECK(cuStreamCreate(&own, CU_STREAM_NON_BLOCKING));
  CHECK(cuStreamCreate(&outgoing, CU_STREAM_NON_BLOCKING));
  const CUdeviceptr peer = mapped(CU_MEM_LOCATION_TYPE_DEVICE, 1);
  const CUdeviceptr host = mapped(CU_MEM_LOCATION_TYPE_HOST_NUMA, 0);
  const CUdeviceptr gpu = mapped(CU_MEM_LOCATION_TYPE_DEVICE, 0);
  const Form forms[] = {
      {"plain (SMs)", 0, 0, true},
      {"destination's base a peer's", peer, 0, false},
      {"source's base a peer's", 0, peer, false},
      {"destination's base the host's", host, 0, false},
      {"source's base the host's", 0, host, false},
      {"both the host's", host, host, false},
      {"destination's the host's, source's a GPU's", host, gpu, false},
      {"source's the host's, destination's a GPU's", gpu, host, false},
      {"destination's the host's, source's a peer's", host, peer, false},
      {"source's the host's, destination's a peer's", peer, host, false},
  };
  std::printf("%s, driver %d, %zu MiB within GPU 0; GB/s of it, and of what is pushed meanwhile\n",
              name, driver, bytes >> 20);
  std::printf("%-46s %6s | %6s %6s | %6s %6s | %6s %6s %6s\n", "form", "alone", "own", "out", "own",
              "in", "own", "out", "in");
  std::vector<unsigned char> pattern(bytes), found(bytes);
  for (size_t i = 0; i < bytes; ++i) pattern[i] = static_cast<unsigned char>(i * 2654435761u >> 13);
  CHECK(cuMemcpyHtoD(a, pattern.data(), bytes));
  CUevent begin, end, o0, o1, i0, i1;
  for (CUevent* e : {&begin, &end, &o0, &o1}) CHECK(cuEventCreate(e, 0));
  CHECK(cuCtxSetCurrent(contexts[1]));
  for (CUevent* e : {&i0, &i1}) CHECK(cuEventCreate(e, 0));
  CHECK(cuCtxSetCurrent(contexts[0]));
  for (const Form& form : forms) {
    CHECK(cuMemsetD8(b, 0, bytes));
    CHECK(cuCtxSynchronize());
    const CUresult tried = copy(form, b, a, bytes, own);
    if (tried != CUDA_SUCCESS) {
      const char* why = "?";
      cuGetErrorName(tried, &why);
      std::printf("%-46s %s\n", form.name, why);
      continue;
    }
    CHECK(cuStreamSynchronize(own));
    CHECK(cuMemcpyDtoH(found.data(), b, bytes));
    if (std::memcmp(found.data(), pattern.data(), bytes) != 0) {
      std::printf("%-46s WRONG BYTES\n", form.name);
      continue;
    }
    double rates[4][3] = {};
    for (int way = 0; way < 4; ++way) {
      const bool out = way & 1, in = way & 2;
      const int turns = 20;
      // Neighbours run before, during and after what is timed.
      for (int lead = 0; lead < 4; ++lead) {
        if (out) CHECK(cuMemcpyAsync(far_b, c, bytes, outgoing));
      }
      if (out) CHECK(cuEventRecord(o0, outgoing));
      for (int t = 0; out && t < turns; ++t) CHECK(cuMemcpyAsync(far_b, c, bytes, outgoing));
      if (out) CHECK(cuEventRecord(o1, outgoing));
      CHECK(cuCtxSetCurrent(contexts[1]));
      if (in) CHECK(cuEventRecord(i0, incoming));
      for (int t = 0; in && t < turns; ++t) CHECK(cuMemcpyAsync(d, far_a, bytes, incoming));
      if (in) CHECK(cuEventRecord(i1, incoming));
      CHECK(cuCtxSetCurrent(contexts[0]));
      CHECK(cuEventRecord(begin, own));
      for (int t = 0; t < turns / 2; ++t) CHECK(copy(form, b, a, bytes, own));
      CHECK(cuEventRecord(end, own));
      CHECK(cuStreamSynchronize(own));
      CHECK(cuStreamSynchronize(outgoing));
      CHECK(cuCtxSetCurrent(contexts[1]));
      CHECK(cuStreamSynchronize(incoming));
      CHECK(cuCtxSetCurrent(contexts[0]));
      float ms = 0;
      CHECK(cuEventElapsedTime(&ms, begin, end));
      rates[way][0] = bytes * (turns / 2) / 1e6 / ms;
      if (out) {
        CHECK(cuEventElapsedTime(&ms, o0, o1));
        rates[way][1] = bytes * static_cast<double>(turns) / 1e6 / ms;
      }
      if (in) {
        CHECK(cuEventElapsedTime(&ms, i0, i1));
        rates[way][2] = bytes * static_cast<double>(turns) / 1e6 / ms;
      }
    }
    std::printf("%-46s %6.0f | %6.0f %6.0f | %6.0f %6.0f | %6.0f %6.0f %6.0f\n", form.name,
                rates[0][0], rates[1][0], rates[1][1], rates[2][0], rates[2][2], rates[3][0],
                rates[3][1], rates[3][2]);
  }
  return 0;
}
