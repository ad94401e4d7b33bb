"""Runs pytest without optional tools and packages: `python tests/bare.py FOLDER ARGUMENT...`

PATH is a folder of links to all programs but those, and the Python is that of a virtual environment
that links to all packages of this one but those: what they hide is hidden from every process that a
test starts, too.
"""

import os
import shutil
import site
import subprocess
import sys
import venv
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from needs import PACKAGES, TOOLS

# With what comes along with them.
HIDDEN_PACKAGES = (*PACKAGES, "functorch", "mpl_toolkits", "nvtx", "pylab", "torchgen")
HIDDEN_TOOLS = (*TOOLS, "cuobjdump", "nvcc", "nvdisasm", "nvidia-smi", "torchrun")


def tools(folder: Path) -> None:
    """Links to every program on PATH but the hidden ones; the first of a name counts."""
    folder.mkdir()
    for place in map(Path, os.get_exec_path()):
        for program in place.iterdir() if place.is_dir() else ():
            link = folder / program.name
            if program.name not in HIDDEN_TOOLS and not link.is_symlink():
                link.symlink_to(program.absolute())


def packages(folder: Path) -> Path:
    """A virtual environment without the hidden packages. Its Python."""
    venv.EnvBuilder(symlinks=True).create(folder)
    python = folder / "bin" / "python"
    asked = "import site; print(site.getsitepackages()[0])"
    inside = Path(subprocess.check_output((python, "-c", asked), text=True).strip())
    for place in map(Path, site.getsitepackages()):
        for package in place.iterdir():
            name = package.name.split("-")[0].split(".")[0]
            if name not in HIDDEN_PACKAGES:
                (inside / package.name).symlink_to(package)
    return python


def main(folder: Path, arguments: list[str]) -> int:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    tools(folder / "bin")
    python = packages(folder / "venv")
    path = os.pathsep.join(map(str, (python.parent, folder / "bin")))
    return subprocess.call((python, "-m", "pytest", *arguments), env=os.environ | {"PATH": path})


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).absolute(), sys.argv[2:]))
