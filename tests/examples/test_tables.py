"""Tables in the documents are those that benchmarks/tables.py makes of what was recorded."""

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

import offcore
from offcore.comm.programs import variants
from offcore.tools.papers.mcast import claims as mcast_claims
from offcore.tools.records import read_records

ROOT = Path(__file__).parents[2]


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(ROOT / "benchmarks"))  # of the modules that it imports
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.pop(0)
    return module


tables = load("tables")


@pytest.mark.parametrize("page", tables.PAGES)
def test_a_document_shows_what_was_recorded(page: str) -> None:
    """`python benchmarks/tables.py` writes them anew."""
    text = (ROOT / page).read_text("utf-8")
    assert tables.filled(text) == text


def test_every_table_is_shown_and_kept() -> None:
    texts = [(ROOT / page).read_text("utf-8") for page in tables.PAGES]
    shown = re.findall(r"<!-- table (\S+) -->\n\n\| ", "".join(texts))
    assert set(shown) == set(tables.TABLES)
    # A number that was not recorded is not kept.
    [text] = [one for one in texts if "<!-- table many-hosts -->" in one]
    changed = text.replace("| 188 | 64K | multicast | ", "| 188 | 64K | multicast | 9")
    assert changed != text
    assert tables.filled(changed) == text


def test_the_simulator_beside_simgrid() -> None:
    """What docs/measurements/mcast.md says of the table, from the largest difference of each."""
    found = tables.simgrid_differences()
    assert len(found) == 15
    worst = {
        (name, large): max(
            abs(share)
            for (of, nbytes), share in found.items()
            if of == name and (nbytes >= 64 << 10) == large
        )
        for name in tables.SIMGRID
        for large in (False, True)
    }
    assert max(worst["ring", False], worst["ring", True]) < 0.01
    assert worst["knomial", True] < 0.03
    assert 0.2 < worst["knomial", False] < 0.25
    assert worst["linear", True] < 0.12
    assert 0.25 < worst["linear", False] < 0.3


def ratios(peer: str, *names: str) -> str:
    """ "2.8 to 10": how many times as fast as a peer multicast is, at least and at most."""
    found: list[float] = []
    for name in names:
        times: dict[int, dict[str, float]] = {}
        for row in read_records(tables.RESULTS / f"mcast-{name}.jsonl"):
            times.setdefault(row["bytes"], {})[row["impl"]] = row["time_us"]
        found += [of[peer] / of["offcore"] for of in times.values()]
    least, most = (f"{one:.0f}" if one >= 10 else f"{one:.1f}" for one in (min(found), max(found)))
    return f"{least} to {most}"


def test_performance_tells_of_recorded_multicast() -> None:
    text = " ".join((ROOT / "docs/performance.md").read_text("utf-8").split())
    gathers, casts = ("all_gather-4", "all_gather-8"), ("broadcast-4", "broadcast-8")
    casts += ("broadcast-4-jumbo", "broadcast-8-jumbo")
    lossy, plain = "all_gather-4-lossy", "all_gather-4-lossy-plain"
    fast = "times as fast as"
    for words in (
        f"all-gathers are {ratios('gloo', *gathers)} {fast} gloo's and "
        f"{ratios('ring', *gathers)} {fast} our own ring",
        f"broadcasts {ratios('gloo', *casts)} and {ratios('ring', *casts)} times",
        f"all-gathers are {ratios('gloo', lossy)} {fast} gloo's and "
        f"{ratios('ring', lossy)} {fast} the ring",
        f"without offloads {ratios('gloo', plain)} and {ratios('ring', plain)} times",
    ):
        assert words in text
    sent = {
        row["impl"]: row["switch_bytes"] / 1e9
        for row in read_records(tables.RESULTS / "mcast-testbed-188.jsonl")
    }
    assert f"sends {sent['offcore']:.1f} GB through switch ports" in text
    assert f"a ring {sent['ring']:.1f} GB" in text


def test_performance_tells_how_many_claims_are_met() -> None:
    found = mcast_claims.findings(mcast_claims.results())
    counted = [one for one in found if one.met is not None]
    told = f"{sum(bool(one.met) for one in counted)} of {len(counted)} are met"
    assert f"of whose claims {told}" in (ROOT / "docs/performance.md").read_text("utf-8")


def test_offloads_are_worth_what_the_document_says() -> None:
    rates = {
        (row["datagram_bytes"], row["gro"]): row["gbitps"]
        for row in read_records(tables.RESULTS / "mcast-loopback.jsonl")
        if row["measure"] == "receive" and row["bytes"] == 8 << 20
    }
    small, large = (rates[size, True] / rates[size, False] for size in (1472, 8972))
    text = " ".join((ROOT / "docs/measurements/mcast.md").read_text("utf-8").split())
    assert f"{small:.1f} times as fast in datagrams of 1472 bytes, {large:.1f} times" in text


def test_a_mac_costs_what_the_document_says() -> None:
    rates = {
        row["sealed"]: f"{row['gbitps']:.1f}"
        for row in read_records(tables.RESULTS / "mcast-loopback.jsonl")
        if row["measure"] == "sealed" and row["bytes"] == 64 << 20
    }
    text = " ".join((ROOT / "docs/measurements/mcast.md").read_text("utf-8").split())
    told = f"64 MiB arrive at {rates[True]} instead of {rates[False]} Gbit/s"
    assert f"With a MAC in every datagram (`sealed`), {told}." in text


def test_the_rows_by_variant_are_those_that_papers_names() -> None:
    """On 2 x H100, of every variant that two ranks have."""
    records = read_records(tables.RESULTS / "cuda-h100-2-variants.jsonl")
    assert {(row["machine"], row["ranks"]) for row in records} == {("h100-2", 2)}
    found: dict[tuple[str, bool], set[str]] = {}
    for row in records:
        if row["impl"] == "offcore":
            assert (row["protocol"], row["wrong"]) == ("promise", 0)
            found.setdefault((row["op"], row["in_place"]), set()).add(row["variant"])
    for op, in_place in found:
        assert "bcst" not in variants(op, ranks=2, in_place=in_place)
    plain = {"pcpy", "b2b", "fan", "prelaunch_pcpy", "prelaunch_b2b", "prelaunch_fan"}
    assert found == {
        ("all_gather", True): plain,
        ("all_to_all", False): plain,
        ("all_to_all", True): {"swap", "prelaunch_swap"},
    }
    page = (ROOT / "docs/papers.md").read_text("utf-8")
    [line] = [one for one in page.splitlines() if "(cuda-h100-2-variants.jsonl;" in one]
    assert "two ranks have no bcst, and in-place all-to-all has swap alone" in line
    named = re.search(r"--in-place --protocol promise --variants (\S+) --baseline nccl", line)
    assert named is not None
    assert set(named[1].split(",")) == plain


@pytest.mark.parametrize(
    ("op", "variant"),
    re.findall(r"^\| (all_\w+) `(\w+)`", (ROOT / "docs/papers.md").read_text("utf-8"), re.M),
)
def test_counts_of_a_program(op: str, variant: str) -> None:
    """Table 1 of DMA-Latte, by the command that docs/papers.md names: in place."""
    page = (ROOT / "docs/papers.md").read_text("utf-8")
    assert "`offcore show OP --machine mi300x-8 --protocol promise --in-place --variant V" in page
    program = offcore.show_program(
        op,
        machine="mi300x-8",
        ranks=8,
        nbytes=1 << 20,
        variant=variant,
        in_place=True,
        protocol="promise",
    )
    counts = program.counts()
    told = f"| {counts.copies} | {counts.engines} | {counts.syncs} |"
    assert re.search(rf"^\| {op} `{variant}`(?: \(ours\))? {re.escape(told)}", page, re.M)


def test_every_file_of_results_is_accounted_for() -> None:
    """benchmarks/README.md says how each came about."""
    page = (ROOT / "benchmarks" / "README.md").read_text("utf-8")
    files = {path.name for path in (ROOT / "benchmarks" / "results").iterdir()}
    named = set(re.findall(r"`([\w.-]+\.(?:jsonl|txt))`", page))
    assert named == files
