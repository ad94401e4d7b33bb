"""Where the stand-in drivers are, built first if need be. As a program: prints libcuda's path."""

import fcntl
import functools
import os
import shutil
import subprocess
from pathlib import Path

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
LIMIT_S = 600


@functools.cache
def fake_cuda_library() -> Path:
    """The library, brought up to date. No sanitizer's build has one: no test wants it there."""
    build = ROOT / "build" / "fakes"
    build.mkdir(parents=True, exist_ok=True)
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    steps = [
        ["cmake", "-S", str(FOLDER), "-B", str(build), *generator],
        ["cmake", "--build", str(build), "--parallel", "2"],
    ]
    # A build tool that runs in a thread sanitizer's runtime, as tests do there, never ends.
    env = {name: told for name, told in os.environ.items() if name != "LD_PRELOAD"}
    with (build / "lock").open("w") as lock:  # tests may run in several processes
        fcntl.flock(lock, fcntl.LOCK_EX)
        for step in steps:
            done = subprocess.run(step, capture_output=True, text=True, env=env, timeout=LIMIT_S)
            if done.returncode != 0:
                raise RuntimeError(f"{' '.join(step)}:\n{done.stdout}{done.stderr}")
    return build / "libcuda.so.1"


def fake_hsa_library(kind: str = "", preset: str | None = None) -> Path:
    """The stand-in HSA runtime, plain or of a sanitizer's build; `_batch` has no queues, `_old` no
    batch copy either."""
    folder = ROOT / "build" / preset / "fakes" if preset else fake_cuda_library().parent
    return folder / f"libhsa-runtime64{kind}.so.1"


def toy_library(preset: str | None = None) -> Path:
    """The toy backend (tests/conformance/toy), plain or of a sanitizer's build."""
    folder = ROOT / "build" / preset / "fakes" if preset else fake_cuda_library().parent
    return folder / "libtoy.so"


def without_torch() -> dict[str, str]:
    """The environment in which a started Python finds none: see absent/torch.py."""
    path = [str(FOLDER / "absent"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(path)}


if __name__ == "__main__":
    print(fake_cuda_library())
