"""Hooks that a model may be copied and saved with."""

import weakref
from collections.abc import Callable

import torch


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

    @property
    def is_live(self) -> bool:
        """Whether its optimizer is there."""
        return self._optimizer() is not None

    def __reduce__(self) -> tuple[Callable[[], object], tuple[()]]:
        return _idle_hook, ()


def is_taken(parameter: torch.Tensor) -> bool:
    """Tell whether a hook waits for the gradients of a parameter, and its optimizer is there."""
    hooks: dict[int, object] = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    return any(isinstance(hook, Hook) and hook.is_live for hook in hooks.values())


def _idle_hook() -> Callable[..., None]:
    return _do_nothing


def _do_nothing(*arguments: object) -> None:
    del arguments
