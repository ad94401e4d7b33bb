"""Records what the simulator says: `python benchmarks/record.py [FOLDER]` (benchmarks/results).

Runs the commands below, as a user would, and writes their rows, one file a command. Into
`sim-mi300x-8-measures.jsonl` go the seconds that the full sweep took and DMA-Latte's claims
beside the model's numbers; the plot of docs/performance.md is drawn from the rows too.

`python benchmarks/record.py --gpus` runs nothing: it makes the tables of GPUs and the README's
plot anew from the recorded rows, which gpu_bench.py measures.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from PIL import Image

from offcore.tools import plot
from offcore.tools.bench import compare
from offcore.tools.papers.latte import calibrated, sweep
from offcore.tools.papers.latte import rows as claims
from offcore.tools.records import read_records
from offcore.tools.report import Row, Stamp, rows_of

MACHINE = "mi300x-8"
ROOT = Path(__file__).resolve().parents[1]
WITH_TABLES = (
    ROOT / "docs" / "performance.md",
    ROOT / "docs" / "measurements" / "cuda.md",
)  # of GPUs
RESULTS = ROOT / "benchmarks" / "results"
IMAGES = ROOT / "docs" / "images"
GPU_PANELS = (("all_gather", True, "in place"), ("all_to_all", False, "out of place"))
GPU_LINES = {
    "promised,co": ("offcore, promised, copy order", "#0072B2", "o"),
    "safe,co": ("offcore, safe, copy order", "#D55E00", "s"),
    "promised": ("offcore, promised, fenced", "#56B4E9", "^"),
    "nccl-ce": ("NCCL's copy engines, graph", "#7F7F7F", "x"),
}
SWEEPS = {
    "all_gather": ("bench", "all_gather"),
    "all_gather-in_place": ("bench", "all_gather", "--in-place"),
    "all_to_all": ("bench", "all_to_all"),
    "all_to_all-in_place": ("bench", "all_to_all", "--in-place"),
}
# One sweep of both collectives, every variant of each (swap has to be in place).
FULL = ("all_gather-in_place", "all_to_all", "all_to_all-in_place")


def run(words: tuple[str, ...], path: Path) -> float:
    """The seconds that a command took, its start-up included."""
    command = (*words, "--machine", MACHINE, "--json", str(path))
    print("offcore", *command[:-2], flush=True)
    start_s = time.monotonic()
    subprocess.run(
        (sys.executable, "-m", "offcore.tools.cli", *command), check=True, stdout=subprocess.DEVNULL
    )
    return time.monotonic() - start_s


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", type=Path, default=RESULTS, help="for the rows")
    parser.add_argument("--gpus", action="store_true", help="tables and plot of GPUs, no more")
    args = parser.parse_args()
    if args.gpus:
        for page in WITH_TABLES:
            page.write_text(compare.filled(page.read_text("utf-8"), RESULTS), "utf-8")
        draw_gpus(IMAGES / "h200-4-collectives.png")
        return
    folder = args.folder
    folder.mkdir(parents=True, exist_ok=True)
    # Moved into place at the end: results being written would make the commit of the next dirty.
    with tempfile.TemporaryDirectory() as name:
        measure(Path(name))
        for path in sorted(Path(name).iterdir()):
            target = IMAGES if path.suffix == ".png" else folder
            shutil.move(path, target / path.name)
            print(target / path.name)


def measure(folder: Path) -> None:
    paths = {name: folder / f"sim-{MACHINE}-{name}.jsonl" for name in SWEEPS}
    stamp = vars(Stamp())
    load = os.getloadavg()[0]
    seconds = {name: run(words, paths[name]) for name, words in SWEEPS.items()}
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    run(("breakdown",), folder / f"sim-{MACHINE}-breakdown.jsonl")

    rows = [row for name in FULL for row in rows_of(read_records(paths[name]))]
    measures: list[dict[str, Any]] = [
        {
            "measure": "sweep_seconds",
            "value": round(sum(seconds[name] for name in FULL), 2),
            "limit": 20,
            "cores": len(os.sched_getaffinity(0)),
            "load_before": round(load, 1),
            "cpu_seconds_of_all_files": round(used.ru_utime + used.ru_stime, 2),
            "sizes": "1K:4G",
            "files": [paths[name].name for name in FULL],
            "rows": len(rows),
        }
    ]
    model = calibrated.load(MACHINE)
    found = sweep.simulated(model.machine, model.rccl)
    measures += [
        {"measure": "claim"} | claim.to_json()
        for claim in claims.findings(found, sweep.programs(model.machine))
    ]
    lines = [json.dumps(one | stamp) + "\n" for one in measures]
    (folder / f"sim-{MACHINE}-measures.jsonl").write_text("".join(lines), "utf-8")
    draw(rows, folder / f"sim-{MACHINE}.png")


def draw(rows: list[Row], path: Path) -> None:
    """The plot of docs/performance.md."""
    plot.plot_rows(rows, path, "speedup")
    shrink(path, (1400, 644))


def draw_gpus(path: Path) -> None:
    """The README's plot: times as fast as NCCL's kernels on 4 x H200."""
    records = read_records(RESULTS / "cuda-h200-4.jsonl")
    figure, panels = plot.pyplot().subplots(1, 2, figsize=(9.6, 3.6), sharey=True)
    for axes, (op, in_place, where) in zip(panels, GPU_PANELS, strict=True):
        times = compare.times_of(records, op, 4, in_place)
        sizes = sorted(times["nccl"])
        for head, (label, colour, marker) in GPU_LINES.items():
            of = {size: times["nccl"][size] / one for size, one in times[head].items()}
            axes.plot(of.keys(), of.values(), color=colour, marker=marker, ms=3.5, label=label)
        axes.axhline(1, color="black", linewidth=1)
        plot.size_axis(axes, sizes)
        axes.set_title(f"{op}, {where}", fontsize=10)
        axes.grid(alpha=0.25)
    panels[0].set_ylabel("times as fast as NCCL's kernels")
    panels[0].set_ylim(0, None)
    panels[0].yaxis.set_major_formatter("{x:g}x")
    lines, labels = panels[0].get_legend_handles_labels()
    figure.legend(lines, labels, fontsize=8, loc="lower center", ncols=4)
    figure.suptitle(
        "4 x H200, NCCL 2.28.9 replayed from a graph, without NVLink multicast", size=10
    )
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.savefig(path, dpi=150)
    shrink(path, (1440, 540))


def shrink(path: Path, size: tuple[int, int]) -> None:
    """In few colours: it lies in the repository."""
    with Image.open(path) as image:
        small = image.convert("RGB").resize(size, Image.Resampling.LANCZOS)
    small.quantize(128, Image.Quantize.MAXCOVERAGE).save(path, optimize=True)


if __name__ == "__main__":
    main()
