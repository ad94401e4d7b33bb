"""`offcore sdma encode | decode | run`: the packets that an MI300X's SDMA engines fetch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

import offcore
from offcore import _core
from offcore.errors import error
from offcore.sizes import parse_bytes
from offcore.tools import report
from offcore.tools.cli.options import NUMBER_MAX, JsonOption, parsed
from offcore.tools.report import JsonLines
from offcore.tools.sdma import emulator
from offcore.tools.sdma import text as sdma_text

MACHINE = "mi300x-8"

app = typer.Typer(
    help="Encode, decode and run SDMA packets; an emulated engine runs them.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)

FileArgument = Annotated[
    str, typer.Argument(metavar="FILE|-", help="A program's text, or a JSON list of commands.")
]
MachineOption = Annotated[
    str, typer.Option(metavar="NAME", help="Machine whose largest copy limits packets.")
]


def _read(file: str) -> str:
    try:
        return sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except OSError as failure:
        raise error("invalid", f"cannot read '{file}': {failure.strerror}") from None
    except UnicodeDecodeError:
        raise error("invalid", f"cannot read '{file}': it is not text") from None


def _largest(machine: str) -> int:
    loaded = offcore.machines.load(machine)
    if loaded.vendor != "amd":
        raise error("unsupported", f"machine {machine} has no SDMA engines: packets are AMD's")
    return int(loaded.limits.copy_bytes_max)


def _queue_name(program: _core.Program, index: int) -> str:
    rank, queue, _ = program.queues[index]
    return f"{rank}.{queue}"


@app.command("encode")
def encode_command(
    file: FileArgument,
    machine: MachineOption = MACHINE,
    annotate: Annotated[
        bool,
        typer.Option("--annotate", metavar="", help="Name packets and fields next to the dwords."),
    ] = False,
    json: JsonOption = None,
) -> None:
    """Print the dwords of commands, one per line, 8 hexadecimal digits.

    Each engine queue of a program follows a line `# queue R.Q`. docs/sdma.md lists the addresses of
    buffers. --json writes one object per queue, with the dwords that a replay changes.

    \b
    echo '[{"op": "copy", "dst": 4096, "src": 0, "bytes": 64}]' | offcore sdma encode -
    echo '[{"op": "copy", "dst": 4096, "src": 0, "bytes": 64}]' | offcore sdma encode --annotate -
    offcore show all_gather --variant b2b | offcore sdma encode -
    """
    text, largest = _read(file), _largest(machine)
    with JsonLines(json) as lines:
        if not sdma_text.is_program(text):
            dwords = sdma_text.encode_commands(sdma_text.parse_commands(text), largest)
            lines.write({"queue": None, "dwords": sdma_text.shown(dwords)})
            if json != "-":
                _print_dwords(dwords, annotate)
            return
        program = offcore.Program.parse(text)
        addresses = _core.SdmaAddresses.model(program)
        for stream in _core.sdma_encode(program, addresses, largest):
            name = _queue_name(program, stream.queue)
            lines.write(sdma_text.stream_record(name, stream, program))
            if json != "-":
                sys.stdout.write(f"# queue {name}\n")
                _print_dwords(stream.dwords, annotate)


def _print_dwords(dwords: list[int], annotate: bool) -> None:
    lines = sdma_text.annotated(dwords) if annotate else sdma_text.shown(dwords)
    sys.stdout.write("".join(f"{line}\n" for line in lines))


@app.command("decode")
def decode_command(
    file: Annotated[str, typer.Argument(metavar="FILE|-", help="Dwords, as encode writes them.")],
    program: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A program's text: print it with the decoded commands.",
        ),
    ] = None,
    json: JsonOption = None,
) -> None:
    """Print the commands that dwords encode: a JSON list, or with --program a program's text.

    Invalid dwords raise an error that names the dword.

    \b
    echo '00000005 00001000 00000000 00000001' | offcore sdma decode -
    """
    queues = sdma_text.parse_dwords(_read(file))
    if program is not None:
        return _decode_program(queues, offcore.Program.parse(_read(str(program))))
    if json is None and len(queues) > 1:
        raise error(
            "invalid",
            "these are several queues: name their program (--program), or ask for --json",
        )
    with JsonLines(json) as lines:
        for name, dwords in queues.items():
            commands = sdma_text.decode_commands(dwords)
            lines.write({"queue": name, "commands": commands})
            if json != "-":
                sys.stdout.write(sdma_text.listed(commands))


def _decode_program(queues: dict[str | None, list[int]], program: _core.Program) -> None:
    known = {_queue_name(program, i): i for i in range(len(program.queues))}
    only = [name for name in known if not name.endswith(".caller")]
    if list(queues) == [None] and len(only) == 1:
        queues = {only[0]: queues[None]}
    if strange := [name for name in queues if name not in known]:
        raise error(
            "invalid", f"the program has no queue {strange[0] or 'without a name'}; it has {only}"
        )
    indexed = {known[str(name)]: dwords for name, dwords in queues.items()}
    addresses = _core.SdmaAddresses.model(program)
    sys.stdout.write(str(_core.sdma_decode(indexed, program, addresses)))


@app.command("run")
def run_command(
    file: FileArgument,
    machine: MachineOption = MACHINE,
    seed: Annotated[
        int,
        typer.Option(
            min=0,
            max=NUMBER_MAX,
            metavar="N",
            help="Random seed for data and ordering; 0: in order.",
        ),
    ] = 1,
    ring: Annotated[
        str, typer.Option(metavar="SIZE", help="Bytes of a ring, a power of two.")
    ] = "4K",
    memory: Annotated[
        str,
        typer.Option(metavar="SIZE", help="Bytes of emulated memory from --base on (commands)."),
    ] = "1M",
    base: Annotated[
        int,
        typer.Option(
            min=0, max=NUMBER_MAX, metavar="ADDRESS", help="Start address of emulated memory."
        ),
    ] = 0,
    json: JsonOption = None,
) -> None:
    """Execute commands on emulated engines, and check every byte of their memory.

    Each queue of a program, callers included, has its own engine and ring. The bytes are compared
    with those of the packets executed one after the other: commands that lack a fence between
    them fail for some seeds.

    \b
    echo '[{"op": "copy", "dst": 4096, "src": 0, "bytes": 64}]' | offcore sdma run -
    offcore show all_to_all --variant swap --in-place --bytes 64K | offcore sdma run -
    """
    text, largest = _read(file), _largest(machine)
    ring_bytes = int(parsed(parse_bytes, ring, "--ring"))
    work: emulator.Work
    if sdma_text.is_program(text):
        work = emulator.of_program(offcore.Program.parse(text), largest, seed)
    else:
        dwords = sdma_text.encode_commands(sdma_text.parse_commands(text), largest)
        nbytes = int(parsed(parse_bytes, memory, "--memory"))
        work = emulator.of_commands(dwords, base, nbytes, seed)
    done = emulator.run(work, ring_bytes, seed)
    with JsonLines(json) as lines:
        for record in done.records:
            lines.write(record)
        summary: dict[str, Any] = {"checked_bytes": done.checked, "wrong": done.wrong}
        lines.write(summary | {"timestamps": done.timestamps})
    if json != "-":
        report.console().print(emulator.table(done))
    if done.wrong:
        raise error(
            "verify",
            f"{done.wrong} bytes differ from the packets done in order, the first at "
            f"{done.first_wrong:#x}: commands between two fences touch each other's bytes",
        )
