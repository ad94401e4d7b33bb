"""Tables as the command line prints them: 80 columns, where the terminal has no more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
from rich.table import Column, Table
from rich.text import Text

WIDTH = 80
_WORD_MAX = 24  # longer cells are prose, which wraps
_ANY = 1000


class Page(Console):
    """A console that fits tables to its width: heads go on two lines, columns move together, and
    what is the same in all rows goes into the title. What is wider still keeps its width."""

    def print(self, *objects: Any, **options: Any) -> None:
        for one in objects:
            if isinstance(one, Table):
                needed = self._fitted(one)
                title, one.title = one.title, None  # it would wrap at a narrow table's width
                if title:
                    super().print(f"[table.title]{title}[/]", highlight=False)
                if needed > self.width:
                    options |= {"width": needed, "crop": False}
        super().print(*objects, **options)

    def _fitted(self, table: Table) -> int:
        """The width that it needs."""
        for column in table.columns:
            column.no_wrap = max(map(_width, column.cells), default=0) <= _WORD_MAX
        if self._least(table) > self.width:
            for column in table.columns:
                column.header = str(column.header).replace(" ", "\n")
                column.vertical = "bottom"
            table.padding = (0, 0)
        for column in list(table.columns):
            if self._least(table) > self.width and table.row_count > 1 and _is_constant(column):
                table.columns.remove(column)
                head = str(column.header).replace("\n", " ")
                table.title = f"{table.title or ''}, {head}: {next(iter(column.cells))}".strip(", ")
        return self._least(table)

    def _least(self, table: Table) -> int:
        for column in table.columns:
            if column.no_wrap:
                column.min_width = max(map(_width, [column.header, *column.cells]))
        return Measurement.get(self, self.options.update(width=_ANY), table).minimum


def _width(cell: object) -> int:
    lines = Text.from_markup(str(cell)).plain.splitlines()
    return max(map(cell_len, lines), default=0)


def _is_constant(column: Column) -> bool:
    return (
        column.header not in ("", "#wrong")
        and len({str(cell) for cell in column.cells} - {""}) == 1
    )


def titled(title: str, words: Sequence[str], numbers: Sequence[str] = ()) -> Table:
    """A table whose columns hold words, and then numbers, which are aligned to the right."""
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", padding=(0, 1, 0, 0))
    for name in words:
        table.add_column(name)
    for name in numbers:
        table.add_column(name, justify="right")
    return table
