"""Where the stand-in drivers are, built first if need be. As a program: prints libcuda's path."""

import fcntl
import functools
import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
LIMIT_S = 600


def sanitizer() -> str | None:
    """Whose build of the package this is."""
    spec = importlib.util.find_spec("offcore")
    origin = "" if spec is None else str(spec.origin)
    return next((name for name in ("asan", "tsan") if f"/build/{name}/" in origin), None)


@functools.cache
def fake_cuda_library() -> Path:
    """The library, brought up to date; beside a sanitizer's build of the package the one of that
    build, which came with it. The thread sanitizer sees the copies of any other, but not what
    orders them."""
    if preset := sanitizer():
        return ROOT / "build" / preset / "fakes" / "libcuda.so.1"
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


def fake_hsa_library(kind: str = "") -> Path:
    """The stand-in HSA runtime: `_batch` has no queues, `_old` no batch copy either."""
    return fake_cuda_library().with_name(f"libhsa-runtime64{kind}.so.1")


def toy_library() -> Path:
    """The toy backend (tests/conformance/toy)."""
    return fake_cuda_library().with_name("libtoy.so")


def without_torch() -> dict[str, str]:
    """The environment in which a started Python finds none: see absent/torch.py."""
    path = [str(FOLDER / "absent"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(path)}


if __name__ == "__main__":
    print(fake_cuda_library())
