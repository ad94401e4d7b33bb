"""How buffers are cut into parts and chunks, and how roots take turns."""

import pytest
from fabrics import faults_of, group_of
from hypothesis import given
from hypothesis import strategies as st

from offcore import _core

COUNTS = st.lists(st.sampled_from([0, 0, 1, 99, 100, 101, 777, 12_345]), min_size=1, max_size=12)


def layout_of(counts: list[int], **group: int) -> _core.McastBlockLayout:
    return _core.McastBlockLayout(group_of(len(counts), **group), "all_gather", 0, counts)


@given(counts=COUNTS, subgroups=st.integers(1, 9), chunk_bytes=st.sampled_from([1, 100, 1440]))
def test_parts_are_the_chunks_of_a_block_in_order(
    counts: list[int], subgroups: int, chunk_bytes: int
) -> None:
    layout = layout_of(counts, subgroups=subgroups, chunk_bytes=chunk_bytes)
    for source, count in enumerate(counts):
        chunks = -(-count // chunk_bytes)
        assert layout.chunks(source) == chunks
        parts = [layout.part(source, subgroup) for subgroup in range(subgroups)]
        covered = [psn for first, length in parts for psn in range(first, first + length)]
        assert covered == list(range(chunks))
        lengths = {length for _, length in parts}
        assert max(lengths) - min(lengths) <= 1
        for subgroup, (first, length) in enumerate(parts):
            assert {layout.subgroup_of(source, psn) for psn in range(first, first + length)} <= {
                subgroup
            }
            if length:
                nbytes = layout.bytes_of(source, first, length)
                assert nbytes == min(count, (first + length) * chunk_bytes) - first * chunk_bytes


@given(counts=COUNTS, chains=st.integers(1, 14))
def test_chains_let_every_root_send_once(counts: list[int], chains: int) -> None:
    layout = layout_of(counts, chains=chains)
    ranks = range(len(counts))
    senders = [rank for rank in ranks if counts[rank] > 0]
    assert [rank for rank in ranks if layout.sends(rank)] == senders
    begins = [rank for rank in ranks if layout.begins(rank)]
    assert len(begins) == min(chains, len(senders))
    lengths, sent = [], []
    for rank in begins:
        chain = [rank]
        while layout.next(chain[-1]) != chain[-1]:
            assert layout.previous(layout.next(chain[-1])) == chain[-1]
            chain.append(layout.next(chain[-1]))
        lengths.append(len(chain))
        sent += chain
    assert sent == senders
    assert not lengths or max(lengths) - min(lengths) <= 1


def test_places_past_64_gib() -> None:
    """Nothing is counted in 32 bits but the chunks of one block."""
    terabyte = 10**12
    counts = [terabyte, 7, terabyte + 5]
    layout = layout_of(counts, subgroups=4, chunk_bytes=1440)
    assert layout.bytes == 2 * terabyte + 12
    assert layout.offset(2, 0) == terabyte + 7
    last = layout.chunks(2) - 1
    assert last == (terabyte + 5) // 1440
    assert layout.offset(2, last) == terabyte + 7 + last * 1440
    assert layout.bytes_of(2, last, 1) == terabyte + 5 - last * 1440
    first, length = layout.part(2, 3)
    assert first + length == last + 1
    assert layout.bytes_of(2, first, length) == terabyte + 5 - first * 1440


@pytest.mark.parametrize("counts", [[2**32], [1, 2**62], [2**62 - 1, 2**62]])
def test_a_block_of_more_chunks_than_a_psn_can_tell_is_refused(counts: list[int]) -> None:
    with pytest.raises(_core.Error, match="split it") as caught:
        layout_of(counts, chunk_bytes=1)
    assert caught.value.code == "invalid"


@pytest.mark.parametrize(("chunk_bytes", "bits"), [(4096, 3_906_250), (1440, 11_111_112)])
def test_state_of_a_16_gb_buffer(chunk_bytes: int, bits: int) -> None:
    """A bit a chunk, and a table of the sources: armed, but nothing of the buffer is touched."""
    ranks = 4
    counts = [16 * 10**9 // (ranks - 1) if rank else 0 for rank in range(ranks)]
    group = group_of(ranks, chunk_bytes=chunk_bytes, multicast=True)
    fabric = _core.McastSimNetwork([group], faults_of())
    fabric.submit(0, "all_gather", 0, 0, counts, None)
    fabric.run_until(0)
    state = fabric.counters(0)["state_bytes"]
    assert bits / 8 <= state < bits / 8 + 1000
