// The kernels behind reduce commands (core/base/reduction.h says what they compute), a type each.
//
// A launch does a few jobs one after another: every warp waits for the words of one, by its own
// looks, and goes on to the next as soon as its own part is written; the last warp that is through
// signals. So a chunk costs no launch, no wait of a stream, and no barrier that lets memory idle.
// A thread takes 16 bytes of every source at a time, several of them in flight; where addresses are
// not aligned alike it takes elements. Two, four and eight sources, as hosts have GPUs, have loops of
// their own for sums of floats: eight loads are in flight before one is looked at. Written out by
// compile.py, beside it, into reduce_ptx.inc, which is what gets built: nobody needs a compiler of
// CUDA.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace {

enum Operation : uint32_t { kSum, kMin, kMax };

constexpr int kJobsMax = 15;
constexpr int kWordsMax = 8;

// One reduce command, the words that it waits for, and those that tell of it.
struct Job {
  uint64_t dst;
  uint64_t src;
  uint64_t step;   // from source to source, in bytes
  uint64_t own;    // the one that lies apart
  uint64_t bytes;  // of each
  uint64_t wait[kWordsMax];
  uint64_t signal[kWordsMax];
  uint32_t wait_value[kWordsMax];
  uint32_t signal_value[kWordsMax];
  uint32_t waits;
  uint32_t signals;
  uint32_t rows;
  uint32_t at;  // the number of the source apart; rows or more: there is none
};

// As core/backend/cuda/reduce_kernel.cpp lays it out.
struct Arguments {
  double scale;       // of each source
  uint64_t counters;  // a job's each: blocks that are through with it
  uint32_t operation;
  uint32_t averages;
  uint32_t jobs;
  uint32_t pad;
  Job job[kJobsMax];
};

constexpr uint32_t kWarp = 32;

// Flag values are compared cyclically. A word that has come also tells of all that was written
// before it, by whatever engine.
__device__ void await(const Job& job) {
  const uint32_t lane = threadIdx.x % kWarp;
  if (lane < job.waits) {
    for (;;) {
      uint32_t seen;
      asm volatile("ld.acquire.sys.global.u32 %0, [%1];"
                   : "=r"(seen)
                   : "l"(job.wait[lane])
                   : "memory");
      if (static_cast<int32_t>(seen - job.wait_value[lane]) >= 0) break;
      __nanosleep(64);
    }
  }
  __syncwarp();
}

// The last warp that is through signals for all.
__device__ void tell(const Job& job, uint32_t* counter) {
  if (job.signals == 0) return;
  __syncwarp();
  if (threadIdx.x % kWarp != 0) return;
  const uint32_t warps = gridDim.x * (blockDim.x / kWarp);
  __threadfence_system();
  if (atomicInc(counter, warps - 1) != warps - 1) return;
  __threadfence_system();
  for (uint32_t i = 0; i < job.signals; ++i) {
    asm volatile("st.release.sys.global.u32 [%0], %1;"
                 :
                 : "l"(job.signal[i]), "r"(job.signal_value[i])
                 : "memory");
  }
}

__device__ void copy(const Job& a) {
  const uint64_t stride = uint64_t{gridDim.x} * blockDim.x;
  const uint64_t thread = uint64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const uint64_t units = ((a.dst | a.src) & 15) == 0 ? a.bytes / 16 : 0;
  const uint4* from = reinterpret_cast<const uint4*>(a.src);
  uint4* to = reinterpret_cast<uint4*>(a.dst);
  uint64_t unit = thread;
  for (; unit + 3 * stride < units; unit += 4 * stride) {
    uint4 held[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) held[k] = __ldcg(from + unit + k * stride);
#pragma unroll
    for (int k = 0; k < 4; ++k) __stcs(to + unit + k * stride, held[k]);
  }
  for (; unit < units; unit += stride) __stcs(to + unit, __ldcg(from + unit));
  for (uint64_t i = units * 16 + thread; i < a.bytes; i += stride) {
    reinterpret_cast<uint8_t*>(a.dst)[i] = __ldcg(reinterpret_cast<const uint8_t*>(a.src) + i);
  }
}

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
  static __device__ uint32_t pair(uint32_t one, uint32_t other, float factor) {
    const float2 x = __half22float2(reinterpret_cast<const __half2&>(one));
    const float2 y = __half22float2(reinterpret_cast<const __half2&>(other));
    const __half2 sums = __floats2half2_rn((x.x + y.x) * factor, (x.y + y.y) * factor);
    return reinterpret_cast<const uint32_t&>(sums);
  }
  static __device__ Sum load(Store value) { return __half2float(__ushort_as_half(value)); }
  static __device__ Store store(Sum value) { return __half_as_ushort(__float2half_rn(value)); }
};

struct Bfloat {
  using Store = uint16_t;
  using Sum = float;
  static __device__ uint32_t pair(uint32_t one, uint32_t other, float factor) {
    const float2 x = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(one));
    const float2 y = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(other));
    const __nv_bfloat162 sums = __floats2bfloat162_rn((x.x + y.x) * factor, (x.y + y.y) * factor);
    return reinterpret_cast<const uint32_t&>(sums);
  }
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

  const Job& a;
  const uint32_t operation;
  const uint32_t divisor;
  const Sum scale;

  __device__ uint64_t source(uint32_t row) const {
    if (row == a.at) return a.own;
    return a.src + a.step * (row > a.at ? row - 1 : row);
  }
  __device__ Sum first(Store value) const {
    const Sum loaded = Element::load(value);
    return operation == kSum ? loaded * scale : loaded;
  }
  __device__ Sum next(Sum sum, Store value) const {
    return combine(operation, sum, Element::load(value), scale);
  }
  __device__ Store last(Sum sum) const {
    return Element::store(divisor == 1 ? sum : sum / static_cast<Sum>(divisor));
  }

  static __device__ Pack load(uint64_t address, uint64_t unit) {
    Pack pack;
    pack.whole = __ldcs(reinterpret_cast<const uint4*>(address) + unit);
    return pack;
  }
  __device__ void store(uint64_t unit, const Pack& pack) const {
    __stcs(reinterpret_cast<uint4*>(a.dst) + unit, pack.whole);
  }

  // Sums that are scaled once, if at all, by a power of two, which is exact: sum and avg, as a rule.
  __device__ bool plain() const {
    return operation == kSum && scale == Sum(1) && (divisor & (divisor - 1)) == 0;
  }

  static __device__ uint4 both(uint4 one, uint4 other, Sum factor) {
    if constexpr (sizeof(Store) == 2) {
      return {Element::pair(one.x, other.x, factor), Element::pair(one.y, other.y, factor),
              Element::pair(one.z, other.z, factor), Element::pair(one.w, other.w, factor)};
    } else {
      const Pack x{one};
      const Pack y{other};
      Pack result;
#pragma unroll
      for (int i = 0; i < Pack::kCount; ++i) {
        result.element[i] = (x.element[i] + y.element[i]) * factor;
      }
      return result.whole;
    }
  }

  template <int unroll>
  __device__ uint64_t two(uint64_t unit, uint64_t stride, uint64_t units) const {
    const Sum factor = Sum(1) / static_cast<Sum>(divisor);
    const uint4* one = reinterpret_cast<const uint4*>(source(0));
    const uint4* other = reinterpret_cast<const uint4*>(source(1));
    uint4* to = reinterpret_cast<uint4*>(a.dst);
    for (; unit + (unroll - 1) * stride < units; unit += unroll * stride) {
      uint4 x[unroll];
      uint4 y[unroll];
#pragma unroll
      for (int k = 0; k < unroll; ++k) x[k] = __ldcs(one + unit + k * stride);
#pragma unroll
      for (int k = 0; k < unroll; ++k) y[k] = __ldcs(other + unit + k * stride);
#pragma unroll
      for (int k = 0; k < unroll; ++k) __stcs(to + unit + k * stride, both(x[k], y[k], factor));
    }
    return unit;
  }

  // Plain sums of that many sources, in rank order.
  template <int rows, int unroll>
  __device__ uint64_t sums(uint64_t unit, uint64_t stride, uint64_t units) const {
    const Sum factor = Sum(1) / static_cast<Sum>(divisor);
    for (; unit + (unroll - 1) * stride < units; unit += unroll * stride) {
      uint4 loaded[unroll][rows];
#pragma unroll
      for (int row = 0; row < rows; ++row) {
        const uint4* from = reinterpret_cast<const uint4*>(source(row)) + unit;
#pragma unroll
        for (int k = 0; k < unroll; ++k) loaded[k][row] = __ldcs(from + k * stride);
      }
#pragma unroll
      for (int k = 0; k < unroll; ++k) {
        Sum sum[Pack::kCount];
#pragma unroll
        for (int row = 0; row < rows; ++row) {
          const Pack pack{loaded[k][row]};
#pragma unroll
          for (int i = 0; i < Pack::kCount; ++i) {
            const Sum value = Element::load(pack.element[i]);
            sum[i] = row == 0 ? value : sum[i] + value;
          }
        }
        Pack result;
#pragma unroll
        for (int i = 0; i < Pack::kCount; ++i) result.element[i] = Element::store(sum[i] * factor);
        store(unit + k * stride, result);
      }
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
    Sum sum = first(__ldcg(reinterpret_cast<const Store*>(source(0)) + index));
    for (uint32_t row = 1; row < a.rows; ++row) {
      sum = next(sum, __ldcg(reinterpret_cast<const Store*>(source(row)) + index));
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
    const uint64_t count = a.bytes / sizeof(Store);
    const uint64_t units = aligned() ? count / Pack::kCount : 0;
    uint64_t unit = thread;
    // Integers are rare, and code is what a program's first reduction waits for.
    if constexpr (Sum(0.5f) != Sum(0)) {
      if (a.rows == 2 && plain()) unit = two<4>(unit, stride, units);
      if (a.rows == 2 && plain()) unit = two<1>(unit, stride, units);
      if (a.rows == 4 && plain()) unit = sums<4, 2>(unit, stride, units);
      if (a.rows == 8 && plain()) unit = sums<8, 1>(unit, stride, units);
    }
    for (; unit < units; unit += stride) many(unit);
    for (uint64_t i = units * Pack::kCount + thread; i < count; i += stride) element(i);
  }
};

template <typename Element>
__device__ void reduce(const Arguments& arguments) {
  using Sum = typename Element::Sum;
  for (uint32_t i = 0; i < arguments.jobs; ++i) {
    const Job& job = arguments.job[i];
    await(job);
    if (job.rows == 1 && job.at >= job.rows) {
      copy(job);
    } else {
      const uint32_t divisor = arguments.averages != 0 ? job.rows : 1;
      Reducer<Element>{job, arguments.operation, divisor, static_cast<Sum>(arguments.scale)}.run();
    }
    tell(job, reinterpret_cast<uint32_t*>(arguments.counters) + i);
  }
}

}  // namespace

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
