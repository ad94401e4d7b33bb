"""What an overlap is called, what it could save, and what plans do with tables."""

import itertools
import json
from pathlib import Path

import pytest

import offcore
from offcore import overlap
from offcore.overlap import Collective, Compute, Cores, Plan, Tables, gemm

G = 1 << 30


def row(kernel: str, cores: int, slowdown: float, **more: object) -> dict[str, object]:
    found = {"row": "slowdown", "kernel": kernel, "cores": cores, "slowdown": slowdown}
    return found | more


def latency(op: str, time_us: float, engines: bool) -> dict[str, object]:
    return {"row": "latency", "kernel": op, "engines": engines, "bytes": 1024, "time_us": time_us}


CORES = Cores(count=64, least=8, tflops=100, memory_gbps=1000, network_gbps=100)
# A GEMM of 700 us, and an all-gather over two ranks that sends 70 MB in 1000 us.
TABLES = Tables(
    machine="toy",
    source="by hand",
    cores=CORES,
    workgroups={"all_gather": 16, "all_reduce": 8},
    rows=(
        *(row("cb", count, 64 / count) for count in (8, 16, 32, 48, 56)),
        *(row("mb", count, max(1.0, 32 / count)) for count in (8, 16, 32, 48)),
        row("mb", 56, 0.9),
        row("all_gather", 8, 2.0, bound="bandwidth"),
        row("all_gather", 8, 1.0, bound="latency"),
        row("all_reduce", 8, 1.0, bound="bandwidth"),
        latency("all_gather", 10, False),
        latency("all_gather", 50, True),
        latency("all_reduce", 10, False),
    ),
)
GATHER = Collective("all_gather", 140_000_000, 2, time_us=1000)
BUSY = Compute("busy", flops=49e9, memory_bytes=1e7, workgroups=256)


def test_kernels_know_their_work() -> None:
    made = gemm(4096, 512, 1024)
    assert made.flops == 2 * 4096 * 512 * 1024
    assert made.memory_bytes == 2 * (4096 * 1024 + 1024 * 512 + 4096 * 512)
    assert made.workgroups == 16 * 2
    assert gemm(64, 64, 64, "float8_e4m3fn").memory_bytes == 3 * 64 * 64
    assert gemm(1, 257, 1, memory_bytes=7, workgroups=3) == Compute("gemm 1x257x1", 514, 7, 3)
    assert Collective("all_gather", G, 8).wire_bytes == G * 7 / 8
    assert Collective("all_reduce", G, 8).wire_bytes == 2 * G * 7 / 8
    calls = itertools.count()
    counted = Compute.of(lambda: next(calls), "counts", workgroups=1)
    assert next(calls) == 15
    assert counted.time_us is not None


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: gemm(0, 1, 1), "all must be 1 or more"),
        (lambda: gemm(1, 1, 1, "bool"), "a dtype such as bfloat16"),
        (lambda: Compute("x"), "give its time_us"),
        (lambda: Compute("x", time_us=0.0), "must be above 0"),
        (lambda: Compute("x", flops=1, workgroups=0), "workgroups must be 1 or more"),
        (lambda: Collective("all_hope", 1, 2), "unknown collective 'all_hope'"),
        (lambda: Collective("all_gather", 0, 2), "1 byte or more"),
        (lambda: overlap.ideal([1, 0]), "must be above 0"),
        (lambda: overlap.is_latency_bound({1024: 1.0}, 1024), "another size"),
        (
            lambda: overlap.load("no-such-machine"),
            "no-such-machine: run offcore overlap characterise",
        ),
        (lambda: Plan([BUSY], TABLES), "2 to 5 kernels"),
        (lambda: Plan([BUSY, BUSY], TABLES), "distinct names"),
        (lambda: Plan([BUSY, GATHER], TABLES, allowed=["magic"]), "unknown strategy 'magic'"),
        (lambda: Plan([BUSY, GATHER], TABLES, allowed=["base"]), "no strategy of those"),
        (lambda: Plan([BUSY, Collective("all_to_all", G, 2)], TABLES), "give its workgroups"),
    ],
)
def test_what_cannot_be_is_invalid(make, words) -> None:
    with pytest.raises(offcore.Error, match=words) as raised:
        make()
    assert raised.value.code == "invalid"


def test_tables_that_lack_a_class_say_so() -> None:
    with pytest.raises(offcore.Error, match="no latency of all_to_all") as raised:
        Plan([BUSY, Collective("all_to_all", G, 2, workgroups=8)], TABLES)
    assert raised.value.code == "unsupported"
    without = Tables("toy", "", CORES, {}, TABLES.rows[5:])
    with pytest.raises(offcore.Error, match="no slowdowns of cb"):
        without.slowdown(BUSY, 32)


def test_types_and_ideals() -> None:
    assert overlap.kind_of(1.16, 1) == "G-long"
    assert overlap.kind_of(1, 1.16) == "C-long"
    assert overlap.kind_of(1.15, 1) == overlap.kind_of(1, 1.14) == "GC-equal"
    assert CORES.op_to_byte == 100
    assert CORES.bound_of(Compute("x", flops=101, memory_bytes=1)) == "cb"
    assert CORES.bound_of(Compute("x", flops=100, memory_bytes=1)) == "mb"
    times = {1024: 10.0, 2048: 10.5, 4096: 12.0, 8192: 23.0}
    bound = [size for size in times if overlap.is_latency_bound(times, size)]
    assert bound == [1024, 2048, 4096]
    assert overlap.ideal([3, 1]) == overlap.Ideal(4 / 3, 4 / 3)
    assert overlap.ideal([3, 4], [3, 2]) == overlap.Ideal(7 / 4, 7 / 3)
    assert overlap.share_of_ideal(1.13, 1.6) == pytest.approx(0.2167, abs=1e-4)
    assert overlap.share_of_ideal(1.0, 1.0) == 0


def test_a_plan_by_hand() -> None:
    plan = Plan([BUSY, GATHER], TABLES)
    assert TABLES.time_us(BUSY) == pytest.approx(700)
    found = {name: one.time_us for name, one in plan.choices.items()}
    assert found["serial"] == pytest.approx(1700)
    # 16 of 64 cores go to the collective: the GEMM takes 4/3 of its time, and ends first.
    assert found["sp"] == pytest.approx(1000)
    # 8 cores double the collective's time, 16 do not.
    assert plan.choices["rp"].cores == {GATHER.name: 16, "busy": 48}
    assert found["rp"] == found["sp_rp"] == pytest.approx(1000)
    # On engines by roofline and their latency.
    assert found["ConCCL"] == pytest.approx(1050)
    assert "ConCCL_rp" not in found, "nothing is memory-bound"
    assert (plan.strategy, plan.order, dict(plan.cores)) == ("sp", (GATHER.name, "busy"), {})
    assert plan.engines == ()
    assert plan.choices["rp"].order == ("busy", GATHER.name)
    forced = Plan([GATHER, BUSY], TABLES, allowed=["ConCCL", "serial"])
    assert (forced.strategy, forced.engines) == ("ConCCL", (GATHER.name,))


def test_neighbours_count_where_they_were_measured() -> None:
    beside = (
        {"row": "beside", "kernel": "cb", "other": "all_gather", "engines": False, "slowdown": 1.5},
        {"row": "beside", "kernel": "cb", "other": "all_gather", "engines": True, "slowdown": 1.1},
    )
    tables = Tables("toy", "", CORES, TABLES.workgroups, (*TABLES.rows, *beside))
    short = Compute("busy", flops=49e9, memory_bytes=1e7, workgroups=256, time_us=2000)
    found = Plan([short, GATHER], tables).choices
    # For 1000 us at 4/3 x 1.5 of its time, then alone.
    assert found["sp"].time_us == pytest.approx(1000 + 2000 - 500)
    assert found["ConCCL"].time_us == pytest.approx(1050 + 2000 - 1050 / 1.1)


def test_collectives_share_the_links() -> None:
    twin = Collective("all_gather", 70_000_000, 2, time_us=1000)
    found = Plan([GATHER, twin], TABLES).choices
    assert found["sp"].time_us == pytest.approx(2000)
    # By roofline 1000 and 500 us, and 50 us each to begin.
    assert found["ConCCL"].time_us == pytest.approx(2 * 550 + 500)
    assert found["ConCCL"].engines == (GATHER.name, twin.name)


def test_memory_bound_kernels_gain_from_idle_cores() -> None:
    hungry = Compute("hungry", flops=1e9, memory_bytes=1.4e9, workgroups=256)
    plan = Plan([hungry, GATHER], TABLES)
    assert TABLES.time_us(hungry) == pytest.approx(2000)
    assert plan.strategy == "ConCCL_rp"
    assert plan.time_us == pytest.approx(1800)
    assert plan.cores == {"hungry": 56}


def test_more_kernels_and_those_that_reduce() -> None:
    adds = Collective("all_reduce", 10_000_000, 2)
    small = Compute("small", workgroups=4, flops=1e8, memory_bytes=1e6, time_us=100)
    plan = Plan([BUSY, GATHER, adds, small], TABLES)
    order = ("small", adds.name, GATHER.name, "busy")
    assert plan.choices["sp_rp"].order == order, "fewest workgroups first"
    assert plan.choices["rp"].order == order[::-1]
    assert plan.choices["ConCCL"].engines == (GATHER.name,), "engines do not reduce"
    assert sum(plan.choices["rp"].cores.values()) == 64
    # No split of powers of two is better.
    kernels = {one.name: one for one in plan.kernels}

    def longest(split: dict[str, int]) -> float:
        return max(
            TABLES.time_us(kernels[n]) * TABLES.slowdown(kernels[n], c) for n, c in split.items()
        )

    every = [
        dict(zip(order, (*few, 64 - sum(few)), strict=True))
        for few in itertools.product((8, 16, 32), repeat=3)
        if sum(few) <= 56
    ]
    assert len(every) == 17
    assert longest(dict(plan.choices["rp"].cores)) == min(map(longest, every))


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "toy.json"
    path.write_text(TABLES.to_json(), "utf-8")
    assert overlap.load(path) == TABLES
    for change in ({"machine": None}, {"rows": [{"row": "slowdown"}]}, {"cores": {"count": 1}}):
        value = json.loads(TABLES.to_json()) | change
        if value["machine"] is None:
            del value["machine"]
        path.write_text(json.dumps(value), "utf-8")
        with pytest.raises(offcore.Error, match="not tables of overlap") as raised:
            overlap.load(path)
        assert raised.value.code == "invalid"
