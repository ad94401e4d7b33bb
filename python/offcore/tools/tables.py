"""Tables as the command line prints them."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table


def titled(title: str, words: Sequence[str], numbers: Sequence[str] = ()) -> Table:
    """A table whose columns hold words, and then numbers, which are aligned to the right."""
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", padding=(0, 1, 0, 0))
    for name in words:
        table.add_column(name)
    for name in numbers:
        table.add_column(name, justify="right")
    return table
