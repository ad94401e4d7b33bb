"""A published claim beside what this project gives for it, and how such lines are counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

# Where our number comes from. "predicted": nothing that the claim states went into it. "fitted":
# parameters were fitted to the published number, so that an agreement shows only that the model can
# produce it. "by construction": it follows from a program's commands, from arithmetic, or is taken
# from the paper. "circular": another of the paper's numbers in other units. "measured": on other
# hardware than the paper's, as recorded. "not measured": there is no number of ours.
Basis = Literal["predicted", "fitted", "by construction", "circular", "measured", "not measured"]


@dataclass(frozen=True)
class Finding:
    """One line of the table that a person reads."""

    key: str
    claim: str
    published: str
    model: str
    difference: str
    basis: Basis
    met: bool | None  # None: it cannot fail, so it is not counted

    @property
    def verdict(self) -> str:
        return "not counted" if self.met is None else "met" if self.met else "not met"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def percent(share: float) -> str:
    """With its sign, which a zero has not."""
    return f"{100 * share:+.1f} %" if abs(share) >= 5e-4 else "0.0 %"


def tally(findings: Sequence[Finding]) -> str:
    """How many are met, apart by basis: an agreement that was fitted is no prediction."""
    parts = []
    for basis in get_args(Basis):
        of_basis = [one for one in findings if one.basis == basis]
        counted = [one for one in of_basis if one.met is not None]
        met = sum(bool(one.met) for one in counted)
        if counted:
            parts.append(f"{met} of {len(counted)} {basis}")
        elif basis == "predicted":
            parts.append("none predicted")
        if left := len(of_basis) - len(counted):
            parts.append(f"{left} {basis}, not counted")
    return ", ".join(parts)
