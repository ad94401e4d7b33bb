"""`offcore overlap`, as a user runs it."""

import json
from pathlib import Path

import needs
from offcore import overlap


def test_the_command_line(offcore_cli, tmp_path: Path) -> None:
    ran = offcore_cli("overlap", "run", "cb1_896M,mb1_4G", "--json", "-")
    assert ran.status == 0
    assert len(ran.records) == 2 * 2 * 7
    assert {one["strategy"] for one in ran.records} == overlap.STRATEGIES.keys()
    assert {one["bytes"] for one in ran.records} == {896 << 20, 4 << 30}
    assert all(one["ideal_published"] <= one["ideal_least"] for one in ran.records)
    advised = offcore_cli("overlap", "advise", "8192x8192x8192", "all_gather:896M", "--json", "-")
    assert advised.records[0]["strategy"] == "ConCCL"
    assert advised.records[0]["kernels"][1]["class"] == "cb"
    rows_file = tmp_path / "rows.jsonl"
    rows_file.write_text(ran.out, "utf-8")
    out = tmp_path / "tables.json"
    assert offcore_cli("overlap", "characterise", "--out", out).status == 0
    assert json.loads(out.read_text("utf-8"))["machine"] == "mi300x-8"
    for words in (("cb1_896M,x",), ("cb1_0G",), ("cb1_12",)):
        assert offcore_cli("overlap", "run", *words).status == 2
    refused = offcore_cli("overlap", "advise", "8192x8192", "all_gather:1G")
    assert refused.status == 2
    assert "MxNxK" in refused.err
    if not needs.missing("matplotlib"):
        to = tmp_path / "10.png"
        ran = offcore_cli("overlap", "plot", rows_file, "--figure", "10", "--out", to)
        assert ran.status == 0, ran.err
        assert to.stat().st_size > 5000
