"""Reading documents: strict JSON, validation at the door, digests.

Whatever is wrong becomes a `DocumentError`: one line with file, place, value and rule.
"""

import contextlib
import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from pydantic import JsonValue, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from solver_plan.documents.frame import Document, PlanDocument, ProblemDocument
from solver_plan.documents.writing import document_text
from solver_plan.errors import DocumentError, PlanMismatchError

LARGEST_FILE_BYTES = 1 << 30
MOST_DIGITS = 40
DEEPEST = 100
"""Levels of nesting; the documents themselves need fewer than ten, provenance may need more."""
_DIGEST = "_digest_of_file"
_LONE_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
"""An escape that may be half a character; a pair of them is whole."""

DataT = TypeVar("DataT")
DocumentT = TypeVar("DocumentT", bound=Document)


class _Refused(float):
    """Stands for a value that JSON or this project does not allow, until its place in the document is known."""

    found: str
    rule: str


def _refuse(found: str, rule: str) -> _Refused:
    refused = _Refused("nan")
    refused.found, refused.rule = found, rule
    return refused


def parse_json(text: str, file: str) -> JsonValue:
    """Parse strict JSON: no key twice in an object, no NaN or infinity, no number out of range, no half characters.

    Raises
    ------
    DocumentError
        For anything else, with the line and column where the parser knows them, or the place in the document.
    """
    refused: list[_Refused] = []

    def refuse(found: str, rule: str) -> _Refused:
        refused.append(_refuse(found, rule))
        return refused[-1]

    def unique(pairs: list[tuple[str, JsonValue]]) -> JsonValue:
        found = dict(pairs)
        if len(found) < len(pairs):
            twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
            return refuse(f"the key {short(twice)} twice in one object", "write each key once")
        return found

    def constant(word: str) -> JsonValue:
        return refuse(word, "numbers must be finite; JSON knows no NaN or Infinity")

    def whole(digits: str) -> JsonValue:
        if len(digits) > MOST_DIGITS:
            return refuse(f"a number of {len(digits)} digits", "whole numbers have at most 18 digits")
        return int(digits)

    def real(digits: str) -> JsonValue:
        value = float(digits)
        return value if math.isfinite(value) else refuse(f"the number {digits[:40]}", "numbers must be below 1e18")

    try:
        parsed: JsonValue = json.loads(
            text, object_pairs_hook=unique, parse_constant=constant, parse_int=whole, parse_float=real
        )
        if _depth_exceeds(parsed, DEEPEST):
            raise RecursionError
        if refused:
            place, value = next(_refused_values(parsed, ""), ("", refused[0]))
            raise DocumentError(file, place, value.found, value.rule)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        raise DocumentError(file, where, f"no JSON ({error.msg})", "write a complete JSON document") from None
    except RecursionError:
        raise DocumentError(file, "", "nesting too deep", f"documents nest at most {DEEPEST} levels") from None
    if _LONE_SURROGATE.search(text):
        _refuse_lone_surrogates(parsed, file)
    return parsed


def _refused_values(value: JsonValue, place: str) -> Iterator[tuple[str, _Refused]]:
    if isinstance(value, _Refused):
        yield place, value
    for step, inner in _children(value, place):
        yield from _refused_values(inner, step)


def _children(value: JsonValue, place: str) -> Iterator[tuple[str, JsonValue]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield (f"{place}.{key}" if place else key), inner
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield f"{place}[{index}]", inner


def _refuse_lone_surrogates(value: JsonValue, file: str, place: str = "") -> None:
    texts = [value] if isinstance(value, str) else list(value) if isinstance(value, dict) else []
    for text in texts:
        if any("\ud800" <= sign <= "\udfff" for sign in text):
            raise DocumentError(file, place, short(text), "texts are Unicode: \\ud800 to \\udfff only in pairs")
    for step, inner in _children(value, place):
        _refuse_lone_surrogates(inner, file, step)


def read_document(path: str | Path, kinds: Mapping[str, type[DocumentT]], expected_format: str) -> DocumentT:
    """Read and validate a document; the class is chosen by its ``kind``.

    Parameters
    ----------
    path
        The file.
    kinds
        Document class of each kind.
    expected_format
        ``solver-plan/problem``, ``solver-plan/plan`` or ``solver-plan/program``.

    Raises
    ------
    DocumentError
        If the file cannot be read or breaks a rule.
    """
    file = str(path)
    if not file:
        raise DocumentError("a document", "", "an empty name", "name a file that can be read")
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


@contextlib.contextmanager
def computed_from(source: str) -> Iterator[None]:
    """Within the block, documents are computed: one that breaks a rule raises a `DocumentError` that names `source`."""
    try:
        yield
    except ValidationError as error:
        first = error.errors(include_url=False)
        refused = _document_error(source, None, first[0], len(first))
        steps = [str(step) for step in first[0]["loc"]]
        place = ".".join([error.title, *steps]) if not refused.place else refused.place
        rule = f"{refused.rule}: correct the numbers that it is computed from"
        raise DocumentError(source, place, refused.found, rule) from None


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
    """Raise `PlanMismatchError` if the plan is of another kind or names another problem; one that names none passes."""
    if plan.kind != problem.kind:
        raise PlanMismatchError(
            f"the plan is of kind {plan.kind}, the problem of kind {problem.kind}: give two that match"
        )
    if plan.problem_digest is not None and plan.problem_digest != digest_of(problem):
        raise PlanMismatchError(
            f"the plan was made for problem {plan.problem_digest[:23]}…, this problem is {digest_of(problem)[:23]}…: "
            "plan again, or use the problem file as it was"
        )


def _depth_exceeds(value: JsonValue, levels: int) -> bool:
    layer: list[JsonValue] = [value]
    for _ in range(levels):
        layer = [
            inner
            for outer in layer
            for inner in (outer.values() if isinstance(outer, dict) else outer if isinstance(outer, list) else ())
            if isinstance(inner, dict | list)
        ]
        if not layer:
            return False
    return True


def short(value: object) -> str:
    """Return a value as text of at most 60 characters on one line, for messages."""
    text = json.dumps(value, default=str) if not isinstance(value, str) else repr(value)
    return text if len(text) <= 60 else text[:57] + "…"


def _read_text(path: Path, file: str) -> str:
    try:
        if path.is_file() and path.stat().st_size > LARGEST_FILE_BYTES:
            raise DocumentError(file, "", f"{path.stat().st_size} bytes", "documents are at most 1 GiB")
        with path.open("rb") as stream:
            data = stream.read(LARGEST_FILE_BYTES + 1)
        if len(data) > LARGEST_FILE_BYTES:
            raise DocumentError(file, "", "a stream without end", "documents are at most 1 GiB")
        return data.decode("utf-8")
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


def _place(parsed: JsonValue, location: tuple[int | str, ...], *, missing: bool) -> str:
    """Write a location as `components[3].layers`.

    What is not in the file is dropped: names of union members (tags, which must not be names of fields). Only a missing
    field is named though it is not there.
    """
    text = ""
    at: JsonValue = parsed
    for number, step in enumerate(location):
        if isinstance(step, int):
            text += f"[{step}]"
            at = at[step] if isinstance(at, list) and step < len(at) else None
        elif isinstance(at, dict) and (step in at or (missing and number == len(location) - 1)):
            text += f".{step}" if text else step
            at = at.get(step)
    return text


def _document_error(file: str, parsed: JsonValue, error: ErrorDetails, count: int) -> DocumentError:
    kind, context = error["type"], error.get("ctx", {})
    place = _place(parsed, error["loc"], missing=kind == "missing")
    more = f" (and {count - 1} more)" if count > 1 else ""
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
