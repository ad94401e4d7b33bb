"""Facts common to all results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from offcore import _core


@dataclass(frozen=True)
class Phases:
    """Phases of the path that finished last, in microseconds (section 3.2.2)."""

    control_us: float
    schedule_us: float
    copy_us: float
    sync_us: float


def phases_of(core: _core.Phases) -> Phases:
    return Phases(
        control_us=core.control_ns / 1e3,
        schedule_us=core.schedule_ns / 1e3,
        copy_us=core.copy_ns / 1e3,
        sync_us=core.sync_ns / 1e3,
    )


class Facts:
    """The facts of a result: a class's properties, and the attributes named in `_given`."""

    __slots__ = ()
    _given: ClassVar[tuple[str, ...]] = ("backend", "machine", "ranks")

    def as_dict(self) -> dict[str, Any]:
        """Returns all facts by name."""
        own = vars(type(self))
        names = [*self._given, *(name for name in own if isinstance(own[name], property))]
        return {name: getattr(self, name) for name in names}

    def __repr__(self) -> str:
        facts = ", ".join(f"{name}={value!r}" for name, value in self.as_dict().items())
        return f"{type(self).__name__}({facts})"
