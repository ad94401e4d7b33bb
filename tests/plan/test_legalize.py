"""What legalize writes does what the given program says, on machines that lack its commands."""

import numpy as np
import pytest

from offcore import _core, machines

SWAP = """\
program test machine=m ranks=2 variant=v mode=eager protocol=promise native=yes flags=4 span=1
buffer out window 512
queue 0.0
  swap out[1]+{dst} <-> out[0]+0 bytes=64 rows=3 dst_step=64 src_step=128
  signal flag[1]:0 = 1
queue 1.caller
  poll flag[1]:0 >= 1
"""


@pytest.mark.parametrize("machine", ["mi300x-8", "h200-2"])
@pytest.mark.parametrize("dst", [64, 3])  # 3: no swap packet may start there
def test_a_strided_swap_keeps_all_its_rows(machine: str, dst: int) -> None:
    loaded = machines.load(machine)
    given = _core.Program.parse(SWAP.format(dst=dst))
    legal = _core.legalize(given, loaded)
    _core.verify(legal)
    assert not legal.native
    assert "rows=" not in str(legal)
    results = []
    for program in (given, legal):
        data = [np.arange(512, dtype=np.uint16).astype(np.uint8) + rank for rank in range(2)]
        _core.Session("sim", loaded, 2).run(program, {"out": data})
        results.append(data)
    for before, after in zip(*results, strict=True):
        assert (before == after).all()
    assert (results[1][0][:64] == np.arange(dst, dst + 64, dtype=np.uint8) + 1).all()
