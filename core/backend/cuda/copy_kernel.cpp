#include "core/backend/cuda/copy_kernel.h"

#include <algorithm>
#include <array>

namespace offcore::cuda {
namespace {

constexpr uint32_t kThreads = 1024;
constexpr uint64_t kUnit = 16;                     // bytes that a thread moves at once
constexpr uint64_t kUnitsMax = uint64_t{1} << 31;  // of a launch: they are counted in 32 bits

// Unit u of all copies' rows goes to thread u, modulo the threads that there are.
constexpr const char* kGatherPtx = R"(
.version 6.4
.target sm_70
.address_size 64

.visible .entry gather(
  .param .align 16 .b8 places[2048], .param .u64 dst_step, .param .u64 src_step,
  .param .u32 units, .param .u32 rows, .param .u32 total)
.maxntid 1024, 1, 1
{
  .reg .pred %p;
  .reg .u32 %at, %stride, %units, %rows, %total, %page, %rest, %copy, %row;
  .reg .u32 %a, %b, %c, %d;
  .reg .u64 %places, %place, %dst, %src, %dst_step, %src_step, %offset;

  mov.u32 %at, %ctaid.x;
  mov.u32 %stride, %ntid.x;
  mov.u32 %rest, %tid.x;
  mad.lo.u32 %at, %at, %stride, %rest;
  mov.u32 %rest, %nctaid.x;
  mul.lo.u32 %stride, %stride, %rest;
  ld.param.u64 %dst_step, [dst_step];
  ld.param.u64 %src_step, [src_step];
  ld.param.u32 %units, [units];
  ld.param.u32 %rows, [rows];
  ld.param.u32 %total, [total];
  mov.b64 %places, places;

unit:
  setp.ge.u32 %p, %at, %total;
  @%p bra done;
  div.u32 %page, %at, %units;
  mul.lo.u32 %rest, %page, %units;
  sub.u32 %rest, %at, %rest;
  div.u32 %copy, %page, %rows;
  mul.lo.u32 %row, %copy, %rows;
  sub.u32 %row, %page, %row;
  mul.wide.u32 %offset, %copy, 16;
  add.u64 %place, %places, %offset;
  ld.param.u64 %dst, [%place];
  ld.param.u64 %src, [%place+8];
  mul.wide.u32 %offset, %rest, 16;
  add.u64 %dst, %dst, %offset;
  add.u64 %src, %src, %offset;
  cvt.u64.u32 %offset, %row;
  mad.lo.u64 %dst, %offset, %dst_step, %dst;
  mad.lo.u64 %src, %offset, %src_step, %src;
  ld.global.v4.u32 {%a, %b, %c, %d}, [%src];
  st.global.v4.u32 [%dst], {%a, %b, %c, %d};
  add.u32 %at, %at, %stride;
  bra unit;

done:
  ret;
}
)";

}  // namespace

CopyKernel::CopyKernel(const std::shared_ptr<const PrimaryContext>& context)
    : kernel_(context, kGatherPtx, "gather",
              "the driver's own compiler of PTX, libnvidia-ptxjitcompiler, has to be installed") {
  if (attribute(context->ordinal(), Attribute::can_use_host_pointer) == 0) {
    fail(Code::unsupported, "kernels of GPU ", context->ordinal(),
         " do not reach host memory by its own addresses: leave the kernel out");
  }
}

bool KernelCopies::takes(const StridedCopy& copy) {
  const uint64_t all = copy.dst | copy.src | copy.dst_pitch | copy.src_pitch | copy.bytes;
  return all % kUnit == 0 && copy.bytes / kUnit * copy.rows < kUnitsMax;
}

bool KernelCopies::fits(const StridedCopy& copy) const {
  const uint64_t units = copy.bytes / kUnit * copy.rows;
  return pairs_.size() < kCopiesMax && shape_.bytes == copy.bytes && shape_.rows == copy.rows &&
         shape_.dst_pitch == copy.dst_pitch && shape_.src_pitch == copy.src_pitch &&
         (pairs_.size() + 1) * units < kUnitsMax;
}

uint32_t KernelCopies::add(const StridedCopy& copy) {
  const uint32_t launches = fits(copy) ? 0 : flush();
  shape_ = copy;
  pairs_.push_back({copy.dst, copy.src});
  return launches;
}

uint32_t KernelCopies::flush() {
  if (pairs_.empty()) return 0;
  auto units = static_cast<uint32_t>(shape_.bytes / kUnit);
  auto total = static_cast<uint32_t>(pairs_.size() * shape_.rows * units);
  std::array<Pair, kCopiesMax> places{};
  std::copy(pairs_.begin(), pairs_.end(), places.begin());
  std::array<void*, 6> arguments{&places, &shape_.dst_pitch, &shape_.src_pitch,
                                 &units,  &shape_.rows,      &total};
  const uint32_t blocks = std::min(CopyKernel::kBlocks, (total + kThreads - 1) / kThreads);
  pairs_.clear();
  check(Driver::get().cuLaunchKernel(gather_.kernel_.function(), blocks, 1, 1, kThreads, 1, 1, 0,
                                     stream_, arguments.data(), nullptr),
        "cuLaunchKernel");
  return 1;
}

}  // namespace offcore::cuda
