#include "core/base/reduction.h"

#include <cmath>

#include "core/base/names.h"

namespace offcore {
namespace {

constexpr std::string_view kDTypes[] = {"int8",    "uint8",    "int16",   "int32",  "int64",
                                        "float16", "bfloat16", "float32", "float64"};
constexpr uint64_t kSizes[] = {1, 1, 2, 4, 8, 2, 2, 4, 8};
constexpr std::string_view kOps[] = {"sum", "avg", "premul_sum", "min", "max"};

}  // namespace

std::string_view to_string(DType dtype) { return kDTypes[static_cast<size_t>(dtype)]; }

DType parse_dtype(std::string_view text) {
  return parse_name<DType>("dtype of a reduction", text, kDTypes);
}

uint64_t size_of(DType dtype) { return kSizes[static_cast<size_t>(dtype)]; }

std::string_view to_string(ReduceOp op) { return kOps[static_cast<size_t>(op)]; }

ReduceOp parse_reduce_op(std::string_view text) {
  return parse_name<ReduceOp>("reduction", text, kOps);
}

void check(const Reduction& reduction, std::string_view call) {
  const double scale = reduction.scale;
  const bool whole = reduction.dtype <= DType::i64;
  constexpr double kScaleMax = INT32_MAX;  // kernels multiply in 32 bits where that is enough
  if (whole && (scale != std::trunc(scale) || std::abs(scale) > kScaleMax)) {
    fail(Code::invalid, call, ": a scale of ", scale, " is not a whole number of 32 bits, as ",
         to_string(reduction.dtype), " needs");
  }
  if (!std::isfinite(scale)) fail(Code::invalid, call, ": the scale is not finite");
}

}  // namespace offcore
