"""Rows of results: their fields, their stamp, and how they print.

A row is one JSON object a line. Its field names are stable: benchmarks/compare.py and the tests
read them. `wrong` is None where nothing was checked; what a baseline cannot know is None too.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TextIO

from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import offcore
from offcore import _core
from offcore.errors import error
from offcore.sizes import algbw_gbps, busbw_factor, format_bytes
from offcore.tools import tables
from offcore.tools.records import check_records

_TENTHS = 10  # of the work, of which progress is told where no bar can be drawn


@dataclass(frozen=True)
class Row:
    impl: str  # offcore, or the baseline's name
    op: str
    backend: str
    machine: str
    ranks: int
    bytes: int
    in_place: bool
    variant: str | None
    native: bool | None
    protocol: str | None
    mode: str  # eager or graph
    time_us: float  # median of the batches
    time_us_min: float
    time_us_max: float
    wrong: int | None
    commands: int | None
    engines: int | None
    syncs: int | None
    phases: dict[str, float] | None
    timing: str = "chain"  # or call: one alone, as the host sees it (see timers.py)
    asked: str | None = None  # the protocol that was asked for
    named: bool | None = None  # whether the caller named the variant; False: auto chose it
    signals: str | None = None  # GPUs: fenced or copy_order
    own_copy: str | None = None  # GPUs: what copied within one, as results say it
    staged: bool | None = None
    tuned: bool | None = None  # whether a measured table chose the variant
    armed_ahead: bool | None = None
    kernels: int | None = None  # how many ran; None: nothing was profiled
    nvls: str | None = None  # "off" for libraries that could use NVLink multicast
    dtype: str | None = None  # of what reduces
    reduction: str | None = None  # what it computes: sum, avg, ...
    sms: int | None = None  # GPUs: that a reduction took, or could take at most (nccl-sms)

    @property
    def algbw_gbps(self) -> float:
        return algbw_gbps(self.bytes, self.time_us)

    @property
    def busbw_gbps(self) -> float:
        return self.algbw_gbps * busbw_factor(self.op, self.ranks)

    @property
    def name(self) -> str:
        """What a line of a table or of a plot is called."""
        return self.variant if self.impl == "offcore" and self.variant else self.impl

    @property
    def setting(self) -> tuple[str, str | None, str | None, str | None]:
        """What makes times of offcore comparable beside the size."""
        return self.timing, self.asked, self.signals, self.own_copy


@dataclass(frozen=True)
class Skip:
    """Something that was asked for as one of many and cannot be had."""

    name: str
    bytes: int
    reason: str


def _version(package: str) -> str | None:
    from importlib import metadata  # which takes as long to import as all else here

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    """This machine's processor as its kernel names it, and how many cores there are."""
    names = re.findall(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return f"{os.cpu_count()} x {names[0] if names else platform.machine()}"


def _gpus() -> str | None:
    """`2 x NVIDIA H200, driver for CUDA 13.0`, where the cuda backend is available."""
    return next(
        (told for name, usable, told in _core.probe_backends() if name == "cuda" and usable), None
    )


def _gpu_driver() -> str | None:
    """The version of NVIDIA's kernel module."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    found = re.search(r"\b\d+\.\d+(\.\d+)?\b", text)
    return found[0] if found else None


def versions() -> dict[str, str]:
    """What a result depends on: versions, the kernel and the processor."""
    found = {name: _version(name) for name in ("numpy", "torch")}
    found |= {"offcore": offcore.__version__, "python": platform.python_version()}
    found |= {"linux": platform.release(), "processor": _processor()}
    found["nccl"] = _version("nvidia-nccl-cu13") or _version("nvidia-nccl-cu12")
    found["gpus"], found["driver"] = _gpus(), _gpu_driver()
    return {name: version for name, version in found.items() if version}


def commit() -> str:
    """`git describe` of the source in a checkout; else OFFCORE_COMMIT, the commit that the core was
    built from, or the version."""
    fallback = _core.env("OFFCORE_COMMIT") or _core.build()[2] or offcore.__version__

    def git(*words: str, folder: Path) -> str:
        done = subprocess.run(
            ("git", "-C", str(folder), *words), capture_output=True, text=True, timeout=10
        )
        return done.stdout.strip() if done.returncode == 0 else ""

    try:
        top = git("rev-parse", "--show-toplevel", folder=Path(__file__).resolve().parent)
        # A virtual environment may lie inside a checkout of something else.
        if not top or not git("ls-files", "core/ir/program.h", folder=Path(top)):
            return fallback
        return git("describe", "--always", "--dirty", "--tags", folder=Path(top)) or fallback
    except (OSError, subprocess.SubprocessError):
        return fallback


@dataclass(frozen=True)
class Stamp:
    """What all rows of one invocation share."""

    run: str = field(default_factory=lambda: uuid.uuid4().hex)
    versions: dict[str, str] = field(default_factory=versions)
    commit: str = field(default_factory=commit)
    date: str = field(
        default_factory=lambda: datetime.datetime.now(datetime.timezone.utc).isoformat(
            timespec="seconds"
        )
    )


Outcome = Row | Skip


def to_json(row: Row, stamp: Stamp) -> dict[str, Any]:
    record = asdict(row)
    record["algbw_gbps"] = round(row.algbw_gbps, 6)
    record["busbw_gbps"] = round(row.busbw_gbps, 6)
    return record | asdict(stamp)


def rows_of(records: Iterable[dict[str, Any]]) -> list[Row]:
    """Rows from their JSON; those that an older version wrote lack some fields. Raises invalid."""
    found = list(records)
    forms = {one.name: str(one.type) for one in fields(Row)} | {"ranks": "int > 0"}
    optional = [one.name for one in fields(Row) if one.default is not MISSING]
    check_records(found, forms, optional)
    return [Row(**{name: one[name] for name in forms if name in one}) for one in found]


def dumps(record: dict[str, Any]) -> str:
    """A line of a file of rows."""
    return json.dumps(record) + "\n"


class JsonLines:
    """Where `--json FILE|-` goes: an object a line, written as soon as it is known."""

    def __init__(self, target: str | None) -> None:
        self.to_stdout = target == "-"
        self._file: TextIO | None = sys.stdout if self.to_stdout else None
        if target is not None and not self.to_stdout:
            # Opened at once: a path that cannot be written is told before hours of work. close()
            # closes it, which the linter does not see.
            try:
                self._file = Path(target).open("w", encoding="utf-8")  # noqa: SIM115
            except OSError as failure:
                raise error("invalid", f"cannot write '{target}': {failure.strerror}") from None

    def write(self, record: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(dumps(record))
            self._file.flush()

    def close(self) -> None:
        if self._file is not None and not self.to_stdout:
            self._file.close()

    def __enter__(self) -> JsonLines:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def console(stderr: bool = False) -> Console:
    """A console on which tables keep their columns, however narrow or absent the terminal is."""
    found = tables.Page(stderr=stderr)
    found.width = max(found.width, tables.WIDTH) if found.is_terminal else tables.WIDTH
    return found


def tell_plot(out: Path, rows: int, json_to: str | None) -> None:
    """That a plot was drawn, of how many rows."""
    with JsonLines(json_to) as lines:
        lines.write({"plot": str(out), "rows": rows})
    print(f"plot: {out}", file=sys.stderr if json_to == "-" else sys.stdout)


def progress_bar() -> Progress:
    """On stderr and gone when done, so that stdout holds results only."""
    to = Console(stderr=True)
    return Progress(console=to, transient=True, disable=not to.is_terminal)


def collect(
    measure: Callable[[Callable[[float], None]], Iterable[Outcome]],
    steps: int,
    label: str,
    lines: JsonLines,
    stamp: Stamp,
    rows: list[Row],
    skips: list[Skip],
    said: bool = False,
) -> None:
    """Runs a measurement under a progress bar; what it has found is kept also when it fails.

    said: without a terminal, progress is a line on stderr for each tenth."""
    with progress_bar() as bar:
        task = bar.add_task(label, total=steps)
        told = 0

        def advance(done: float) -> None:
            nonlocal told
            bar.advance(task, done)
            tenths = int(_TENTHS * bar.tasks[task].completed / max(steps, 1))
            if said and bar.disable and tenths > told:
                told = tenths
                print(f"{label}: {100 // _TENTHS * tenths} % of {steps} runs", file=sys.stderr)

        for outcome in measure(advance):
            if isinstance(outcome, Row):
                rows.append(outcome)
                lines.write(to_json(outcome, stamp))
            else:
                skips.append(outcome)


Key = tuple[Any, ...]


def best_key(row: Row) -> Key:
    return (row.bytes, *row.setting)


def best_of(rows: Iterable[Row]) -> dict[Key, Row]:
    """The fastest row of offcore's for each size, among those that are comparable."""
    best: dict[Key, Row] = {}
    for row in rows:
        key = best_key(row)
        if row.impl == "offcore" and (key not in best or row.time_us < best[key].time_us):
            best[key] = row
    return best


def has_choice(rows: list[Row]) -> bool:
    """Whether some size was run in several variants, so that a best one means something."""
    variants = {(best_key(row), row.variant) for row in rows if row.impl == "offcore"}
    return len(variants) > len({key for key, _ in variants})


def differing(rows: Sequence[Row]) -> list[str]:
    """The fields, of those that a table need not show, in which offcore's rows differ."""
    own = [row for row in rows if row.impl == "offcore"]
    names = [
        name
        for name in ("asked", "signals", "own_copy")
        if len({getattr(row, name) for row in own}) > 1
    ]
    return names + [
        name for name in ("mode", "timing") if len({getattr(row, name) for row in rows}) > 1
    ]


def size_ranges(sizes: Iterable[int], known: Sequence[int]) -> str:
    """`1K-64K, 4M`: sizes that follow each other among the known ones, drawn together."""
    order = sorted(set(known))
    runs: list[tuple[int, int]] = []
    for position in sorted(order.index(size) for size in set(sizes)):
        if runs and runs[-1][1] == position - 1:
            runs[-1] = (runs[-1][0], position)
        else:
            runs.append((position, position))
    return ", ".join(
        format_bytes(order[first]) + (f"-{format_bytes(order[last])}" if last != first else "")
        for first, last in runs
    )


def best_ranges(rows: list[Row]) -> list[str]:
    """`prelaunch_b2b 1K-64K`, ...: which variant is best where, setting by setting."""
    ranges: list[tuple[str, int, int, Key]] = []
    shown = [name for name in differing(rows) if name != "mode"]
    for row in sorted(best_of(rows).values(), key=lambda row: (str(row.setting), row.bytes)):
        if ranges and (ranges[-1][0], ranges[-1][3]) == (row.name, row.setting):
            ranges[-1] = (row.name, ranges[-1][1], row.bytes, row.setting)
        else:
            ranges.append((row.name, row.bytes, row.bytes, row.setting))
    names = ("timing", "asked", "signals", "own_copy")
    return [
        f"{name} {format_bytes(first)}"
        + (f"-{format_bytes(last)}" if last != first else "")
        + "".join(
            f" {value}" for key, value in zip(names, setting, strict=True) if key in shown and value
        )
        for name, first, last, setting in ranges
    ]


def format_us(time_us: float) -> str:
    return f"{time_us:,.2f}" if time_us < 1000 else f"{time_us:,.0f}"


def title_of(rows: list[Row]) -> str:
    row = rows[0]
    where = "simulated" if row.backend == "sim" else row.backend
    own = [one for one in rows if one.impl == "offcore"] or rows
    places = {one.in_place for one in own}
    place = ", in place" if places == {True} and row.op != "broadcast" else ""
    place += "; swap in place" if len(places) > 1 else ""
    if sms := max((one.sms or 0 for one in own), default=0):
        place += f", {sms} SMs"
    what = f" ({row.reduction} of {row.dtype})" if row.reduction else ""
    return f"{row.op}{what} on {row.ranks} ranks of {row.machine} ({where}{place})"


def _optional(value: object) -> str:
    return "-" if value is None else str(value)


def table(rows: list[Row]) -> Table:
    """nccl-tests' columns, and what offcore adds to them: variant, commands, engines, syncs."""
    result = Table(
        title=title_of(rows), box=box.SIMPLE_HEAD, title_justify="left", padding=(0, 1, 0, 0)
    )
    several = len({row.impl for row in rows}) > 1
    result.add_column("size", justify="right")
    if several:
        result.add_column("impl")
    result.add_column("variant")
    more = differing(rows)
    for name in more:
        result.add_column("protocol" if name == "asked" else name)
    for name in ("time us", "algbw GB/s", "busbw GB/s", "#wrong", "commands", "engines", "syncs"):
        result.add_column(name, justify="right")
    best = best_of(rows)
    choice = has_choice(rows)
    for position, row in enumerate(rows):
        is_best = choice and best.get(best_key(row)) is row
        expanded = " +" if row.native is False else ""
        cells = [format_bytes(row.bytes)]
        cells += [row.impl] if several else []
        cells += [_optional(row.variant) + expanded + (" *" if is_best else "")]
        cells += [_optional(getattr(row, name)) for name in more]
        cells += [format_us(row.time_us), f"{row.algbw_gbps:.2f}", f"{row.busbw_gbps:.2f}"]
        cells += [_optional(v) for v in (row.wrong, row.commands, row.engines, row.syncs)]
        last = position + 1 == len(rows) or rows[position + 1].bytes != row.bytes
        style = "bold red" if row.wrong else "bold green" if is_best else None
        result.add_row(*cells, style=style, end_section=last and (choice or several))
    return result


def matrix(rows: list[Row]) -> Table:
    """Times by size (down) and variant (across), the best of each size marked."""
    names = list(dict.fromkeys(row.name for row in rows))
    best = best_of(rows)
    result = Table(
        title=title_of(rows) + ": time in us",
        box=box.SIMPLE_HEAD,
        title_justify="left",
        padding=0,
    )
    result.add_column("size", justify="right")
    expanded = {row.name for row in rows if row.native is False}
    for name in names:
        head = name.replace("_", "_\n") + (" +" if name in expanded else "")
        result.add_column(head, justify="right", vertical="bottom")
    for size in dict.fromkeys(row.bytes for row in rows):
        cells = [format_bytes(size)]
        of_size = {row.name: row for row in rows if row.bytes == size}
        for name in names:
            row = of_size.get(name)
            text = "- " if row is None else format_us(row.time_us)
            is_best = row is not None and best.get(best_key(row)) is row
            cells.append(f"[bold green]{text}*[/]" if is_best else text + " ")
        result.add_row(*cells)
    return result


def footnotes(rows: list[Row], skips: list[Skip]) -> list[str]:
    """What a reader of the table has to know besides."""
    notes = []
    if has_choice(rows):
        notes.append("* best of its size: " + ", ".join(best_ranges(rows)))
    if any(row.native is False for row in rows):
        notes.append("+ this machine lacks the command; emulated with several")
    offcore_rows = [row for row in rows if row.impl == "offcore"]
    if any(row.nvls == "off" for row in rows):
        notes.append("NVLink multicast (NVLS) is off")
    proven = sorted({row.impl for row in rows if row.kernels == 0})
    if proven:
        notes.append(f"{', '.join(proven)}: profiled, no kernel ran")
    there = {row.impl for row in rows if row.in_place} - {"offcore"}
    if there and not any(row.in_place for row in offcore_rows):
        notes.append(f"{', '.join(sorted(there))}: in place, the only form that torch has")
    unchecked = [row.bytes for row in offcore_rows if row.wrong is None]
    if len(unchecked) == len(offcore_rows):
        notes.append("bytes were not checked")
    elif unchecked:
        notes.append(f"bytes were checked below {format_bytes(min(unchecked))}")
    wrong = sum(row.wrong or 0 for row in rows)
    if wrong:
        notes.append(f"WRONG: {wrong} bytes differ from what they must be")
    return notes + _skip_notes(rows, skips)


def _skip_notes(rows: list[Row], skips: list[Skip]) -> list[str]:
    """One line a reason, with the variants it holds for."""
    sizes_by_case: dict[tuple[str, str], list[int]] = {}
    for skip in skips:
        reason = skip.reason.removeprefix(f"variant {skip.name}: ")
        sizes_by_case.setdefault((skip.name, reason), []).append(skip.bytes)
    known = sorted({row.bytes for row in rows} | {skip.bytes for skip in skips})
    names_by_note: dict[tuple[str, str], list[str]] = {}
    for (name, reason), sizes in sizes_by_case.items():
        where = "" if len(sizes) == len(known) else " at " + size_ranges(sizes, known)
        names_by_note.setdefault((where, reason), []).append(name)
    return [
        f"skipped {', '.join(names)}{where}: {reason}"
        for (where, reason), names in names_by_note.items()
    ]


def print_rows(
    rows: list[Row],
    skips: list[Skip],
    to: Console,
    form: Callable[[list[Row]], Table] = table,
) -> None:
    to.print(form(rows))
    for note in footnotes(rows, skips):
        to.print(note, highlight=False, markup=False, soft_wrap=True)
