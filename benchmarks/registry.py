"""What can be run: groups of cases, and measurements.

A group is a module of this package with `CASES`, a measurement one with `main`; each is imported when it is asked for.
"""

import importlib
from collections.abc import Sequence

from benchmarks.case import Case
from solver_plan.errors import InputError

GROUPS = ("parallelism", "full", "offload", "wavefront")
MEASUREMENTS = ("execution", "faults", "reality")


def measure(name: str, arguments: Sequence[str]) -> int:
    """Run a measurement with its own arguments and return its exit code."""
    code: int = importlib.import_module(f"benchmarks.{name}").main(arguments)
    return code


def cases_of(group: str) -> tuple[Case, ...]:
    """Return the cases of a group. Raises `InputError` for an unknown one."""
    if group not in GROUPS:
        raise InputError(f"group: found {group!r}; one of {', '.join(GROUPS)}")
    cases: tuple[Case, ...] = importlib.import_module(f"benchmarks.{group}").CASES
    return cases


def chosen(group: str, *, smoke: bool, names: Sequence[str] = ()) -> tuple[Case, ...]:
    """Return the cases of a group that are asked for. Raises `InputError` for an unknown name."""
    cases = cases_of(group)
    unknown = [name for name in names if name not in {case.name for case in cases}]
    if unknown:
        raise InputError(f"case: found {unknown[0]!r}; one of {', '.join(case.name for case in cases)}")
    return tuple(case for case in cases if (case.name in names or not names) and (case.smoke or not smoke))


def case_named(group: str, name: str) -> Case:
    """Return one case. Raises `InputError` for an unknown one."""
    return chosen(group, smoke=False, names=[name])[0]
