"""The one exception, and how Python code raises it."""

from offcore import _core

Error = _core.Error


def error(code: str, message: str) -> _core.Error:
    """An Error to raise: `code` is one of the codes in docs/errors.md."""
    instance = _core.Error(message)
    instance.code = code
    return instance
