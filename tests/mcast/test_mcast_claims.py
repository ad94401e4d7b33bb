"""What `offcore reproduce mcast` says of paper 004's claims, and how it judges them."""

import pytest

from offcore.tools.papers import findings
from offcore.tools.papers.mcast import claims as mcast_claims


@pytest.fixture(scope="module")
def found() -> list[findings.Finding]:
    return mcast_claims.findings(mcast_claims.results())


def test_verdicts(found: list[findings.Finding]) -> None:
    verdicts: dict[str, list[str]] = {}
    for one in found:
        verdicts.setdefault(one.key, []).append(one.verdict)
    assert verdicts == {
        "F2": ["met"],
        "F7": ["met"],
        "F10": ["not met", "met"],  # 64 KiB, 256 KiB
        "F11": ["not met", "not met", "met", "met"],  # two ceilings, two all-gathers
        "F12": ["met", "met", "not met"],
        "F13": ["not counted", "not counted", "not met", "not met"],  # UC, UD
        "B": ["met"],
    }
    told = findings.tally(found)
    assert told == "7 of 13 predicted, 1 of 1 by construction, 2 circular, not counted"


@pytest.mark.parametrize(("best", "met"), [(1.3, True), (1.4, True), (1.0, False), (8.0, False)])
def test_a_ceiling_is_no_floor(best: float, met: bool) -> None:
    """Of "up to 1.3x" 8x is as far off as 1x."""
    ceiling = mcast_claims.ceiling("F11", "broadcast over k-nomial", 1.3, best)
    assert ceiling.met == met
    assert (ceiling.published, ceiling.model) == ("up to 1.3x", f"up to {best:g}x")


def test_uc_is_told_from_its_own_cycles(found: list[findings.Finding]) -> None:
    """Table I's throughput of one UC thread follows from its cycles, simulated or by hand."""
    by_hand = mcast_claims.CHUNK / (598 / 1.8) * 1e9 / mcast_claims.GIB
    uc = [one for one in found if one.basis == "circular"]
    assert float(uc[0].model) == pytest.approx(by_hand, rel=0.01)
    assert all("UC" in one.claim and one.met is None for one in uc)
