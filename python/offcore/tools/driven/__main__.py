"""One section on two GPUs: python -m offcore.tools.driven SECTION ROUNDS FILE."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from offcore.tools.driven.by_cpu import by_the_cpu
from offcore.tools.driven.by_nccl import by_nccl
from offcore.tools.driven.contention import contention
from offcore.tools.driven.forms import chases
from offcore.tools.driven.gpu import Bench, ping_pongs, pushes, soak, throughput

SECTIONS: dict[str, Callable[[Bench], None]] = {
    "proxy": lambda bench: ping_pongs(bench, "proxy"),
    "armed": lambda bench: ping_pongs(bench, "armed"),
    "armed-co": lambda bench: ping_pongs(bench, "armed co"),
    "cpu": by_the_cpu,
    "nccl": by_nccl,
    "push": pushes,
    "soak": soak,
    "throughput": throughput,
    "contention": contention,
    "forms": chases,
}


def main(section: str, rounds: int, file: Path) -> None:
    failures: list[str] = []
    try:
        bench = Bench(rounds, file, "copy_order" if section == "armed-co" else "fenced")
        failures = bench.failures
        SECTIONS[section](bench)
    except Exception as error:  # a driver's too: told like the others
        tell(section, [*failures, f"{type(error).__name__}: {error}"])
        os._exit(1)  # nothing of a failed context is taken down
    tell(section, failures)
    sys.exit(len(failures) > 0)


def tell(section: str, failures: list[str]) -> None:
    for failure in failures:
        print(f"{section}: {failure}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
