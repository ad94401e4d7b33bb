"""Errors made in Python, alike those that the core raises."""

from __future__ import annotations

import offcore


def error(code: str, message: str) -> offcore.Error:
    """An offcore.Error to raise; `code` is one of those that the class lists."""
    made = offcore.Error(message)
    made.code = code
    return made
