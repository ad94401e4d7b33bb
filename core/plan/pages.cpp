#include "core/plan/pages.h"

#include <algorithm>

namespace offcore {
namespace {

constexpr uint32_t kFirstPart = 64;   // copies of the first part, so that longer calls come soon
constexpr uint32_t kByCpuMax = 64;    // copies of a call that a driver may make by a CPU
constexpr uint64_t kBlocksPlain = 3;  // else strided copies are about as few calls
constexpr uint64_t kPackedMin = 16;   // commands: fewer have come before a kernel has begun
constexpr uint32_t kBothRowsMin = 8;  // else a block takes many copies
// Than is expected: a thread that has just woken, or shares its core, is slow for a while. Strided
// copies need none of that time.
constexpr double kSubmitSlower = 1.2;
// Of a part, so that the other direction's come between soon: to submit one takes as long as
// several plain ones.
constexpr uint32_t kStridedMax = 16;

}  // namespace

PageForms::PageForms(const Machine& machine, bool calls, std::optional<uint64_t> plain_from)
    : strided_(machine.native.strided),
      calls_(calls && machine.batches.sub_batch != 0),
      plain_from_(plain_from),
      batches_(machine.batches),
      pages_(machine.pages),
      call_ns_(machine.cost.issue_ns),
      host_gbps_(machine.links.host_gbps) {}

bool PageForms::strided(uint64_t rows, uint64_t bytes, bool submitted_soonest) const {
  if (!strided_ || !calls_ || plain_from_) return strided_ && rows > 1;
  const double row_ns = submitted_soonest ? 0 : static_cast<double>(bytes) / host_gbps_;
  const double copy_ns = batches_.copy_ns;
  return RowCosts{call_ns_, row_ns, std::max(copy_ns, row_ns)}.strided_pays(rows);
}

PageForm PageForms::form(const PagesLeft& run, const PageBudget& budget) const {
  PageForm form = this->form();
  form.copies = run.folds ? budget.strided : budget.plain;
  if (!calls_) return form;
  const uint32_t in_time = plain_from_ ? 0 : budget.in_time;
  const bool waits = in_time < batches_.sub_batch;  // the engine does
  const bool small = run.page_bytes < pages_.small_bytes;
  const bool soon = waits && !small && run.begins;
  form.strided_max = kStridedMax;
  const bool by_cpu = small && run.from_host;  // where the stream is idle
  form.together = run.folds
                      ? std::max(batches_.sub_batch, std::min(in_time, batches_.sub_batch_max))
                  : by_cpu ? std::min(pages_.sub_batch_apart, kByCpuMax)
                           : pages_.sub_batch_apart;
  if (soon) form.together = std::min(pages_.sub_batch_first, form.together);
  // What a driver makes by a CPU has to be little, and to last until the next call.
  if (waits && by_cpu) {
    form.first = static_cast<uint32_t>(
        std::max<uint64_t>(pages_.small_first, pages_.small_first_bytes / run.page_bytes));
  }
  const auto surely = static_cast<uint32_t>(in_time / kSubmitSlower);
  const uint64_t blocks_in_time =
      std::min<uint64_t>({surely / run.block_pages, budget.bytes / run.block_bytes, run.blocks});
  form.plain = run.folds && blocks_in_time >= kBlocksPlain;
  if (form.plain) {
    form.copies = surely;
  } else if (soon && !run.folds) {
    form.copies = std::min(budget.strided, kFirstPart);
  }
  form.listed = std::min<uint64_t>(form.copies, run.blocks * run.block_pages) >= batches_.call_min;
  return form;
}

PageForm PageForms::form() const {
  return {.copies = UINT32_MAX, .together = calls_ ? batches_.sub_batch : UINT32_MAX};
}

bool both_engines_pay(uint64_t rows, uint64_t bytes, const Machine& machine) {
  return bytes <= machine.pages.both_bytes_max && rows >= kBothRowsMin;
}

bool packing_pays(uint64_t commands, uint64_t rows, uint64_t bytes, const Machine& machine) {
  if (commands < kPackedMin) return false;
  const Pages& pages = machine.pages;
  const bool strided = rows / commands >= kBothRowsMin;
  return bytes / rows < (strided ? pages.pack_strided_below : pages.pack_plain_below);
}

uint64_t strided_ns(uint64_t rows, uint64_t bytes, const Machine& machine) {
  const auto all = static_cast<double>(rows * bytes);
  return static_cast<uint64_t>(machine.cost.issue_ns + all / machine.links.host_gbps);
}

}  // namespace offcore
