"""`offcore mcast simulate | testbed | bench`: multicast collectives between hosts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Annotated, Any

import typer
from rich.table import Table

from offcore.errors import error
from offcore.mcast.communicator import CHAINS
from offcore.sizes import format_bytes, parse_bytes, parse_sizes
from offcore.tools import plot, report
from offcore.tools.cli.options import (
    COUNT_MAX,
    JsonOption,
    PlotOption,
    known_names,
    parsed,
)
from offcore.tools.mcast import bench as mcast_bench
from offcore.tools.mcast import fat_tree
from offcore.tools.mcast import plot as mcast_plot
from offcore.tools.mcast.fat_tree import ALGORITHMS, MULTICAST, Load, Row, Wire
from offcore.tools.report import JsonLines, Stamp
from offcore.tools.tables import titled
from offcore.tools.testbed import launcher
from offcore.tools.testbed.faults import Faults

app = typer.Typer(
    help="Multicast collectives between hosts: simulator, testbed and bench.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)

_PARTNERS = {MULTICAST: "in_network"}  # which reduce-scatter runs beside an all-gather
HOSTS_MAX = 1 << 16
HostsOption = Annotated[int, typer.Option(min=1, max=HOSTS_MAX, metavar="N", help="Hosts.")]
RankOption = Annotated[
    int, typer.Option(min=0, max=HOSTS_MAX, metavar="R", help="Real hosts: rank of this host.")
]
BatchesOption = Annotated[
    int,
    typer.Option(
        min=1, max=COUNT_MAX, metavar="N", help="Number of batches; the time is their median."
    ),
]
ChainsOption = Annotated[
    int,
    typer.Option(min=1, max=HOSTS_MAX, metavar="N", help="Concurrent senders of an all-gather."),
]
PerLeafOption = Annotated[
    int, typer.Option(min=1, max=HOSTS_MAX, metavar="N", help="Hosts on each leaf bridge.")
]
MtuOption = Annotated[int, typer.Option(max=COUNT_MAX, metavar="BYTES", help="MTU of the links.")]
NoOffloadsOption = Annotated[
    bool, typer.Option("--no-offloads", metavar="", help="Split packets by the MTU (no GSO).")
]
LossOption = Annotated[
    float,
    typer.Option(min=0, max=1, metavar="SHARE", help="Share of packets lost on the way to a host."),
]
BurstsOption = Annotated[
    str | None,
    typer.Option(metavar="N/EVERY", help="Drop N consecutive packets of every EVERY."),
]
DuplicatesOption = Annotated[
    float, typer.Option(min=0, max=1, metavar="SHARE", help="Share of datagrams duplicated.")
]
ReorderingOption = Annotated[
    float,
    typer.Option(min=0, max=1, metavar="SHARE", help="Share of datagrams delivered out of order."),
]
ImplsOption = Annotated[
    str | None,
    typer.Option(
        metavar="LIST",
        help="offcore, ring (offcore with multicast off), gloo. Default: offcore,ring; offcore for "
        "reduce_scatter.",
    ),
]
TimeoutOption = Annotated[
    float, typer.Option(min=0.001, metavar="S", help="Limit of an operation, in seconds.")
]
PerRankOption = Annotated[
    bool, typer.Option("--per-rank", metavar="", help="Sizes are of one rank's part.")
]
BesideOption = Annotated[
    bool,
    typer.Option("--beside-reduce-scatter", metavar="", help="Run a reduce-scatter concurrently."),
]
SendMbitOption = Annotated[
    int,
    typer.Option(
        min=0, max=COUNT_MAX, metavar="N", help="Limit of a host's sends, Mbit/s; 0: none."
    ),
]
ReceiveMbitOption = Annotated[
    int,
    typer.Option(
        min=0, max=COUNT_MAX, metavar="N", help="Limit of a host's receives, Mbit/s; 0: none."
    ),
]
TreeOption = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="paper (12 leaf, 6 spine switches), radix:PORTS (full bandwidth), leaf:HOSTS (one "
        "spine, like the testbed).",
    ),
]
MeetingOption = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help="Real hosts: where rank 0 listens (3 ports); all need the same job secret.",
    ),
]


@app.command()
def simulate(
    op: Annotated[str, typer.Argument(metavar="OP", help=", ".join(ALGORITHMS))],
    hosts: HostsOption = 188,
    tree: TreeOption = "paper",
    sizes: Annotated[
        str, typer.Option(metavar="SIZES", help="Total bytes: 1M:1G:4, 12M (K = 1024).")
    ] = "1M:64M:4",
    algorithms: Annotated[
        str, typer.Option(metavar="all|LIST", help="Algorithms: multicast, ring, knomial...")
    ] = "all",
    chains: Annotated[
        str, typer.Option(metavar="LIST", help="Multicast: concurrent senders.")
    ] = "1",
    radix: Annotated[
        int, typer.Option(max=COUNT_MAX, metavar="K", help="Radix of the k-nomial tree.")
    ] = 4,
    segments: Annotated[
        int,
        typer.Option(max=COUNT_MAX, metavar="N", help="Segments of a message (trees)."),
    ] = 1,
    loss: LossOption = 0.0,
    gbitps: Annotated[float, typer.Option(metavar="N", help="Rate of every link, Gbit/s.")] = 56.0,
    beside: BesideOption = False,
    json: JsonOption = None,
    plot_to: PlotOption = None,
) -> None:
    """Simulate a collective on a fat-tree: multicast and other algorithms.

    \b
    offcore mcast simulate all_gather --hosts 188 --sizes 12M --chains 1,4
    offcore mcast simulate broadcast --tree radix:32 --hosts 1024 --sizes 1M:64M:4
    """
    if op not in ALGORITHMS:
        raise error("invalid", f"no operation '{op}' is simulated: {', '.join(ALGORITHMS)}")
    if beside and op != "all_gather":
        raise error("invalid", "a concurrent reduce-scatter needs an all_gather")
    if plot_to is not None:
        plot.check_plot(plot_to)
    names = known_names(
        ",".join(ALGORITHMS[op]) if algorithms == "all" else algorithms,
        "--algorithms",
        list(ALGORITHMS[op]),
    )
    if algorithms == "all" and hosts & (hosts - 1):
        names = [name for name in names if name != "doubling"]
    built = parsed(lambda text: fat_tree.tree_of(text, hosts), tree, "--tree")
    counts = parsed(lambda text: [int(one) for one in text.split(",")], chains, "--chains")
    template = Load(op, "", 0, radix=radix, segments=segments, loss=loss)
    rows: list[Row] = []
    stamp = vars(Stamp())
    with JsonLines(json) as lines:
        for nbytes in parsed(parse_sizes, sizes, "--sizes"):
            for name in names:
                for count in counts if name == MULTICAST else counts[:1]:
                    load = replace(template, algorithm=name, bytes=nbytes, chains=count)
                    loads = [load]
                    if beside:
                        partner = _PARTNERS.get(name, "ring")
                        loads.append(Load("reduce_scatter", partner, nbytes))
                    for row in fat_tree.measure(built, Wire(gbitps=gbitps), loads):
                        rows.append(row)
                        lines.write(row.to_json() | stamp)
    report.console(stderr=json == "-").print(_simulated(rows))
    if plot_to is not None:
        mcast_plot.plot_rows([row for row in rows if row.op == op], plot_to)
        typer.echo(f"plot: {plot_to}", err=json == "-")


def _simulated(rows: list[Row]) -> Table:
    first = rows[0]
    title = f"{first.op} on {first.hosts} hosts of {first.tree} (simulated)"
    names = ("op", "algorithm", "size", "time us", "GB/s a leaf", "switch ports MB", "fetched")
    table = titled(title, names[:2], (*names[2:], "longest queue"))
    for row in rows:
        table.add_row(
            row.op,
            row.name,
            format_bytes(row.bytes),
            report.format_us(row.time_us),
            f"{row.goodput_gbps:.2f}",
            f"{row.switch_bytes / 1e6:,.1f}",
            f"{row.fetched_chunks}",
            format_bytes(row.queue_bytes_max),
        )
    return table


def place_of(
    hosts: int,
    per_leaf: int,
    mtu: int,
    offloads: bool,
    loss: float,
    bursts: str | None,
    duplicates: float,
    reordering: float,
    send_mbit: int = 0,
    receive_mbit: int = 0,
) -> launcher.Place:
    """The testbed that options ask for."""

    def burst(text: str) -> tuple[int, int]:
        packets, _, every = text.partition("/")
        if not (packets.isdecimal() and every.isdecimal()):
            raise ValueError(f"'{text}' is not a burst: write 8/1000")
        return int(packets), int(every)

    packets, every = parsed(burst, bursts, "--bursts") if bursts else (0, 0)
    faults = Faults(
        loss=loss,
        burst_packets=packets,
        burst_every=every,
        duplicates=duplicates,
        reordering=reordering,
        rate_mbit=receive_mbit,
        send_mbit=send_mbit,
    )
    faults.check()
    return launcher.Place(hosts, per_leaf, mtu, offloads, faults=faults)


@app.command("testbed")
def on_testbed(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[-- COMMAND...]", help="Command for every host.")
    ] = None,
    hosts: HostsOption = 8,
    per_leaf: PerLeafOption = 16,
    mtu: MtuOption = 1500,
    no_offloads: NoOffloadsOption = False,
    loss: LossOption = 0.0,
    bursts: BurstsOption = None,
    duplicates: DuplicatesOption = 0.0,
    reordering: ReorderingOption = 0.0,
    timeout: Annotated[
        float, typer.Option(min=0.001, metavar="S", help="Limit of the command, in seconds.")
    ] = 600.0,
    json: JsonOption = None,
) -> None:
    """Build a fat-tree of network namespaces, run a command on it, and always remove it.

    Does not need root. Without a command, every host multicasts to all others, and the counters of
    the switch ports are compared with those of a ring over TCP. A command runs on every host with
    RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and a shared OFFCORE_JOB_SECRET.

    \b
    offcore mcast testbed --hosts 188
    offcore mcast testbed --hosts 3 --loss 0.01 -- \\
      sh -c 'offcore mcast bench broadcast --sizes 1M --hosts $WORLD_SIZE \\
               --rank $RANK --meeting $MASTER_ADDR:$MASTER_PORT'
    """
    place = place_of(hosts, per_leaf, mtu, not no_offloads, loss, bursts, duplicates, reordering)
    task, arguments = "offcore.tools.testbed.launcher:check", {}
    if words:
        task = "offcore.tools.testbed.launcher:command"
        arguments = {"words": words, "timeout_s": timeout}
    with JsonLines(json) as lines:
        [found] = launcher.run(task, place, arguments)
        lines.write(found | vars(Stamp()))
    console = report.console(stderr=json == "-" or bool(words))
    if words:
        console.print(
            f"{found['hosts']} hosts: {found['seconds']} s, switch ports carried "
            f"{found['switch_bytes'] / 1e6:,.1f} MB",
            highlight=False,
        )
        if death := launcher.obituary(found):
            raise error("peer", death)
        return
    console.print(_checked(found))
    if found["multicast"]["wrong"] and not (loss or bursts or duplicates or reordering):
        raise error("driver", "datagrams were lost on a testbed without faults: nothing to rely on")


def _checked(found: dict[str, Any]) -> Table:
    title = (
        f"{found['hosts']} hosts on {found['leaves']} leaves, built in {found['built_s']:.2f} s; "
        f"each gives {found['bytes'] // found['hosts']} bytes to all"
    )
    table = titled(title, ("exchange",), ("time ms", "wrong bytes", "switch ports MB", "share"))
    ring = found["ring"]["switch_bytes"]
    for name in ("multicast", "ring"):
        one = found[name]
        carried = one["switch_bytes"]
        table.add_row(
            name,
            f"{one['time_us'] / 1e3:.1f}",
            str(one["wrong"]),
            f"{carried / 1e6:.2f}",
            f"{carried / ring:.2f}" if ring else "-",
        )
    return table


@app.command("bench")
def bench_command(
    op: Annotated[str, typer.Argument(metavar="OP", help=", ".join(mcast_bench.OPS))],
    hosts: HostsOption = 4,
    sizes: Annotated[
        str, typer.Option(metavar="SIZES", help="Total bytes: 1M:1G:4, 12M (K = 1024).")
    ] = "256K:16M:4",
    per_rank: PerRankOption = False,
    impls: ImplsOption = None,
    per_leaf: PerLeafOption = 16,
    mtu: MtuOption = 1500,
    no_offloads: NoOffloadsOption = False,
    loss: LossOption = 0.0,
    bursts: BurstsOption = None,
    duplicates: DuplicatesOption = 0.0,
    reordering: ReorderingOption = 0.0,
    buffer: Annotated[
        str, typer.Option(metavar="SIZE", help="Maximum receive buffer of a rank.")
    ] = "4M",
    chains: ChainsOption = CHAINS,
    beside: BesideOption = False,
    send_mbit: SendMbitOption = 0,
    receive_mbit: ReceiveMbitOption = 0,
    batches: BatchesOption = 5,
    timeout: TimeoutOption = 60.0,
    meeting: MeetingOption = None,
    rank: RankOption = 0,
    interface: Annotated[
        str, typer.Option(metavar="NAME", help="Real hosts: network interface.")
    ] = "",
    json: JsonOption = None,
) -> None:
    """Time collectives between hosts, check every byte, and count bytes at switches.

    Runs one operation at a time, or an all-gather concurrently with a reduce-scatter (sum of
    float32). Uses a temporary testbed, or with --meeting real hosts: run the same command on each
    with its own --rank.

    \b
    offcore mcast bench all_gather --hosts 4 --sizes 64K:1M:4 --per-rank --impls offcore,ring,gloo
    offcore mcast bench all_gather --hosts 188 --sizes 64K --per-rank
    offcore mcast bench broadcast --hosts 4 --loss 0.01 --no-offloads
    offcore mcast bench all_gather --hosts 8 --sizes 1M --per-rank --beside-reduce-scatter
    """
    if impls is None:
        impls = "offcore" if op == mcast_bench.PARTNER else "offcore,ring"
    limits = [limit for limit in (send_mbit, receive_mbit) if limit]
    factor = hosts if per_rank and op != "broadcast" else 1
    request = mcast_bench.Request(
        op=op,
        sizes=[size * factor for size in parsed(parse_sizes, sizes, "--sizes")],
        impls=known_names(impls, "--impls", mcast_bench.IMPLS),
        batches=batches,
        timeout_s=timeout,
        buffer_bytes=parsed(parse_bytes, buffer, "--buffer"),
        chains=chains,
        beside=beside,
        # Where links are limited ranks are told: their cutoff timer goes by it.
        options={"link_gbitps": min(limits) / 1000} if limits else {},
    )
    if meeting is None:
        drawn = (loss, bursts, duplicates, reordering)
        place = place_of(hosts, per_leaf, mtu, not no_offloads, *drawn, send_mbit, receive_mbit)
        found = mcast_bench.on_testbed(request, place)
    else:
        found = mcast_bench.on_real_hosts(request, hosts, rank, meeting, interface)
    _record(found, json)


def _record(found: Iterable[dict[str, Any]], json: str | None) -> None:
    """Writes and prints rows as they are measured; exits with 1 where a byte is wrong."""
    rows: list[dict[str, Any]] = []
    stamp = vars(Stamp())
    try:
        with JsonLines(json) as lines:
            for row in found:
                rows.append(row)
                lines.write(row | stamp)
    finally:
        if rows:
            report.console(stderr=json == "-").print(_measured(rows))
    if any(row["wrong"] for row in rows):
        raise typer.Exit(1)


def _measured(rows: list[dict[str, Any]]) -> Table:
    first = rows[0]
    beside = f" beside {first['beside']}" if first["beside"] else ""
    title = f"{first['op']}{beside} between {first['hosts']} hosts, ranks as {first['ranks_as']}"
    names = ("impl", "size", "time us", "GB/s a leaf", "#wrong", "fetched", "duplicates")
    counted = ("switch_bytes", "host_sent_bytes", "host_received_bytes")
    table = titled(title, names[:1], (*names[1:], "switch ports MB", "host sent", "received"))
    for row in rows:
        table.add_row(
            row["impl"],
            format_bytes(row["bytes"]),
            report.format_us(row["time_us"]),
            f"{row['goodput_gbps']:.3f}",
            str(row["wrong"]),
            *(
                "-" if row[name] is None else str(row[name])
                for name in ("fetched_chunks", "duplicates")
            ),
            *("-" if row.get(name) is None else f"{row[name] / 1e6:,.2f}" for name in counted),
            style="bold red" if row["wrong"] else None,
        )
    return table
