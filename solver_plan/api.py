"""The steps between documents as functions, for every kind of problem: plan, check, simulate, what_if, show."""

from typing import overload

from solver_plan.documents import PlanDocument, ProblemDocument, require_same_problem
from solver_plan.kinds import kind_of
from solver_plan.parallelism.plan import ParallelismPlan
from solver_plan.parallelism.problem import ParallelismProblem
from solver_plan.solving.budget import Budget
from solver_plan.solving.progress import Progress, silent


@overload
def plan(
    problem: ParallelismProblem,
    *,
    time_limit_s: float = ...,
    gap_limit: float = ...,
    workers: int | None = ...,
    deterministic: bool = ...,
    seed: int = ...,
    heuristic: str | None = ...,
    on_progress: Progress = ...,
) -> ParallelismPlan: ...
@overload
def plan(
    problem: ProblemDocument,
    *,
    time_limit_s: float = ...,
    gap_limit: float = ...,
    workers: int | None = ...,
    deterministic: bool = ...,
    seed: int = ...,
    heuristic: str | None = ...,
    on_progress: Progress = ...,
) -> PlanDocument: ...
def plan(
    problem: ProblemDocument,
    *,
    time_limit_s: float = 60.0,
    gap_limit: float = 0.0,
    workers: int | None = None,
    deterministic: bool = False,
    seed: int = 0,
    heuristic: str | None = None,
    on_progress: Progress = silent,
) -> PlanDocument:
    """Find the best plan within a budget and certify how good it is.

    Parameters
    ----------
    problem
        What to plan.
    time_limit_s
        Seconds; with `deterministic`, deterministic seconds, which a loaded machine does not shorten.
    gap_limit
        Stop when (objective - bound) / objective is at most this.
    workers
        Solver workers; None: the machine's cores, or one with `deterministic`.
    deterministic
        The same plan every time.
    seed
        Of the solvers' random choices.
    heuristic
        Run this heuristic alone, and no solver.
    on_progress
        Is told each better plan or bound; `terminal_progress()` prints them.

    Returns
    -------
    PlanDocument
        The plan, of the kind of the problem, with its certificate.

    Raises
    ------
    InputError
        If a limit or the heuristic's name makes no sense.
    InfeasibleProblemError
        If no plan exists: which limit, where, by how much.
    NoPlanFoundError
        If the limit was reached without any plan.
    """
    budget = Budget(
        time_limit_s=time_limit_s, gap_limit=gap_limit, workers=workers, deterministic=deterministic, seed=seed
    )
    return kind_of(problem).plan(problem, budget, heuristic=heuristic, on_progress=on_progress).plan


def check(problem: ProblemDocument, plan: PlanDocument) -> tuple[str, ...]:
    """Return every violation of a plan, one line each; empty for a valid one.

    Raises
    ------
    PlanMismatchError
        If the plan was made for another problem.
    """
    require_same_problem(problem, plan)
    return kind_of(problem).check(problem, plan)


def simulate(problem: ProblemDocument, plan: PlanDocument) -> str:
    """Play a plan event by event and return what happened, as text for a terminal.

    Raises
    ------
    PlanMismatchError
        If the plan was made for another problem.
    InvalidPlanError
        If the plan violates the problem.
    """
    require_same_problem(problem, plan)
    return kind_of(problem).simulate(problem, plan)


def what_if(
    problem: ProblemDocument,
    plan: PlanDocument,
    *,
    time_limit_s: float = 60.0,
    workers: int | None = None,
    deterministic: bool = False,
) -> str:
    """Return what binds a plan and what a larger machine would bring, as tables for a terminal.

    Parameters
    ----------
    problem, plan
        A problem and a valid plan of it.
    time_limit_s
        Seconds for planning all larger problems, in equal shares; with `deterministic`, deterministic seconds.
    workers, deterministic
        As for `plan`.

    Raises
    ------
    PlanMismatchError
        If the plan was made for another problem.
    InvalidPlanError
        If the plan violates the problem.
    """
    require_same_problem(problem, plan)
    budget = Budget(time_limit_s=time_limit_s, workers=workers, deterministic=deterministic)
    return kind_of(problem).what_if(problem, plan, budget)


def show(plan: PlanDocument, problem: ProblemDocument | None = None, *, more: str = "") -> str:
    """Return a plan and its certificate as tables for a terminal; with the problem, names and limits too.

    `more`, as from `what_if`, follows behind.

    Raises
    ------
    PlanMismatchError
        If the plan was made for another problem.
    """
    from solver_plan.report.tables import certificate_table, trace_table

    if problem is not None:
        require_same_problem(problem, plan)
    parts = [kind_of(plan).describe(plan, problem)]
    if plan.certificate is not None:
        parts += [certificate_table(plan.certificate), trace_table(plan.certificate)]
    parts.append(more)
    return "\n\n".join(part.rstrip("\n") for part in parts if part) + "\n"


def show_html(plan: PlanDocument, problem: ProblemDocument | None = None, *, more: str = "") -> str:
    """Return a plan as a self-contained page: its picture where the kind has one, then what `show` returns.

    Raises
    ------
    PlanMismatchError
        If the plan was made for another problem.
    """
    from solver_plan.report.page import page

    text = show(plan, problem, more=more)
    return page(f"{plan.kind} plan", kind_of(plan).picture(plan, problem), text)
