"""Plain text tables for terminals: any rows, the certificate of a plan, the way to it."""

from collections.abc import Sequence

from solver_plan.documents.certificate import Certificate, StoppedBy
from solver_plan.report.printable import printable

Cell = str | int | float | None

STOPPED_BY: dict[StoppedBy, str] = {
    "proof": "proven",
    "gap": "stopped at the gap limit",
    "time": "stopped at the time limit",
    "deterministic_time": "stopped at the limit of solver time",
    "interrupt": "interrupted",
    "completed": "ran to its end",
}


def table(headers: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """Lay rows out under headers: columns of numbers to the right, text to the left, None as a dash.

    Floats are written with three decimals; give text where other digits matter.
    """
    texts = [[_text(cell) for cell in row] for row in rows]
    widths = [max([len(header), *(len(row[at]) for row in texts)]) for at, header in enumerate(headers)]
    right = [all(_is_number(row[at]) for row in texts) for at in range(len(headers))]

    def line(cells: Sequence[str]) -> str:
        padded = (
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(cells, widths, right, strict=True)
        )
        return "  ".join(padded).rstrip()

    rule = "  ".join("-" * width for width in widths)
    return "\n".join([line(headers), rule, *(line(row) for row in texts)])


def certificate_table(certificate: Certificate) -> str:
    """Return how good a plan is, how that is known and why the search ended."""
    by = "" if certificate.bound_from is None else f" by {printable(certificate.bound_from)}"
    bound = "nothing proven" if certificate.bound is None else f"{certificate.bound:.3f} ms{by}"
    gap = "" if certificate.gap is None else f", gap {certificate.gap:.3%}"
    ending = f"{STOPPED_BY[certificate.stopped_by]} after {certificate.seconds:.1f} s"
    return (
        f"{certificate.status}: {certificate.objective:.3f} ms, bound {bound}{gap}\n"
        f"found by {printable(certificate.incumbent)}; {ending}; {printable(certificate.solver)}"
    )


def trace_table(certificate: Certificate) -> str:
    """Return the plans and bounds that were found on the way; empty if none was recorded."""
    if not certificate.trace:
        return ""
    return table(
        ["seconds", "plan (ms)", "bound (ms)", "gap", "source"],
        [
            [f"{step.seconds:.2f}", step.objective, step.bound, _gap(step.objective, step.bound), step.source]
            for step in certificate.trace
        ],
    )


def _gap(objective: float | None, bound: float | None) -> str | None:
    if objective is None or bound is None or objective <= 0:
        return None
    return f"{max(0.0, 1 - bound / objective):.3%}"


def _is_number(text: str) -> bool:
    try:
        float(text.rstrip("%"))
    except ValueError:
        return text == _text(None)
    return True


def _text(cell: Cell) -> str:
    if cell is None:
        return "-"
    return f"{cell:.3f}" if isinstance(cell, float) else printable(str(cell))
