"""Machine files: every one that comes along loads, and every kind of mistake is named."""

import json
from pathlib import Path

import pytest

import offcore
from offcore import _core, machines

FOLDER = Path(__file__).parents[2] / "machines"


def test_names_lists_every_file() -> None:
    names = machines.names()
    assert {"mi300x-8", "h200-2", "h200-4", "h200-8", "host-N"} <= set(names)


def test_published_facts() -> None:
    mi300x = machines.load("mi300x-8")
    assert (mi300x.ranks, mi300x.engines_peer, mi300x.engines_host) == (8, 14, 2)
    assert (mi300x.links.link_gbps, mi300x.links.egress_gbps) == (64, 448)
    assert mi300x.topology == _core.Topology.full
    assert mi300x.flags == _core.FlagHome.host
    assert (mi300x.native.bcst_rows, mi300x.native.swap, mi300x.native.strided) == (2, True, False)
    assert mi300x.limits.swap_align == 64
    assert mi300x.limits.copy_bytes_max == 0x3FFFFFC0
    assert mi300x.limits.pitch_bytes_max == 2**64 - 1, "null is no limit"
    h200 = machines.load("h200-4")
    assert (h200.native.strided, h200.native.bcst_rows, h200.native.swap) == (True, 4, False)
    assert h200.limits.pitch_bytes_max == 2**40 - 1


@pytest.mark.parametrize("ranks", [1, 2, 17, 64])
def test_host_of_any_size(ranks: int) -> None:
    machine = machines.load(f"host-{ranks}")
    assert (machine.name, machine.ranks) == (f"host-{ranks}", ranks)


@pytest.mark.parametrize("name", ["mi300x", "host", "../x", ""])
def test_unknown_names_list_the_known(name: str) -> None:
    with pytest.raises(offcore.Error, match=r"known machines: .*mi300x-8") as raised:
        machines.load(name)
    assert raised.value.code == "invalid"


@pytest.mark.parametrize("name", ["host-0", "host-1025", "host-08"])
def test_a_host_has_1_to_1024_ranks(name: str) -> None:
    with pytest.raises(offcore.Error, match=f"{name}: backend host has 1 to 1024 ranks") as raised:
        machines.load(name)
    assert raised.value.code == "invalid"


def write(folder: Path, change: dict, name: str = "mi300x-8") -> Path:
    """The MI300X's file with some values changed: a key "links.x" is x of links, ... deletes it."""
    data = json.loads((FOLDER / "mi300x-8.json").read_text())
    for place, value in change.items():
        at = data
        *sections, key = place.split(".")
        for section in sections:
            at = at[section]
        if value is ...:
            del at[key]
        else:
            at[key] = value
    path = folder / f"{name}.json"
    path.write_text(json.dumps(data))
    return path


MISTAKES = [
    ({"speed": 1}, "speed: unknown key"),
    ({"links.speed": 1}, "links.speed: unknown key"),
    ({"cost.setup_ns": ...}, "cost.setup_ns: missing"),
    ({"native": ...}, "native: missing"),
    ({"links": 3}, "links. must be an object"),
    ({"links.link_gbps": "64"}, "links.link_gbps: must be a finite number"),
    ({"links.link_gbps": True}, "links.link_gbps: must be a finite number"),
    ({"links.link_gbps": float("nan")}, "links.link_gbps: must be a finite number"),
    ({"links.link_gbps": float("inf")}, "links.link_gbps: must be a finite number"),
    ({"links.link_gbps": 10**400}, "links.link_gbps: must be a finite number"),
    ({"links.link_gbps": 0}, "every bandwidth must be above zero"),
    ({"cost.sync_ns": -1}, "no cost may be negative"),
    ({"requests.push_ns": -1}, "requests.push_ns: must not be negative"),
    ({"requests.see_ns": -1}, "no cost of requests may be negative"),
    ({"cost.overlap": 0}, "cost.overlap: must be an integer from 1"),
    ({"cost.overlap": 1.5}, "cost.overlap: must be an integer"),
    ({"limits.rows_max": 0}, "limits.rows_max: must be an integer from 1"),
    ({"limits.swap_align": 2**33}, "limits.swap_align: must be an integer from 1"),
    ({"limits.swap_align": 2**20}, "limits.swap_align: must be an integer from 1 to 65536"),
    ({"limits.copy_bytes_max": 1}, "limits.copy_bytes_max: must be an integer from 4096"),
    ({"limits.swap_scratch_bytes": 64}, "limits.swap_scratch_bytes: must be an integer from 4096"),
    ({"ranks": 0}, "ranks: must be an integer from 1"),
    ({"ranks": 8.0}, "ranks: must be an integer"),
    ({"engines.peer": None}, "engines.peer: must be an integer"),
    ({"native.swap": 1}, "native.swap: must be true or false"),
    ({"topology": "ring"}, "topology: must be one of full, switched, shared"),
    ({"flags": None}, "flags: must be one of host, peer"),
    ({"vendor": ""}, "vendor: must be a string"),
    ({"name": "other"}, "name: must be the file's name"),
    ({"sources.links.link": 1}, "sources.links.link: unknown key"),
    ({"sources": {}}, "sources.links.link_gbps: missing"),
]


@pytest.mark.parametrize(("change", "message"), MISTAKES, ids=[m for _, m in MISTAKES])
def test_mistakes_name_file_and_key(tmp_path: Path, change: dict, message: str) -> None:
    if "sources.links.link" in change:
        sources = json.loads((FOLDER / "mi300x-8.json").read_text())["sources"]
        change = {"sources": {**sources, "links.link": "?"}}
    path = write(tmp_path, change)
    with pytest.raises(offcore.Error) as raised:
        machines.load(path)
    assert raised.value.code == "invalid"
    assert str(path) in str(raised.value)
    assert message in str(raised.value)


@pytest.mark.parametrize("text", ["", "[]", "3", "{", '{"name": "a", "name": "b"}', "[" * 100000])
def test_not_a_machine(tmp_path: Path, text: str) -> None:
    path = tmp_path / "m.json"
    path.write_text(text)
    with pytest.raises(offcore.Error, match=r"m\.json") as raised:
        machines.load(path)
    assert raised.value.code == "invalid"


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(offcore.Error, match="cannot be read") as raised:
        machines.load(tmp_path / "none.json")
    assert raised.value.code == "invalid"


def test_folder_by_environment_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, {"links.link_gbps": 1})
    write(tmp_path, {"name": "mine"}, name="mine")
    monkeypatch.setenv("OFFCORE_MACHINES", str(tmp_path))
    assert machines.load("mi300x-8").links.link_gbps == 1
    assert machines.load("mine").name == "mine"
    assert {"mine", "h200-4"} <= set(machines.names())


ROW = {
    "op": "all_gather",
    "ranks": 8,
    "in_place": False,
    "bytes_min": 0,
    "bytes_max": 4096,
    "bytes": 1024,
    "variant": "b2b",
    "time_us": 3.5,
    "signals": None,
    "entry": True,
    "staged": False,
    "date": "2026-01-01",
    "commit": "abc",
}


def test_tuned_table(tmp_path: Path) -> None:
    path = write(tmp_path, {})
    assert machines.load(path).tuned_version == ""
    (tmp_path / "tuned").mkdir()
    table = tmp_path / "tuned" / "mi300x-8.json"
    table.write_text(json.dumps([ROW]))
    machine = machines.load(path)
    assert [(row.op, row.bytes_max, row.variant) for row in machine.tuned] == [
        ("all_gather", 4096, "b2b")
    ]
    assert len(machine.tuned_version) == 12
    table.write_text(json.dumps([{**ROW, "bytes_max": 8192}]))
    changed = machines.load(path)
    assert changed.tuned_version != machine.tuned_version
    assert [row.bytes_max for row in changed.tuned] == [8192]  # it is not the table from before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ranks": 9}, "[0].ranks: must be an integer from 1 to 8"),
        ({"bytes_min": 5000}, "[0].bytes_max: must be an integer from 5000"),
        ({"time_us": "fast"}, "[0].time_us: must be a finite number"),
        ({"speed": 1}, "[0].speed: unknown key"),
        ({"bytes": 5000}, "[0].bytes: must be an integer from 0 to 4096"),
        ({"signals": "smoke"}, "[0].signals: must be null, fenced or copy_order"),
    ],
)
def test_tuned_mistakes(tmp_path: Path, change: dict, message: str) -> None:
    path = write(tmp_path, {})
    (tmp_path / "tuned").mkdir()
    (tmp_path / "tuned" / "mi300x-8.json").write_text(json.dumps([{**ROW, **change}]))
    with pytest.raises(offcore.Error) as raised:
        machines.load(path)
    assert raised.value.code == "invalid"
    assert message in str(raised.value)
