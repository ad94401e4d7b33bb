"""One section on two GPUs: python -m offcore.tools.driven SECTION ROUNDS FILE."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from offcore.tools.driven.by_cpu import by_the_cpu
from offcore.tools.driven.contention import contention
from offcore.tools.driven.forms import chases
from offcore.tools.driven.gpu import Bench, ping_pongs, pushes, throughput

SECTIONS: dict[str, Callable[[Bench], None]] = {
    "proxy": lambda bench: ping_pongs(bench, "proxy"),
    "armed": lambda bench: ping_pongs(bench, "armed"),
    "armed-co": lambda bench: ping_pongs(bench, "armed co"),
    "cpu": by_the_cpu,
    "push": pushes,
    "throughput": throughput,
    "contention": contention,
    "forms": chases,
}


def main(section: str, rounds: int, file: Path) -> None:
    try:
        bench = Bench(rounds, file, "copy_order" if section == "armed-co" else "fenced")
        SECTIONS[section](bench)
    except Exception as error:  # a driver's too: told like the others
        print(f"{section}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)  # nothing of a failed context is taken down
    for failure in bench.failures:
        print(f"{section}: {failure}", file=sys.stderr, flush=True)
    sys.exit(len(bench.failures) > 0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
