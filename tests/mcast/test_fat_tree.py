"""The simulated fat-tree against closed forms and properties."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import offcore
from offcore.tools.mcast import fat_tree
from offcore.tools.mcast.fat_tree import Load, Tree, Wire, measure, one_spine, paper, radix, run

KIB = 1024
IDEAL = Wire(hop_ns=0)  # 7 bytes a nanosecond, nothing else
TREES = st.one_of(
    st.builds(one_spine, st.integers(1, 9), st.integers(1, 40)),
    st.builds(radix, st.sampled_from([4, 8]), st.integers(1, 16)),
    st.builds(radix, st.just(6), st.integers(19, 54)),
)


def us(nbytes: float, wire: Wire = IDEAL) -> float:
    return nbytes / (wire.gbitps / 8) / 1e3


def crossed(tree: Tree) -> int:
    """Links that a multicast from every host crosses, a tree for each, per byte of a block."""
    leaves = math.ceil(tree.hosts / tree.hosts_per_leaf)
    pods = math.ceil(leaves / tree.leaves_per_pod) if tree.leaves_per_pod else 1
    links = tree.hosts  # up from the root, down to all the others
    links += leaves if leaves > 1 else 0
    return links + (pods if pods > 1 else 0)


@pytest.mark.parametrize("hosts", [2, 3, 8, 188])
def test_a_ring_takes_its_closed_form(hosts: int) -> None:
    block = 64 * KIB
    wire = Wire(hop_ns=250)
    [row] = measure(one_spine(hosts, hosts), wire, [Load("all_gather", "ring", block * hosts)])
    # Cut-through: a block takes its length and two hops, and one packet waits nowhere.
    assert row.time_us == pytest.approx((hosts - 1) * (us(block) + 0.5), rel=1e-4)
    assert row.link_bytes == 2 * (hosts - 1) * hosts * block


@pytest.mark.parametrize("chains", [1, 2, 4, 47, 188])
def test_multicast_is_bound_by_what_a_leaf_receives(chains: int) -> None:
    block = 64 * KIB
    load = Load("all_gather", "multicast", block * 188, chains=chains)
    [row] = measure(paper(), IDEAL, [load])
    assert us(187 * block) <= row.time_us <= us(188 * block) + us(188 * block) * 0.02
    assert sum(row.phases_us.values()) <= row.time_us
    # The control messages are the rest.
    data = crossed(paper()) * 188 * block
    assert data <= row.link_bytes <= data * 1.001


def test_a_host_is_bound_by_its_receive_workers() -> None:
    load = Load("broadcast", "multicast", 8 * KIB * KIB)
    slow = Wire(hop_ns=0, datagram_recv_ns=4 * 4096 / 7)
    times = [
        measure(paper(), replace(slow, recv_workers=n), [load])[0].time_us for n in (1, 2, 4, 8)
    ]
    assert times == pytest.approx([us(load.bytes) * share for share in (4, 2, 1, 1)], rel=0.01)


@pytest.mark.parametrize(("hosts", "within"), [(16, 0.07), (64, 0.03), (188, 0.03)])
def test_the_speedup_of_a_concurrent_reduce_scatter(hosts: int, within: float) -> None:
    """Appendix B: S = 2 - 2/P, for blocks long enough."""
    nbytes = hosts * 256 * KIB
    tree = replace(paper(), hosts=hosts)
    pair = measure(
        tree, IDEAL, [Load(op, "ring", nbytes) for op in ("all_gather", "reduce_scatter")]
    )
    ours = measure(
        tree,
        IDEAL,
        [
            Load("all_gather", "multicast", nbytes, chains=8),
            Load("reduce_scatter", "in_network", nbytes),
        ],
    )
    speedup = max(row.time_us for row in pair) / max(row.time_us for row in ours)
    assert speedup == pytest.approx(2 - 2 / hosts, rel=within)


def test_the_papers_traffic() -> None:
    """188 nodes, 64 KiB a rank: about half the bytes of a ring through all switch ports."""
    nbytes = 188 * 64 * KIB
    loads = [Load("all_gather", name, nbytes) for name in ("multicast", "ring")]
    multicast, ring = (measure(paper(), Wire(), [load])[0].switch_bytes for load in loads)
    assert multicast / ring < 0.53
    assert ring / multicast == pytest.approx(1.99, abs=0.01)


@given(TREES, st.integers(0, 300_000), st.integers(1, 9), st.data())
def test_each_byte_crosses_each_link_once(
    tree: Tree, nbytes: int, chains: int, data: st.DataObject
) -> None:
    op = data.draw(st.sampled_from(["all_gather", "broadcast"]))
    root = data.draw(st.integers(0, tree.hosts - 1))
    load = Load(op, "multicast", nbytes, chains=chains, root=root)
    found = run(tree, IDEAL, [load])
    for port in found.ports:
        if port.target.startswith("host"):
            host = int(port.target.removeprefix("host"))
            own = nbytes // tree.hosts + (host < nbytes % tree.hosts)
            own = own if op == "all_gather" else nbytes * (host == root)
            control = port.bytes - (nbytes - own if tree.hosts > 1 else 0)
            assert 0 <= control <= 64 * 24, port
        else:
            assert port.bytes <= nbytes + 64 * 2 * (tree.hosts + 20) * 8


@given(TREES, st.integers(0, 200_000), st.sampled_from(["ring", "linear"]))
def test_point_to_point_delivers_to_all(tree: Tree, nbytes: int, algorithm: str) -> None:
    found = run(tree, IDEAL, [Load("all_gather", algorithm, nbytes)])
    down = sum(port.bytes for port in found.ports if port.target.startswith("host"))
    assert down == nbytes * (tree.hosts - 1)
    assert len(found.outcomes[0].host_ns) == tree.hosts


@given(
    TREES,
    st.integers(0, 200_000),
    st.sampled_from(["knomial", "binary_tree", "scatter_ring"]),
    st.integers(2, 5),
    st.integers(1, 7),
    st.data(),
)
def test_broadcast_trees_reach_every_host(
    tree: Tree, nbytes: int, algorithm: str, base: int, segments: int, data: st.DataObject
) -> None:
    root = data.draw(st.integers(0, tree.hosts - 1))
    load = Load("broadcast", algorithm, nbytes, radix=base, segments=segments, root=root)
    found = run(tree, IDEAL, [load])
    for port in found.ports:
        if port.target.startswith("host") and port.target != f"host{root}":
            assert port.bytes >= nbytes or algorithm == "scatter_ring"
    down = sum(port.bytes for port in found.ports if port.target.startswith("host"))
    assert down >= nbytes * (tree.hosts - 1)


@given(TREES, st.integers(0, 200_000))
def test_switches_combine_every_contribution(tree: Tree, nbytes: int) -> None:
    found = run(tree, IDEAL, [Load("reduce_scatter", "in_network", nbytes)])
    down = {p.target: p.bytes for p in found.ports if p.target.startswith("host")}
    for host in range(tree.hosts):
        own = nbytes // tree.hosts + (host < nbytes % tree.hosts)
        assert down[f"host{host}"] == (own if tree.hosts > 1 else 0)


@given(TREES, st.floats(0, 1), st.integers(0, 2**63), st.sampled_from([0.0, 1e5, 1e7]))
def test_any_loss_is_fetched(tree: Tree, loss: float, seed: int, alpha_ns: float) -> None:
    load = Load("all_gather", "multicast", 100_000, loss=loss, seed=seed, alpha_ns=alpha_ns)
    found = run(tree, Wire(), [load])
    assert found.outcomes[0].fetched == found.outcomes[0].lost
    assert min(found.outcomes[0].host_ns) >= 0


def test_a_run_repeats_exactly() -> None:
    loads = [
        Load("all_gather", "multicast", 10**6, chains=3, loss=0.02),
        Load("reduce_scatter", "ring", 10**6),
    ]
    first, second = (measure(paper(50), Wire(), loads) for _ in range(2))
    assert first == second
    assert first != measure(paper(50), Wire(), [replace(loads[0], seed=2), loads[1]])


def test_two_thousand_hosts() -> None:
    tree = radix(32, 2048)
    [row] = measure(tree, Wire(), [Load("all_gather", "multicast", 2048 * 16 * KIB, chains=4)])
    assert row.time_us == pytest.approx(us(2048 * 16 * KIB), rel=0.05)


@pytest.mark.parametrize(
    ("tree", "wire", "load"),
    [
        (Tree("t", 0, 1), Wire(), Load("all_gather", "ring", 1)),
        (Tree("t", 9, 2, 1, 0), Wire(), Load("all_gather", "ring", 1)),
        (Tree("t", 9, 2, 1, 1, 2, 0), Wire(), Load("all_gather", "ring", 1)),
        (paper(4), Wire(gbitps=0), Load("all_gather", "ring", 1)),
        (paper(4), Wire(), Load("all_gather", "knomial", 1)),
        (paper(4), Wire(), Load("gather", "ring", 1)),
        (paper(6), Wire(), Load("all_gather", "doubling", 1)),
        (paper(4), Wire(), Load("broadcast", "multicast", 1, root=4)),
        (paper(4), Wire(), Load("broadcast", "knomial", 1, radix=1)),
        (paper(4), Wire(), Load("broadcast", "binary_tree", 1, segments=0)),
        (paper(4), Wire(), Load("all_gather", "multicast", 1, loss=1.5)),
    ],
)
def test_what_cannot_be_simulated(tree: Tree, wire: Wire, load: Load) -> None:
    with pytest.raises(offcore.Error) as failure:
        run(tree, wire, [load])
    assert failure.value.code == "invalid"


def test_trees_by_name() -> None:
    assert fat_tree.tree_of("paper", 188).leaf_ports == 18
    assert fat_tree.tree_of("radix:32", 1024).leaves_per_pod == 16
    assert fat_tree.tree_of("leaf:16", 188).spines == 1
    with pytest.raises(ValueError, match="is not a tree"):
        fat_tree.tree_of("ring", 4)
