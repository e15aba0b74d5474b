"""What can go wrong, one class a kind.

Each message states the rule, the value found and the remedy, on one line. `exit_code` is what the command
line answers with.
"""


class SolverPlanError(Exception):
    """Base of everything this package raises on purpose."""

    exit_code = 1


class InputError(SolverPlanError):
    """What was given cannot be used: an argument, a file or a combination of them."""

    exit_code = 2


class DocumentError(InputError):
    """A document breaks a rule of its format.

    Parameters
    ----------
    file
        Name of the file, or a word for a document that is no file.
    place
        Where in the document, such as ``components[3].layers``; empty for the document as a whole.
    found
        The offending value, as short text.
    rule
        What would be right.
    """

    def __init__(self, file: str, place: str, found: str, rule: str) -> None:
        at = f"{file}: {place}" if place else file
        super().__init__(f"{at}: found {found}; {rule}")
        self.file = file
        self.place = place
        self.found = found
        self.rule = rule

    def __reduce__(self) -> tuple[type["DocumentError"], tuple[str, str, str, str]]:
        return type(self), (self.file, self.place, self.found, self.rule)  # a worker's error reaches its parent whole


class PlanMismatchError(InputError):
    """A plan belongs to another problem than the one it was given with."""


class NotExecutableError(InputError):
    """A valid plan that cannot be run: the message names what is not built, or what does not match."""


class NotExportableError(InputError):
    """A valid plan that another system cannot carry out as it is: the message names each thing that would be lost."""


class CheckpointError(InputError):
    """A checkpoint cannot be used for this run, or is not whole."""


class OutputError(InputError):
    """A result cannot be written where it was asked to go."""


class InfeasibleProblemError(SolverPlanError):
    """No valid plan exists; the message says which limit, where, by how much, and what would help."""

    exit_code = 3


class NoPlanFoundError(SolverPlanError):
    """No plan was found: the limit came first, or what was searched holds none; one may exist."""

    exit_code = 4


class InvalidPlanError(SolverPlanError):
    """A plan violates its problem.

    Parameters
    ----------
    violations
        One line for each violation.
    """

    exit_code = 5

    def __init__(self, violations: tuple[str, ...]) -> None:
        super().__init__("; ".join(violations))
        self.violations = violations

    def __reduce__(self) -> tuple[type["InvalidPlanError"], tuple[tuple[str, ...]]]:
        return type(self), (self.violations,)


class SolverError(SolverPlanError):
    """A solver refused a model or a parameter: a fault of this package, with the solver's own words."""


class RunFailedError(SolverPlanError):
    """A process of a run ended early or did not end in time; the message says which."""
