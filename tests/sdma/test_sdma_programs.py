"""Programs as packets: there and back, elsewhere, and what no packet can say."""

import random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from worlds import PROTOCOLS, VARIANTS, collectives, machine_of, moves_of

import offcore
from offcore import _core
from offcore.tools.sdma.text import ADD64
from oracles import Case, kinds_of

WORD = 64  # bytes from flag word to flag word


def mi300x(copy_bytes_max: int = 0x3FFFFFC0, strided: bool = False) -> _core.Machine:
    return machine_of(
        "mi300x-8",
        [("limits", "copy_bytes_max", copy_bytes_max), ("native", "strided", strided)],
        14,
    )


def somewhere(program: _core.Program, seed: int, epoch: int) -> _core.SdmaAddresses:
    """Every buffer of every rank at an address of its own."""
    rng = random.Random(seed)
    addresses = _core.SdmaAddresses()
    places = [("flag", rank) for rank in (-1, *range(program.ranks))]
    for name, kind, _ in program.buffers:
        places += [(name, rank) for rank in ((-1,) if kind == "host" else range(program.ranks))]
    slots = rng.sample(range(1, 1 << 16), len(places) + 2)
    for (name, rank), slot in zip(places, slots, strict=False):
        addresses.set(program, name, rank, slot * 0x1_0000_0000 + 64 * rng.randrange(1 << 20))
    addresses.scratch = slots[-1] * 0x1_0000_0000
    addresses.timestamps = slots[-2] * 0x1_0000_0000
    addresses.epoch = epoch
    return addresses


def back(
    program: _core.Program, streams: list[_core.SdmaEncodedQueue], addresses: _core.SdmaAddresses
) -> _core.Program:
    queues = {stream.queue: stream.dwords for stream in streams}
    return _core.sdma_decode(queues, program, addresses)


def parsed(*commands: str, ranks: int = 2, mode: str = "eager", nbytes: int = 1 << 20) -> object:
    head = (
        f"program test machine=m ranks={ranks} variant=v mode={mode} protocol=promise native=yes "
        f"flags=8 span=4\nbuffer a window {nbytes}\nbuffer own local {nbytes}\n"
        f"buffer pool host {nbytes}\nqueue 0.0\n"
    )
    return _core.Program.parse(head + "".join(f"  {command}\n" for command in commands))


@given(
    collectives(ranks_max=8),
    st.sampled_from(VARIANTS),
    st.sampled_from(sorted(PROTOCOLS)),
    st.sampled_from([64, 128, 0x3FFFFFC0]),
    st.integers(0, 1 << 30),
    st.sampled_from([0, 1, 2**31, 2**32 - 1]),
)
def test_legalized_collectives_come_back(
    case: Case, variant: str, protocol: str, copy_bytes_max: int, seed: int, epoch: int
) -> None:
    machine = mi300x(copy_bytes_max)
    staged = protocol in ("eager", "barrier, staged")
    assume(variant.removeprefix("prelaunch_") in kinds_of(case, staged))
    program = _core.plan(moves_of(case), variant, machine, PROTOCOLS[protocol])
    addresses = somewhere(program, seed, epoch)
    streams = _core.sdma_encode(program, addresses, copy_bytes_max)
    assert back(program, streams, addresses) == program


@st.composite
def single_queues(draw: st.DrawFn) -> _core.Program:
    """One queue of commands that are one packet each on a machine with rectangles."""
    size = 1 << 24
    rank = st.integers(0, 1)
    commands = []
    for _ in range(draw(st.integers(1, 12))):
        op = draw(st.sampled_from(["copy", "bcst", "rows", "swap", "word", "time", "fence"]))
        nbytes = draw(st.integers(1, 5000))
        to, at = draw(st.integers(0, size // 4)), draw(st.integers(0, size // 4))
        places = f"a[{draw(rank)}]+{to} <- own[0]+{at}"
        if op == "copy":
            commands.append(f"copy {places} bytes={nbytes}")
        elif op == "bcst":
            step = draw(st.sampled_from(["rank", "32", "8192", "-32"]))
            to += 32
            commands.append(
                f"copy a[1]+{to} <- pool[host]+{at} bytes={nbytes} rows=2 dst_step={step} "
                "src_step=0"
            )
        elif op == "rows":
            step = st.integers(nbytes + 6 >> 2, nbytes + 4000 >> 2).map(lambda n: 4 * n)
            rows = draw(st.integers(2, 500))
            commands.append(
                f"copy {places} bytes={nbytes} rows={rows} dst_step={draw(step)} "
                f"src_step={draw(step)}"
            )
        elif op == "swap":
            commands.append(f"swap a[1]+{to // 64 * 64} <-> own[0]+{at // 64 * 64} bytes={nbytes}")
        elif op == "word":
            kind = draw(st.sampled_from(["poll", "signal"]))
            sign = ">=" if kind == "poll" else "="
            where = draw(st.sampled_from(["0", "1", "host"]))
            word, value = draw(st.integers(0, 7)), draw(st.integers(1, 4))
            commands.append(f"{kind} flag[{where}]:{word} {sign} {value}")
        else:
            commands.append("fence" if op == "fence" else f"timestamp {draw(st.integers(0, 99))}")
    return parsed(*commands, nbytes=size)


@given(single_queues(), st.integers(0, 1 << 30), st.sampled_from([0, 7, 2**32 - 2]))
def test_single_queues_come_back(program: _core.Program, seed: int, epoch: int) -> None:
    addresses = somewhere(program, seed, epoch)
    [stream] = _core.sdma_encode(program, addresses)
    assert str(back(program, [stream], addresses)) == str(program)
    assert len(stream.starts) == len(program.queues[0][2])


@given(single_queues(), st.integers(0, 99), st.integers(100, 199), st.integers(0, 2**32 - 1))
def test_replay_is_encoding_anew(program: _core.Program, old: int, new: int, epoch: int) -> None:
    before, after = somewhere(program, old, 0), somewhere(program, new, epoch)
    [stream] = _core.sdma_encode(program, before)
    [wanted] = _core.sdma_encode(program, after)
    unpatched = stream.dwords
    stream.replay(before, after)
    assert stream.dwords == wanted.dwords
    written = set()
    for dword, what, _, _, _ in stream.patches(program):
        written |= {dword} if what == "flag" else {dword, dword + 1}
    changed = {
        i for i, pair in enumerate(zip(unpatched, wanted.dwords, strict=True)) if len({*pair}) > 1
    }
    assert changed <= written


def test_replay_where_alignment_changes() -> None:
    program = parsed("copy a[1]+0 <- own[0]+0 bytes=64")
    before, after = somewhere(program, 1, 0), somewhere(program, 1, 0)
    [stream] = _core.sdma_encode(program, before)
    after.set(program, "own", 0, 0x5008)
    with pytest.raises(offcore.Error, match="encode the program anew"):
        stream.replay(before, after)


def kinds(*commands: str, machine_max: int = 0x3FFFFFC0, **options: object) -> list[str]:
    program = parsed(*commands, **options)
    [stream] = _core.sdma_encode(program, _core.SdmaAddresses.model(program), machine_max)
    return [kind for kind, _, _ in _core.sdma_unpack(stream.dwords)]


@pytest.mark.parametrize(
    ("commands", "packets"),
    [
        (["copy a[1]+0 <- own[0]+0 bytes=8"], ["copy"]),
        (["copy a[1]+0 <- own[0]+0 bytes=8 rows=2 dst_step=rank src_step=0"], ["broadcast"]),
        # An odd last destination goes plain.
        (
            ["copy a[1]+0 <- own[0]+0 bytes=8 rows=3 dst_step=64 src_step=0"],
            ["broadcast", "copy"],
        ),
        # Over ranks each row has an address of its own.
        (["copy a[0]+0 <- own[0]+0 bytes=8 rows=2 dst_step=rank src_step=64"], ["copy"] * 2),
        # Rows: a rectangle; two where they are more than 2^14; slices where the pitch is too small.
        (["copy a[1]+0 <- own[0]+0 bytes=8 rows=9 dst_step=64 src_step=16"], ["rect"]),
        (["copy a[1]+0 <- own[0]+0 bytes=4 rows=16385 dst_step=4 src_step=4"], ["rect", "copy"]),
        # No rectangle: a step that is no dword's, negative, or shorter than the row.
        (["copy a[1]+0 <- own[0]+0 bytes=8 rows=3 dst_step=62 src_step=64"], ["copy"] * 3),
        (["copy a[1]+640 <- own[0]+0 bytes=8 rows=3 dst_step=-64 src_step=64"], ["copy"] * 3),
        (["copy a[1]+0 <- own[0]+0 bytes=80 rows=3 dst_step=64 src_step=128"], ["copy"] * 3),
        # What a poll or a timestamp needs after data, and only there.
        (
            [
                "poll flag[0]:1 >= 1",
                "copy a[1]+0 <- own[0]+0 bytes=8",
                "poll flag[0]:2 >= 1",
                "timestamp 3",
                "copy a[1]+0 <- own[0]+0 bytes=8",
                "fence",
                "timestamp 4",
                "copy a[1]+0 <- own[0]+0 bytes=8",
                "signal flag[1]:1 = 1",
                "poll flag[0]:3 >= 1",
            ],
            [
                *("poll", "copy", "fence", "poll", "timestamp", "copy", "fence", "timestamp"),
                *("copy", "fence", "poll"),
            ],
        ),
        (["signal flag[0]:1 = 2 rows=2 step=rank"], ["fence"] * 2),
        (["poll flag[0]:1 >= 2 rows=3 step=2"], ["poll"] * 3),
    ],
)
def test_what_commands_become(commands: list[str], packets: list[str]) -> None:
    assert kinds(*commands) == packets


def test_splitting_at_the_largest_copy() -> None:
    copy = "copy a[1]+0 <- own[0]+0 bytes="
    assert kinds(copy + "256", machine_max=128) == ["copy"] * 2
    assert kinds(copy + "257", machine_max=128) == ["copy"] * 3
    swap = "swap a[1]+0 <-> own[0]+0 bytes=200"
    assert kinds(swap, machine_max=100) == ["swap"] * 4  # whole blocks of 64
    for most in (0x3FFFFFC0, 0x3FFFE0):  # this engine's, and older firmware's
        encoder = _core.SdmaEncoder(most)
        encoder.copy(0, 1 << 40, most)
        encoder.copy(0, 1 << 40, most + 1)
        found = [fields for _, fields, _ in _core.sdma_unpack(encoder.dwords)]
        assert [fields["bytes"] for fields in found] == [most, most, 1]
        assert found[2]["src"] == (1 << 40) + most


def test_rectangles() -> None:
    """Largest elements, offsets below a dword, slices where the pitch field ends, and bounds."""
    encoder = _core.SdmaEncoder()
    encoder.strided(0x1000, 0x2000, 32, 4, 4096, 64)
    encoder.strided(0x1003, 0x2002, 1, 4, 8, 4)
    pitch_max = 16 << 19
    encoder.strided(0, 0, 16, 2, pitch_max, 16)
    encoder.strided(0, 0, 16, 2, pitch_max + 16, 16)
    encoder.strided(0, 0, 16, 2, 16 << 28, 16)
    encoder.strided(0, 0, 16, 2, (16 << 28) + 16, 16)
    encoder.strided(0, 0, 16 << 14, 2, 16 << 14, 16 << 14)
    encoder.strided(0, 0, (16 << 14) + 16, 2, 1 << 20, 1 << 20)
    found = _core.sdma_unpack(encoder.dwords)
    assert [kind for kind, _, _ in found] == ["rect"] * 5 + ["copy"] * 2 + ["rect"] + ["copy"] * 2
    wide, odd, largest, slices, farthest = [fields for _, fields, _ in found[:5]]
    assert (wide["element"], wide["width"], wide["height"]) == (4, 2, 4)
    assert (wide["dst_pitch"], wide["src_pitch"]) == (256, 4)
    assert (odd["dst"], odd["dst_x"], odd["src_x"], odd["element"]) == (0x1000, 3, 2, 0)
    assert (largest["dst_pitch"], largest["depth"]) == (1 << 19, 1)
    assert (slices["dst_slice"], slices["height"], slices["depth"]) == ((1 << 19) + 1, 1, 2)
    assert farthest["dst_slice"] == 1 << 28


@pytest.mark.parametrize(
    ("call", "code", "told"),
    [
        (("copy", 0, 64, 0), "invalid", "0 bytes"),
        (("swap", 0, 64, 0), "invalid", "0 bytes"),
        (("broadcast", [0, 64], 128, 0), "invalid", "0 bytes"),
        (("strided", 0, 64, 0, 4, 8, 8), "invalid", "0 bytes"),
        (("broadcast", [], 128, 4), "invalid", "needs destinations"),
        (("broadcast", [0x20, 0x50], 128, 4), "invalid", "agree modulo 32"),
        (("swap", 0x20, 64, 64), "invalid", "address 0x20 has to be a multiple of 64"),
        (("swap", 0x40, 0x48, 64), "invalid", "address 0x48 has to be a multiple of 64"),
        (("poll", 6, 1), "invalid", "multiple of 4"),
        (("poll", 8, 1 << 32), "unsupported", "no 64-bit poll"),
        (("fence", 2, 1), "invalid", "multiple of 4"),
        (("fence", 4, 1 << 32), "invalid", "32 bits"),
        (("add", "atomic", {**ADD64, "dst": 4, "value": 1}), "invalid", "multiple of 8"),
        (("timestamp", 16), "invalid", "multiple of 32"),
        (("copy", 0, 0, (1 << 64) - 1), "invalid", "more than 1048576 packets"),
        (("copy", 0, (1 << 64) - 63, 64), "invalid", "beyond the 64-bit addresses"),
        (("copy", (1 << 64) - 63, 0, 64), "invalid", "beyond the 64-bit addresses"),
        (("broadcast", [0, 1 << 60], 0, 1 << 51), "invalid", "more than 1048576 packets"),
        (("broadcast", [0, (1 << 64) - 32], 0, 64), "invalid", "beyond the 64-bit addresses"),
        (("swap", 0, 64, 1 << 60), "invalid", "more than 1048576 packets"),
        (("swap", 0, (1 << 64) - 64, 65), "invalid", "beyond the 64-bit addresses"),
        (("strided", 0, 0, 4, (1 << 32) - 1, 5, 5), "invalid", "more than 1048576 packets"),
        (("strided", 0, 0, 1 << 40, 2000, 1 << 41, -1), "invalid", "beyond the 64-bit"),
        (("strided", 0, 9000, 1 << 40, 2000, 1, -1), "invalid", "more than 1048576 packets"),
        (("strided", 0, 99, 4, 2, 8, -100), "invalid", "beyond the 64-bit addresses"),
        (("strided", 0, 0, 1, 4, 1, (1 << 63) - 1), "invalid", "beyond the 64-bit addresses"),
        (("strided", 0, 64, 4, 0, 8, 8), "invalid", "0 bytes"),
        (("add", "fill", {"dst": 64, "value": 1, "bytes": 6}), "invalid", "not whole dwords"),
        (("add", "rect", {"element": 5}), "invalid", "at most 16 bytes"),
        (("add", "fence", {"dst": 64, "bytes": 1}), "invalid", "FENCE has no field bytes"),
    ],
)
def test_what_no_packet_says(call: tuple[object, ...], code: str, told: str) -> None:
    encoder = _core.SdmaEncoder()
    with pytest.raises(offcore.Error, match=told) as refused:
        getattr(encoder, str(call[0]))(*call[1:])
    assert refused.value.code == code
    assert encoder.dwords == []


def test_programs_that_have_no_packets() -> None:
    swap = parsed("fence", "swap a[1]+8 <-> own[0]+0 bytes=64")
    with pytest.raises(offcore.Error, match=r"queue 0\.0, command 1 \(swap .*legalize") as refused:
        _core.sdma_encode(swap, _core.SdmaAddresses.model(swap))
    assert refused.value.code == "unsupported"
    captured = parsed("poll flag[0]:1 >= 1", mode="capture")
    with pytest.raises(offcore.Error, match="captured") as refused:
        _core.sdma_encode(captured, _core.SdmaAddresses.model(captured))
    assert refused.value.code == "unsupported"
    nowhere = parsed("copy a[1]+0 <- own[0]+0 bytes=64")
    with pytest.raises(offcore.Error, match="has no address"):
        _core.sdma_encode(nowhere, _core.SdmaAddresses())


def refused_decoding(dwords: list[int]) -> str:
    program = parsed("fence")
    addresses = _core.SdmaAddresses.model(program)
    with pytest.raises(offcore.Error) as refused:
        _core.sdma_decode({0: dwords}, program, addresses)
    return str(refused.value)


def test_packets_that_are_no_commands() -> None:
    program = parsed("fence")
    bases = {(n, r): b for n, r, b in _core.SdmaAddresses.model(program).bases(program)}
    own, window, flags = bases["own", 0], bases["a", 1], bases["flag", 0]
    scratch = _core.SdmaAddresses.model(program).scratch

    def packet(kind: str, **fields: int) -> list[int]:
        return _core.sdma_pack(kind, fields)

    copy = packet("copy", dst=window, src=own, bytes=64)
    poll = {"func": 5, "memory": 1, "mask": 0xFFFFFFFF, "retry": 0xFFF, "interval": 4}
    poll |= {"value": 1, "dst": flags}
    polled = packet("poll", **poll)
    rect = {"element": 6, "dst": window, "src": own, "dst_pitch": 64, "src_pitch": 64, "width": 8}
    rect |= {"dst_slice": 1, "src_slice": 1, "height": 2, "depth": 1}
    for dwords, told in [
        (
            packet("copy", dst=12, src=own, bytes=64),
            "64 bytes from address 0xc on lie in no buffer",
        ),
        (packet("copy", dst=window, src=own, bytes=(1 << 20) + 1), "lie in no buffer"),
        (packet("broadcast", dst=window, dst2=own, src=own, bytes=64), "no step leads"),
        (packet("fence", dst=flags + 4, value=1), "lie in no buffer"),
        (packet("fence", dst=own, value=1), "is not a flag word"),
        (packet("fence", dst=flags, value=1 << 17), "does not belong to epoch 0"),
        (packet("atomic", operation=47, dst=flags, value=1), "no command"),
        (packet("poll", **(poll | {"func": 3})), "polls memory for ever"),
        (packet("poll", **(poll | {"mask": 255})), "polls memory for ever"),
        ([*copy, *polled], "dword 7 (POLL_REGMEM): no FENCE"),
        ([*copy, *packet("fence", dst=scratch, value=1), *copy], "belongs to a poll"),
        # What an engine refuses, and what encode never writes.
        (packet("broadcast", dst=window, dst2=window + 40, src=own, bytes=8), "agree modulo 32"),
        (packet("broadcast", dst=window, dst2=window, src=own, bytes=8), "destinations are one"),
        (packet("swap", dst=window + 3, src=own, bytes=64), "not a multiple of 64"),
        (packet("rect", **rect), "elements have at most 16 bytes"),
        (packet("rect", **(rect | {"element": 0, "width": 65})), "longer than its pitch"),
        (packet("poll", **(poll | {"interval": 5})), "every 4 clocks"),
        ([*copy, *packet("fence", dst=scratch, value=7), *polled], "value 0 or 1, not 7"),
        (packet("fence", dst=scratch, value=1), "no data commands before it need it"),
        ([*copy, *packet("fence", dst=scratch, value=1)], "dword 11 (the end): the FENCE"),
    ]:
        assert told in refused_decoding(dwords), told
