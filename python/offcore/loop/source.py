"""The CUDA text of a plan: its operators as cases of a switch, with all sizes as constants."""

from __future__ import annotations

from pathlib import Path

import offcore
from offcore.loop.graph import C_TYPES, Graph, Operator, Slice
from offcore.loop.plan import Plan, in_chunks

THREADS = 256
PRELUDE = f"""\
#include <offcore/device.cuh>
namespace offcore::loop {{
using Memory = proxy::GpuMemory;
constexpr unsigned kThreads = {THREADS};
}}
"""
FOOTER = """
extern "C" __global__ void __launch_bounds__({threads}) offcore_loop(offcore::loop::Args args) {{
  Block block{{args, 0, 0}};
  block.run(operate);
}}

// One operator of one iteration, a block a tile: the ordinary run.
extern "C" __global__ void __launch_bounds__({threads}) offcore_step(
    offcore::loop::Args args, Instruction one, Word iteration) {{
  Block block{{args, iteration, 0}};
  if (one.kind != kRun) {{
    if (threadIdx.x == 0) block.await(one);
    return;
  }}
  operate(block, one.a, blockIdx.x);
  block.done(one.a);
}}
"""


def include_paths() -> list[str]:
    return [offcore.device.include_path(), str(Path(__file__).parent)]


def _pointer(graph: Graph, one: Slice) -> str:
    index = list(graph.buffers).index(one.buffer.name)
    kind = C_TYPES[one.buffer.dtype]
    return f"reinterpret_cast<{kind}*>(block.args.memory[{index}]) + {one.first}"


def _map(graph: Graph, one: Operator, part: int) -> list[str]:
    assert one.out is not None
    assert one.function is not None
    kind = C_TYPES[one.out.buffer.dtype]
    names = "abcdefgh"[: len(one.inputs)]
    lines = [f"{kind}* const out = {_pointer(graph, one.out)};"]
    for name, inp in zip(names, one.inputs, strict=True):
        lines.append(f"const {kind}* const in_{name} = {_pointer(graph, inp)};")
    pointers = ", ".join(["out", *(f"in_{name}" for name in names)])
    pack = f"Pack<{kind}>"
    lines.append(f"each<{kind}>({one.out.count}, {part}, tile, aligned({pointers}), [&](Word i) {{")
    for name in names:
        lines.append(f"  const {pack} p_{name} = *reinterpret_cast<const {pack}*>(in_{name} + i);")
    lines += [f"  {pack} made;", f"  for (unsigned j = 0; j < 16 / sizeof({kind}); ++j) {{"]
    lines += [f"    const {kind} {name} = p_{name}.at[j];" for name in names]
    lines += [f"    made.at[j] = {one.function.cuda};", "  }"]
    lines += [f"  *reinterpret_cast<{pack}*>(out + i) = made;", "}, [&](Word i) {"]
    lines += [f"  const {kind} {name} = in_{name}[i];" for name in names]
    return [*lines, f"  out[i] = {one.function.cuda};", "});"]


def _push(graph: Graph, number: int, one: Operator) -> list[str]:
    port = "*block.args.port"
    if one.kind == "signal":
        call = f"signal({port}, {one.peer}, {one.buffer})"
    else:
        assert one.out is not None
        src, place = one.inputs[0], in_chunks(graph, one)
        if place is not None:
            named = f"{one.buffer}, {src.buffer.number}, {place[0]}, {place[1]}"
            call = f"put_signal({port}, {one.peer}, {named})"
        else:
            first, last = src.place[1:]
            named = f"{one.buffer}, {one.out.place[1]}, {src.buffer.number}, {first}"
            call = f"put_bytes({port}, {one.peer}, {named}, {last - first}, true)"
    return [f"if (threadIdx.x == 0) block.pushed({number}, Port::{call});"]


def _case(plan: Plan, number: int) -> list[str]:
    graph, one = plan.graph, plan.graph.operators[number]
    if one.kind in ("put", "signal"):
        return _push(graph, number, one)
    if one.out is None or one.kind == "wait":
        return []
    part = part_of(plan, number)
    if one.kind == "map":
        return _map(graph, one, part)
    kind, out = C_TYPES[one.out.buffer.dtype], _pointer(graph, one.out)
    inputs = ", ".join(_pointer(graph, inp) for inp in one.inputs)
    sizes = ", ".join(str(size) for size in one.sizes)
    if one.kind == "gemm":
        return [f"gemm<{kind}>({out}, {inputs}, {sizes}, tile);"]
    return [f"reduce<{kind}>({out}, {inputs}, {one.out.count}, {sizes}, {part}, tile);"]


def part_of(plan: Plan, number: int) -> int:
    """Elements of each tile of a map or reduce: a multiple of 16 bytes."""
    out = plan.graph.operators[number].out
    assert out is not None
    each = -(-out.count // plan.tiles[number])
    return -(-each // 16) * 16


def body_of(plan: Plan) -> str:
    """Of the text, what is not the GPU's alone."""
    lines = [
        "#include <kernel.cuh>",
        "using namespace offcore::loop;",
        "namespace {",
        "__device__ void operate(Block& block, unsigned op, unsigned tile) {",
        "  switch (op) {",
    ]
    for number, one in enumerate(plan.graph.operators):
        case = _case(plan, number)
        if case:
            lines.append(f"    case {number}: {{  // {one.kind}")
            lines += [f"      {line}" for line in case]
            lines += ["      break;", "    }"]
    return "\n".join([*lines, "    default:", "      break;", "  }", "}", "}  // namespace", ""])


def text_of(plan: Plan) -> str:
    """What nvcc and NVRTC compile: `offcore_loop` and `offcore_step`."""
    return PRELUDE + body_of(plan) + FOOTER.format(threads=THREADS)
