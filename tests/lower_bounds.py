"""`python tests/lower_bounds.py FOLDER ARGUMENT...`: pytest with the oldest packages allowed.

Exactly the lower bounds of pyproject.toml are installed from PyPI into a virtual environment;
offcore is the one that this Python imports. Wheels that old are for Python 3.10 and 3.11.
"""

import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]


def oldest() -> list[str]:
    """NAME==VERSION of every lower bound of what is needed to run, to plot, to fit and to test."""
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    lists = re.findall(r"^(?:dependencies|plot|fit|test) = \[(.*?)\]$", text, re.M | re.S)
    bounds = re.findall(r'"([\w-]+)>=([\w.]+)"', " ".join(lists))
    return sorted({f"{name}=={version}" for name, version in bounds})


def main(folder: Path, arguments: list[str]) -> int:
    import offcore

    shutil.rmtree(folder, ignore_errors=True)
    venv.EnvBuilder(with_pip=True, symlinks=True).create(folder)
    python = folder / "bin" / "python"
    install = (python, "-m", "pip", "install", "-q", "--disable-pip-version-check")
    subprocess.check_call((*install, *oldest()))
    site = folder / "site"  # of offcore alone: newer packages lie beside it
    site.mkdir()
    (site / "offcore").symlink_to(Path(offcore.__file__).parent)
    environment = os.environ | {"PYTHONPATH": str(site)}
    return subprocess.call((python, "-m", "pytest", *arguments), env=environment)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).absolute(), sys.argv[2:]))
