"""Registered tensors: memory that others allocated, as a window."""

from __future__ import annotations

from offcore import _core


class Registration:
    """What `Communicator.register` gives: tensors that peers write directly until `close`.

    A handle that is dropped closes nothing. As a context manager it closes at the end.
    """

    __slots__ = ("_core", "_made", "_number")

    def __init__(self, core: _core.Communicator, number: int, made: dict[object, object]) -> None:
        self._core, self._made = core, made
        self._number: int | None = number

    def close(self) -> None:
        """Undoes this registration: later operations on the tensors go by way of a slot.

        Waits for nobody, but all ranks close at the same place among their calls; where one has
        closed and another has not, operations on the tensors raise `mismatch` or are staged. What
        is under way, graphs and prelaunched operations keep the memory. A second call does nothing,
        nor does any after the communicator was closed or in a child of this process.
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
