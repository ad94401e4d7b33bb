"""What this machine can run, and what would make it run more: `offcore doctor`."""

from __future__ import annotations

import datetime
import os
import platform
from dataclasses import asdict
from difflib import get_close_matches
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.markup import escape
from rich.table import Table

import offcore
from offcore import _core, folders
from offcore.comm import signal_forms
from offcore.errors import error
from offcore.tools.report import JsonLines, commit, progress_bar, versions


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


def _gpus() -> dict[str, Any] | None:
    """The driver, its GPUs and the signal form that `auto` is on them; None: no driver or GPU."""
    try:
        facts: dict[str, Any] = _core.cuda_facts()
    except offcore.Error:
        return None  # the backends' table says why
    form, why = signal_forms.choose(facts)
    reached = all(len(gpu["peers"]) == len(facts["gpus"]) - 1 for gpu in facts["gpus"])
    return {
        "driver": signal_forms.driver_name(facts),
        "gpus": facts["gpus"],
        **_profile(len(facts["gpus"])),
        "all_reach_each_other": reached,
        "multicast": "never used",
        "signals": form,
        "signals_why": why,
    }


def _profile(gpus: int) -> dict[str, Any]:
    """The machine that all GPUs are taken for, and what of it was not measured on such ones."""
    machines = offcore.machines
    name = machines.for_gpus(gpus)
    table = machines.tables().get(name)
    assumed = name.startswith(f"{machines.ASSUMED}-")
    notes = ["its costs are assumed, not measured on these GPUs"] if assumed else []
    notes.append("a tuned table" if table else "no tuned table: run `offcore tune --backend cuda`")
    return {"machine": name, "assumed": assumed, "machine_notes": notes}


def _build() -> dict[str, str]:
    """How the core was built: by which compiler, from which commit, when."""
    compiler, _, built_from = _core.build()
    made = os.stat(str(_core.__file__)).st_mtime
    date = datetime.datetime.fromtimestamp(made, datetime.timezone.utc)
    return {
        "compiler": compiler,
        "commit": built_from or "unknown",
        "date": date.isoformat(timespec="seconds"),
    }


def _machines() -> list[dict[str, Any]]:
    """Every machine: its ranks, its file, and the tables of measured choices that are used."""
    found: list[dict[str, Any]] = []
    tables = offcore.machines.tables()
    for name in offcore.machines.names():
        many = name.endswith("-N")  # stands for any number of ranks
        told: dict[str, Any] = {"name": name, "ranks": None}
        told["file"] = str(offcore.machines.path_of(name))
        pattern = f"{name[:-1]}[0-9]*" if many else name
        told["tuned"] = [str(path) for stem, path in tables.items() if fnmatch(stem, pattern)]
        try:
            told["ranks"] = None if many else offcore.machines.load(name).ranks
        except offcore.Error as failure:
            told["error"] = str(failure)
        found.append(told)
    return found


def _environment() -> list[dict[str, Any]]:
    """Every variable that is read, and those of our prefix that are not. `problem`: what is wrong
    with its name or value, else None."""
    found: list[dict[str, Any]] = []
    known = _core.env_variables()
    for name, default, meaning in known:
        read = {"OFFCORE_VARIANT": _core.default_variant}.get(name, partial(_core.env, name))
        try:
            read()
            problem = None
        except offcore.Error as failure:
            problem = str(failure)
        told = {"name": name, "value": _shown(name), "default": default}
        found.append(told | {"meaning": meaning, "problem": problem})
    names = [name for name, *_ in known]
    for name in sorted(os.environ):
        if name.startswith("OFFCORE_") and name not in names:
            near = get_close_matches(name, names, 1)
            problem = "not read by offcore" + (f": did you mean {near[0]}?" if near else "")
            told = {"name": name, "value": os.environ[name], "default": None, "meaning": None}
            found.append(told | {"problem": problem})
    return found


def _folders() -> list[dict[str, Any]]:
    """What is read from the user's folders, and written there."""
    return [
        {"use": use, "path": str(path), "exists": path.exists()}
        for use, path in (
            ("machine files, tuned tables", folders.machines()),
            ("verdicts of doctor --stress", signal_forms.memory()),
        )
    ]


def examine() -> dict[str, Any]:
    return {
        "backends": [
            {"name": name, "available": available, "reason": reason}
            for name, available, reason in offcore.probe_backends()
        ],
        "cuda": _gpus(),
        "machines": _machines(),
        "folders": _folders(),
        "versions": versions(),
        "commit": commit(),
        "build": _build(),
        "platform": platform.platform(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": _memory_bytes(),
        "shared_memory": _shared_memory(),
        "environment": _environment(),
    }


def _shown(variable: str) -> str | None:
    value = os.environ.get(variable)
    return "(set)" if value and variable == "OFFCORE_JOB_SECRET" else value


def _grid(title: str, *columns: str) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def stressed(operations: int, lines: JsonLines, console: Console) -> None:
    """Runs the stress, remembers its verdicts and prints them. Raises `Error`: driver where even
    the documented form has failed, or where the stress proves nothing."""
    with progress_bar() as bar:
        task = bar.add_task("stress", total=signal_forms.trials())
        verdicts = signal_forms.run(operations, step=lambda: bar.advance(task))
    file = signal_forms.remember(verdicts)
    table = _grid("signal forms", "GPU", "form", "state", "")
    for verdict in verdicts:
        lines.write(asdict(verdict))
        state = "[green]passed[/]" if verdict.passed else "[red]failed[/]"
        table.add_row(verdict.gpu, verdict.signals, state, verdict.told)
    console.print(table)
    form, why = signal_forms.choose(_core.cuda_facts())
    first = verdicts[0]
    rows = "reaches all GPUs" if first.strided else "does not reach all GPUs: rows go one by one"
    console.print(f"driver {first.driver}, {first.gpus} GPUs; one strided copy {rows}")
    console.print(f"the planted fault gave {first.planted_wrong_words} wrong words")
    console.print(f"signals='auto' is {form}: {why}\nremembered in {file}")
    for verdict in verdicts:
        if verdict.signals == "fenced" and not verdict.passed:
            raise error("driver", f"the stress of {verdict.gpu} failed: {verdict.told}")


def _render_gpus(cuda: dict[str, Any]) -> Group:
    gpus = _grid("GPUs", "", "name", "PCI address", "NUMA node", "reaches")
    for gpu in cuda["gpus"]:
        node = "not told" if gpu["node"] < 0 else str(gpu["node"])
        if gpu["node_refusal"]:
            node += f" (no memory there: {gpu['node_refusal']})"
        peers = ", ".join(map(str, gpu["peers"])) or "no other GPU"
        gpus.add_row(str(gpu["ordinal"]), gpu["name"], gpu["pci"], node, peers)
    driver = _grid("driver", "what", "")
    driver.add_row("version", cuda["driver"])
    driver.add_row("machine", "; ".join((cuda["machine"], *cuda["machine_notes"])))
    driver.add_row("signal form", f"{cuda['signals']}: {cuda['signals_why']}")
    driver.add_row("NVLink multicast", cuda["multicast"])
    return Group(gpus, driver)


def render(found: dict[str, Any], console: Console) -> None:
    backends = _grid("backends", "name", "state", "")
    for backend in found["backends"]:
        state = "[green]available[/]" if backend["available"] else "[yellow]unavailable[/]"
        backends.add_row(backend["name"], state, backend["reason"])
    gpus = [_render_gpus(found["cuda"])] if found["cuda"] else []
    system = _grid("this machine", "what", "")
    for name, version in found["versions"].items():
        system.add_row(name, version)
    build = found["build"]
    system.add_row("commit", found["commit"])
    system.add_row("build", f"{build['date']} of {build['commit']} by {build['compiler']}")
    system.add_row("system", found["platform"])
    system.add_row("cores", str(found["cores"]))
    system.add_row("memory", f"{found['memory_bytes'] / 2**30:.1f} GiB")
    if found["shared_memory"]:
        shared = found["shared_memory"]
        system.add_row(
            "/dev/shm",
            f"{shared['free_bytes'] / 2**30:.1f} GiB free of {shared['bytes'] / 2**30:.1f} GiB",
        )
    tables = (_render_machines(found["machines"]), _render_folders(found["folders"]))
    environment = _render_environment(found["environment"])
    console.print(Group(backends, *gpus, *tables, system, environment))


def _render_machines(machines: list[dict[str, Any]]) -> Table:
    table = _grid("machines", "name", "ranks", "file, tuned tables")
    for machine in machines:
        files = "\n".join((machine["file"], *machine["tuned"]))
        told = machine.get("error") or str(machine["ranks"] or "N")
        table.add_row(machine["name"], told, files)
    return table


def _render_folders(places: list[dict[str, Any]]) -> Table:
    table = _grid("your folders", "what", "where")
    for place in places:
        table.add_row(place["use"], place["path"] + ("" if place["exists"] else " (none yet)"))
    return table


def _render_environment(variables: list[dict[str, Any]]) -> Table:
    table = _grid("environment", "variable", "value", "meaning")
    table.columns[0].no_wrap = True
    for variable in variables:
        value, problem = variable["value"], variable["problem"]
        shown = (
            f"[dim]{variable['default'] or '-'} (not set)[/]" if value is None else escape(value)
        )
        meaning = f"[yellow]{escape(problem)}[/]" if problem else variable["meaning"]
        table.add_row(variable["name"], shown, meaning)
    return table
