// Functions that pass their call on to the real library, as they got it.
//
// Each is a jump through a slot: where to, and its name. A slot first leads to `bind`, which saves
// the registers that carry arguments, asks for the function, and goes there; from then on the slot
// leads there by itself. Nothing on the stack moves, so that parameters may lie there too.
#include "shim/library.h"
#include "shim/names.h"

#if !defined(__x86_64__)
#error "the trampolines are written for x86-64 only"
#endif

// What a slot lies on: NAME, as C++ sees it, is shim::Slot.
#define OFFCORE_TRAMPOLINE(name)                                 \
  asm(".pushsection .data\n"                                     \
      ".balign 8\n"                                              \
      ".Lslot_" #name ": .quad offcore_nccl_bind, .Lname_" #name \
      "\n"                                                       \
      ".popsection\n"                                            \
      ".pushsection .rodata\n"                                   \
      ".Lname_" #name ": .asciz \"" #name                        \
      "\"\n"                                                     \
      ".popsection\n"                                            \
      ".pushsection .text\n"                                     \
      ".balign 16\n"                                             \
      ".globl " #name                                            \
      "\n"                                                       \
      ".type " #name ", @function\n" #name                       \
      ":\n"                                                      \
      "endbr64\n"                                                \
      "leaq .Lslot_" #name                                       \
      "(%rip), %r11\n"                                           \
      "jmp *(%r11)\n"                                            \
      ".size " #name ", . - " #name                              \
      "\n"                                                       \
      ".popsection\n");
#define OFFCORE_TRAMPOLINE_P(name) OFFCORE_TRAMPOLINE(p##name)

asm(".pushsection .text\n"
    ".balign 16\n"
    ".local offcore_nccl_bind\n"
    ".type offcore_nccl_bind, @function\n"
    "offcore_nccl_bind:\n"
    ".cfi_startproc\n"
    "endbr64\n"
    "pushq %rbp\n"
    ".cfi_adjust_cfa_offset 8\n"
    ".cfi_rel_offset %rbp, 0\n"
    "movq %rsp, %rbp\n"
    ".cfi_def_cfa_register %rbp\n"
    "andq $-16, %rsp\n"
    "subq $192, %rsp\n"
    "movq %rdi, 0(%rsp)\n"
    "movq %rsi, 8(%rsp)\n"
    "movq %rdx, 16(%rsp)\n"
    "movq %rcx, 24(%rsp)\n"
    "movq %r8, 32(%rsp)\n"
    "movq %r9, 40(%rsp)\n"
    "movq %rax, 48(%rsp)\n"
    "movups %xmm0, 64(%rsp)\n"
    "movups %xmm1, 80(%rsp)\n"
    "movups %xmm2, 96(%rsp)\n"
    "movups %xmm3, 112(%rsp)\n"
    "movups %xmm4, 128(%rsp)\n"
    "movups %xmm5, 144(%rsp)\n"
    "movups %xmm6, 160(%rsp)\n"
    "movups %xmm7, 176(%rsp)\n"
    "movq %r11, %rdi\n"
    "call offcore_nccl_target\n"
    "movq %rax, %r11\n"
    "movq 0(%rsp), %rdi\n"
    "movq 8(%rsp), %rsi\n"
    "movq 16(%rsp), %rdx\n"
    "movq 24(%rsp), %rcx\n"
    "movq 32(%rsp), %r8\n"
    "movq 40(%rsp), %r9\n"
    "movq 48(%rsp), %rax\n"
    "movups 64(%rsp), %xmm0\n"
    "movups 80(%rsp), %xmm1\n"
    "movups 96(%rsp), %xmm2\n"
    "movups 112(%rsp), %xmm3\n"
    "movups 128(%rsp), %xmm4\n"
    "movups 144(%rsp), %xmm5\n"
    "movups 160(%rsp), %xmm6\n"
    "movups 176(%rsp), %xmm7\n"
    "leave\n"
    ".cfi_def_cfa %rsp, 8\n"
    "jmp *%r11\n"
    ".cfi_endproc\n"
    ".size offcore_nccl_bind, . - offcore_nccl_bind\n"
    ".popsection\n");

OFFCORE_NCCL_FORWARDED(OFFCORE_TRAMPOLINE)
OFFCORE_NCCL_FORWARDED(OFFCORE_TRAMPOLINE_P)
OFFCORE_NCCL_OWN(OFFCORE_TRAMPOLINE_P)

namespace offcore::shim {
namespace {

NcclResult missing() {
  return Library::of_process().loaded() ? kNcclInvalidUsage : kNcclSystemError;
}

}  // namespace

extern "C" __attribute__((used, visibility("hidden"))) void* offcore_nccl_target(Slot* slot) {
  void* const function = Library::of_process().find(slot->name);
  if (function == nullptr) return reinterpret_cast<void*>(&missing);
  __atomic_store_n(&slot->target, function, __ATOMIC_RELEASE);
  return function;
}

}  // namespace offcore::shim
