"""The user's folders: machines and tuned tables of theirs (config), what is remembered (cache)."""

from __future__ import annotations

import tempfile
from pathlib import Path

from offcore import _core
from offcore.errors import error


def machines() -> Path:
    """Where `tune` and `calibrate` write, and where machine files are looked up first."""
    return _folder("OFFCORE_MACHINES", "XDG_CONFIG_HOME", "offcore/machines")


def cache() -> Path:
    """Where offcore keeps what it remembers."""
    return _folder("OFFCORE_CACHE", "XDG_CACHE_HOME", "offcore")


def _folder(variable: str, base: str, below: str) -> Path:
    return Path(_core.env(variable) or Path(_core.env(base), below)).expanduser()


def prepare(folder: Path) -> None:
    """Makes the folder, with its parents, for what comes of minutes of work. Raises `Error`:
    invalid where nothing can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as failure:
        why = failure.strerror
        raise error(
            "invalid", f"cannot write to '{folder}': {why}; name another place by --out"
        ) from None
