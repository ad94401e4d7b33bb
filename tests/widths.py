"""Whether what commands print fits a terminal of 80 columns."""

COLUMNS = 80


def tables(out: str) -> list[list[str]]:
    """The lines of each table: its head, the line below that, and its rows."""
    lines = out.splitlines()
    found = []
    for number, line in enumerate(lines):
        if line.strip(" ").startswith("\u2500\u2500"):
            rows = lines[number:]
            end = next((at for at, row in enumerate(rows) if not row.strip()), len(rows))
            found.append([*lines[max(0, number - 3) : number], *rows[:end]])
    return found


def too_wide(out: str) -> list[str]:
    """Lines of tables that do not fit, or whose cells were cut to fit."""
    lines = [line.rstrip() for table in tables(out) for line in table]
    return [line for line in lines if len(line) > COLUMNS or "\u2026" in line]
