"""Packets, bit by bit, against dwords and places worked out by hand from AMD's layouts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import offcore
from offcore import _core

A = 0x0000_7F12_3456_7880
B = 0x0001_2345_6789_ABC0
C = 0x0000_0010_8765_4320

# Worked out by hand: the header is operation | sub-operation << 8 | flags; counts are bytes - 1.
BY_HAND = {
    "copy": (
        {"bytes": 4096, "src": A, "dst": B},
        "00000001 00000fff 00000000 34567880 00007f12 6789abc0 00012345",
    ),
    "copy of the largest count": (
        {"bytes": 1 << 30, "src": 0, "dst": (1 << 64) - 1},
        "00000001 3fffffff 00000000 00000000 00000000 ffffffff ffffffff",
    ),
    "broadcast": (
        {"bytes": 1, "src": A, "dst": B, "dst2": C},
        "08000001 00000000 00000000 34567880 00007f12 6789abc0 00012345 87654320 00000010",
    ),
    "swap": (
        {"bytes": 64, "dst": A, "src": B},
        "00000901 0000003f 00000000 34567880 00007f12 6789abc0 00012345",
    ),
    # 16-byte elements (4 << 29); pitches 512 and 1024 (511 << 13, 1023 << 13); 3 x 5 x 7
    "rect": (
        {
            "element": 4,
            "src": A,
            "src_x": 1,
            "src_y": 2,
            "src_z": 3,
            "src_pitch": 512,
            "src_slice": 4096,
            "dst": B,
            "dst_x": 4,
            "dst_y": 5,
            "dst_z": 6,
            "dst_pitch": 1024,
            "dst_slice": 8192,
            "width": 3,
            "height": 5,
            "depth": 7,
        },
        "80000401 34567880 00007f12 00020001 003fe003 00000fff "
        "6789abc0 00012345 00050004 007fe006 00001fff 00040002 00000006",
    ),
    # memory (bit 31), function 5 (>=), every 4 clocks (DW5), for ever (0xfff << 16)
    "poll": (
        {
            "func": 5,
            "memory": 1,
            "dst": A,
            "value": 0x11223344,
            "mask": 0xFFFFFFFF,
            "interval": 4,
            "retry": 0xFFF,
        },
        "d0000008 34567880 00007f12 11223344 ffffffff 0fff0004",
    ),
    "fence": ({"dst": A, "value": 0xDEADBEEF}, "00000005 34567880 00007f12 deadbeef"),
    # ADD64: 47 << 25 = 0x5e000000
    "atomic": (
        {"operation": 47, "dst": A, "value": (1 << 64) - 1, "compare": 0, "interval": 0},
        "5e00000a 34567880 00007f12 ffffffff ffffffff 00000000 00000000 00000000",
    ),
    "timestamp": ({"dst": A}, "0000020d 34567880 00007f12"),
    "trap": ({"value": 0x0ABCDEF1}, "00000006 0abcdef1"),
    # dwords: fill size 2 << 30; the count is bytes - 4
    "fill": ({"dst": A, "value": 0x55AA55AA, "bytes": 64},
             "8000000b 34567880 00007f12 55aa55aa 0000003c"),
}  # fmt: skip

# Where each field lies: dword, lowest bit, bits, and what is taken off before it is stored.
PLACES = {
    "copy": {"bytes": (1, 0, 30, 1), "src": (3, 0, 64, 0), "dst": (5, 0, 64, 0)},
    "broadcast": {
        "bytes": (1, 0, 30, 1),
        "src": (3, 0, 64, 0),
        "dst": (5, 0, 64, 0),
        "dst2": (7, 0, 64, 0),
    },
    "swap": {"bytes": (1, 0, 30, 1), "dst": (3, 0, 64, 0), "src": (5, 0, 64, 0)},
    "rect": {
        "element": (0, 29, 3, 0),
        "src": (1, 0, 64, 0),
        "src_x": (3, 0, 14, 0),
        "src_y": (3, 16, 14, 0),
        "src_z": (4, 0, 11, 0),
        "src_pitch": (4, 13, 19, 1),
        "src_slice": (5, 0, 28, 1),
        "dst": (6, 0, 64, 0),
        "dst_x": (8, 0, 14, 0),
        "dst_y": (8, 16, 14, 0),
        "dst_z": (9, 0, 11, 0),
        "dst_pitch": (9, 13, 19, 1),
        "dst_slice": (10, 0, 28, 1),
        "width": (11, 0, 14, 1),
        "height": (11, 16, 14, 1),
        "depth": (12, 0, 11, 1),
    },
    "poll": {
        "func": (0, 28, 3, 0),
        "memory": (0, 31, 1, 0),
        "dst": (1, 0, 64, 0),
        "value": (3, 0, 32, 0),
        "mask": (4, 0, 32, 0),
        "interval": (5, 0, 16, 0),
        "retry": (5, 16, 12, 0),
    },
    "fence": {"dst": (1, 0, 64, 0), "value": (3, 0, 32, 0)},
    "atomic": {
        "operation": (0, 25, 7, 0),
        "dst": (1, 0, 64, 0),
        "value": (3, 0, 64, 0),
        "compare": (5, 0, 64, 0),
        "interval": (7, 0, 13, 0),
    },
    "timestamp": {"dst": (1, 0, 64, 0)},
    "trap": {"value": (1, 0, 28, 0)},
    "fill": {"dst": (1, 0, 64, 0), "value": (3, 0, 32, 0), "bytes": (4, 0, 30, 4)},
}
HEADERS = {kind: int(BY_HAND[kind][1][:8], 16) for kind in PLACES} | {
    "rect": 0x401,
    "poll": 0x8,
    "atomic": 0xA,
}
DWORDS = {kind: len(BY_HAND[kind][1].split()) for kind in PLACES}


def least(kind: str) -> dict[str, int]:
    """Every field stored as 0."""
    return {name: bias for name, (_, _, _, bias) in PLACES[kind].items()}


@pytest.mark.parametrize("what", BY_HAND)
def test_packets_worked_out_by_hand(what: str) -> None:
    fields, text = BY_HAND[what]
    kind = what.split()[0]
    dwords = [int(word, 16) for word in text.split()]
    assert _core.sdma_pack(kind, fields) == dwords
    assert _core.sdma_unpack(dwords) == [(kind, fields, 0)]


@pytest.mark.parametrize(
    ("kind", "field"), [(kind, field) for kind, fields in PLACES.items() for field in fields]
)
def test_every_bit_of_every_field(kind: str, field: str) -> None:
    dword, low, bits, bias = PLACES[kind][field]
    empty = _core.sdma_pack(kind, least(kind))
    assert empty == [HEADERS[kind]] + [0] * (DWORDS[kind] - 1)
    for bit in range(bits):
        value = (1 << bit) + bias
        packed = _core.sdma_pack(kind, least(kind) | {field: value})
        changed = [(i, a ^ b) for i, (a, b) in enumerate(zip(empty, packed, strict=True)) if a != b]
        assert changed == [(dword + (low + bit) // 32, 1 << (low + bit) % 32)]
        [(_, fields, _)] = _core.sdma_unpack(packed)
        assert fields == least(kind) | {field: value}
    for value in [(1 << bits) + bias, *([bias - 1] if bias else [])]:
        if value >= 1 << 64:
            continue
        with pytest.raises(offcore.Error, match=f"{field} = {value} does not fit") as refused:
            _core.sdma_pack(kind, least(kind) | {field: value})
        assert refused.value.code == "invalid"


@pytest.mark.parametrize("kind", PLACES)
def test_bits_that_have_to_be_0(kind: str) -> None:
    dwords = _core.sdma_pack(kind, least(kind))
    known = [0] * DWORDS[kind]
    for dword, low, bits, _ in PLACES[kind].values():
        for bit in range(low, low + bits):
            known[dword + bit // 32] |= 1 << bit % 32
    for i, word in enumerate(dwords):
        for bit in range(16 if i == 0 else 0, 32):
            if known[i] >> bit & 1 or (i == 0 and kind in ("copy", "broadcast") and bit == 27):
                continue
            wrong = [*dwords]
            wrong[i] = word ^ 1 << bit
            with pytest.raises(offcore.Error, match=r"dword \d+ \(0x"):
                _core.sdma_unpack(wrong)


def test_nops_are_skipped() -> None:
    fence = _core.sdma_pack("fence", {"dst": 4, "value": 1})
    skip_two = [2 << 16, 0xFFFFFFFF, 0x12345678]
    found = _core.sdma_unpack([0, *fence, *skip_two, 0, *fence, 0])
    assert [dword for _, _, dword in found] == [1, 9]
    assert _core.sdma_pack("nop", {"skip": 2}) == [2 << 16, 0, 0]
    assert _core.sdma_unpack([]) == []
    for kind, skip in [("nop", 1 << 14), ("nop", 1 << 62), ("fence", 2), ("fence", 1 << 62)]:
        with pytest.raises(offcore.Error, match=r"skip") as refused:
            _core.sdma_pack(kind, {"skip": skip})
        assert refused.value.code == "invalid"


@pytest.mark.parametrize(
    ("dwords", "told"),
    [
        ([0xFF], "dword 0 (0xff): no packet has operation 255 with sub-operation 0"),
        ([0, 0x0801], "dword 1 (0x801): no packet has operation 1 with sub-operation 8"),
        ([0, 0, 1, 63], "dword 2 (0x1): this COPY_LINEAR has 7 dwords, and 2 are left"),
        ([3 << 16, 0, 0], "dword 0 (0x30000): this NOP has 4 dwords, and 3 are left"),
        ([0x05, 0, 0, 0, 0x0508], "dword 4 (0x508): no packet has operation 8 with sub-op"),
        ([0x0000000B, 0, 0, 0, 0], "dword 0 (0xb): no packet has operation 11"),
        ([0x06, 0xF0000000], "dword 1 (0xf0000000): bits 0xf0000000 have to be 0 in dword 1"),
    ],
)
def test_decoding_names_the_dword(dwords: list[int], told: str) -> None:
    with pytest.raises(offcore.Error) as refused:
        _core.sdma_unpack(dwords)
    assert refused.value.code == "invalid"
    assert told in str(refused.value)


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40))
def test_what_decodes_packs_to_the_same_dwords(dwords: list[int]) -> None:
    """Whatever the dwords are: no crash, and nothing of them is lost but what nops skip."""
    try:
        packets = _core.sdma_unpack(dwords)
    except offcore.Error as failure:
        refused = failure
    else:
        refused = None
    if refused is not None:
        assert (refused.code, "dword " in str(refused)) == ("invalid", True)
        return
    for kind, fields, first in packets:
        packed = _core.sdma_pack(kind, fields)
        assert packed == dwords[first : first + len(packed)]
