"""Files of rows, an object a line: read, and checked before anything is made of them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from offcore.errors import error

# What a key of a row may hold, as annotations of dataclasses spell it. Numbers are finite and not
# below 0; of a form with " > 0" they are above.
_KINDS: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "bool": (bool,),
    "int": (int,),
    "float": (int, float),
    "dict[str, float]": (dict,),
    "None": (type(None),),
}


def read_records(path: Path) -> list[dict[str, Any]]:
    """The objects of a file of rows. Raises invalid."""
    try:
        found = [json.loads(line) for line in path.read_text("utf-8").splitlines() if line.strip()]
    except OSError as failure:
        raise error("invalid", f"cannot read '{path}': {failure.strerror}") from None
    except (ValueError, RecursionError) as failure:
        raise error("invalid", f"'{path}' holds no rows, an object a line: {failure}") from None
    if strange := [number for number, one in enumerate(found, 1) if not isinstance(one, dict)]:
        raise error(
            "invalid", f"'{path}' must hold one JSON object per line: row {strange[0]} is not one"
        )
    return found


def check_records(
    records: Iterable[Mapping[str, Any]], forms: Mapping[str, str], optional: Iterable[str] = ()
) -> None:
    """Raises invalid where a row lacks a key of `forms`, or holds there what it must not."""
    for one in records:
        if missing := [name for name in forms if name not in one and name not in optional]:
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            raise error("invalid", f"not a row: it lacks {', '.join(missing[:3])}{more}")
        for name, form in forms.items():
            if name in one and not _fits(one[name], form):
                raise error("invalid", f"not a row: {name} is {one[name]!r:.40}, not {form}")


def _fits(value: Any, form: str) -> bool:
    form, _, bound = form.partition(" > ")
    kinds = [kind for part in form.split(" | ") for kind in _KINDS[part]]
    if isinstance(value, bool):
        return bool in kinds
    if isinstance(value, int | float):
        above = value > 0 if bound else value >= 0
        if not (above and math.isfinite(value)):
            return False
    return isinstance(value, tuple(kinds))
