"""The library imports no tool, and no module imports itself by way of others."""

from pathlib import Path

import imports
import pytest

MODULES = imports.modules_in(Path(__file__).parents[2] / "python" / "offcore")
GRAPH = imports.graph_of(MODULES)


def test_the_library_imports_no_tool() -> None:
    assert imports.upward_in(GRAPH) == []
    tools = {name for name in GRAPH if imports.is_tool(name)}
    assert tools > {"offcore.tools", "offcore.tools.cli.main"}
    assert GRAPH.keys() - tools > {"offcore", "offcore.comm.communicator", "offcore.kv"}


def test_no_import_comes_round() -> None:
    assert imports.circle_in(GRAPH) == []
    assert imports.relative_in(MODULES) == []
    assert GRAPH["offcore"] > {"offcore.comm", "offcore.kv", "offcore.machines"}


def test_the_library_stays_small() -> None:
    """What `import offcore` brings; beside it stands what plans overlap, which imports it."""
    lines = {name: text.count("\n") for name, text in MODULES.items() if not imports.is_tool(name)}
    overlap = {name for name in lines if name.split(".")[1:2] == ["overlap"]}
    assert sum(lines[name] for name in lines.keys() - overlap) <= 5000, lines
    assert sum(lines[name] for name in overlap) <= 650, lines
    assert [name for name in lines.keys() - overlap if GRAPH[name] & overlap] == []


PLANTED = {
    "module_level": "from offcore.tools import cli\n",
    "in_a_function": "def f():\n    import offcore.tools.cli.main\n",
    "a_name": "from offcore.tools.cli.main import main\n",
    "for_types": "if TYPE_CHECKING:\n    from offcore.tools.cli import main\n",
}


@pytest.mark.parametrize("text", PLANTED.values(), ids=PLANTED.keys())
def test_a_planted_import_of_a_tool_is_found(text: str) -> None:
    tools = dict.fromkeys(("offcore.tools", "offcore.tools.cli", "offcore.tools.cli.main"), "")
    graph = imports.graph_of({"offcore": "", "offcore.a": text, **tools})
    assert [one.split(" ")[0] for one in imports.upward_in(graph)] == ["offcore.a"]


def test_a_planted_circle_is_found() -> None:
    modules = {
        "offcore": "from offcore.a import f\nfrom offcore import c, _core\n",
        "offcore.a": "import os\nfrom offcore import b\n",
        "offcore.b": "def f():\n    from offcore.a import g\n",
        "offcore.c": "import numpy\n",
    }
    assert imports.circle_in(imports.graph_of(modules)) == ["offcore", "offcore.a", "offcore.b"]
    modules["offcore.b"] = "from offcore import __version__\n"
    assert imports.circle_in(imports.graph_of(modules)) == ["offcore", "offcore.a", "offcore.b"]
    modules["offcore.b"] = "from offcore.c import g\n"
    assert imports.circle_in(imports.graph_of(modules)) == []
    modules["offcore.c"] = "from . import a\n"
    assert imports.relative_in(modules) == ["offcore.c"]
