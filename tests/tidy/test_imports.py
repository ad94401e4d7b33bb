"""The library imports no tool, and no module imports itself by way of others."""

from pathlib import Path

import imports
import pytest

MODULES = imports.modules_in(Path(__file__).parents[2] / "python" / "offcore")
GRAPH = imports.graph_of(MODULES)
# Parts that stand beside the library, which needs none of them, and the lines of each at most:
# plans for overlap and what carries them out, loop kernels, adapters for torch, serving engines.
BESIDE = {
    "offcore.overlap": 800,
    "offcore.distributed": 1995,  # of which groups that span hosts are 370, direct calls 137
    "offcore.fsdp": 500,
    "offcore.serving": 1540,  # four engines
    "offcore.loop": 1180,
    "offcore.device.cuda": 320,
    "offcore.device.triton": 330,
    "offcore.torch": 95,
    "offcore.torch_matmul": 245,  # both directions
    "offcore.mcast.torch": 235,
    "offcore.mcast.gpu": 410,
    "offcore.torch_calls": 205,
}


def test_the_library_imports_no_tool() -> None:
    assert imports.upward_in(GRAPH) == []
    tools = {name for name in GRAPH if imports.is_tool(name)}
    assert tools > {"offcore.tools", "offcore.tools.cli.main"}
    assert GRAPH.keys() - tools > {"offcore", "offcore.comm.communicator", "offcore.kv"}


def test_no_import_comes_round() -> None:
    assert imports.circle_in(GRAPH) == []
    assert imports.relative_in(MODULES) == []
    assert GRAPH["offcore"] > {"offcore.comm", "offcore.kv", "offcore.machines"}


def part_of(name: str) -> str:
    """The part beside the library that a module belongs to; empty: it belongs to the library."""
    return next((one for one in BESIDE if name == one or name.startswith(f"{one}.")), "")


def test_the_library_stays_small() -> None:
    lines = {name: text.count("\n") for name, text in MODULES.items() if not imports.is_tool(name)}
    for part, limit in {"": 5000, **BESIDE}.items():
        own = {name: count for name, count in lines.items() if part_of(name) == part}
        assert 0 < sum(own.values()) <= limit, own


def test_the_library_needs_nothing_beside_it() -> None:
    for name, below in GRAPH.items():
        if not imports.is_tool(name) and not part_of(name):
            assert not any(part_of(one) for one in below), name


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
