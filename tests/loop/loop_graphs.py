"""Graphs of two ranks and what they compute, for tests: integers, so that no byte may differ."""

import numpy as np

from offcore import loop

STEP = loop.Function("(a + b) * 1664525u + 1013904223u", lambda a, b: mixed(a + b))
NEXT = loop.Function("a * 1664525u + 1013904223u", lambda a: mixed(a))


def mixed(a):
    return a * np.uint32(1664525) + np.uint32(1013904223)


def all_reduce(count):
    """In place: halves to their owners, which add and mix, and send them on."""
    graphs = []
    for rank in range(2):
        graph = loop.Graph(rank, 2)
        data = graph.buffer("data", count, "uint32", number=0)
        other = graph.buffer("other", count, "uint32", number=1)
        half = count // 2
        mine = slice(rank * half, (rank + 1) * half)
        theirs = slice((1 - rank) * half, (2 - rank) * half)
        graph.put(1 - rank, other.buffer[theirs], data.buffer[theirs])
        graph.wait(1 - rank, other.buffer[mine])
        graph.map(STEP, data.buffer[mine], data.buffer[mine], other.buffer[mine])
        graph.put(1 - rank, data.buffer[mine], data.buffer[mine])
        graph.wait(1 - rank, data.buffer[theirs])
        graphs.append(graph)
    return graphs


def all_reduce_expected(data, iterations):
    a, b = data
    for _ in range(iterations):
        a = b = mixed(a + b)
    return [a, b]


def mlp(rows, width, hidden):
    """Of a tensor-parallel MLP: each rank has half of the hidden units; sums are split and
    gathered by rows."""
    graphs = []
    for rank in range(2):
        graph = loop.Graph(rank, 2)
        x = graph.buffer("x", rows * width, number=0)
        got = graph.buffer("got", rows * width, number=1)
        y = graph.buffer("y", rows * width, number=2)
        w1, w2 = graph.buffer("w1", width * hidden), graph.buffer("w2", hidden * width)
        h = graph.buffer("h", rows * hidden)
        half = rows * width // 2
        mine = slice(rank * half, (rank + 1) * half)
        theirs = slice((1 - rank) * half, (2 - rank) * half)
        graph.gemm(h, x, w1, rows, hidden, width)
        graph.map(loop.RELU, h, h)
        graph.gemm(y, h, w2, rows, width, hidden)
        graph.put(1 - rank, got.buffer[theirs], y.buffer[theirs])
        graph.wait(1 - rank, got.buffer[mine])
        graph.map(ROW, x.buffer[mine], y.buffer[mine], got.buffer[mine])
        graph.put(1 - rank, x.buffer[mine], x.buffer[mine])
        graph.wait(1 - rank, x.buffer[theirs])
        graphs.append(graph)
    return graphs


# Within -3 to 3, so that sums stay exact in float32, in whatever order they are made.
ROW = loop.Function(
    "(a + b) > 3 ? 3 : (a + b) < -3 ? -3 : (a + b)",
    lambda a, b: np.clip(a + b, np.float32(-3), np.float32(3)),
)


def mlp_expected(x, weights, rows, width, hidden, iterations):
    x = x.reshape(rows, width)
    for _ in range(iterations):
        y = [
            np.maximum(x @ w1.reshape(width, hidden), 0) @ w2.reshape(hidden, width)
            for w1, w2 in weights
        ]
        x = ROW.host(y[0], y[1]).astype(np.float32)
    return x.ravel()
