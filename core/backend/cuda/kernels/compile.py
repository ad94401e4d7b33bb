"""Compiles NAME.cu into NAME_ptx.inc, which is committed: users need no compiler of CUDA.

    python3 core/backend/cuda/kernels/compile.py               # all; needs nvcc 13.0
    python3 core/backend/cuda/kernels/compile.py --print NAME  # one, to the standard output instead

The PTX is for GPUs from sm_80 (A100) on, in a version that drivers from 470 on take. Each kernel is
a module of its own: the driver compiles the one that is asked for.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).parent
NVCC = ["nvcc", "-std=c++17", "-arch=compute_80", "-ptx", "-O3", "-fmad=false"]
NVCC += [f"-I{FOLDER.parents[3]}"]
VERSION = "7.4"
NAMES = ("reduce", "pack", "exchange")


def compiled(name: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        ptx = Path(folder) / f"{name}.ptx"
        subprocess.run([*NVCC, str(FOLDER / f"{name}.cu"), "-o", str(ptx)], check=True)
        text = ptx.read_text()
    lines = [line.split("//")[0].rstrip() for line in text.splitlines()]
    body = "\n".join(line for line in lines if line)
    entries = re.findall(r"^\.visible \.entry (\w+)\(.*?^\}$", body, re.MULTILINE | re.DOTALL)
    texts = re.findall(r"^\.visible \.entry \w+\(.*?^\}$", body, re.MULTILINE | re.DOTALL)
    head = f".version {VERSION}\n.target sm_80\n.address_size 64\n"
    written = [
        f'{{"{entry}", R"ptx({head}{text}\n)ptx"}},\n'
        for entry, text in zip(entries, texts, strict=True)
    ]
    return f"// Generated from {name}.cu by compile.py.\n" + "".join(written)


if __name__ == "__main__":
    if "--print" in sys.argv[1:]:
        sys.stdout.write(compiled(sys.argv[-1]))
    else:
        for one in NAMES:
            (FOLDER / f"{one}_ptx.inc").write_text(compiled(one))
