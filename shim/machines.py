"""Writes the machine files of NVIDIA GPUs as C++, for a library that has no Python to read them.

machines.py OUTPUT FILE...: each file is an initialiser of a `Machine` (core/machine/machine.h),
whose keys are the struct's fields in their order. The library's own reader checks them.
"""

import json
import sys
from pathlib import Path
from typing import Any

_STRUCTS = ("native", "limits", "links", "cost", "batches", "pages", "requests")


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f'"{value}"' if isinstance(value, str) else str(value)


def _struct(fields: dict[str, Any]) -> str:
    """A null stands for what the struct has anyhow."""
    given = [f".{key} = {_value(value)}" for key, value in fields.items() if value is not None]
    return "{" + ", ".join(given) + "}"


def initialiser(machine: dict[str, Any]) -> str:
    """The machine as C++."""
    parts = [
        f'.name = "{machine["name"]}"',
        f'.vendor = "{machine["vendor"]}"',
        f".ranks = {machine['ranks']}",
        f".engines_peer = {machine['engines']['peer']}",
        f".engines_host = {machine['engines']['host']}",
        f".topology = Topology::{machine['topology']}",
        f".flags = FlagHome::{machine['flags']}",
        *(f".{name} = {_struct(machine[name])}" for name in _STRUCTS),
    ]
    return "{" + ",\n ".join(parts) + "},\n"


def main() -> None:
    output, *files = map(Path, sys.argv[1:])
    machines = [json.loads(file.read_text("utf-8")) for file in files]
    output.write_text("".join(map(initialiser, machines)), "utf-8")


if __name__ == "__main__":
    main()
