"""Ranks that loaded other machines find out before their first call."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import offcore
from stores import free_store

HOST = Path(offcore.__file__).parent / "machines" / "host.json"


def machine_file(folder: Path, **changed: object) -> str:
    """host.json as machine `pair` of two ranks, with some keys `section__key` changed."""
    facts = json.loads(HOST.read_text("utf-8")) | {"name": "pair", "ranks": 2}
    for key, value in changed.items():
        section, name = key.split("__")
        assert facts[section][name] != value
        facts[section][name] = value
    folder.mkdir()
    path = folder / "pair.json"
    path.write_text(json.dumps(facts), "utf-8")
    return str(path)


def errors_of(machines: list[str]) -> list[str]:
    store = free_store()

    def one(rank: int) -> str:
        try:
            with offcore.Communicator(
                backend="host",
                machine=machines[rank],
                store=store,
                rank=rank,
                world_size=2,
                timeout=20,
            ) as comm:
                comm.barrier()
        except offcore.Error as failure:
            return f"{failure.code}: {failure}"
        return ""

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(one, range(2)))


@pytest.mark.parametrize(
    "changed",
    [
        {"cost__control_ns": 123.5},
        {"limits__rows_max": 77},
        {"native__swap": False},
        {"links__egress_gbps": 3.25},
        {"engines__peer": 5},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_machines_of_one_name_and_other_content(tmp_path: Path, changed: dict[str, object]) -> None:
    plain = machine_file(tmp_path / "plain")
    other = machine_file(tmp_path / "other", **changed)
    said = errors_of([plain, other])
    for rank, text in enumerate(said):
        assert text.startswith(f"mismatch: rank {rank} loaded machine pair, content ")
        assert f"; rank {1 - rank} loaded machine pair, content " in text
    contents = {part.split("content ")[1].split(";")[0].split(".")[0] for part in said}
    assert len(contents) == 2


def test_a_tuned_table_is_content(tmp_path: Path) -> None:
    row = {
        "op": "all_gather",
        "ranks": 2,
        "in_place": False,
        "bytes_min": 0,
        "bytes_max": 4096,
        "bytes": 4096,
        "variant": "b2b",
        "time_us": 1.0,
        "signals": None,
        "entry": True,
        "staged": False,
        "date": "2026-11-22",
        "commit": "none",
    }
    plain = machine_file(tmp_path / "plain")
    tuned = machine_file(tmp_path / "tuned")
    (tmp_path / "tuned" / "tuned").mkdir()
    (tmp_path / "tuned" / "tuned" / "pair.json").write_text(json.dumps([row]), "utf-8")
    assert all(text.startswith("mismatch: ") for text in errors_of([plain, tuned]))


def test_equal_files_at_other_places(tmp_path: Path) -> None:
    assert errors_of([machine_file(tmp_path / "a"), machine_file(tmp_path / "b")]) == ["", ""]


def test_machines_of_other_names() -> None:
    said = errors_of(["host-2", "mi300x-8"])
    assert "rank 0 loaded machine host-2" in said[0]
    assert "rank 1 loaded machine mi300x-8" in said[0]
    assert said[0].startswith("mismatch: ")
