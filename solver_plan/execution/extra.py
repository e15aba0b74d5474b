"""The extra that running needs. Imports no torch."""

import importlib.util

from solver_plan.errors import NotExecutableError


def require_torch() -> None:
    """Raise `NotExecutableError` if PyTorch is not installed."""
    if importlib.util.find_spec("torch") is None:
        raise NotExecutableError("torch: not installed; running plans needs it: pip install 'solver-plan[run]'")
