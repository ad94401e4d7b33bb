"""The options that commands share, and the names they take."""

from __future__ import annotations

import enum
import inspect
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from offcore import _core
from offcore.operands import SMS_MAX

SIM_SIZES = "1K:4G"
REAL_SIZES = "1K:64M"
# Of counts, and of what fills the core's 64 bits.
COUNT_MAX = 2**31 - 1
NUMBER_MAX = 2**63 - 1


class Op(str, enum.Enum):
    all_gather = "all_gather"
    all_to_all = "all_to_all"
    broadcast = "broadcast"
    scatter = "scatter"
    gather = "gather"
    reduce_scatter = "reduce_scatter"
    all_reduce = "all_reduce"
    reduce = "reduce"


class BackendName(str, enum.Enum):
    auto = "auto"
    sim = "sim"
    host = "host"
    cuda = "cuda"
    sdma = "sdma"


class ProtocolName(str, enum.Enum):
    auto = "auto"
    barrier = "barrier"
    credits = "credits"
    promise = "promise"
    eager = "eager"
    view = "view"


class Reduction(str, enum.Enum):
    sum = "sum"
    avg = "avg"
    min = "min"
    max = "max"
    premul_sum = "premul_sum"


class Metric(str, enum.Enum):
    time = "time"
    busbw = "busbw"
    speedup = "speedup"


JsonOption = Annotated[
    str | None,
    typer.Option("--json", metavar="FILE|-", help="Write JSON, one object per line (-: stdout)."),
]
OpArgument = Annotated[
    Op, typer.Argument(metavar="OP", show_choices=False, help=", ".join(Op.__members__))
]
MACHINE_HELP = "Machine name (see: offcore doctor) or .json file."
_KINDS = [name for name in _core.variants() if not name.startswith("prelaunch_")]
VARIANT_HELP = f"{', '.join(_KINDS)}, prelaunch_ and any but pipelined; one_shot (reductions)"
SIZES_METAVAR = "FIRST:LAST[:FACTOR]|LIST"
MachineOption = Annotated[str | None, typer.Option(metavar="NAME", help=MACHINE_HELP)]
SimMachineOption = Annotated[str, typer.Option(metavar="NAME", help=MACHINE_HELP)]
StressOption = Annotated[
    bool,
    typer.Option("--stress", metavar="", help="Test which signal forms are safe here (GPUs)."),
]
RanksOption = Annotated[
    int | None,
    typer.Option(min=1, max=COUNT_MAX, metavar="N", help="Use only the machine's first N ranks."),
]
InPlaceOption = Annotated[
    bool, typer.Option("--in-place", metavar="", help="Input and output share a buffer.")
]
ProtocolOption = Annotated[
    ProtocolName,
    typer.Option(
        metavar="NAME",
        help="How ranks enter: barrier, eager (through slots), promise (the caller guarantees that "
        "buffers are free) or auto.",
    ),
]
ProtocolsOption = Annotated[
    str,
    typer.Option(
        "--protocol",
        metavar="NAME,...",
        help="How ranks enter: barrier, eager (through slots), promise (the caller guarantees that "
        "buffers are free) or auto: promise on sim, elsewhere a protocol that is always safe.",
    ),
]
SignalsOption = Annotated[
    str | None,
    typer.Option(metavar="NAME,...", help="cuda: signal forms: fenced (default), copy_order."),
]
OwnCopyOption = Annotated[
    str,
    typer.Option(
        metavar="NAME,...", help="cuda: how to copy within a GPU: engines, engine (one), sm."
    ),
]
TimingOption = Annotated[
    str,
    typer.Option(
        "--timing",
        metavar="NAME,...",
        help="chain: time per call when many are enqueued ahead; call: a single call as seen by "
        "the host. Always a single call on sim.",
    ),
]
PlotOption = Annotated[
    Path | None, typer.Option("--plot", metavar="FILE", help="Write a plot (.png, .svg, .pdf).")
]
BackendOption = Annotated[
    BackendName,
    typer.Option(
        metavar="NAME",
        help="sim, host, cuda, sdma, or auto: sim if --machine is given, else what works here.",
    ),
]
SizesOption = Annotated[
    str | None,
    typer.Option(
        metavar=SIZES_METAVAR,
        help="Total bytes: 1K:4G, 1K:1G:4 or 4096,1000003 (K = 1024). "
        f"Default {SIM_SIZES} on sim, {REAL_SIZES} elsewhere.",
    ),
]
VariantsOption = Annotated[
    str,
    typer.Option(
        metavar="all|auto|LIST",
        help=f"all (all that are possible), auto (the selected one), or names: {VARIANT_HELP}.",
    ),
]
ItersOption = Annotated[
    int,
    typer.Option(
        min=1, max=COUNT_MAX, metavar="N", help="Number of batches; the time is their median."
    ),
]
CallsOption = Annotated[
    int, typer.Option(min=1, max=COUNT_MAX, metavar="N", help="Calls per batch, enqueued ahead.")
]
WarmupOption = Annotated[
    int, typer.Option(min=0, max=COUNT_MAX, metavar="N", help="Calls before the first batch.")
]
CheckOption = Annotated[
    bool, typer.Option(metavar="", help="Check every byte (on sim up to 64M, 512M of all ranks).")
]
BaselineOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME,...", help="Baselines: gloo, memcpy (host); nccl, nccl-sms, nccl-ce (cuda)."
    ),
]
# None: what a reduction takes by default; other operations have none of these.
DtypeOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="Reductions: float32 (default), bfloat16, float16, int32, ..."
    ),
]
ReductionOption = Annotated[
    Reduction | None,
    typer.Option(metavar="NAME", help="Reductions: sum (default), avg, min, max or premul_sum."),
]
SmsOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=SMS_MAX,
        metavar="N",
        help="cuda: maximum number of SMs of a reduction, and of CTAs of nccl-sms. Default 12.",
    ),
]
TimeoutOption = Annotated[
    float, typer.Option(min=0.001, metavar="S", help="Limit of a wait, in seconds.")
]
MetricOption = Annotated[
    Metric | None,
    typer.Option(
        metavar="NAME",
        help="Plot time, busbw or speedup (over nccl, else over pcpy). Default: speedup if nccl "
        "was measured, else time.",
    ),
]


def parsed(parse: Callable[[str], Any], text: str, option: str) -> Any:
    try:
        return parse(text)
    except ValueError as failure:
        raise typer.BadParameter(str(failure), param_hint=option) from None


def names_of(text: str, option: str) -> list[str]:
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise typer.BadParameter("name at least one", param_hint=option)
    return names


def known_names(text: str, option: str, known: Sequence[str]) -> list[str]:
    names = names_of(text, option)
    if strange := [name for name in names if name not in known]:
        raise typer.BadParameter(
            f"'{strange[0]}' is not one of {', '.join(known)}", param_hint=option
        )
    return names


HELP_COLUMNS = 78  # of a terminal's 80


def help_of(docstring: str) -> str:
    """A help page: a terminal breaks paragraphs where it likes, and examples that are too long for
    its lines as a shell takes them."""
    made = []
    for paragraph in inspect.cleandoc(docstring).split("\n\n"):
        lines = paragraph.splitlines()
        if lines[0] != "\b":
            made.append(" ".join(lines))
            continue
        made.append("\n".join(("\b", *map(_folded, lines[1:]))))
    return "\n\n".join(made)


def _folded(line: str) -> str:
    """A command in lines that a terminal has room for, broken outside quotes."""
    if len(line) <= HELP_COLUMNS:
        return line
    lines = [""]
    for word in re.findall(r"(?:'[^']*'|\"[^\"]*\"|[^\s'\"])+", line):
        if len(lines[-1]) + len(word) > HELP_COLUMNS - 2:
            lines[-1] += "\\"
            lines.append("    ")
        lines[-1] += f"{word} "
    return "\n".join(lines).rstrip()


def fold_help(app: typer.Typer) -> None:
    """All help pages of an application, by `help_of`."""
    for group in app.registered_groups:
        if group.typer_instance is not None:
            fold_help(group.typer_instance)
    for command in app.registered_commands:
        command.help = help_of((command.callback and command.callback.__doc__) or "")
