"""`offcore sdma`: encode, decode and run, as docs/sdma.md says."""

import json

import pytest

import offcore
from offcore.tools.sdma import emulator
from offcore.tools.sdma import text as sdma_text

LARGEST = 0x3FFFFFC0
COMMANDS = [
    {"op": "copy", "dst": "0x1000", "src": "0x0", "bytes": 64},
    {"op": "bcst", "dsts": ["0x2000", "0x3000"], "src": "0x0", "bytes": 256},
    {"op": "swap", "a": "0x4000", "b": "0x5000", "bytes": 128},
    {"op": "signal", "addr": "0x8000", "value": 1, "how": "fence"},
    {"op": "poll", "addr": "0x8000", "value": 1},
    {"op": "poll", "addr": "0x8000", "value": 1, "func": 3, "mask": 255},
    {"op": "copy", "dst": "0x6000", "src": "0x1000", "bytes": 64},
    {"op": "signal", "addr": "0x8008", "value": 1, "how": "atomic"},
    {"op": "timestamp", "addr": "0x8020"},
    {"op": "trap", "value": 5},
    {"op": "fill", "dst": "0x9000", "value": 7, "bytes": 64},
]


def test_a_list_goes_there_and_back(offcore_cli):
    encoded = offcore_cli("sdma", "encode", "-", stdin=json.dumps(COMMANDS))
    lines = encoded.out.splitlines()
    assert lines[:7] == ["00000001", "0000003f", *["00000000"] * 3, "00001000", "00000000"]
    assert all(len(line) == 8 for line in lines)
    decoded = offcore_cli("sdma", "decode", "-", stdin=encoded.out)
    assert json.loads(decoded.out) == COMMANDS
    again = offcore_cli("sdma", "encode", "-", stdin=decoded.out)
    assert again.out == encoded.out


def test_annotated_dwords_name_their_fields_and_decode(offcore_cli):
    plain = offcore_cli("sdma", "encode", "-", stdin=json.dumps(COMMANDS)).out.splitlines()
    named = offcore_cli("sdma", "encode", "--annotate", "-", stdin=json.dumps(COMMANDS)).out
    lines = named.splitlines()
    assert [line[:8] for line in lines] == plain
    assert lines[0] == "00000001  # COPY_LINEAR"
    assert lines[1] == "0000003f  # bytes"
    assert lines[5] == "00001000  # dst[0:31]"
    told = {line.partition("# ")[2].split(",")[0] for line in lines}
    assert {"FENCE", "POLL_REGMEM", "ATOMIC", "TIMESTAMP", "TRAP", "CONST_FILL"} <= told
    assert json.loads(offcore_cli("sdma", "decode", "-", stdin=named).out) == COMMANDS


def test_a_program_goes_there_and_back(offcore_cli, tmp_path):
    shown = offcore_cli("show", "all_gather", "--variant", "prelaunch_bcst", "--bytes", "64K")
    (file := tmp_path / "program.dma").write_text(shown.out, "utf-8")
    encoded = offcore_cli("sdma", "encode", file)
    assert encoded.out.startswith("# queue 0.0\nd0000008\n")
    decoded = offcore_cli("sdma", "decode", "-", "--program", file, stdin=encoded.out)
    assert decoded.out == shown.out
    records = offcore_cli("sdma", "encode", file, "--json", "-")
    by_json = offcore_cli("sdma", "decode", "-", "--program", file, stdin=records.out)
    assert by_json.out == shown.out
    first = records.records[0]
    assert first["queue"] == "0.0"
    assert {patch["what"] for patch in first["patches"]} == {"address", "flag"}
    lists = offcore_cli("sdma", "decode", "-", "--json", "-", stdin=encoded.out).records
    assert len(lists) == len(records.records)
    assert lists[0]["commands"][0]["op"] == "poll"


def test_running_says_what_engines_did(offcore_cli):
    ran = offcore_cli("sdma", "run", "-", "--seed", "3", "--json", "-", stdin=json.dumps(COMMANDS))
    assert ran.status == 0
    engine, summary = ran.records
    assert engine["state"] == "idle"
    assert (engine["packets"], engine["moves"], engine["traps"]) == (11, 5, 1)
    assert summary["checked_bytes"] == 1 << 20
    assert summary["wrong"] == 0
    assert summary["timestamps"][0]["address"] == "0x8020"
    table = offcore_cli("sdma", "run", "-", stdin=json.dumps(COMMANDS))
    assert "1048576 bytes checked, 0 wrong" in table.out


@pytest.mark.parametrize("op", ["all_gather", "all_to_all", "broadcast"])
@pytest.mark.parametrize("variant", ["b2b", "prelaunch_pcpy", "bcst", "swap"])
def test_collectives_run_on_engines(op: str, variant: str) -> None:
    if (op, variant) in [("all_to_all", "bcst"), ("all_gather", "swap"), ("broadcast", "swap")]:
        pytest.skip("there is no such program")
    swap = variant == "swap"
    program = offcore.show_program(
        op, machine="mi300x-8", ranks=8, nbytes=1 << 16, variant=variant, in_place=swap
    )
    for seed in (0, 1, 2):
        done = emulator.run(emulator.of_program(program, LARGEST, seed), 256, seed)
        assert done.wrong == 0
        assert sum(record["bytes"] for record in done.records) == program.counts().bytes
        assert sum(record["laps"] for record in done.records) >= (variant == "b2b")


def test_a_missing_fence_is_seen(offcore_cli):
    chain = [
        {"op": "copy", "dst": 4096, "src": 0, "bytes": 64},
        {"op": "copy", "dst": 8192, "src": 4096, "bytes": 64},
    ]
    ran = offcore_cli("sdma", "run", "-", "--seed", "2", stdin=json.dumps(chain))
    assert ran.status == 1
    assert ran.err.startswith("offcore: verify: ")
    assert "between two fences" in ran.err
    chain.insert(1, {"op": "signal", "addr": 0, "value": 1})
    assert offcore_cli("sdma", "run", "-", "--seed", "2", stdin=json.dumps(chain)).status == 0


REFUSED = [
    ('[{"op": "move"}]', "invalid: command 0: it must be an object whose op"),
    ("[1]", "invalid: command 0: it must be an object"),
    ("[", "invalid: the commands are not JSON"),
    ("{}", "invalid: the commands have to be a JSON list"),
    (
        '[{"op": "trap", "value": 1}, {"op": "copy", "dst": 0}]',
        "invalid: command 1: copy lacks src",
    ),
    ('[{"op": "trap", "value": 1, "x": 2}]', "invalid: command 0: trap has no x; its keys are"),
    ('[{"op": "trap", "value": "7"}]', "invalid: command 0: value has to be a number"),
    ('[{"op": "poll", "addr": 0, "value": 4294967296}]', "unsupported: command 0: a poll for"),
    ('[{"op": "copy", "dst": 0, "src": 64, "bytes": 0}]', "invalid: command 0: a copy of 0 bytes"),
    ('[{"op": "swap", "a": 0, "b": 8, "bytes": 8}]', "invalid: command 0: a swap's address 0x8"),
    ('[{"op": "bcst", "dsts": [0, 48], "src": 64, "bytes": 8}]', "agree modulo 32"),
    ('[{"op": "bcst", "dsts": 7, "src": 64, "bytes": 8}]', "dsts has to be a list"),
    ('[{"op": "signal", "addr": 0, "value": 1, "how": "post"}]', 'how has to be "fence"'),
    ('[{"op": "fill", "dst": 0, "value": 4294967296, "bytes": 8}]', "value = 4294967296 does not"),
    ('[{"op": "fill", "dst": 0, "value": 1, "bytes": 6}]', "its bytes are not whole dwords"),
    ('[{"op": "trap", "value": 4611686018427387904}]', "does not fit"),
    (f'[{{"op": "copy", "dst": 0, "src": 0, "bytes": {(1 << 64) - 1}}}]', "more than 1048576 pack"),
    (f'[{{"op": "copy", "dst": {(1 << 64) - 1}, "src": 0, "bytes": 2}}]', "beyond the 64-bit"),
    (
        '[{"op": "copy", "dst": 0, "src": 0, "bytes": 4, "rows": 4294967295, "dst_step": 5, '
        '"src_step": 5}]',
        "more than 1048576 packets",
    ),
]


@pytest.mark.parametrize(("text", "told"), REFUSED)
def test_lists_that_have_no_packets(text: str, told: str) -> None:
    with pytest.raises(offcore.Error) as refused:
        sdma_text.encode_commands(sdma_text.parse_commands(text), LARGEST)
    assert told in f"{refused.value.code}: {refused.value}"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("000000ff", "dword 0 (0xff): no packet"),
        ("0 0 00000001", "dword 2 (0x1): this COPY_LINEAR has 7 dwords, and 1 are left"),
        ("0\n0000000g", "line 2: '0000000g' is not a dword"),
        ("123456789", "line 1: '123456789' is not a dword"),
        ('{"dwords": []}', "line 1 is not an object"),
        ('{"queue": null, "dwords": [5]}', "line 1: 5 is not a dword"),
        ("[", "line 1 is not an object"),
        ("# queue 0.0\n# queue 0.1", "several queues"),
    ],
)
def test_dwords_that_are_no_packets(offcore_cli, text, told):
    ran = offcore_cli("sdma", "decode", "-", stdin=text)
    assert (ran.status, ran.out) == (1, "")
    assert ran.err.startswith("offcore: invalid: ")
    assert told in ran.err


def test_what_cannot_run(offcore_cli):
    far = [{"op": "copy", "dst": "0x10000000", "src": 0, "bytes": 64}]
    ran = offcore_cli("sdma", "run", "-", stdin=json.dumps(far))
    assert "offcore: invalid: queue 0.0: dword 0 (byte 0): COPY_LINEAR: 64 bytes at" in ran.err
    stuck = [{"op": "poll", "addr": 64, "value": 1}]
    ran = offcore_cli("sdma", "run", "-", stdin=json.dumps(stuck))
    assert "offcore: timeout: no queue can continue; polls wait: queue 0.0 at dword 0" in ran.err
    ran = offcore_cli("sdma", "encode", "-", "--machine", "h200-4", stdin="[]")
    assert "offcore: unsupported: machine h200-4 has no SDMA engines" in ran.err
    ran = offcore_cli("sdma", "run", "no-such-file")
    assert "offcore: invalid: cannot read 'no-such-file'" in ran.err
