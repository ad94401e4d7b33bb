"""Loop kernels: a static graph of operators as one persistent kernel per GPU (docs/loop.md)."""

from offcore.loop.graph import ADD, COPY, MUL, RELU, Buffer, Function, Graph, Slice
from offcore.loop.plan import Plan, schedule_of
from offcore.loop.run import Loop

__all__ = [
    "ADD",
    "COPY",
    "MUL",
    "RELU",
    "Buffer",
    "Function",
    "Graph",
    "Loop",
    "Plan",
    "Slice",
    "schedule_of",
]
