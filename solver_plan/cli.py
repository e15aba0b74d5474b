"""The command line: one verb an arrow between documents.

Exit codes: 0 done; 2 wrong input; 3 proven infeasible; 4 no plan found within the limit; 5 violations; 1 anything else.
What goes wrong is one line on standard error. Verbs stand in `solver_plan/commands`; nothing heavy is imported here.
"""

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from solver_plan.commands import VERBS
from solver_plan.errors import InputError, OutputError, SolverPlanError
from solver_plan.report.printable import printable


class _Parser(argparse.ArgumentParser):
    """A parser whose complaints are one line."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{self.prog}: {message}; see {self.prog} --help")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser with every verb."""
    common = _Parser(add_help=False)
    common.add_argument("--verbose", action="store_true", help="log each step, and show tracebacks")
    parser = _Parser(
        prog="solver-plan",
        description="Plan the training of large models as a constraint program, and prove how good the plan is.",
    )
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True, parser_class=_Parser)
    for verb in VERBS:
        sub = verbs.add_parser(verb.name, help=verb.summary, description=verb.summary, parents=[common])
        verb.add_arguments(sub)
        sub.set_defaults(run=verb.run)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    verbose = "--verbose" in (sys.argv[1:] if arguments is None else arguments)
    level = logging.DEBUG if verbose else logging.ERROR
    logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s")
    try:
        try:
            parsed = build_parser().parse_args(arguments)
            code = int(parsed.run(parsed))
        except SystemExit as done:  # after --help
            code = int(done.code or 0)
        _flush()
    except SolverPlanError as error:
        logging.getLogger(__name__).debug("where it was refused", exc_info=error)
        _complain(str(error))
        return error.exit_code
    except BrokenPipeError:
        _drop_output()
        return 1
    except KeyboardInterrupt:
        _complain("interrupted")
        return 1
    except MemoryError as error:
        if verbose:
            raise
        _complain(f"out of memory ({str(error) or 'none is left'}); take a smaller problem, or a larger machine")
        return 1
    except Exception as error:
        if verbose:
            raise
        _complain(f"unexpected {type(error).__name__}: {error}; --verbose shows where")
        return 1
    return code


def _flush() -> None:
    if sys.stdout is None:  # closed by the shell: >&-
        return
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        _drop_output()
        raise OutputError(f"standard output: cannot write ({error.strerror}); choose another place") from None


def _drop_output() -> None:
    """Send what is still buffered nowhere: nobody takes it, and it must not complain at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _complain(message: str) -> None:
    """Write one line to standard error, whatever the message contains."""
    shown = printable(" ".join(message.split())) or "failed"
    print(f"solver-plan: {shown}" if not shown.startswith("solver-plan") else shown, file=sys.stderr)
