"""Offcore's communication for FSDP2's modules."""

from __future__ import annotations

import dataclasses
import datetime
import uuid
import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_process_group_store
from torch.distributed.fsdp import FSDPModule

from offcore import defaults
from offcore.distributed import reach
from offcore.distributed.group import NAME, Calls, Options
from offcore.distributed.report import calls_of
from offcore.distributed.report import report as report_of_group
from offcore.distributed.sides import log
from offcore.errors import error
from offcore.fsdp.shards import AllGather, Meeting, ReduceScatter, Shards, tight

_ROUND = 1 << 21


@dataclasses.dataclass
class _Enabled:
    """What `enable` made of a model, and what was there before."""

    timeout: float
    arguments: dict[str, Any]  # of communicators
    shards: dict[Any, Shards] = dataclasses.field(default_factory=dict)
    # Groups of HSDP's all-reduces, by the groups that they stand for; None: these stay.
    replicas: dict[Any, Any] = dataclasses.field(default_factory=dict)
    # Why a group stays with its own backend, by its ranks.
    obstacles: dict[str, str] = dataclasses.field(default_factory=dict)
    # By weak references: nothing here may keep the model, which keeps all this.
    before: list[tuple[Any, str, Any]] = dataclasses.field(default_factory=list)

    def put(self, holder: Any, name: str, value: Any) -> None:
        self.before.append((weakref.ref(holder), name, getattr(holder, name)))
        setattr(holder, name, value)

    def undo(self) -> None:
        for holder, name, value in reversed(self.before):
            if holder() is not None:
                setattr(holder(), name, value)
        for shards in self.shards.values():
            shards.close()
        for group, own in self.replicas.items():
            if own not in (None, group):
                dist.destroy_process_group(own)


_enabled: weakref.WeakKeyDictionary[Any, _Enabled] = weakref.WeakKeyDictionary()


def enable(
    model: Any,
    *,
    all_gather: bool = True,
    reduce_scatter: bool = True,
    all_reduce: bool = True,
    memory: int | None = None,
    timeout: float = 600.0,
    **arguments: Any,
) -> None:
    """Makes all FSDPModules of a model communicate through Offcore. Collective: all ranks of the
    model's mesh call it with the same arguments, after `fully_shard` and before the first step.

    all_gather, reduce_scatter, all_reduce: the collectives to handle; all_reduce is HSDP's.
    memory: bytes of window memory for outputs of all-gathers, per group of ranks that share
        parameters; default: room for the two largest modules (CPUs, several hosts: four). FSDP2 has
        usually two outputs at a time, more with explicit prefetching, `unshard(async_op=True)`, or
        modules that run forward without a backward pass: see `refused`.
        Outputs that do not fit are allocated by torch and staged through slots (`staged`).
    timeout: seconds after which an unfinished call fails and the group is dead. Ranks may not
        be further apart than this, e.g. during a checkpoint.
    arguments: of offcore.Communicator, such as sms=8; `between`, for multicast between hosts
        (docs/hosts.md); and `all_reduce_from`, for HSDP's all-reduces (default 0).
    Raises `Error`: invalid for a model without FSDPModules, a model that is already enabled, or an
    unknown argument; and as offcore.Communicator does.
    """
    param_groups = [*_param_groups(model)]
    if not param_groups:
        raise error("invalid", "the model has no FSDPModule: call fully_shard first")
    if model in _enabled:
        raise error("invalid", "the model is enabled already: call disable first")
    made = _Enabled(defaults.seconds(timeout), Options(**arguments).arguments)
    try:
        for group, device, sizes in _groups_of(param_groups):
            meeting = _meeting(group, device, made) if all_gather or reduce_scatter else None
            if meeting is None:
                continue
            size = _ring_bytes(sizes, tight(device, meeting.hosts)) if memory is None else memory
            ring = size if all_gather else 0
            made.shards[group] = Shards(group, device, made.timeout, ring, arguments, meeting)
        for param_group in param_groups:
            _put_shards(made, param_group, all_gather, reduce_scatter)
            if all_reduce:
                _put_replicas(made, param_group)
    except BaseException:
        made.undo()
        raise
    _enabled[model] = made


def disable(model: Any) -> None:
    """Restores the model's original communication. Collective, between steps. Raises `Error`:
    invalid if the model is not enabled."""
    made = _enabled.pop(model, None)
    if made is None:
        raise error("invalid", "the model is not enabled: call offcore.fsdp.enable(model)")
    made.undo()


def _put_shards(made: _Enabled, param_group: Any, gathers: bool, reduces: bool) -> None:
    shards = made.shards.get(getattr(param_group.mesh_info, "shard_process_group", None))
    if shards is not None and gathers:
        made.put(param_group, "_all_gather_comm", AllGather(param_group, made.shards))
    if shards is not None and reduces:
        made.put(param_group, "_reduce_scatter_comm", ReduceScatter(shards))


def _put_replicas(made: _Enabled, param_group: Any) -> None:
    info = param_group.mesh_info
    replicas = getattr(info, "replicate_process_group", None)
    own = None if replicas is None else _replicas_of(replicas, param_group.device, made)
    if own is not None:
        made.put(info, "replicate_process_group", own)


def report(model: Any) -> dict[str, Any]:
    """Returns this rank's counts since `enable`, after waiting for calls in progress.

    - "all_gather" and "reduce_scatter": calls, bytes (of the whole arrays), variants (calls by
      name), staged (calls through slots, since an output was outside window memory), sms (the
      maximum of any call) and handed (calls passed to the group's backend).
    - "all_reduce", HSDP's: calls carried and handed.
    - "memory": bytes of window memory; "refused": outputs that did not fit.
    - "hosts", for groups that span several, by their ranks: number of hosts, `ranks` per host, and
      bytes `received` from other hosts.
    - "obstacles": the reason why a group stays with its backend, by its ranks.

    Raises `Error`: invalid if the model is not enabled.
    """
    made = _enabled.get(model)
    if made is None:
        raise error("invalid", "the model is not enabled: call offcore.fsdp.enable(model)")
    facts: dict[str, Any] = {}
    for shards in made.shards.values():
        shards.settle()
    for op in ("all_gather", "reduce_scatter"):
        facts[op] = _sum([shards.ran[op].facts() for shards in made.shards.values()])
    told = [report_of_group(own) for own in {*made.replicas.values()} - {None}]
    facts["all_reduce"] = {
        kind: sum(sum(one[kind].values()) for one in told) for kind in ("carried", "handed")
    }
    facts["memory"] = sum(shards.ring.nbytes for shards in made.shards.values())
    facts["refused"] = sum(shards.ring.refused for shards in made.shards.values())
    facts["hosts"] = {
        str(dist.get_process_group_ranks(group)): {
            **shards.hosts[0].facts(),
            "received": sum(one.received for one in shards.hosts),
        }
        for group, shards in made.shards.items()
        if shards.hosts
    }
    facts["obstacles"] = dict(made.obstacles)
    return facts


def _sum(all_facts: list[dict[str, Any]]) -> dict[str, Any]:
    total: dict[str, Any] = {"variants": {}}
    for facts in all_facts:
        for name, value in facts.items():
            if name == "variants":
                for variant, calls in value.items():
                    total[name][variant] = total[name].get(variant, 0) + calls
            elif name == "sms":
                total[name] = max(total.get(name, 0), value)
            else:
                total[name] = total.get(name, 0) + value
    return total


def _param_groups(model: Any) -> Iterator[Any]:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            found = getattr(state, "_fsdp_param_groups", None)  # torch 2.13 and later
            if found is None:
                found = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
            yield from found


def _groups_of(param_groups: list[Any]) -> Iterator[tuple[Any, Any, list[int]]]:
    """Each group of ranks that share parameters, its device, and bytes of modules, falling."""
    needs: dict[Any, list[int]] = {}
    devices = {}
    for param_group in param_groups:
        for info in (param_group.mesh_info, param_group.post_forward_mesh_info):
            group = getattr(info, "shard_process_group", None)
            if group is None:
                continue
            whole = _gathered_bytes(param_group) * param_group.mesh_info.shard_mesh_size
            needs.setdefault(group, []).append(whole)
            devices[group] = param_group.device
    for group, sizes in needs.items():
        yield group, devices[group], sorted(sizes, reverse=True)


def _ring_bytes(sizes: list[int], tight: bool) -> int:
    """Room for two outputs at a time, or twice as many where calls hold them for longer."""
    most = sizes[:2] if tight else [*sizes[:3], sizes[0]]
    return -(-(sum(most) + 4 * 512) // _ROUND) * _ROUND  # pieces have whole multiples of 512


def _gathered_bytes(param_group: Any) -> int:
    """Of a rank's part of an all-gather."""
    total = 0
    for one in param_group.fsdp_params:
        data = one._sharded_param_data
        total += data.numel() * (one.mp_policy.param_dtype or data.dtype).itemsize
    return total


def _meeting(group: Any, device: Any, made: _Enabled) -> Meeting | None:
    """Where the ranks of a group are; None, on all of them: it stays with its own backend."""
    if dist.get_world_size(group) == 1:
        return None
    told: list[Any] = [None] * dist.get_world_size(group)
    own = (reach.facts_of(torch.device(device)), uuid.uuid4().hex)
    dist.all_gather_object(told, own, group=group)
    facts = [one for one, _ in told]
    if why := reach.obstacle(facts):
        ranks = str(dist.get_process_group_ranks(group))
        made.obstacles[ranks] = why
        log.warning("fsdp: ranks %s stay with backend %s: %s", ranks, dist.get_backend(group), why)
        return None
    store = dist.PrefixStore(f"offcore.fsdp/{told[0][1]}/", _get_process_group_store(group))
    return Meeting(store, reach.hosts_of(facts))


def _replicas_of(group: Any, device: Any, made: _Enabled) -> Any:
    """The group of the backend "offcore" that stands for one of HSDP; None: it stays."""
    if group not in made.replicas:
        made.replicas[group] = None
        if isinstance(calls_of(group), Calls):
            made.replicas[group] = group
        elif _meeting(group, device, made) is not None:
            ranks = dist.get_process_group_ranks(group)
            made.replicas[group] = dist.new_group(
                ranks,
                timeout=datetime.timedelta(seconds=made.timeout),
                backend=NAME,
                pg_options=Options(**{"all_reduce_from": 0, **made.arguments}),
                use_local_synchronization=True,
                group_desc="offcore.fsdp",
            )
    own = made.replicas[group]
    return None if own is group else own
