"""What a wheel built for PyPI says of itself beside pyproject.toml, which names this as a provider.

The version comes from git's tags: v1.2.3 is version 1.2.3, and 4 commits later it is
1.2.4.dev4+gHASH. An sdist and `git archive` keep that. Where no tag can be seen, as in a shallow
clone, it is a development version after the newest one in CHANGELOG.md. `python python/pypi.py`
prints it.

PyPI shows README.md away from the repository: links and pictures must lead to the repository, as it
is at this version's tag. Who publishes names it, `PROJECT_URL=https://... python -m build`. Without
PROJECT_URL README.md stays as it is, and the metadata names no pages.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ARCHIVED = "$Format:%(describe:tags=true,match=v[0-9]*)$"  # `git archive` fills it in
# What `git describe` tells: a tag with commits after it, or a commit alone.
DESCRIBED = re.compile(r"(?:v(\d+)\.(\d+)\.(\d+)(?:-(\d+)-g([0-9a-f]+))?|([0-9a-f]+))(-dirty)?")
# To a file: neither to another site nor to a heading of the page.
LINK = re.compile(r"(!?)(\[[^\]]*\])\((?!\w+:|#)([^)\s]+)\)")


def described(root: Path) -> str:
    """What git tells of a tree; empty where there is no git, or none of it."""
    if not (root / ".git").exists():
        return "" if ARCHIVED.startswith("$") else ARCHIVED
    # Containers that build wheels see the checkout of another user.
    command = ("git", "-c", "safe.directory=*", "describe", "--always", "--dirty", "--tags")
    try:
        return subprocess.run(
            (*command, "--abbrev=8", "--match=v[0-9]*"),
            cwd=root,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def version(root: Path = ROOT) -> str:
    if (told := root / "PKG-INFO").is_file():  # of an sdist
        [kept] = re.findall(r"^Version: (.+)$", told.read_text("utf-8"), re.M)
        return str(kept)
    told = described(root)
    if (found := DESCRIBED.fullmatch(told)) is None and told:
        raise SystemExit(f"git tells {told!r} of this tree: name tags v1.2.3")
    *tag, commits, after, alone, dirty = found.groups() if found else [None] * 7
    if tag[0] is None:  # of commits since then nothing is known
        log = (root / "CHANGELOG.md").read_text("utf-8")
        [tag, *_] = re.findall(r"^## (\d+)\.(\d+)\.(\d+)$", log, re.M)
    elif not dirty and commits is None:
        return ".".join(tag)
    commit = after or alone
    major, minor, patch = map(int, tag)
    local = ".".join(filter(None, (commit and f"g{commit}", dirty and "dirty")))
    return f"{major}.{minor}.{patch + 1}.dev{commits or 0}{local and '+'}{local}"


def absolute(text: str, url: str, tag: str) -> str:
    """The page with links to the repository's files at that tag."""

    def led(link: re.Match[str]) -> str:
        view = "raw" if link[1] else "blob"
        return f"{link[1]}{link[2]}({url}/{view}/{tag}/{link[3]})"

    return LINK.sub(led, text)


def dynamic_metadata(settings: Mapping[str, Any], project: Mapping[str, Any]) -> dict[str, Any]:
    """The fields version, readme and urls, as scikit-build-core asks for them."""
    text = Path("README.md").read_text("utf-8")
    told = version()
    url, tag = os.environ.get("PROJECT_URL", "").rstrip("/"), f"v{told}"
    pages = {
        "Repository": url,
        "Documentation": f"{url}/blob/{tag}/docs/index.md",
        "Changelog": f"{url}/blob/{tag}/CHANGELOG.md",
        "Issues": f"{url}/issues",
    }
    readme = {"content-type": "text/markdown", "text": absolute(text, url, tag) if url else text}
    return {"version": told, "readme": readme, "urls": pages if url else {}}


def dynamic_wheel(settings: Mapping[str, Any]) -> dict[str, bool]:
    """A wheel may be built from the sdist with another PROJECT_URL."""
    return {"version": False, "readme": True, "urls": True}


if __name__ == "__main__":
    print(version())
