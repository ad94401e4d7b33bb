// Compiled with -O3 -ffp-contract=off (CMakeLists.txt): loops are vectorised, and a product and a
// sum are rounded one after the other on every machine.
#include "core/base/reduce.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "core/base/error.h"

#define OFFCORE_INLINE inline __attribute__((always_inline))

namespace offcore {
namespace {

constexpr size_t kBlock = 1024;  // elements: accumulators that stay in the first cache

// How an element is stored, and what it is accumulated in.
template <typename Stored, typename Accumulated>
struct ElementTypes {
  using StoredValue = Stored;
  using SumValue = Accumulated;
};

template <typename Stored, typename Accumulated = Stored>
struct Plain : ElementTypes<Stored, Accumulated> {
  static OFFCORE_INLINE Accumulated load(Stored value) { return static_cast<Accumulated>(value); }
  static OFFCORE_INLINE Stored store(Accumulated sum) { return static_cast<Stored>(sum); }
};

// Sums of integers are kept modulo 2^64, and cut to their width.
template <typename Stored>
using Integer = Plain<Stored, int64_t>;

struct Bf16 : ElementTypes<uint16_t, float> {
  static OFFCORE_INLINE float load(uint16_t value) {
    return std::bit_cast<float>(static_cast<uint32_t>(value) << 16);
  }
  static OFFCORE_INLINE uint16_t store(float value) {
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fffu : rounded);
  }
};

struct F16 : ElementTypes<uint16_t, float> {
  // The exponent is moved by a product, which also makes subnormals right.
  static OFFCORE_INLINE float load(uint16_t value) {
    const uint32_t shifted = (static_cast<uint32_t>(value) & 0x7fffu) << 13;
    const float scaled = std::bit_cast<float>(shifted) * 0x1p112f;
    const uint32_t special = shifted >= 0x0f800000u ? 0x7f800000u | shifted : 0;
    const uint32_t bits = (special != 0 ? special : std::bit_cast<uint32_t>(scaled)) |
                          (static_cast<uint32_t>(value) & 0x8000u) << 16;
    return std::bit_cast<float>(bits);
  }
  static OFFCORE_INLINE uint16_t store(float value) {
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    const uint32_t sign = (bits >> 16) & 0x8000u;
    const uint32_t magnitude = bits & 0x7fffffffu;
    // Below 2^-14 the sum with 0.5 leaves the subnormal's bits, rounded, at the end.
    const float aligned = std::bit_cast<float>(magnitude) + 0.5f;
    const uint32_t subnormal = std::bit_cast<uint32_t>(aligned) - 0x3f000000u;
    const uint32_t normal = (magnitude - 0x38000000u + 0x0fffu + ((magnitude >> 13) & 1u)) >> 13;
    uint32_t half = magnitude < 0x38800000u ? subnormal : normal;
    half = magnitude >= 0x477ff000u ? 0x7c00u : half;
    half = magnitude > 0x7f800000u ? 0x7fffu : half;
    return static_cast<uint16_t>(sign | half);
  }
};

template <typename Type>
OFFCORE_INLINE Type plus(Type a, Type b) {
  if constexpr (std::is_integral_v<Type>) {
    return static_cast<Type>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
  } else {
    return a + b;
  }
}

template <typename Type>
OFFCORE_INLINE Type times(Type a, Type b) {
  if constexpr (std::is_integral_v<Type>) {
    return static_cast<Type>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
  } else {
    return a * b;
  }
}

template <ReduceOp op, typename Type>
OFFCORE_INLINE Type combine(Type sum, Type value, Type scale) {
  if constexpr (op == ReduceOp::premul_sum) return plus(sum, times(value, scale));
  if constexpr (op == ReduceOp::min) return value < sum || value != value ? value : sum;
  if constexpr (op == ReduceOp::max) return value > sum || value != value ? value : sum;
  return plus(sum, value);
}

struct ReduceJob {
  std::byte* dst;
  std::span<const std::byte* const> sources;
  uint64_t count;
  double scale;
};

template <typename Element, ReduceOp op>
OFFCORE_INLINE void run(const ReduceJob& job) {
  typename Element::SumValue sums[kBlock];
  typename Element::StoredValue values[kBlock];
  const auto scale = static_cast<typename Element::SumValue>(
      op == ReduceOp::avg ? static_cast<double>(job.sources.size()) : job.scale);
  for (uint64_t at = 0; at < job.count; at += kBlock) {
    const size_t count = static_cast<size_t>(std::min<uint64_t>(kBlock, job.count - at));
    const size_t offset = at * sizeof(values[0]);
    for (size_t k = 0; k < job.sources.size(); ++k) {
      std::memcpy(values, job.sources[k] + offset, count * sizeof(values[0]));
      if (k == 0) {
        for (size_t i = 0; i < count; ++i) {
          const auto value = Element::load(values[i]);
          sums[i] = op == ReduceOp::premul_sum ? times(value, scale) : value;
        }
      } else {
        for (size_t i = 0; i < count; ++i) {
          sums[i] = combine<op>(sums[i], Element::load(values[i]), scale);
        }
      }
    }
    for (size_t i = 0; i < count; ++i) {
      if constexpr (op == ReduceOp::avg) sums[i] = sums[i] / scale;
      values[i] = Element::store(sums[i]);
    }
    std::memcpy(job.dst + offset, values, count * sizeof(values[0]));
  }
}

template <typename Element>
OFFCORE_INLINE void run(ReduceOp op, const ReduceJob& job) {
  switch (op) {
    case ReduceOp::sum:
      return run<Element, ReduceOp::sum>(job);
    case ReduceOp::avg:
      return run<Element, ReduceOp::avg>(job);
    case ReduceOp::premul_sum:
      return run<Element, ReduceOp::premul_sum>(job);
    case ReduceOp::min:
      return run<Element, ReduceOp::min>(job);
    case ReduceOp::max:
      return run<Element, ReduceOp::max>(job);
  }
}

OFFCORE_INLINE void run(const Reduction& reduction, const ReduceJob& job) {
  switch (reduction.dtype) {
    case DType::i8:
      return run<Integer<int8_t>>(reduction.op, job);
    case DType::u8:
      return run<Integer<uint8_t>>(reduction.op, job);
    case DType::i16:
      return run<Integer<int16_t>>(reduction.op, job);
    case DType::i32:
      return run<Integer<int32_t>>(reduction.op, job);
    case DType::i64:
      return run<Integer<int64_t>>(reduction.op, job);
    case DType::f16:
      return run<F16>(reduction.op, job);
    case DType::bf16:
      return run<Bf16>(reduction.op, job);
    case DType::f32:
      return run<Plain<float>>(reduction.op, job);
    case DType::f64:
      return run<Plain<double>>(reduction.op, job);
  }
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) void run_wide(const Reduction& reduction, const ReduceJob& job) {
  run(reduction, job);
}
#endif

void run_anywhere(const Reduction& reduction, const ReduceJob& job) { run(reduction, job); }

}  // namespace

void reduce(const Reduction& reduction, std::byte* dst, std::span<const std::byte* const> sources,
            uint64_t bytes) {
  const ReduceJob job{dst, sources, bytes / size_of(reduction.dtype), reduction.scale};
#if defined(__x86_64__)
  static const bool wide = __builtin_cpu_supports("avx2") != 0;
  if (wide) return run_wide(reduction, job);
#endif
  run_anywhere(reduction, job);
}

}  // namespace offcore
