"""Reading, validating, digesting and writing documents. No kind of problem is known here."""

from solver_plan.documents.certificate import Certificate, Incumbency, certify
from solver_plan.documents.fields import (
    Bytes,
    Count,
    Devices,
    Fraction,
    Index,
    Milliseconds,
    Name,
    PerSecond,
    Range,
    document,
    fail,
    refuse_too_many_devices,
)
from solver_plan.documents.frame import Document, PlanDocument, ProblemDocument, ProgramDocument
from solver_plan.documents.reading import (
    computed_from,
    digest_of,
    parse_document,
    parse_json,
    read_document,
    require_same_problem,
)
from solver_plan.documents.writing import certificate_text, document_text, ensure_writable, write_document, write_text

__all__ = [
    "Bytes",
    "Certificate",
    "Count",
    "Devices",
    "Document",
    "Fraction",
    "Incumbency",
    "Index",
    "Milliseconds",
    "Name",
    "PerSecond",
    "PlanDocument",
    "ProblemDocument",
    "ProgramDocument",
    "Range",
    "certificate_text",
    "certify",
    "computed_from",
    "digest_of",
    "document",
    "document_text",
    "ensure_writable",
    "fail",
    "parse_document",
    "parse_json",
    "read_document",
    "refuse_too_many_devices",
    "require_same_problem",
    "write_document",
    "write_text",
]
