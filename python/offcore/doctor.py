"""What this machine can run, and what would make it run more: `offcore doctor`."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.table import Table

import offcore
from offcore import _core, stress
from offcore.errors import error
from offcore.report import JsonLines, commit, progress_bar, versions


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _shared_memory() -> dict[str, int] | None:
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return None
    found = os.statvfs(folder)
    return {
        "bytes": found.f_frsize * found.f_blocks,
        "free_bytes": found.f_frsize * found.f_bavail,
    }


def examine() -> dict[str, Any]:
    machines: list[dict[str, Any]] = []
    for name in offcore.machines.names():
        if name.endswith("-N"):  # stands for any number of ranks
            machines.append({"name": name, "ranks": None})
            continue
        try:
            machines.append({"name": name, "ranks": offcore.machines.load(name).ranks})
        except offcore.Error as failure:
            machines.append({"name": name, "error": str(failure)})
    return {
        "backends": [
            {"name": name, "available": available, "reason": reason}
            for name, available, reason in offcore.probe_backends()
        ],
        "machines": machines,
        "versions": versions(),
        "commit": commit(),
        "platform": platform.platform(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": _memory_bytes(),
        "shared_memory": _shared_memory(),
        "environment": [
            {"name": name, "value": os.environ.get(name), "default": default, "meaning": meaning}
            for name, default, meaning in offcore._core.env_variables()
        ],
    }


def _grid(title: str, *columns: str) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def stressed(operations: int, lines: JsonLines, console: Console) -> None:
    """Runs the stress, remembers its verdicts and prints them. Raises `Error`: driver where even
    the documented form has failed, or where the stress proves nothing."""
    with progress_bar() as bar:
        task = bar.add_task("stress", total=stress.trials())
        verdicts = stress.run(operations, step=lambda: bar.advance(task))
    file = stress.remember(verdicts)
    table = _grid("signal forms", "GPU", "form", "state", "")
    for verdict in verdicts:
        lines.write(asdict(verdict))
        state = "[green]passed[/]" if verdict.passed else "[red]failed[/]"
        table.add_row(verdict.gpu, verdict.signals, state, verdict.told)
    console.print(table)
    form, why = stress.choose(_core.cuda_facts())
    console.print(f"driver {verdicts[0].driver}, {verdicts[0].gpus} GPUs; the planted fault gave "
                  f"{verdicts[0].planted_wrong_words} wrong words")  # fmt: skip
    console.print(f"signals='auto' is {form}: {why}\nremembered in {file}")
    for verdict in verdicts:
        if verdict.signals == "fenced" and not verdict.passed:
            raise error("driver", f"the stress of {verdict.gpu} failed: {verdict.told}")


def render(found: dict[str, Any], console: Console) -> None:
    backends = _grid("backends", "name", "state", "")
    for backend in found["backends"]:
        state = "[green]available[/]" if backend["available"] else "[yellow]unavailable[/]"
        backends.add_row(backend["name"], state, backend["reason"])
    machines = _grid("machines", "name", "ranks")
    for machine in found["machines"]:
        told = machine["error"] if "error" in machine else machine["ranks"] or "N"
        machines.add_row(machine["name"], str(told))
    system = _grid("this machine", "what", "")
    for name, version in found["versions"].items():
        system.add_row(name, version)
    system.add_row("commit", found["commit"])
    system.add_row("system", found["platform"])
    system.add_row("cores", str(found["cores"]))
    system.add_row("memory", f"{found['memory_bytes'] / 2**30:.1f} GiB")
    if found["shared_memory"]:
        shared = found["shared_memory"]
        system.add_row(
            "/dev/shm",
            f"{shared['free_bytes'] / 2**30:.1f} GiB free of {shared['bytes'] / 2**30:.1f} GiB",
        )
    environment = _grid("environment", "variable", "value", "meaning")
    for variable in found["environment"]:
        value = variable["value"]
        shown = f"[dim]{variable['default'] or '-'} (not set)[/]" if value is None else value
        environment.add_row(variable["name"], shown, variable["meaning"])
    console.print(Group(backends, machines, system, environment))
