// The kernels behind reduce commands (core/ir/reduction.h says what they compute), a type each.
//
// A thread takes 16 bytes of every source at a time, several of them in flight; where addresses are
// not aligned alike it takes elements. Two sources, as on two GPUs, have a loop of their own: both
// are loaded before either is looked at. Written out by compile.py, beside it, into
// reduce_ptx.inc, which is what gets built: nobody needs a compiler of CUDA.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace {

enum Operation : uint32_t { kSum, kMin, kMax };

// As core/backend/cuda/reduce_kernel.cpp lays it out.
struct Arguments {
  uint64_t dst;
  uint64_t src;
  uint64_t step;   // from source to source, in bytes
  uint64_t own;    // the one that lies apart
  double scale;    // of each source
  uint64_t count;  // of elements
  uint32_t rows;
  uint32_t at;  // the number of the one apart; rows or more: there is none
  uint32_t operation;
  uint32_t divisor;  // of the sum
};

template <typename Stored, typename Accumulated>
struct Plain {
  using Store = Stored;
  using Sum = Accumulated;
  static __device__ Sum load(Store value) { return static_cast<Sum>(value); }
  static __device__ Store store(Sum value) { return static_cast<Store>(value); }
};

struct Half {
  using Store = uint16_t;
  using Sum = float;
  static __device__ Sum load(Store value) { return __half2float(__ushort_as_half(value)); }
  static __device__ Store store(Sum value) { return __half_as_ushort(__float2half_rn(value)); }
};

struct Bfloat {
  using Store = uint16_t;
  using Sum = float;
  static __device__ Sum load(Store value) { return __uint_as_float(uint32_t{value} << 16); }
  static __device__ Store store(Sum value) {
    return __bfloat16_as_ushort(__float2bfloat16_rn(value));
  }
};

template <typename Sum>
__device__ Sum combine(uint32_t operation, Sum sum, Sum value, Sum scale) {
  if (operation == kSum) return sum + value * scale;
  const bool closer = operation == kMin ? value < sum : value > sum;
  return closer || value != value ? value : sum;
}

template <typename Element>
union Vector {
  static constexpr int kCount = 16 / sizeof(typename Element::Store);
  uint4 whole;
  typename Element::Store element[kCount];
};

template <typename Element>
struct Reducer {
  using Store = typename Element::Store;
  using Sum = typename Element::Sum;
  using Pack = Vector<Element>;

  const Arguments& a;
  const Sum scale;

  __device__ uint64_t source(uint32_t row) const {
    if (row == a.at) return a.own;
    return a.src + a.step * (row > a.at ? row - 1 : row);
  }
  __device__ Sum first(Store value) const {
    const Sum loaded = Element::load(value);
    return a.operation == kSum ? loaded * scale : loaded;
  }
  __device__ Sum next(Sum sum, Store value) const {
    return combine(a.operation, sum, Element::load(value), scale);
  }
  __device__ Store last(Sum sum) const {
    return Element::store(a.divisor == 1 ? sum : sum / static_cast<Sum>(a.divisor));
  }

  static __device__ Pack load(uint64_t address, uint64_t unit) {
    Pack pack;
    pack.whole = __ldcs(reinterpret_cast<const uint4*>(address) + unit);
    return pack;
  }
  __device__ void store(uint64_t unit, const Pack& pack) const {
    __stcs(reinterpret_cast<uint4*>(a.dst) + unit, pack.whole);
  }

  __device__ Pack both(const Pack& one, const Pack& other) const {
    Pack result;
#pragma unroll
    for (int i = 0; i < Pack::kCount; ++i) {
      result.element[i] = last(next(first(one.element[i]), other.element[i]));
    }
    return result;
  }

  template <int unroll>
  __device__ uint64_t two(uint64_t unit, uint64_t stride, uint64_t units) const {
    const uint64_t one = source(0);
    const uint64_t other = source(1);
    for (; unit + (unroll - 1) * stride < units; unit += unroll * stride) {
      Pack x[unroll];
      Pack y[unroll];
#pragma unroll
      for (int k = 0; k < unroll; ++k) x[k] = load(one, unit + k * stride);
#pragma unroll
      for (int k = 0; k < unroll; ++k) y[k] = load(other, unit + k * stride);
#pragma unroll
      for (int k = 0; k < unroll; ++k) store(unit + k * stride, both(x[k], y[k]));
    }
    return unit;
  }

  __device__ void many(uint64_t unit) const {
    Sum sums[Pack::kCount];
    Pack ahead = load(source(0), unit);
    for (uint32_t row = 0; row < a.rows; ++row) {
      const Pack pack = ahead;
      if (row + 1 < a.rows) ahead = load(source(row + 1), unit);
#pragma unroll
      for (int i = 0; i < Pack::kCount; ++i) {
        sums[i] = row == 0 ? first(pack.element[i]) : next(sums[i], pack.element[i]);
      }
    }
    Pack result;
#pragma unroll
    for (int i = 0; i < Pack::kCount; ++i) result.element[i] = last(sums[i]);
    store(unit, result);
  }

  __device__ void element(uint64_t index) const {
    Sum sum = first(reinterpret_cast<const Store*>(source(0))[index]);
    for (uint32_t row = 1; row < a.rows; ++row) {
      sum = next(sum, reinterpret_cast<const Store*>(source(row))[index]);
    }
    reinterpret_cast<Store*>(a.dst)[index] = last(sum);
  }

  __device__ bool aligned() const {
    const uint64_t apart = a.at < a.rows ? a.own : 0;
    return ((a.dst | a.src | a.step | apart) & 15) == 0;
  }

  __device__ void run() const {
    const uint64_t stride = uint64_t{gridDim.x} * blockDim.x;
    const uint64_t thread = uint64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    const uint64_t units = aligned() ? a.count / Pack::kCount : 0;
    uint64_t unit = thread;
    // Integers are rare, and code is what a program's first reduction waits for.
    if (Sum(0.5f) != Sum(0) && a.rows == 2) unit = two<4>(unit, stride, units);
    for (; unit < units; unit += stride) many(unit);
    for (uint64_t i = units * Pack::kCount + thread; i < a.count; i += stride) element(i);
  }
};

template <typename Element>
__device__ void reduce(const Arguments& arguments) {
  using Sum = typename Element::Sum;
  Reducer<Element>{arguments, static_cast<Sum>(arguments.scale)}.run();
}

}  // namespace

// Bytes as they are, of one source.
extern "C" __global__ void __launch_bounds__(1024) offcore_copy(const __grid_constant__ Arguments a) {
  const uint64_t stride = uint64_t{gridDim.x} * blockDim.x;
  const uint64_t thread = uint64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const uint64_t units = ((a.dst | a.src) & 15) == 0 ? a.count / 16 : 0;
  const uint4* from = reinterpret_cast<const uint4*>(a.src);
  uint4* to = reinterpret_cast<uint4*>(a.dst);
  uint64_t unit = thread;
  for (; unit + 7 * stride < units; unit += 8 * stride) {
    uint4 held[8];
#pragma unroll
    for (int k = 0; k < 8; ++k) held[k] = __ldcs(from + unit + k * stride);
#pragma unroll
    for (int k = 0; k < 8; ++k) __stcs(to + unit + k * stride, held[k]);
  }
  for (; unit < units; unit += stride) __stcs(to + unit, __ldcs(from + unit));
  for (uint64_t i = units * 16 + thread; i < a.count; i += stride) {
    reinterpret_cast<uint8_t*>(a.dst)[i] = reinterpret_cast<const uint8_t*>(a.src)[i];
  }
}

#define OFFCORE_KERNEL(name, ...)                                          \
  extern "C" __global__ void __launch_bounds__(1024)                       \
      offcore_reduce_##name(const __grid_constant__ Arguments arguments) { \
    reduce<__VA_ARGS__>(arguments);                                        \
  }

using Accumulator = long long;
OFFCORE_KERNEL(int8, Plain<int8_t, int>)
OFFCORE_KERNEL(uint8, Plain<uint8_t, int>)
OFFCORE_KERNEL(int16, Plain<int16_t, int>)
OFFCORE_KERNEL(int32, Plain<int32_t, Accumulator>)
OFFCORE_KERNEL(int64, Plain<int64_t, Accumulator>)
OFFCORE_KERNEL(float16, Half)
OFFCORE_KERNEL(bfloat16, Bfloat)
OFFCORE_KERNEL(float32, Plain<float, float>)
OFFCORE_KERNEL(float64, Plain<double, double>)
