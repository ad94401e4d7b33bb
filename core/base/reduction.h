// How elements are combined: by reduce commands of programs, and by reduce-scatters across hosts.
//
// Sources are taken in their order. Floating-point elements are accumulated in fp32 (fp64 for fp64)
// and rounded once, to nearest even; integers exactly, modulo their width. So every rank that
// reduces the same sources gets the same bits, in every run.
#pragma once
#include <cstdint>
#include <string_view>

namespace offcore {

enum class DType : uint8_t { i8, u8, i16, i32, i64, f16, bf16, f32, f64 };

// "int8", "uint8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"
std::string_view to_string(DType dtype);
DType parse_dtype(std::string_view text);  // throws invalid
uint64_t size_of(DType dtype);             // bytes

enum class ReduceOp : uint8_t {
  sum,
  avg,         // the sum divided by the number of sources; of integers, towards zero
  premul_sum,  // the sum of each source times `scale`
  min,         // of floating-point numbers NaN, where any source is one
  max,
};

std::string_view to_string(ReduceOp op);
ReduceOp parse_reduce_op(std::string_view text);  // throws invalid

struct Reduction {
  ReduceOp op = ReduceOp::sum;
  DType dtype = DType::f32;
  double scale = 1;  // of premul_sum; 1 otherwise

  friend bool operator==(const Reduction&, const Reduction&) = default;
};

// Throws invalid, and names `call`, where the scale is not finite, or not whole for integers.
void check(const Reduction& reduction, std::string_view call);

}  // namespace offcore
