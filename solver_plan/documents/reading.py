"""Reading documents: strict JSON, validation at the door, digests.

Whatever is wrong becomes a `DocumentError`: one line with file, place, value and rule.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn, TypeVar

from pydantic import JsonValue, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from solver_plan.documents.frame import PlanDocument, ProblemDocument
from solver_plan.documents.writing import document_text
from solver_plan.errors import DocumentError, PlanMismatchError

LARGEST_FILE_BYTES = 1 << 30
_DIGEST = "_digest_of_file"

DataT = TypeVar("DataT")
DocumentT = TypeVar("DocumentT", bound=ProblemDocument | PlanDocument)


def parse_json(text: str, file: str) -> JsonValue:
    """Parse strict JSON: no key twice in an object, no NaN or infinity, no number out of range.

    Raises
    ------
    DocumentError
        For anything else, with the line and column where the parser knows them.
    """

    def unique(pairs: list[tuple[str, JsonValue]]) -> dict[str, JsonValue]:
        found = dict(pairs)
        if len(found) < len(pairs):
            seen: set[str] = set()
            for key, _ in pairs:
                if key in seen:
                    raise DocumentError(file, "", f"the key {short(key)} twice in one object", "write each key once")
                seen.add(key)
        return found

    def constant(word: str) -> NoReturn:
        raise DocumentError(file, "", word, "numbers must be finite; JSON knows no NaN or Infinity")

    def whole(digits: str) -> int:
        if len(digits) > 40:
            raise DocumentError(file, "", f"a number of {len(digits)} digits", "whole numbers have at most 18 digits")
        return int(digits)

    def real(digits: str) -> float:
        value = float(digits)
        if value in (float("inf"), float("-inf")):
            raise DocumentError(file, "", f"the number {digits[:40]}", "numbers must be below 1e18 in magnitude")
        return value

    try:
        parsed: JsonValue = json.loads(
            text, object_pairs_hook=unique, parse_constant=constant, parse_int=whole, parse_float=real
        )
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        raise DocumentError(file, where, f"no JSON ({error.msg})", "write a complete JSON document") from None
    except RecursionError:
        raise DocumentError(file, "", "nesting too deep", "documents nest fewer than ten levels") from None
    return parsed


def read_document(path: str | Path, kinds: Mapping[str, type[DocumentT]], expected_format: str) -> DocumentT:
    """Read and validate a document; the class is chosen by its ``kind``.

    Parameters
    ----------
    path
        The file.
    kinds
        Document class of each kind.
    expected_format
        ``solver-plan/problem`` or ``solver-plan/plan``.

    Raises
    ------
    DocumentError
        If the file cannot be read or breaks a rule.
    """
    file = str(path)
    text = _read_text(Path(path), file)
    parsed = parse_json(text, file)
    if not isinstance(parsed, dict):
        raise DocumentError(file, "", short(parsed), "a document is a JSON object")
    for key, right in (("format", (expected_format,)), ("version", (1,)), ("kind", tuple(kinds))):
        if key not in parsed:
            raise DocumentError(file, key, "nothing", f"the field is required: {_alternatives(right)}")
        value = parsed[key]
        if isinstance(value, bool) or not isinstance(value, str | int) or value not in right:
            raise DocumentError(file, key, short(value), f"this reader knows {_alternatives(right)}")
    document = parse_document(text, file, kinds[str(parsed["kind"])])
    object.__setattr__(document, _DIGEST, _digest(parsed))
    return document


def parse_document(text: str, file: str, cls: type[DataT]) -> DataT:
    """Validate JSON text as a class made by `@document`; `file` names it in messages. Raises `DocumentError`."""
    try:
        return TypeAdapter(cls).validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)
        raise _document_error(file, parse_json(text, file), first[0], len(first)) from None


def digest_of(document: ProblemDocument | PlanDocument) -> str:
    """Return ``sha256:…`` of the document's canonical JSON without provenance.

    For a document that was read, the digest of what the file says, before defaults were filled in; for one made in
    memory, of what `write_document` would write.
    """
    known = document.__dict__.get(_DIGEST)
    if isinstance(known, str):
        return known
    parsed = parse_json(document_text(document), "document")
    assert isinstance(parsed, dict)
    return _digest(parsed)


def require_same_problem(problem: ProblemDocument, plan: PlanDocument) -> None:
    """Raise `PlanMismatchError` if the plan names another problem; a plan that names none passes."""
    if plan.problem_digest is not None and plan.problem_digest != digest_of(problem):
        raise PlanMismatchError(
            f"the plan was made for problem {plan.problem_digest[:23]}…, this problem is {digest_of(problem)[:23]}…: "
            "plan again, or use the problem file as it was"
        )


def short(value: object) -> str:
    """Return a value as text of at most 60 characters on one line, for messages."""
    text = json.dumps(value, default=str) if not isinstance(value, str) else repr(value)
    return text if len(text) <= 60 else text[:57] + "…"


def _read_text(path: Path, file: str) -> str:
    try:
        if path.is_file() and path.stat().st_size > LARGEST_FILE_BYTES:
            raise DocumentError(file, "", f"{path.stat().st_size} bytes", "documents are at most 1 GiB")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise DocumentError(file, "", error.strerror or "no file", "name a file that can be read") from None
    except UnicodeDecodeError as error:
        raise DocumentError(file, f"byte {error.start}", "no UTF-8", "documents are UTF-8 text") from None


def _digest(parsed: dict[str, JsonValue]) -> str:
    kept = {key: value for key, value in parsed.items() if key != "provenance"}
    canonical = json.dumps(kept, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return "sha256:" + hashlib.sha256(canonical.encode("utf-8", "surrogatepass")).hexdigest()


def _alternatives(values: tuple[object, ...]) -> str:
    return " or ".join(json.dumps(value) for value in values)


def _place(parsed: JsonValue, location: tuple[int | str, ...]) -> str:
    """Write a location as `components[3].layers`; names of union members, which are not in the file, are dropped."""
    text = ""
    at: JsonValue = parsed
    for step in location:
        if isinstance(step, int):
            text += f"[{step}]"
            at = at[step] if isinstance(at, list) and step < len(at) else None
        elif isinstance(at, dict) and (step in at or step == location[-1]):
            text += f".{step}" if text else step
            at = at.get(step)
    return text


def _document_error(file: str, parsed: JsonValue, error: ErrorDetails, count: int) -> DocumentError:
    place = _place(parsed, error["loc"])
    more = f" (and {count - 1} more)" if count > 1 else ""
    kind, context = error["type"], error.get("ctx", {})
    if kind == "rule":
        inner = str(context["place"])
        joined = place + inner if inner.startswith("[") or not place else f"{place}.{inner}" if inner else place
        return DocumentError(file, joined, short(context["found"]), str(context["rule"]) + more)
    if kind == "missing":
        return DocumentError(file, place, "nothing", "the field is required" + more)
    if kind in ("unexpected_keyword_argument", "extra_forbidden"):
        return DocumentError(file, place, "an unknown field", "remove it, or correct its name" + more)
    message = error["msg"].removeprefix("Value error, ")
    return DocumentError(file, place, short(error.get("input")), message[:1].lower() + message[1:] + more)
