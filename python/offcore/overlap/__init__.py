"""Overlap of compute and communication: classes, ideals, and plans from measured tables.

    tables = overlap.load("mi300x-8")
    gather = overlap.Collective("all_gather", 896 << 20, ranks=8)
    plan = overlap.Plan([overlap.gemm(8192, 8192, 8192), gather], tables)
    plan.strategy, plan.order, plan.cores

A plan assigns kernels to cores or engines and orders them; `plan.run(calls)` executes it. Terms are
ConCCL's ("Optimizing ML Concurrent Computation and Communication with GPU DMA Engines"); see
docs/overlap.md.
"""

from offcore.overlap.classify import Ideal, ideal, is_latency_bound, kind_of, share_of_ideal
from offcore.overlap.kernels import Collective, Compute, gemm
from offcore.overlap.plan import STRATEGIES, Plan, chunks_of
from offcore.overlap.run import Place
from offcore.overlap.tables import Cores, Tables, load

__all__ = [
    "STRATEGIES",
    "Collective",
    "Compute",
    "Cores",
    "Ideal",
    "Place",
    "Plan",
    "Tables",
    "chunks_of",
    "gemm",
    "ideal",
    "is_latency_bound",
    "kind_of",
    "load",
    "share_of_ideal",
]
