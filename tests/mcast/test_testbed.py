"""Fat-trees of network namespaces: their counters, their faults, and that nothing is left."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import offcore
from offcore.tools.mcast.fat_tree import Load, Wire, run
from offcore.tools.testbed import namespaces, plain_exchange
from offcore.tools.testbed.fabric import Testbed
from offcore.tools.testbed.faults import PSN_BIT, Faults, counts
from offcore.tools.testbed.launcher import Place
from offcore.tools.testbed.launcher import run as on_testbed

pytestmark = pytest.mark.needs("namespaces", "tc")
HERE = Path(__file__).parent
BLOCK = 16 * 1024


def results(name: str, place: Place, **arguments: Any) -> list[dict[str, Any]]:
    """What a function of this file yields on a testbed."""
    return list(on_testbed("on_path:call", place, {"name": name, "arguments": arguments}))


@pytest.fixture(autouse=True)
def importable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the process on the testbed import this file."""
    text = (
        f"import sys\nsys.path.insert(0, {str(HERE)!r})\n"
        "import test_testbed\n"
        "def call(testbed, name, arguments):\n"
        "    yield from getattr(test_testbed, name)(testbed, **arguments)\n"
    )
    (tmp_path / "on_path.py").write_text(text)
    paths = [str(tmp_path), *sys.path]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in paths if path))


def exchange(testbed: Testbed, nbytes: int) -> Iterator[dict[str, Any]]:
    multicast = plain_exchange.multicast_all_gather(testbed, nbytes)
    yield vars(multicast) | counts() if _has_faults() else vars(multicast)


def _has_faults() -> bool:
    listed = subprocess.run(("nft", "list", "tables"), capture_output=True, text=True, timeout=20)
    return "bridge offcore\n" in listed.stdout + "\n"


def both(testbed: Testbed, nbytes: int) -> Iterator[dict[str, Any]]:
    plain_exchange.ring_all_gather(testbed, nbytes)  # bridges and hosts learn addresses
    multicast = plain_exchange.multicast_all_gather(testbed, nbytes)
    ring = plain_exchange.ring_all_gather(testbed, nbytes)
    yield {"multicast": vars(multicast), "ring": vars(ring), "tree": testbed.tree.name}


def test_counters_are_the_simulators() -> None:
    place = Place(hosts=12, hosts_per_leaf=4, offloads=False)
    [found] = results("both", place, nbytes=64 * 1024)
    assert found["multicast"]["wrong"] == found["ring"]["wrong"] == 0
    tree = offcore.tools.mcast.fat_tree.one_spine(4, 12)
    datagrams = Wire(packet_bytes=1472, datagram_header=plain_exchange.DATAGRAM_HEADERS)
    [load] = [Load("all_gather", "multicast", 12 * 64 * 1024)]
    simulated = run(tree, datagrams, [load]).switch_bytes
    assert found["multicast"]["switch_bytes"] == pytest.approx(simulated, rel=0.001)
    # Of TCP the simulator can only guess how many acknowledgements there are: the ports count them,
    # as the packets that hold no data.
    headers = plain_exchange.STREAM_HEADERS
    payload, data, guessed = (
        run(tree, wire, [Load("all_gather", "ring", 12 * 64 * 1024)]).switch_bytes
        for wire in (
            Wire(packet_bytes=1448),
            Wire(packet_bytes=1448, stream_header=headers),
            Wire(packet_bytes=1448, stream_header=headers, ack_bytes=headers, ack_packets=2),
        )
    )
    assert found["ring"]["switch_bytes"] == pytest.approx(guessed, rel=0.04)
    acknowledgements = found["ring"]["switch_packets"] - (data - payload) / headers
    assert acknowledgements > 0
    simulated = data + acknowledgements * headers
    assert found["ring"]["switch_bytes"] == pytest.approx(simulated, rel=0.01)


def test_super_packets_are_counted_as_they_pass() -> None:
    [found] = results("both", Place(hosts=6, hosts_per_leaf=3), nbytes=58_880 * 2)
    together = Wire(packet_bytes=58_880, datagram_header=plain_exchange.DATAGRAM_HEADERS)
    tree = offcore.tools.mcast.fat_tree.one_spine(3, 6)
    simulated = run(tree, together, [Load("all_gather", "multicast", 6 * 58_880 * 2)]).switch_bytes
    assert found["multicast"]["switch_bytes"] == pytest.approx(simulated, rel=0.02)


def test_the_papers_traffic_on_188_hosts() -> None:
    [found] = results("both", Place(hosts=188), nbytes=2048)
    assert found["multicast"]["wrong"] == found["ring"]["wrong"] == 0
    assert found["multicast"]["switch_bytes"] < 0.53 * found["ring"]["switch_bytes"]


def test_losses_are_those_that_were_asked_for() -> None:
    place = Place(hosts=6, hosts_per_leaf=3, offloads=False, faults=Faults(loss=0.1))
    [found] = results("exchange", place, nbytes=4 * BLOCK)
    sent = 6 * 5 * 4 * BLOCK / 1472
    assert found["wrong"] > 0
    assert found["lost"] == pytest.approx(0.1 * sent, rel=0.4)


def test_bursts_of_losses() -> None:
    faults = Faults(burst_every=100, burst_packets=10)
    place = Place(hosts=4, offloads=False, faults=faults)
    [found] = results("exchange", place, nbytes=4 * BLOCK)
    assert found["lost"] == pytest.approx(0.1 * 4 * 3 * 45, rel=0.2)


def test_duplicates_and_reordering() -> None:
    place = Place(hosts=4, offloads=False, faults=Faults(duplicates=0.2))
    [found] = results("exchange", place, nbytes=2 * BLOCK)
    assert found["doubled"] > 10
    place = Place(hosts=4, offloads=False, faults=Faults(reordering=0.2))
    [found] = results("exchange", place, nbytes=2 * BLOCK)
    assert found["delayed"] > 10


def numbered(testbed: Testbed, to: int) -> Iterator[dict[str, Any]]:
    """Datagrams with a number where core/mcast/wire.h has the PSN; which ones arrive."""
    source = testbed.within(0, plain_exchange.multicast_socket)
    sinks = {h: testbed.within(h, plain_exchange.multicast_socket) for h in (to, to + 1)}
    for number in range(10):
        head = bytes(PSN_BIT // 8 - 8) + number.to_bytes(4, "big")
        source.sendto(head, (plain_exchange.GROUP, plain_exchange.PORT))
    for host, sink in sinks.items():
        sink.settimeout(0.3)
        got = []
        try:
            while True:
                got.append(int.from_bytes(sink.recv(100)[-4:], "big"))
        except TimeoutError:
            yield {"host": host, "got": got}


def test_chosen_numbers_are_lost() -> None:
    faults = Faults(psns=[3, 7], psn_hosts=[1])
    found = results("numbered", Place(hosts=3, offloads=False, faults=faults), to=1)
    assert [one["got"] for one in found] == [[0, 1, 2, 4, 5, 6, 8, 9], [*range(10)]]


def test_a_command_runs_on_every_host(capfd: pytest.CaptureFixture[str]) -> None:
    words = ["sh", "-c", "echo $RANK of $WORLD_SIZE; exit $RANK"]
    task = {"words": words, "timeout_s": 30.0}
    [found] = on_testbed("offcore.tools.testbed.launcher:command", Place(hosts=3), task)
    assert found["status"] == [0, 1, 2]
    assert found["failed"] in (1, 2)
    assert sorted(capfd.readouterr().out.splitlines()) == ["0 of 3", "1 of 3", "2 of 3"]


def offcore_tool(folder: Path) -> dict[str, str]:
    """An environment in which `offcore` is this one."""
    tool = folder / "offcore"
    tool.write_text(f'#!/bin/sh\nexec {sys.executable} -m offcore.tools.cli "$@"\n')
    tool.chmod(0o755)
    return os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", "COLUMNS": "200"}


def shell(line: str, environment: dict[str, str]) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        ("sh", "-c", line), capture_output=True, text=True, timeout=100, env=environment
    )


def test_a_rank_that_fails_is_named(tmp_path: Path) -> None:
    """Also where the others wait for it: they are not left to the command's limit."""
    line = "offcore mcast testbed --hosts 3 -- sh -c 'test $RANK != 1 || exit 1; exec sleep 90'"
    done = shell(line, offcore_tool(tmp_path))
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("offcore: peer: rank 1 exited with status 1; ")
    done = shell(line.replace("exit 1", "kill -9 $$"), offcore_tool(tmp_path))
    assert "offcore: peer: rank 1 was killed by signal 9 (Killed); ranks 0, 2 had" in done.stderr


def test_the_example_of_the_help_page_crosses_the_switches(tmp_path: Path) -> None:
    environment = offcore_tool(tmp_path)
    page = shell("offcore mcast testbed --help", environment).stdout.replace("\\ ", "\\")
    page = "\n".join(line.strip() for line in page.splitlines()).replace("\\\n", "")
    [example] = [line for line in page.splitlines() if "--hosts 3" in line]
    assert {"$RANK", "$WORLD_SIZE", "$MASTER_ADDR", "$MASTER_PORT"} <= set(
        re.findall(r"\$[A-Z_]+", example)
    )
    done = shell(example, environment)
    assert done.returncode == 0, done.stderr
    row = next(line.split() for line in done.stdout.splitlines() if "offcore" in line)
    assert row[1] == "1M"
    carried = re.search(r"3 hosts: .* switch ports carried ([\d,.]+) MB", done.stderr)
    assert carried is not None
    assert float(carried[1].replace(",", "")) > 4  # 1 MiB at four ports, for a single call


MEETS = """
import os
from offcore import Error, mcast
address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
try:
    with mcast.Communicator(
        address, rank=int(os.environ["RANK"]), world_size=2, timeout=3.0
    ) as comm:
        comm.barrier().wait()
    said = "met"
except Error as error:
    said = f"{error.code} {error}"
os.write(1, f"{said}\\n".encode())  # in one piece: two ranks write to one pipe
"""


def test_ranks_of_different_hosts_need_a_secret(capfd: pytest.CaptureFixture[str]) -> None:
    """A testbed gives its hosts one."""
    for words, expected in (
        ([], ["met", "met"]),
        (["env", "-u", "OFFCORE_JOB_SECRET"], ["invalid rank 0 at ", "timeout rank 1 did not "]),
    ):
        task = {"words": [*words, sys.executable, "-c", MEETS], "timeout_s": 60.0}
        [found] = on_testbed("offcore.tools.testbed.launcher:command", Place(hosts=2), task)
        assert found["status"] == [0, 0]
        said = sorted(capfd.readouterr().out.splitlines())
        for line, start in zip(said, expected, strict=True):
            assert line.startswith(start)
            assert start == "met" or "OFFCORE_JOB_SECRET" in line


@pytest.mark.parametrize("limit", ["user.max_user_namespaces", "user.max_net_namespaces"])
def test_what_denies_namespaces_is_named(limit: str, tmp_path: Path) -> None:
    """In a namespace where they are denied."""
    line = f"echo 0 > /proc/sys/{limit.replace('.', '/')}; offcore mcast testbed --hosts 2"
    done = shell(f"unshare -Ur sh -c '{line}'", offcore_tool(tmp_path))
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("offcore: unavailable: no testbed: unshare: ")
    assert f"{limit} is 0 (as root: sysctl -w {limit}=" in done.stderr


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("kernel.unprivileged_userns_clone", "0"),
        ("kernel.apparmor_restrict_unprivileged_userns", "1"),
    ],
)
def test_what_other_systems_deny_namespaces_by_is_named(
    name: str, value: str, tmp_path: Path
) -> None:
    assert "sysctl -w" not in namespaces.denied_by(tmp_path)
    path = tmp_path / name.replace(".", "/")
    path.parent.mkdir()
    path.write_text(value + "\n")
    assert f"{name} is {value} (as root: sysctl -w {name}=" in namespaces.denied_by(tmp_path)
    path.write_text(str(1 - int(value)))
    assert name not in namespaces.denied_by(tmp_path)


def test_a_command_has_a_limit() -> None:
    task = {"words": ["sleep", "60"], "timeout_s": 0.2}
    with pytest.raises(offcore.Error, match="ranks 0, 1: the command took more than"):
        list(on_testbed("offcore.tools.testbed.launcher:command", Place(hosts=2), task))


@pytest.mark.parametrize(
    "place", [Place(hosts=0), Place(hosts=2, mtu=100), Place(hosts=3000, hosts_per_leaf=2000)]
)
def test_what_cannot_be_built(place: Place) -> None:
    with pytest.raises(offcore.Error) as failure:
        results("exchange", place, nbytes=1)
    assert failure.value.code == "invalid"


def processes_with(mark: str) -> list[int]:
    """The processes that have a word in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_is_left(number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = f"testbed-{uuid.uuid4().hex}"
    monkeypatch.setenv("OFFCORE_TEST_MARK", mark)
    command = [sys.executable, "-m", "offcore.tools.cli", "mcast", "testbed", "--hosts", "4"]
    words = ["sh", "-c", "echo here; sleep 600"]

    def listen() -> None:  # a job in the background of a script is started deaf to SIGINT
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    with subprocess.Popen(
        [*command, "--", *words], stdout=subprocess.PIPE, text=True, preexec_fn=listen
    ) as outer:
        assert outer.stdout is not None
        assert [outer.stdout.readline() for _ in range(4)] == ["here\n"] * 4
        spaces = {os.readlink(f"/proc/{one}/ns/net") for one in processes_with(mark)}
        assert len(spaces) == 1 + 1 + 4  # the caller's, the switches', the hosts'
        outer.send_signal(number)
        outer.wait(20)
        assert outer.returncode != 0
    deadline_s = time.monotonic() + 10
    while processes_with(mark) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert processes_with(mark) == []


def test_the_command_line_checks_a_testbed() -> None:
    done = subprocess.run(
        (
            sys.executable,
            "-m",
            "offcore.tools.cli",
            "mcast",
            "testbed",
            "--hosts",
            "5",
            "--json",
            "-",
        ),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    record = json.loads(done.stdout)
    assert record["hosts"] == 5
    assert record["multicast"]["wrong"] == record["ring"]["wrong"] == 0
    assert "multicast" in done.stderr
