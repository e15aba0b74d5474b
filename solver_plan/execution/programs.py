"""Plans of the kinds that can be run, and their programs: parallelism and wavefront. No torch."""

from pathlib import Path
from typing import overload

from solver_plan.documents import PlanDocument, ProblemDocument, read_document, require_same_problem
from solver_plan.errors import InputError
from solver_plan.execution import compile as pipelines
from solver_plan.execution.program import Program, describe
from solver_plan.execution.waves.compile import compile_waves
from solver_plan.execution.waves.program import WaveProgram, describe_waves
from solver_plan.kinds import read_problem_and_plan as read_documents
from solver_plan.parallelism.plan import ParallelismPlan
from solver_plan.parallelism.problem import ParallelismProblem
from solver_plan.wavefront.plan import WavefrontPlan
from solver_plan.wavefront.problem import WavefrontProblem

RunnableProblem = ParallelismProblem | WavefrontProblem
RunnablePlan = ParallelismPlan | WavefrontPlan
AnyProgram = Program | WaveProgram


@overload
def compile_plan(problem: ParallelismProblem, plan: ParallelismPlan) -> Program: ...
@overload
def compile_plan(problem: WavefrontProblem, plan: WavefrontPlan) -> WaveProgram: ...
@overload
def compile_plan(problem: RunnableProblem, plan: RunnablePlan) -> AnyProgram: ...
def compile_plan(problem: RunnableProblem, plan: RunnablePlan) -> AnyProgram:
    """Return the program that carries out a plan.

    Raises
    ------
    InputError
        If the plan is of another kind than the problem.
    PlanMismatchError
        If the plan names another problem.
    InvalidPlanError
        If `check` finds violations.
    NotExecutableError
        If the plan asks for what execution does not build.
    """
    if isinstance(problem, ParallelismProblem) and isinstance(plan, ParallelismPlan):
        return pipelines.compile_plan(problem, plan)
    if isinstance(problem, WavefrontProblem) and isinstance(plan, WavefrontPlan):
        return compile_waves(problem, plan)
    require_same_problem(problem, plan)  # refuses two kinds
    raise AssertionError(f"{plan.kind} has programs, and none is compiled")


def read_problem_and_plan(problem: str | Path, plan: str | Path) -> tuple[RunnableProblem, RunnablePlan]:
    """Read the two files. Raises `DocumentError`, and `InputError` if they are not of a kind that has programs."""
    return require_runnable(*read_documents(problem, plan), (problem, plan))


def require_runnable(
    problem: ProblemDocument, plan: PlanDocument, files: tuple[str | Path, str | Path]
) -> tuple[RunnableProblem, RunnablePlan]:
    """Return the two documents, read from these files. Raises `InputError` if they are of a kind without programs."""
    if isinstance(problem, RunnableProblem) and isinstance(plan, RunnablePlan):
        return problem, plan
    other, file = (problem, files[0]) if not isinstance(problem, RunnableProblem) else (plan, files[1])
    raise InputError(
        f"{file}: found kind {other.kind}, which has no program; run it as it is, problem and plan together"
    )


def read_program(path: str | Path) -> AnyProgram:
    """Read and validate a program. Raises `DocumentError`; what it does is checked before it is run, not here."""
    kinds: dict[str, type[AnyProgram]] = {"parallelism": Program, "wavefront": WaveProgram}
    return read_document(path, kinds, "solver-plan/program")


def describe_program(program: AnyProgram) -> str:
    """Return a program as text for a terminal."""
    return describe_waves(program) if isinstance(program, WaveProgram) else describe(program)
