#include "core/machine/machine.h"

#include "core/base/digest.h"
#include "core/base/error.h"

namespace offcore {

void check(const Machine& machine) {
  const auto require = [&](bool holds, const char* what) {
    if (!holds) fail(Code::invalid, "machine ", machine.name, ": ", what);
  };
  require(machine.ranks >= 1 && machine.ranks <= 1024, "ranks must lie in 1..1024");
  require(machine.engines_peer >= 1, "engines_peer must be at least 1");
  require(machine.native.bcst_rows >= 1, "native.bcst_rows must be at least 1");
  require(machine.limits.rows_max >= 1, "limits.rows_max must be at least 1");
  require(machine.limits.copy_bytes_max >= 1, "limits.copy_bytes_max must be at least 1");
  require(machine.limits.swap_align >= 1, "limits.swap_align must be at least 1");
  require(machine.limits.bcst_align >= 1, "limits.bcst_align must be at least 1");
  require(machine.limits.swap_scratch_bytes >= 1, "limits.swap_scratch_bytes must be at least 1");
  require(machine.cost.overlap >= 1, "cost.overlap must be at least 1");
  const Links& links = machine.links;
  for (double gbps :
       {links.link_gbps, links.egress_gbps, links.ingress_gbps, links.host_gbps, links.local_gbps,
        links.engine_gbps, links.strided_gbps, links.bcst_gbps, links.swap_gbps}) {
    require(gbps > 0, "every bandwidth must be above zero");
  }
  const Cost& cost = machine.cost;
  require(cost.reduce_gbps > 0, "cost.reduce_gbps must be above zero");
  require(cost.push_gbps >= 0, "cost.push_gbps must not be negative");
  for (double ns : {cost.control_ns, cost.doorbell_ns, cost.doorbell_growth, cost.wake_ns,
                    cost.fetch_ns, cost.setup_ns, cost.issue_ns, cost.sync_ns, cost.poll_ns,
                    cost.host_poll_ns, cost.trigger_ns, cost.launch_ns, cost.step_ns}) {
    require(ns >= 0, "no cost may be negative");
  }
  const RequestCosts& requests = machine.requests;
  for (double ns : {requests.reach_ns, requests.take_ns, requests.see_ns, requests.event_ns,
                    requests.device_trip_ns}) {
    require(ns >= 0, "no cost of requests may be negative");
  }
  require(requests.overlap >= 1 && requests.device_overlap >= 1,
          "requests.overlap and requests.device_overlap must be at least 1");
  require(requests.store_gbps > 0 && requests.device_gbps > 0,
          "every bandwidth of requests must be above zero");
}

uint64_t digest(const Machine& machine) {
  Digest result;
  const auto add = [&](const auto&... values) { (result.add(values), ...); };
  // Bound by number: a field more does not compile before it is added here.
  const auto& [name, vendor, ranks, engines_peer, engines_host, topology, flags, native, limits,
               links, cost, batches, pages, requests, tuned, signals, tuned_version] = machine;
  add(std::string_view(vendor), ranks, engines_peer, engines_host, topology, flags,
      std::string_view(signals), std::string_view(tuned_version));
  const auto& [strided, bcst_rows, swap, strided_flags, signals_aside] = native;
  add(strided, bcst_rows, swap, strided_flags, signals_aside);
  const auto& [copy_max, pitch_max, rows_max, swap_align, bcst_align, swap_scratch] = limits;
  add(copy_max, pitch_max, rows_max, swap_align, bcst_align, swap_scratch);
  const auto& [link, egress, ingress, host, local, engine, strided_rate, bcst, swap_rate] = links;
  add(link, egress, ingress, host, local, engine, strided_rate, bcst, swap_rate);
  const auto& [control, doorbell, growth, wake, fetch, setup, issue, overlap, sync, poll, host_poll,
               trigger, launch, reduce, push, step] = cost;
  add(control, doorbell, growth, wake, fetch, setup, issue, overlap, sync, poll, host_poll, trigger,
      launch, reduce, push, step);
  const auto& [b2b_max, call_min, sub_batch, sub_batch_max, copy_ns] = batches;
  add(b2b_max, call_min, sub_batch, sub_batch_max, copy_ns);
  const auto& [sub_batch_first, sub_batch_apart, small_bytes, small_first, small_first_bytes,
               both_bytes_max, both_part_bytes, hop_ns, pack_plain_below, pack_strided_below] =
      pages;
  add(sub_batch_first, sub_batch_apart, small_bytes, small_first, small_first_bytes, both_bytes_max,
      both_part_bytes, hop_ns, pack_plain_below, pack_strided_below);
  const auto& [push_ns, reach, take, see, event, request_overlap, stores, device, trip,
               device_overlap] = requests;
  add(push_ns, reach, take, see, event, request_overlap, stores, device, trip, device_overlap);
  for (const auto& [op, op_ranks, in_place, bytes_min, bytes_max, variant, form, entry, staged,
                    bytes, time] : tuned) {
    add(std::string_view(op), op_ranks, in_place, bytes_min, bytes_max, std::string_view(variant),
        std::string_view(form), entry, staged, bytes, time);
  }
  return result.value();
}

Resources::Resources(const Machine& machine, Rank ranks)
    : ranks_(ranks), topology_(machine.topology) {
  const size_t pairs = size_t{ranks} * ranks;
  capacities_gbps_.assign(pairs, machine.links.link_gbps);
  const auto append = [&](double gbps) {
    capacities_gbps_.insert(capacities_gbps_.end(), ranks, gbps);
  };
  append(machine.links.egress_gbps);
  append(machine.links.ingress_gbps);
  append(machine.links.host_gbps);
  append(machine.links.host_gbps);
  append(machine.links.local_gbps);
}

Resources::Path Resources::path(Rank src, Rank dst) const {
  const uint32_t pairs = uint32_t{ranks_} * ranks_;
  if (src == kHostRank && dst == kHostRank) return {};
  if (src == kHostRank) return {1, {pairs + 3u * ranks_ + dst}};
  if (dst == kHostRank) return {1, {pairs + 2u * ranks_ + src}};
  if (src == dst) return {1, {pairs + 4u * ranks_ + src}};
  Path path{2, {pairs + src, pairs + ranks_ + dst}};
  if (topology_ == Topology::full) path.index[path.count++] = uint32_t{src} * ranks_ + dst;
  return path;
}

}  // namespace offcore
