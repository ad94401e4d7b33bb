"""How packets are written: dwords as hexadecimal lines, commands as a JSON list (docs/sdma.md)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from offcore import _core
from offcore.errors import error

Command = dict[str, Any]

POLL = {"func": 5, "mask": 0xFFFFFFFF, "interval": 4, "retry": 0xFFF}  # what encode writes
ADD64 = {"operation": 47, "compare": 0, "interval": 0}
ADDRESSES = ("addr", "dst", "src", "a", "b")
RECT = (
    *("element", "dst", "dst_x", "dst_y", "dst_z", "dst_pitch", "dst_slice"),
    *("src", "src_x", "src_y", "src_z", "src_pitch", "src_slice", "width", "height", "depth"),
)
# Of each command: the keys that it needs, and those that it may have.
KEYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "copy": (("dst", "src", "bytes"), ("rows", "dst_step", "src_step")),
    "bcst": (("dsts", "src", "bytes"), ()),
    "swap": (("a", "b", "bytes"), ()),
    "poll": (("addr", "value"), tuple(POLL)),
    "signal": (("addr", "value"), ("how", *ADD64)),
    "timestamp": (("addr",), ()),
    "trap": (("value",), ()),
    "fill": (("dst", "value", "bytes"), ()),
    "rect": (RECT, ()),
}


def is_program(text: str) -> bool:
    """Whether it is a program's text rather than JSON."""
    return not text.lstrip().startswith(("[", "{"))


def shown(dwords: list[int]) -> list[str]:
    return [f"{word:08x}" for word in dwords]


def annotated(dwords: list[int]) -> list[str]:
    """Dwords with comments: the packet's name beside its first one, the fields that each holds."""
    lines: list[str] = []
    while len(lines) < len(dwords):
        name, count, fields = _core.sdma_packet_at(dwords[len(lines)])
        start = len(lines)
        for index, word in enumerate(dwords[start : start + count]):
            told = [name] if index == 0 else []
            told += [_piece(*one, index) for one in fields if _lies_in(*one[1:], index)]
            lines.append(f"{word:08x}  # {', '.join(told)}".rstrip(" #"))
    return lines


def _lies_in(bit: int, bits: int, dword: int) -> bool:
    return bit < 32 * (dword + 1) and bit + bits > 32 * dword


def _piece(field: str, bit: int, bits: int, dword: int) -> str:
    """A field's name, and which of its bits this dword has where it has not all."""
    low, high = max(0, 32 * dword - bit), min(bits, 32 * (dword + 1) - bit)
    return field if (low, high) == (0, bits) else f"{field}[{low}:{high - 1}]"


def parse_commands(text: str) -> list[Command]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as cause:
        raise error("invalid", f"the commands are not JSON: {cause}") from None
    if not isinstance(found, list):
        raise error("invalid", "the commands have to be a JSON list")
    return found


def encode_commands(commands: list[Command], copy_bytes_max: int) -> list[int]:
    """Raises `Error`: invalid or unsupported, naming the command."""
    dwords: list[int] = []
    for index, command in enumerate(commands):
        try:
            dwords += _encode(_checked(command), copy_bytes_max)
        except _core.Error as failure:
            raise error(failure.code, f"command {index}: {failure}") from None
    return dwords


def _checked(command: object) -> Command:
    """The command with numbers for numbers, and nothing missing or unknown."""
    if not isinstance(command, dict) or command.get("op") not in KEYS:
        raise error("invalid", f"it must be an object whose op is one of {', '.join(KEYS)}")
    needed, optional = KEYS[command["op"]]
    if missing := [key for key in needed if key not in command]:
        raise error("invalid", f"{command['op']} lacks {', '.join(missing)}")
    if unknown := [key for key in command if key not in ("op", *needed, *optional)]:
        keys = ", ".join((*needed, *optional))
        raise error("invalid", f"{command['op']} has no {unknown[0]}; its keys are {keys}")
    checked: Command = {}
    for key, value in command.items():
        if key in ("op", "how"):
            checked[key] = value
        elif key == "dsts":
            if not isinstance(value, list):
                raise error("invalid", "dsts has to be a list of addresses")
            checked[key] = [_number(key, one) for one in value]
        else:
            checked[key] = _number(key, value, signed=key.endswith("_step"))
    return checked


def _number(key: str, value: object, signed: bool = False) -> int:
    if isinstance(value, str) and re.fullmatch(r"0x[0-9a-fA-F]{1,16}", value):
        value = int(value, 16)
    least, most = (-(1 << 63) + 1, (1 << 63) - 1) if signed else (0, (1 << 64) - 1)
    if key == "rows":
        least, most = 1, (1 << 32) - 1
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise error("invalid", f'{key} has to be a number from {least} to {most}, or "0x..."')
    return value


def _encode(command: Command, copy_bytes_max: int) -> list[int]:
    op = command.pop("op")
    encoder = _core.SdmaEncoder(copy_bytes_max)
    fields = {"dst" if key == "addr" else key: value for key, value in command.items()}
    if op == "copy":
        rest = [command.get(key, default) for key, default in _ROWS.items()]
        encoder.strided(command["dst"], command["src"], command["bytes"], *rest)
    elif op == "bcst":
        encoder.broadcast(command["dsts"], command["src"], command["bytes"])
    elif op == "swap":
        encoder.swap(command["a"], command["b"], command["bytes"])
    elif op == "timestamp":
        encoder.timestamp(command["addr"])
    elif op == "poll":
        if set(command) == {"addr", "value"}:
            encoder.poll(command["addr"], command["value"])
        else:
            encoder.add("poll", {"memory": 1, **POLL, **fields})
    elif op == "signal":
        how = fields.pop("how", "fence")
        if how not in ("fence", "atomic") or (how == "fence" and len(fields) > 2):
            raise error("invalid", 'how has to be "fence" or "atomic", which alone has more keys')
        if how == "fence":
            encoder.fence(command["addr"], command["value"])
        else:
            encoder.add("atomic", {**ADD64, **fields})
    else:
        encoder.add(op, fields)
    return list(encoder.dwords)


_ROWS = {"rows": 1, "dst_step": 0, "src_step": 0}


def decode_commands(dwords: list[int]) -> list[Command]:
    """Raises `Error`: invalid, naming the dword."""
    return [_command(kind, fields) for kind, fields, _ in _core.sdma_unpack(dwords)]


def _command(kind: str, fields: dict[str, int]) -> Command:
    def special(usual: dict[str, int]) -> Command:
        return {key: fields[key] for key, value in usual.items() if fields[key] != value}

    address: Callable[[str], str] = lambda name: hex(fields[name])  # noqa: E731
    if kind == "copy":
        return {
            "op": "copy",
            "dst": address("dst"),
            "src": address("src"),
            "bytes": fields["bytes"],
        }
    if kind == "broadcast":
        dsts = [address("dst"), address("dst2")]
        return {"op": "bcst", "dsts": dsts, "src": address("src"), "bytes": fields["bytes"]}
    if kind == "swap":
        return {"op": "swap", "a": address("dst"), "b": address("src"), "bytes": fields["bytes"]}
    if kind == "poll":
        if fields["memory"] != 1:
            raise error("unsupported", "a poll of a register is not supported")
        return {"op": "poll", "addr": address("dst"), "value": fields["value"], **special(POLL)}
    if kind in ("fence", "atomic"):
        command = {"op": "signal", "addr": address("dst"), "value": fields["value"], "how": kind}
        return command if kind == "fence" else command | special(ADD64)
    if kind == "timestamp":
        return {"op": "timestamp", "addr": address("dst")}
    return {"op": kind} | {
        key: hex(value) if key in ADDRESSES else value for key, value in fields.items()
    }


def listed(commands: list[Command]) -> str:
    """A JSON list, a command a line."""
    lines = ",\n".join(" " + json.dumps(command) for command in commands)
    return f"[\n{lines}\n]\n" if commands else "[]\n"


def stream_record(name: str, stream: _core.SdmaEncodedQueue, program: _core.Program) -> Command:
    keys = ("dword", "what", "buffer", "rank", "value")
    patches = [dict(zip(keys, row, strict=True)) for row in stream.patches(program)]
    return {
        "queue": name,
        "dwords": shown(stream.dwords),
        "starts": stream.starts,
        "patches": [{k: v for k, v in patch.items() if v is not None} for patch in patches],
    }


def parse_dwords(text: str) -> dict[str | None, list[int]]:
    """Dwords by queue, of hexadecimal lines or of encode's JSON. Raises `Error`: invalid."""
    if not is_program(text):
        return _dwords_of_json(text)
    queues: dict[str | None, list[int]] = {}
    name: str | None = None
    for number, line in enumerate(text.splitlines(), 1):
        words, _, comment = line.partition("#")
        if header := re.fullmatch(r"\s*queue ([0-9]+\.(?:[0-9]+|caller))\s*", comment):
            name = header[1]
            queues.setdefault(name, [])
        for word in words.split():
            queues.setdefault(name, []).append(_dword(word, f"line {number}"))
    return queues or {None: []}


def _dwords_of_json(text: str) -> dict[str | None, list[int]]:
    queues: dict[str | None, list[int]] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            name, words = record["queue"], record["dwords"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise error(
                "invalid", f'line {number} is not an object {{"queue": ..., "dwords": [...]}}'
            ) from None
        if not isinstance(words, list) or not (name is None or isinstance(name, str)):
            raise error("invalid", f"line {number}: dwords has to be a list, queue a name or null")
        queues[name] = [_dword(word, f"line {number}") for word in words]
    return queues


def _dword(word: object, where: str) -> int:
    if not isinstance(word, str) or not re.fullmatch(r"(0x)?[0-9a-fA-F]{1,8}", word):
        raise error("invalid", f"{where}: {word!r} is not a dword of up to 8 hexadecimal digits")
    return int(word, 16)
