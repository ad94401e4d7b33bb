#include "shim/policy.h"

#include <algorithm>
#include <charconv>
#include <string_view>

#include "core/base/digest.h"
#include "core/base/env.h"
#include "core/base/error.h"
#include "shim/machine_for.h"

namespace offcore::shim {
namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;
constexpr std::string_view kRegistered = "registered_";
constexpr const char* kVariable = "OFFCORE_NCCL_MIN_BYTES";

// What was faster than NCCL's kernels, enqueued ahead; on H200s also as a program calls it, which
// needs 32 MiB in place of 16 (benchmarks/results/reduce-h200-2.txt and reduce-h100-2.txt).
struct Measured {
  std::string_view card;
  Rank ranks;
  Collective collective;
  Form form;
  uint64_t least;
};
constexpr Measured kMeasured[] = {
    {"h200", 2, Collective::reduce_scatter, Form::plain, 32 * kMiB},
    {"h200", 2, Collective::all_reduce, Form::plain, 64 * kMiB},
    {"h100", 2, Collective::reduce_scatter, Form::plain, 32 * kMiB},
    {"h100", 2, Collective::all_reduce, Form::plain, 64 * kMiB},
};

constexpr Collective kTaken[] = {
    Collective::all_gather, Collective::all_to_all,     Collective::broadcast, Collective::scatter,
    Collective::gather,     Collective::reduce_scatter, Collective::all_reduce};

[[noreturn]] void refuse(std::string_view part) {
  fail(Code::invalid, kVariable, ": '", part,
       "': give OPERATION=BYTES, ..., such as reduce_scatter=16M,registered_all_gather=64M, with ",
       "all_gather, all_to_all, broadcast, scatter, gather, reduce_scatter and all_reduce");
}

uint64_t bytes_of(std::string_view text, std::string_view part) {
  if (text == "never") return kNever;
  uint64_t value = 0;
  const char* const end = text.data() + text.size();
  const auto [stop, bad] = std::from_chars(text.data(), end, value);
  const std::string_view unit(stop, static_cast<size_t>(end - stop));
  const int shift = unit.empty() ? 0 : unit == "K" ? 10 : unit == "M" ? 20 : unit == "G" ? 30 : -1;
  if (bad != std::errc() || shift < 0 || value > (UINT64_MAX >> (shift + 1))) refuse(part);
  return value << shift;
}

}  // namespace

std::string shown(uint64_t bytes) {
  const uint64_t kib = bytes >> 10;
  if (bytes >= kMiB && bytes % kMiB == 0) return cat(bytes / kMiB, " MiB");
  return bytes % 1024 == 0 && kib > 0 ? cat(kib, " KiB") : cat(bytes, " bytes");
}

Policy Policy::of_environment() {
  Policy policy;
  const std::string given = env(kVariable);
  if (given.empty()) return policy;
  policy.given_.emplace();
  std::string_view rest = given;
  while (!rest.empty()) {
    const std::string_view part = rest.substr(0, rest.find(','));
    rest.remove_prefix(std::min(rest.size(), part.size() + 1));
    if (part == "never") continue;  // by itself: nothing is taken
    const size_t equals = part.find('=');
    if (equals == std::string_view::npos) refuse(part);
    std::string_view name = part.substr(0, equals);
    const bool registered = name.substr(0, kRegistered.size()) == kRegistered;
    if (registered) name.remove_prefix(kRegistered.size());
    const auto found = std::find_if(std::begin(kTaken), std::end(kTaken),
                                    [&](Collective one) { return to_string(one) == name; });
    if (found == std::end(kTaken)) refuse(part);
    (*policy.given_)[{*found, registered ? Form::registered : Form::plain}] =
        bytes_of(part.substr(equals + 1), part);
  }
  return policy;
}

uint64_t Policy::least(Collective collective, Form form, const std::string& gpu, Rank ranks) const {
  uint64_t least = kNever;
  // What holds for any memory holds for registered memory too.
  const auto matches = [&](Form one) { return one == Form::plain || form == Form::registered; };
  if (given_) {
    for (const auto& [key, bytes] : *given_) {
      if (key.first == collective && matches(key.second)) least = std::min(least, bytes);
    }
    return least;
  }
  for (const Measured& row : kMeasured) {
    if (row.card == card_of(gpu) && row.ranks == ranks && row.collective == collective &&
        matches(row.form)) {
      least = std::min(least, row.least);
    }
  }
  return least;
}

uint64_t Policy::floor(Collective collective) const {
  if (given_) return least(collective, Form::registered, "", 0);
  uint64_t least = kNever;
  for (const Measured& row : kMeasured) {
    if (row.collective == collective) least = std::min(least, row.least);
  }
  return least;
}

bool Policy::any_registered() const {
  const auto registered = [](Form form) { return form == Form::registered; };
  if (given_) {
    return std::any_of(given_->begin(), given_->end(),
                       [&](const auto& row) { return registered(row.first.second); });
  }
  return std::any_of(std::begin(kMeasured), std::end(kMeasured),
                     [&](const Measured& row) { return registered(row.form); });
}

std::string Policy::describe(const std::string& gpu, Rank ranks) const {
  std::string text;
  for (const Collective collective : kTaken) {
    const uint64_t plain = least(collective, Form::plain, gpu, ranks);
    const uint64_t registered = least(collective, Form::registered, gpu, ranks);
    if (plain != kNever) {
      text += cat(text.empty() ? "" : ", ", to_string(collective), " from ", shown(plain));
    }
    if (registered < plain) {
      text += cat(text.empty() ? "" : ", ", to_string(collective), " of registered memory from ",
                  shown(registered));
    }
  }
  return text;
}

uint64_t Policy::digest() const {
  Digest digest;
  digest.add(given_.has_value());
  if (given_) {
    for (const auto& [key, bytes] : *given_) {
      digest.add(key.first);
      digest.add(key.second);
      digest.add(bytes);
    }
  }
  return digest.value();
}

}  // namespace offcore::shim
