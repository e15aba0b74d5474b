"""What a planner returns."""

from dataclasses import dataclass
from typing import Generic, TypeVar

from solver_plan.documents import PlanDocument

PlanT = TypeVar("PlanT", bound=PlanDocument)


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """What a search cost."""

    wall_s: float
    deterministic_s: float
    first_plan_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned(Generic[PlanT]):
    """A plan with its certificate, and what finding it cost."""

    plan: PlanT
    effort: Effort
