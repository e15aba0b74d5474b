"""Plans the training of large models as a constraint program, proves how good the plan is, and runs it.

The functions named here are the whole public interface; each is imported from its room when it is first used, so that
`import solver_plan` costs nothing.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from solver_plan.api import check, plan, show, show_html, simulate, what_if
    from solver_plan.documents import digest_of, write_document
    from solver_plan.execution.checkpoint_folder import Checkpoints
    from solver_plan.execution.offload.optimizer import OffloadOptimizer
    from solver_plan.execution.programs import compile_plan, read_program
    from solver_plan.execution.run import Training, run
    from solver_plan.export.plans import export_plan
    from solver_plan.kinds import read_plan, read_problem
    from solver_plan.profiles.aceso import import_aceso
    from solver_plan.profiles.analytic import profile
    from solver_plan.profiles.cluster import read_cluster
    from solver_plan.profiles.loading import load_description
    from solver_plan.profiles.measured import measure_host, measure_offload
    from solver_plan.solving.progress import terminal_progress

_ROOMS = {
    "Checkpoints": "solver_plan.execution.checkpoint_folder",
    "OffloadOptimizer": "solver_plan.execution.offload.optimizer",
    "Training": "solver_plan.execution.run",
    "check": "solver_plan.api",
    "compile_plan": "solver_plan.execution.programs",
    "digest_of": "solver_plan.documents",
    "export_plan": "solver_plan.export.plans",
    "import_aceso": "solver_plan.profiles.aceso",
    "load_description": "solver_plan.profiles.loading",
    "measure_host": "solver_plan.profiles.measured",
    "measure_offload": "solver_plan.profiles.measured",
    "plan": "solver_plan.api",
    "profile": "solver_plan.profiles.analytic",
    "read_cluster": "solver_plan.profiles.cluster",
    "read_plan": "solver_plan.kinds",
    "read_problem": "solver_plan.kinds",
    "read_program": "solver_plan.execution.programs",
    "run": "solver_plan.execution.run",
    "show": "solver_plan.api",
    "show_html": "solver_plan.api",
    "simulate": "solver_plan.api",
    "terminal_progress": "solver_plan.solving.progress",
    "what_if": "solver_plan.api",
    "write_document": "solver_plan.documents",
}

__all__ = [
    "Checkpoints",
    "OffloadOptimizer",
    "Training",
    "check",
    "compile_plan",
    "digest_of",
    "export_plan",
    "import_aceso",
    "load_description",
    "measure_host",
    "measure_offload",
    "plan",
    "profile",
    "read_cluster",
    "read_plan",
    "read_problem",
    "read_program",
    "run",
    "show",
    "show_html",
    "simulate",
    "terminal_progress",
    "what_if",
    "write_document",
]


def __getattr__(name: str) -> object:
    if name not in _ROOMS:
        raise AttributeError(f"module 'solver_plan' has no attribute {name!r}")
    return getattr(importlib.import_module(_ROOMS[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
