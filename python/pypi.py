"""What a wheel built for PyPI says of itself beside pyproject.toml, which names this as a provider.

PyPI shows README.md away from the repository: links and pictures must lead to the repository, as it
is at this version's tag. Who publishes names it, `PROJECT_URL=https://... python -m build`. Without
PROJECT_URL README.md stays as it is, and the metadata names no pages.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# To a file: neither to another site nor to a heading of the page.
LINK = re.compile(r"(!?)(\[[^\]]*\])\((?!\w+:|#)([^)\s]+)\)")


def absolute(text: str, url: str, tag: str) -> str:
    """The page with links to the repository's files at that tag."""

    def led(link: re.Match[str]) -> str:
        view = "raw" if link[1] else "blob"
        return f"{link[1]}{link[2]}({url}/{view}/{tag}/{link[3]})"

    return LINK.sub(led, text)


def dynamic_metadata(settings: Mapping[str, Any], project: Mapping[str, Any]) -> dict[str, Any]:
    """The fields readme and urls, as scikit-build-core asks for them."""
    text = Path("README.md").read_text("utf-8")
    url, tag = os.environ.get("PROJECT_URL", "").rstrip("/"), f"v{project['version']}"
    pages = {
        "Repository": url,
        "Documentation": f"{url}/blob/{tag}/docs/index.md",
        "Changelog": f"{url}/blob/{tag}/CHANGELOG.md",
        "Issues": f"{url}/issues",
    }
    readme = {"content-type": "text/markdown", "text": absolute(text, url, tag) if url else text}
    return {"readme": readme, "urls": pages if url else {}}


def dynamic_wheel(settings: Mapping[str, Any]) -> dict[str, bool]:
    """A wheel may be built from the sdist with another PROJECT_URL."""
    return {"readme": True, "urls": True}
