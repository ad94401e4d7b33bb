"""Registered tensors: existing memory as a window."""

from __future__ import annotations

from offcore import _core


class Registration:
    """Tensors that peers write directly, from `Communicator.register` until `close`.

    Also a context manager. Dropping the object does not close the registration.
    """

    __slots__ = ("_core", "_made", "_number")

    def __init__(self, core: _core.Communicator, number: int, made: dict[object, object]) -> None:
        self._core, self._made = core, made
        self._number: int | None = number

    def close(self) -> None:
        """Ends this registration: later operations on the tensors are staged through a slot.

        Does not wait, but all ranks must close at the same point in their order of calls;
        otherwise operations on the tensors raise `mismatch` or are staged. Operations in progress,
        graphs and prelaunched operations keep the memory. Does nothing if called twice, after the
        communicator was closed, or in a forked child.
        """
        number, self._number = self._number, None
        if number is not None:
            self._core.deregister(number)
            for key in [key for key, one in self._made.items() if type(one) is _core.Exchanges]:
                del self._made[key]  # by addresses, where other memory may come to lie

    def __enter__(self) -> Registration:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
