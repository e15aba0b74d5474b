"""What a verb is, and what verbs share: arguments, and where their output goes."""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

from solver_plan.errors import OutputError

if TYPE_CHECKING:
    from solver_plan.documents import Document

STANDARD_OUTPUT = "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verb:
    """One command: its arguments and what it does, which returns the exit code."""

    name: str
    summary: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def positive(text: str) -> int:
    """Parse a whole number of at least 1, for argparse."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if not 1 <= value <= 10**12:
        raise argparse.ArgumentTypeError(f"found {text[:40]!r}; a whole number of at least 1")
    return value


def positives(text: str) -> tuple[int, ...]:
    """Parse a comma list of whole numbers of at least 1, for argparse."""
    return tuple(positive(part) for part in text.split(","))


def number(text: str) -> float:
    """Parse a number, for argparse."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"found {text[:40]!r}; a number") from None


def fraction(text: str) -> float:
    """Parse a number from 0 to less than 1, for argparse."""
    value = number(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"found {text[:40]!r}; at least 0 and below 1, such as 0.1")
    return value


def whole(text: str) -> int:
    """Parse a whole number of at least 0, for argparse."""
    if text.strip() == "0":
        return 0
    try:
        return positive(text)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"found {text[:40]!r}; a whole number of at least 0") from None


def wholes(text: str) -> tuple[int, ...]:
    """Parse a comma list of whole numbers of at least 0, for argparse."""
    return tuple(whole(part) for part in text.split(","))


def add_out(parser: argparse.ArgumentParser, what: str, *, required: bool = True) -> None:
    """Add `--out`."""
    help_text = f"where the {what} goes; - for standard output"
    parser.add_argument("--out", required=required, metavar="FILE", help=help_text)


def add_json(parser: argparse.ArgumentParser, what: str) -> None:
    """Add `--json`."""
    parser.add_argument("--json", action="store_true", help=f"write {what} as JSON to standard output")


def require_writable(out: str) -> None:
    """Raise `OutputError` if `--out` cannot be written, before work is spent."""
    from solver_plan.documents import ensure_writable

    if out != STANDARD_OUTPUT:
        ensure_writable(out)


def write_out(document: "Document", out: str) -> None:
    """Write a document where `--out` says. Raises `OutputError`."""
    from solver_plan.documents import document_text, write_document

    if out == STANDARD_OUTPUT:
        write_data(document_text(document))
    else:
        write_document(document, out)


def write_text_out(text: str, out: str) -> None:
    """Write text that is no document where an option says. Raises `OutputError`."""
    from solver_plan.documents import write_text

    if out == STANDARD_OUTPUT:
        write_data(text)
    else:
        write_text(text, out)


def write_data(text: str) -> None:
    """Write text to standard output, as UTF-8 whatever the locale. Raises `OutputError`."""
    if sys.stdout is None:  # closed by the shell: >&-
        raise OutputError("standard output: cannot write (it is closed); choose another place")
    try:
        sys.stdout.flush()
        sys.stdout.buffer.write(text.encode("utf-8"))
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(f"standard output: cannot write ({error.strerror}); choose another place") from None


def people(data_on_standard_output: bool) -> TextIO:
    """Return the stream for people: standard output, unless data goes there."""
    return sys.stderr if data_on_standard_output else sys.stdout
