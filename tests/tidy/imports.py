"""Which module of the package imports which, read from its text."""

import ast
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

PACKAGE = "offcore"
BUILT = "offcore._core"  # has no text, and imports nothing


def modules_in(folder: Path) -> dict[str, str]:
    """The text of every module of the package in that folder, by its dotted name."""
    found = {}
    for path in sorted(folder.rglob("*.py")):
        parts = (PACKAGE, *path.relative_to(folder).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text("utf-8")
    return found


def imported(text: str) -> Iterator[str]:
    """What a module's text names in imports, wherever they stand: modules, or names in them."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{'.' * node.level}{node.module or ''}.{one.name}" for one in node.names)


def graph_of(modules: Mapping[str, str]) -> dict[str, set[str]]:
    """The modules of the package that each imports. A name that is no module is its module's."""
    return {
        name: {
            one if one in modules or one == BUILT else one.rpartition(".")[0]
            for one in imported(text)
            if one.partition(".")[0] == PACKAGE
        }
        & modules.keys()
        for name, text in modules.items()
    }


def relative_in(modules: Mapping[str, str]) -> list[str]:
    """Modules with imports that begin with a dot, which the graph does not show."""
    return [name for name, text in modules.items() if any(i[0] == "." for i in imported(text))]


def circle_in(graph: Mapping[str, Iterable[str]]) -> list[str]:
    """Modules that cannot be put in an order in which each imports only earlier ones."""
    left = {name: set(below) for name, below in graph.items()}
    while ready := {name for name, below in left.items() if not below & left.keys()}:
        left = {name: below for name, below in left.items() if name not in ready}
    return sorted(left)


def is_tool(name: str) -> bool:
    ours = name in (f"{PACKAGE}.tools", f"{PACKAGE}.__main__")
    return ours or name.startswith(f"{PACKAGE}.tools.")


def upward_in(graph: Mapping[str, Iterable[str]]) -> list[str]:
    """Imports of tools by the library, as `importer -> imported`."""
    return [
        f"{name} -> {one}"
        for name, below in graph.items()
        if not is_tool(name)
        for one in sorted(below)
        if is_tool(one)
    ]
