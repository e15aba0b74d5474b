"""Hooks that a model may be copied and saved with."""

import weakref
from collections.abc import Callable


class Hook:
    """Calls a method of an optimizer for as long as it is there.

    The optimizer is not kept alive, and a copy of the model, or one that was pickled, has nothing to do with it.
    """

    def __init__(self, optimizer: object, method: Callable[..., None], *given: object) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._method = method
        self._given = given

    def __call__(self, *arguments: object) -> None:
        """Call the method with what was given, then the arguments."""
        optimizer = self._optimizer()
        if optimizer is not None:
            self._method(optimizer, *self._given, *arguments)

    def __reduce__(self) -> tuple[Callable[[], object], tuple[()]]:
        return _idle_hook, ()


def _idle_hook() -> Callable[..., None]:
    return _do_nothing


def _do_nothing(*arguments: object) -> None:
    del arguments
