// How pages between the host and a rank are copied: by strided copies, one by one, by calls of
// several, or by both engines of the rank's link. A pass of planning for who makes programs of a
// few hundred copies whose order is given (core/kv): it says the forms, its caller lists the
// copies.
#pragma once
#include <cstdint>
#include <optional>

#include "core/machine/copy_forms.h"
#include "core/machine/machine.h"

namespace offcore {

// What is to be copied next, about.
struct PagesLeft {
  uint64_t page_bytes = 0;   // of a page, on average
  uint64_t block_bytes = 0;  // of the pages of a block together
  uint64_t block_pages = 0;
  uint64_t blocks = 0;  // that are left
  bool folds = false;   // some of a block's pages make a strided copy (PageForms::strided)
  bool begins = false;  // nothing comes before
  bool from_host = false;
};

// What may be handed over at once.
struct PageBudget {
  uint64_t bytes = 0;
  uint32_t strided = 0;  // copies, where some are
  uint32_t plain = 0;    // copies, where none is strided
  // Of these, as many as can be submitted before the engine has nothing left to do. Between two
  // calls an engine does nothing for a while, so that many plain copies of one call are copied
  // sooner than strided ones, each of a call of its own; but they take longer to submit.
  uint32_t in_time = 0;
};

struct PageForm {
  bool plain = false;  // also what could be strided, where that is about as few commands
  uint32_t copies = 0;
  uint32_t strided_max = UINT32_MAX;
  uint32_t together = UINT32_MAX;  // plain copies of a call
  uint32_t first = 0;              // of the first one; 0: as many
  bool listed = false;  // blocks whose pages are all plain are one command each (page_table.h)

  SubBatches calls() const { return SubBatches(together == UINT32_MAX ? 0 : together, first); }
};

class PageForms {
 public:
  PageForms() = default;  // strided wherever there are rows
  // `calls`: plain copies may go by calls of several. `plain_from`: pages of so many bytes go one
  // by one; none: as many as there is time for.
  PageForms(const Machine& machine, bool calls, std::optional<uint64_t> plain_from);

  // Whether one strided copy of so many pages is sooner through than as many plain ones;
  // `submitted_soonest`: sooner submitted, which is what counts where two engines copy or a stream
  // waits for that.
  bool strided(uint64_t rows, uint64_t bytes, bool submitted_soonest) const;
  bool one_by_one(uint64_t bytes) const { return plain_from_ && bytes >= *plain_from_; }
  PageForm form(const PagesLeft& run, const PageBudget& budget) const;
  PageForm form() const;  // where the time until the engine runs dry is not asked

 private:
  bool strided_ = true;
  bool calls_ = false;
  std::optional<uint64_t> plain_from_;
  Batches batches_;
  Pages pages_;
  double call_ns_ = 0;  // of a strided copy, besides its bytes
  double host_gbps_ = 1;
};

// Whether both engines of a link bring so many pages sooner than one, as strided copies: the pause
// after each, in which the other one copies, is a large part of the time where pages are small.
bool both_engines_pay(uint64_t rows, uint64_t bytes, const Machine& machine);

// Whether cores that lay pages side by side, for one plain copy of many, bring them sooner than
// engines do by so many commands, of so many rows in all.
bool packing_pays(uint64_t commands, uint64_t rows, uint64_t bytes, const Machine& machine);

// That one engine takes for them.
uint64_t strided_ns(uint64_t rows, uint64_t bytes, const Machine& machine);

}  // namespace offcore
