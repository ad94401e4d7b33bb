"""Sizes and the numbers of nccl-tests."""

import pytest

from offcore.sizes import (
    algbw_gbps,
    busbw_factor,
    format_bytes,
    parse_bytes,
    parse_sizes,
    split_evenly,
)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("0", 0), ("4096", 4096), ("1K", 1024), ("64k", 65536), ("3MiB", 3 << 20), ("4G", 4 << 30)],
)
def test_bytes_use_k_of_1024(text, nbytes):
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "K", "4X", "-1", "1.5K", "1 0", "99999T"])
def test_bytes_that_are_none(text):
    with pytest.raises(ValueError, match="bytes"):
        parse_bytes(text)


def test_ranges_and_lists():
    assert parse_sizes("1K:8K") == [1024, 2048, 4096, 8192]
    assert parse_sizes("1K:1M:16") == [1024, 16384, 262144]
    assert parse_sizes("3:10:1.5") == [3, 4, 6, 9]
    assert parse_sizes("4096,1000003,4096") == [4096, 1000003]
    assert parse_sizes("4K,1M:2M,4096") == [4096, 1 << 20, 2 << 20]
    assert len(parse_sizes("1K:4G")) == 23


@pytest.mark.parametrize(
    "text", ["1K:", "8K:1K", "0:4", "1:2:3:4", "1:9:1", "1:9:x", "1:9:nan", ","]
)
def test_ranges_that_are_none(text):
    with pytest.raises(ValueError, match=r"size|factor|bytes"):
        parse_sizes(text)


@pytest.mark.parametrize("nbytes", [0, 1, 1000, 1024, 1536, 1 << 20, 3 << 30, 1000003])
def test_format_is_exact(nbytes):
    assert parse_bytes(format_bytes(nbytes)) == nbytes


@pytest.mark.parametrize(("nbytes", "parts"), [(0, 3), (1, 8), (1000003, 8), (16, 4)])
def test_split_is_exact_and_even(nbytes, parts):
    split = split_evenly(nbytes, parts)
    assert sum(split) == nbytes
    assert len(split) == parts
    assert max(split) - min(split) <= 1


def test_bandwidths_are_those_of_nccl_tests():
    assert algbw_gbps(1_000_000_000, 1_000_000) == pytest.approx(1.0)
    assert algbw_gbps(4096, 0) == 0
    assert busbw_factor("broadcast", 8) == 1
    for op in ("all_gather", "all_to_all", "scatter", "gather"):
        assert busbw_factor(op, 8) == pytest.approx(7 / 8)
