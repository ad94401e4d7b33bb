"""Machine files: machines/NAME.json, read strictly into a `Machine`.

A file holds the sections `name`, `vendor`, `ranks`, `engines`, `topology`, `flags`, `native`,
`limits`, `links`, `cost`, `batches`, `pages`, `sources` (where each number comes from), and maybe
`requests`. The keys of a section are the fields of the struct of that name in
core/machine/machine.h: none may be missing, none unknown. A limit, or a number of `batches`, of
null means that there is none; a copy or a scratch of less than 4096 bytes is refused, as is an
alignment of more than 65536. `host-N`, for N of 1 to 1024, comes from host.json.

Files are looked up in the user's folder (OFFCORE_MACHINES, else offcore/machines in
XDG_CONFIG_HOME), then among those that come along. In the same folders, calibrated/NAME.json is
what `offcore calibrate` found (docs/model.md), overlap/NAME.json what `offcore.overlap` plans
from, and tuned/NAME.json a list of measured choices,
which `offcore tune` writes: for an operation of that many ranks and a size from `bytes_min` to
`bytes_max`, `variant` was the fastest, and took `time_us` at `bytes`. `signals` is the signal form
of GPUs that it was measured with, else null; `date` and `commit` say when and of what.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from offcore import _core, folders
from offcore.errors import error

_HOST_RANKS_MAX = 1024
# A plan has a command for each copy that the limits allow: smaller ones make programs of millions.
_COPY_BYTES_LEAST = 4096
_ALIGN_MOST = 65536

_SOURCED = ("links", "cost", "batches", "pages", "requests")  # all of their numbers
_OTHERS = ("name", "vendor", "ranks", "topology", "flags", "engines", "native", "limits", "sources")
_SECTIONS = (*_OTHERS, *_SOURCED)


# What the driver calls the GPUs that machine files were measured on.
_CARDS = {"h100": r"NVIDIA H100 80GB HBM3\b", "h200": r"NVIDIA H200\b(?! NVL)"}
ASSUMED = "nvidia"  # profiles of others: costs are assumed, and no table is tuned


def for_gpus(ranks: int) -> str:
    """The profile of a host of such NVIDIA GPUs behind a switch: the least that has as many ranks.
    `nvidia-N` where none was measured on these GPUs.

    A function of the card and the number of ranks alone, so that all ranks choose alike.
    """
    try:
        card = _card()
    except _core.Error:
        card = ASSUMED
    return next((f"{card}-{count}" for count in (2, 4, 8) if ranks <= count), f"{card}-{ranks}")


def tables() -> dict[str, Path]:
    """The tuned tables that count, by machine (host-N for each number of ranks)."""
    found: dict[str, Path] = {}
    for folder in _folders():
        for path in sorted(folder.glob("tuned/*.json")):
            found.setdefault(path.stem, path)
    return found


@functools.cache  # but for failures
def _card() -> str:
    name = _core.gpu_name()
    return next((card for card, named in _CARDS.items() if re.match(named, name)), ASSUMED)


def names() -> list[str]:
    """The machines that `load` knows by name. `host-N` stands for 1 to 1024 ranks of this host."""
    found: set[str] = set()
    for folder in _folders():
        for path in folder.glob("*.json"):
            found.add("host-N" if path.stem == "host" else path.stem)
    return sorted(found)


def load(name_or_path: str | Path) -> _core.Machine:
    """The machine of that name, or of that file (a path that ends in .json), with its tuned table.

    Raises `Error`: invalid for an unknown name, or for a file with a wrong, missing or unknown key.
    """
    name = str(name_or_path)
    if name.endswith(".json"):
        return _with_tuned(_load_file(Path(name)), [Path(name).parent])
    host = re.fullmatch(r"host-([1-9][0-9]{0,3})", name)
    if host and int(host[1]) <= _HOST_RANKS_MAX:
        loaded = _load_file(_find("host", name), rename=name, ranks=int(host[1]))
        return _with_tuned(_on_this_host(loaded), _folders())
    if re.fullmatch(r"host-[0-9]+", name):
        raise error("invalid", f"{name}: backend host has 1 to {_HOST_RANKS_MAX} ranks")
    if name == "host" or not re.fullmatch(r"[A-Za-z0-9_.-]+", name):
        raise _unknown(name)
    return _with_tuned(_load_file(_find(name, name)), _folders())


def _on_this_host(machine: _core.Machine) -> _core.Machine:
    """With links as wide as its engines where no CPU is left for a rank's second one."""
    links = machine.links
    cores = int(_core.env("OFFCORE_HOST_CORES")) or os.cpu_count() or 1
    if cores < 2 * machine.ranks:
        widest = links.engine_gbps
        links.link_gbps = links.egress_gbps = links.ingress_gbps = links.host_gbps = widest
    machine.links = links
    return machine


def tuned_path(name: str) -> Path:
    """Where a tuned table of that machine is looked up first, and written."""
    return folders.machines() / "tuned" / f"{name}.json"


def path_of(name: str) -> Path:
    """The file of that machine. Raises invalid for an unknown name."""
    return _find("host" if name.startswith("host-") else name, name)


def calibration_of(name: str) -> Path | None:
    """What `offcore calibrate` found for that machine; None where nothing was fitted."""
    return _first(f"calibrated/{name}.json", _folders())


def overlap_of(name: str) -> Path | None:
    """The tables of that machine from which `offcore.overlap` plans; None where there are none."""
    return _first(f"overlap/{name}.json", _folders())


def _folders() -> list[Path]:
    """Where machine files may lie, first match first: the user's, then those that come along."""
    found = [folders.machines()]
    for root in map(Path, sys.modules["offcore"].__path__):
        found += [root / "machines", root.parent.parent / "machines"]
    return [folder for folder in found if folder.is_dir()]


def _first(name: str, places: list[Path]) -> Path | None:
    return next((path for one in places if (path := one / name).is_file()), None)


def _find(stem: str, name: str) -> Path:
    if path := _first(f"{stem}.json", _folders()):
        return path
    raise _unknown(name)


def _unknown(name: str) -> _core.Error:
    known = ", ".join(names()) or "none: set OFFCORE_MACHINES to the folder of machine files"
    return error("invalid", f"unknown machine {name!r}; known machines: {known}")


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as cause:
        raise error("invalid", f"{path}: cannot be read: {cause.strerror}") from cause


def _parse(path: Path, raw: bytes) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        for key in keys:
            if keys.count(key) > 1:
                raise error("invalid", f"{path}: {key} is given twice")
        return dict(pairs)

    try:
        return json.loads(raw, object_pairs_hook=unique)
    except (ValueError, RecursionError) as cause:
        raise error("invalid", f"{path}: not a JSON file: {cause}") from cause


class _Section:
    """One JSON object: every key is taken once, by its type, and none may be left. Those of `maybe`
    may be missing."""

    def __init__(
        self, path: Path, where: str, value: Any, keys: Sequence[str], maybe: Sequence[str] = ()
    ) -> None:
        self._path = path
        self._where = where
        if not isinstance(value, dict):
            raise error("invalid", f"{path}: {where or 'the file'} must be an object")
        for key in value:
            if key not in keys:
                raise self._wrong(key, f"unknown key; the keys are {', '.join(keys)}")
        for key in keys:
            if key not in value and key not in maybe:
                raise self._wrong(key, "missing")
        self._value = value

    def _wrong(self, key: str, what: str) -> _core.Error:
        return error("invalid", f"{self._path}: {self._where}{key}: {what}")

    def take(self, key: str) -> Any:
        return self._value[key]

    def section(self, key: str, keys: Sequence[str]) -> _Section:
        return _Section(self._path, f"{key}.", self._value[key], keys)

    def text(self, key: str) -> str:
        value = self._value[key]
        if not isinstance(value, str) or not value:
            raise self._wrong(key, f"must be a string that is not empty, not {value!r}")
        return value

    def boolean(self, key: str) -> bool:
        value = self._value[key]
        if not isinstance(value, bool):
            raise self._wrong(key, f"must be true or false, not {value!r}")
        return value

    def integer(self, key: str, least: int, most: int) -> int:
        value = self._value[key]
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self._wrong(key, f"must be an integer from {least} to {most}, not {value!r}")
        return value

    def number(self, key: str) -> float:
        value = self._value[key]
        good = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not good or abs(value) > 1e15 or not math.isfinite(value):
            raise self._wrong(key, f"must be a finite number, not {value!r}")
        return float(value)

    def choice(self, key: str, options: Any) -> Any:
        known = {option.name: option for option in options}
        value = self._value[key]
        if not isinstance(value, str) or value not in known:
            raise self._wrong(key, f"must be one of {', '.join(known)}, not {value!r}")
        return known[value]


def _fields(struct: object) -> list[str]:
    return [key for key in vars(type(struct)) if not key.startswith("_")]


def _fill(struct: object, section: _Section, read: Callable[[str], Any]) -> None:
    for key in _fields(struct):
        if (value := read(key)) is not None:
            setattr(struct, key, value)


def _load_file(path: Path, rename: str = "", ranks: int = 0) -> _core.Machine:
    value = _parse(path, _read(path))
    top = _Section(path, "", value, _SECTIONS, maybe=("requests",))
    machine = _core.Machine()
    machine.name = rename or top.text("name")
    machine.vendor = top.text("vendor")
    machine.ranks = ranks or top.integer("ranks", 1, 1024)
    if not rename and path.stem != machine.name:
        raise error("invalid", f"{path}: name: must be the file's name, not {machine.name!r}")
    engines = top.section("engines", ("peer", "host"))
    machine.engines_peer = engines.integer("peer", 1, 1024)
    machine.engines_host = engines.integer("host", 0, 1024)
    machine.topology = top.choice("topology", _core.Topology)
    machine.flags = top.choice("flags", _core.FlagHome)

    native = top.section("native", _fields(machine.native))
    _fill(
        machine.native,
        native,
        lambda key: native.integer(key, 1, 1024) if key == "bcst_rows" else native.boolean(key),
    )
    limits = top.section("limits", _fields(machine.limits))
    _fill(machine.limits, limits, lambda key: _limit(limits, key))
    links = top.section("links", _fields(machine.links))
    _fill(machine.links, links, links.number)
    cost = top.section("cost", _fields(machine.cost))
    _fill(machine.cost, cost, lambda key: _cost(cost, key))
    batches = top.section("batches", _fields(machine.batches))
    _fill(machine.batches, batches, lambda key: _limit(batches, key))
    pages = top.section("pages", _fields(machine.pages))
    _fill(machine.pages, pages, lambda key: _limit(pages, key))
    if "requests" in value:
        costs = top.section("requests", _fields(machine.requests))
        _fill(machine.requests, costs, lambda key: _cost(costs, key))
        if machine.requests.push_ns < 0:  # the core's own word for a file without the section
            raise costs._wrong("push_ns", "must not be negative")
    _check_sources(path, value)
    try:
        machine.check()
    except _core.Error as cause:
        raise error("invalid", f"{path}: {cause}") from cause
    return machine


def _cost(costs: _Section, key: str) -> float:
    return costs.integer(key, 1, 1024) if key.endswith("overlap") else costs.number(key)


def _limit(limits: _Section, key: str) -> int | None:
    if limits.take(key) is None:
        return None
    if key in ("copy_bytes_max", "swap_scratch_bytes"):
        return limits.integer(key, _COPY_BYTES_LEAST, 2**63 - 1)
    if key in ("swap_align", "bcst_align"):
        return limits.integer(key, 1, _ALIGN_MOST)
    small = key == "copy_ns" or key.endswith(("rows_max", "call_min", "first"))
    small = small or key.startswith("sub_batch")
    return limits.integer(key, 1, 2**32 - 1 if small else 2**63 - 1)


def _check_sources(path: Path, value: dict[str, Any]) -> None:
    """Every number's origin is a text under the key SECTION.KEY of an existing number."""
    sections = ("engines", "native", "limits", *_SOURCED)
    places = [f"{name}.{key}" for name in sections for key in value.get(name, ())]
    sources = value["sources"]
    given = list(sources) if isinstance(sources, dict) else []
    needed = [place for place in places if place.split(".")[0] in _SOURCED]
    allowed = [place for place in places if place in given or place in needed]
    section = _Section(path, "sources.", sources, allowed)
    for key in allowed:
        section.text(key)


_TUNED_KEYS = (
    "op",
    "ranks",
    "in_place",
    "bytes_min",
    "bytes_max",
    "bytes",
    "variant",
    "time_us",
    "signals",
    "entry",
    "staged",
    "date",
    "commit",
)
_SIGNALS = ("fenced", "copy_order")


def _with_tuned(machine: _core.Machine, places: list[Path]) -> _core.Machine:
    """The first table found counts."""
    if path := _first(f"tuned/{machine.name}.json", places):
        _load_tuned(machine, path)
    return machine


def _load_tuned(machine: _core.Machine, path: Path) -> None:
    raw = _read(path)
    machine.tuned = _tuned_rows(path, raw, machine.ranks)
    machine.tuned_version = hashlib.sha256(raw).hexdigest()[:12]


@functools.lru_cache(maxsize=16)  # its hundreds of rows take milliseconds, at every communicator
def _tuned_rows(path: Path, raw: bytes, ranks: int) -> list[_core.TunedRow]:
    rows = _parse(path, raw)
    if not isinstance(rows, list):
        raise error("invalid", f"{path}: must be a list of rows")
    table: list[_core.TunedRow] = []
    for index, value in enumerate(rows):
        row = _Section(path, f"[{index}].", value, _TUNED_KEYS)
        tuned = _core.TunedRow()
        tuned.op = row.text("op")
        tuned.ranks = row.integer("ranks", 1, ranks)
        tuned.in_place = row.boolean("in_place")
        tuned.bytes_min = row.integer("bytes_min", 0, 2**63 - 1)
        tuned.bytes_max = row.integer("bytes_max", tuned.bytes_min, 2**63 - 1)
        tuned.bytes = row.integer("bytes", tuned.bytes_min, tuned.bytes_max)
        tuned.variant = row.text("variant")
        tuned.time_us = row.number("time_us")
        if (form := row.take("signals")) is not None and form not in _SIGNALS:
            raise error("invalid", f"{path}: [{index}].signals: must be null, fenced or copy_order")
        row.text("date")
        row.text("commit")
        tuned.signals = form or ""
        tuned.entry = row.boolean("entry")
        tuned.staged = row.boolean("staged")
        table.append(tuned)
    return table
