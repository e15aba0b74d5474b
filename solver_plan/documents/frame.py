"""What every problem and every plan have in common."""

from typing import Literal

from pydantic import JsonValue

from solver_plan.documents.certificate import Certificate
from solver_plan.documents.fields import document


@document
class ProblemDocument:
    """What is to be scheduled and what each choice costs; each kind derives its own."""

    format: Literal["solver-plan/problem"] = "solver-plan/problem"
    version: Literal[1] = 1
    kind: str
    provenance: dict[str, JsonValue] | None = None
    """Where it comes from; nothing reads it."""


@document
class PlanDocument:
    """What was chosen, what it is predicted to cost and how good it is proven to be."""

    format: Literal["solver-plan/plan"] = "solver-plan/plan"
    version: Literal[1] = 1
    kind: str
    problem_digest: str | None
    """Digest of the problem it solves; None: written by hand."""
    certificate: Certificate | None = None
    """None: written by hand, nothing is claimed."""
    provenance: dict[str, JsonValue] | None = None


@document
class ProgramDocument:
    """What every rank does to carry out a plan; each kind derives its own."""

    format: Literal["solver-plan/program"] = "solver-plan/program"
    version: Literal[1] = 1
    kind: str
    problem_digest: str
    plan_digest: str


Document = ProblemDocument | PlanDocument | ProgramDocument
