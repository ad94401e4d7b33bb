#include "studies/proof/resident.h"

#include <array>

namespace offcore::cuda {
namespace {

constexpr const char* kResidentPtx = R"(
.version 6.4
.target sm_70
.address_size 64

.visible .entry reader(
  .param .u64 chunks, .param .u64 flags, .param .u64 consumed, .param .u64 stride,
  .param .u64 outcome, .param .u64 limit_ns, .param .u32 words, .param .u32 own,
  .param .u32 ranks, .param .u32 first, .param .u32 count, .param .u32 banks,
  .param .u32 fans)
.maxntid 1024, 1, 1
{
  .shared .align 4 .u32 missed;
  .reg .pred %p;
  .reg .pred %leads;
  .reg .u32 %thread, %threads, %words, %own, %ranks, %first, %count, %banks, %fans;
  .reg .u32 %op, %value, %peer, %seen, %bank, %hop, %base, %at, %got, %wanted;
  .reg .s32 %behind;
  .reg .u64 %chunks, %flags, %consumed, %stride, %outcome, %limit, %began, %now, %wrong;
  .reg .u64 %chunk_bytes, %chunk, %address, %offset;

  mov.u32 %thread, %tid.x;
  mov.u32 %threads, %ntid.x;
  ld.param.u64 %chunks, [chunks];
  ld.param.u64 %flags, [flags];
  ld.param.u64 %consumed, [consumed];
  ld.param.u64 %stride, [stride];
  ld.param.u64 %outcome, [outcome];
  ld.param.u64 %limit, [limit_ns];
  ld.param.u32 %words, [words];
  ld.param.u32 %own, [own];
  ld.param.u32 %ranks, [ranks];
  ld.param.u32 %first, [first];
  ld.param.u32 %count, [count];
  ld.param.u32 %banks, [banks];
  ld.param.u32 %fans, [fans];
  mul.wide.u32 %chunk_bytes, %words, 4;
  setp.eq.u32 %leads, %thread, 0;
  mov.u64 %wrong, 0;
  mov.u32 %op, 0;
  @%leads st.shared.u32 [missed], 0;

operation:
  setp.ge.u32 %p, %op, %count;
  @%p bra done;
  add.u32 %value, %first, %op;
  mov.u32 %peer, 0;

next_peer:
  setp.ge.u32 %p, %peer, %ranks;
  @%p bra next_operation;
  setp.eq.u32 %p, %peer, %own;
  @%p bra after_peer;
  @!%leads bra flag_is_there;

  mul.wide.u32 %offset, %peer, 64;
  add.u64 %address, %flags, %offset;
  mov.u64 %began, %globaltimer;
poll:
  ld.acquire.sys.global.u32 %seen, [%address];
  sub.u32 %seen, %seen, %value;
  mov.b32 %behind, %seen;
  setp.ge.s32 %p, %behind, 0;
  @%p bra flag_is_there;
  mov.u64 %now, %globaltimer;
  sub.u64 %now, %now, %began;
  setp.lt.u64 %p, %now, %limit;
  @%p bra poll;
  st.shared.u32 [missed], 1;
  st.global.u32 [%outcome+8], %value;

flag_is_there:
  bar.sync 0;
  ld.shared.u32 %seen, [missed];
  setp.ne.u32 %p, %seen, 0;
  @%p bra done;

  rem.u32 %bank, %value, %banks;
  add.u32 %hop, %own, %ranks;
  sub.u32 %hop, %hop, %peer;
  sub.u32 %hop, %hop, 1;
  rem.u32 %hop, %hop, %ranks;
  mad.lo.u32 %bank, %hop, %fans, %bank;
  mul.lo.u32 %base, %bank, 2654435761;
  mad.lo.u32 %base, %peer, 40503, %base;
  cvt.u64.u32 %offset, %peer;
  mad.lo.u64 %chunk, %offset, %chunk_bytes, %chunks;
  mov.u32 %at, %thread;
word:
  setp.ge.u32 %p, %at, %words;
  @%p bra chunk_is_read;
  sub.u32 %wanted, %words, %at;
  sub.u32 %wanted, %wanted, 1;
  mul.wide.u32 %offset, %wanted, 4;
  add.u64 %address, %chunk, %offset;
  ld.volatile.global.u32 %got, [%address];
  add.u32 %wanted, %wanted, %base;
  setp.ne.u32 %p, %got, %wanted;
  @%p add.u64 %wrong, %wrong, 1;
  add.u32 %at, %at, %threads;
  bra word;

chunk_is_read:
  bar.sync 0;
  @!%leads bra after_peer;
  cvt.u64.u32 %offset, %peer;
  mad.lo.u64 %address, %offset, %stride, %consumed;
  st.release.sys.global.u32 [%address], %value;

after_peer:
  add.u32 %peer, %peer, 1;
  bra next_peer;

next_operation:
  add.u32 %op, %op, 1;
  bra operation;

done:
  red.global.add.u64 [%outcome], %wrong;
  ret;
}

.visible .entry spinner(.param .u64 stop, .param .u64 state, .param .u64 limit_ns)
.maxntid 512, 1, 1
{
  .reg .pred %p;
  .reg .u32 %thread, %block, %seen;
  .reg .u64 %stop, %state, %limit, %began, %now, %offset;

  mov.u32 %thread, %tid.x;
  setp.ne.u32 %p, %thread, 0;
  @%p bra gone;
  ld.param.u64 %stop, [stop];
  ld.param.u64 %state, [state];
  ld.param.u64 %limit, [limit_ns];
  mov.u32 %block, %ctaid.x;
  mul.wide.u32 %offset, %block, 4;
  add.u64 %state, %state, %offset;
  st.release.sys.global.u32 [%state], 1;
  mov.u64 %began, %globaltimer;
poll:
  ld.acquire.sys.global.u32 %seen, [%stop];
  setp.ne.u32 %p, %seen, 0;
  @%p bra told;
  mov.u64 %now, %globaltimer;
  sub.u64 %now, %now, %began;
  setp.lt.u64 %p, %now, %limit;
  @!%p bra late;
  nanosleep.u32 20000;
  bra poll;
late:
  st.release.sys.global.u32 [%state], 3;
  bra gone;
told:
  st.release.sys.global.u32 [%state], 2;
gone:
  bar.sync 0;
  ret;
}

.visible .entry toucher(.param .u64 word, .param .u32 value)
{
  .reg .u32 %value;
  .reg .u64 %word;
  ld.param.u64 %word, [word];
  ld.param.u32 %value, [value];
  st.release.sys.global.u32 [%word], %value;
  ret;
}
)";

}  // namespace

Kernels::Kernels(std::shared_ptr<const PrimaryContext> context) : context_(std::move(context)) {
  const ContextGuard current(context_->handle());
  const CUresult result = Driver::get().cuModuleLoadData(&module_, kResidentPtx);
  check(result,
        "cuModuleLoadData (the driver's own compiler of PTX, "
        "libnvidia-ptxjitcompiler, has to be installed)");
  try {
    reader_ = function("reader");
    spinner_ = function("spinner");
    toucher_ = function("toucher");
  } catch (...) {
    Driver::get().cuModuleUnload(module_);
    throw;
  }
}

Kernels::~Kernels() {
  const ContextGuard current(context_->handle());
  Driver::get().cuModuleUnload(module_);
}

CUfunction Kernels::function(const char* name) const {
  CUfunction found = nullptr;
  check(Driver::get().cuModuleGetFunction(&found, module_, name), "cuModuleGetFunction");
  return found;
}

void Kernels::launch(CUfunction function, uint32_t blocks, uint32_t threads, CUstream stream,
                     std::span<void*> arguments) const {
  const ContextGuard current(context_->handle());
  check(Driver::get().cuLaunchKernel(function, blocks, 1, 1, threads, 1, 1, 0, stream,
                                     arguments.data(), nullptr),
        "cuLaunchKernel");
}

void Kernels::read(CUstream stream, ReaderArguments a) const {
  std::array<void*, 13> arguments{&a.chunks,   &a.flags, &a.consumed, &a.stride, &a.outcome,
                                  &a.limit_ns, &a.words, &a.own,      &a.ranks,  &a.first,
                                  &a.count,    &a.banks, &a.fans};
  launch(reader_, 1, kReaderThreads, stream, arguments);
}

void Kernels::spin(CUstream stream, uint32_t blocks, SpinnerArguments a) const {
  std::array<void*, 3> arguments{&a.stop, &a.state, &a.limit_ns};
  launch(spinner_, blocks, kSpinnerThreads, stream, arguments);
}

void Kernels::touch(CUstream stream, ToucherArguments a) const {
  std::array<void*, 2> arguments{&a.word, &a.value};
  launch(toucher_, 1, 32, stream, arguments);
}

}  // namespace offcore::cuda
