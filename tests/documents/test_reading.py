"""Bad documents are refused with one line that names file, place, value and remedy."""

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import JsonValue

from solver_plan.documents import document_text, parse_json, read_document, write_document
from solver_plan.documents.reading import short
from solver_plan.errors import DocumentError
from tests.shelf import Parcel, ShelfPlan, ShelfProblem

GOOD = (
    '{"format": "solver-plan/problem", "version": 1, "kind": "shelf", "length": 9, '
    '"parcels": [{"name": "a", "wait_ms": 2.5}, {"name": "b", "wait_ms": 1}], '
    '"rates": {"belt": {"per_s": 3.0}}, "provenance": {"by": ["hand"]}}'
)


@pytest.fixture
def read(tmp_path: Path) -> Callable[[str | bytes], ShelfProblem]:
    """Write text to a file and read it as a problem."""

    def read_text(text: str | bytes) -> ShelfProblem:
        file = tmp_path / "problem.json"
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
        return read_document(file, {"shelf": ShelfProblem}, "solver-plan/problem")

    return read_text


def test_a_good_document_is_read(read: Callable[[str | bytes], ShelfProblem]) -> None:
    problem = read(GOOD)
    assert problem.parcels == (Parcel(name="a", wait_ms=2.5), Parcel(name="b", wait_ms=1.0))
    assert problem.ordered is False


BAD = [
    # not JSON
    ("", "line 1 column 1", "no JSON", "complete JSON"),
    (GOOD[:70], "line 1 column", "no JSON", "complete JSON"),
    (GOOD + "}", "line 1 column", "no JSON", "complete JSON"),
    (GOOD.replace('"length": 9', "'length': 9"), "line 1 column", "no JSON", "complete JSON"),
    ("[" * 100_000, "", "nesting too deep", "at most 100 levels"),
    (b"\xff\xfe" + GOOD.encode("utf-16-le"), "byte 0", "no UTF-8", "UTF-8"),
    # not a document
    ("[]", "", "[]", "JSON object"),
    ("null", "", "null", "JSON object"),
    ("{}", "format", "nothing", '"solver-plan/problem"'),
    (GOOD.replace("solver-plan/problem", "solver-plan/plan"), "format", "'solver-plan/plan'", '"solver-plan/problem"'),
    (GOOD.replace('"version": 1', '"version": 2'), "version", "2", "knows 1"),
    (GOOD.replace('"version": 1', '"version": true'), "version", "true", "knows 1"),
    (GOOD.replace('"version": 1', '"version": 1.0'), "version", "1.0", "knows 1"),
    (GOOD.replace('"version": 1', '"version": "1"'), "version", "'1'", "knows 1"),
    (GOOD.replace('"version": 1, ', ""), "version", "nothing", "required"),
    (GOOD.replace('"shelf"', '"cupboard"'), "kind", "'cupboard'", '"shelf"'),
    (GOOD.replace('"shelf"', '["shelf"]'), "kind", '["shelf"]', '"shelf"'),
    # fields
    (GOOD.replace('"length": 9, ', ""), "length", "nothing", "required"),
    (GOOD.replace('"length"', '"lenght"'), "length", "nothing", "required"),
    (GOOD.replace('"length": 9', '"length": 9, "width": 2'), "width", "an unknown field", "remove it"),
    (GOOD.replace('"wait_ms": 1', '"wait": 3, "wait_ms": 1'), "parcels[1].wait", "an unknown field", "remove it"),
    # types
    (GOOD.replace("9", '"9"'), "length", "'9'", "integer"),
    (GOOD.replace("9", "9.0"), "length", "9.0", "integer"),
    (GOOD.replace("9", "true"), "length", "true", "integer"),
    (GOOD.replace("9", "null"), "length", "null", "integer"),
    (GOOD.replace("2.5", "false"), "parcels[0].wait_ms", "false", "number"),
    (GOOD.replace("2.5", '"2.5"'), "parcels[0].wait_ms", "'2.5'", "number"),
    (GOOD.replace('"a"', "7"), "parcels[0].name", "7", "string"),
    (GOOD.replace('"by": ["hand"]', '"by": 1').replace('{"by": 1}', "[]"), "provenance", "[]", "object"),
    # numbers
    (GOOD.replace("9", "0"), "length", "0", "greater than or equal to 1"),
    (GOOD.replace("9", "-4"), "length", "-4", "greater than or equal to 1"),
    (GOOD.replace("2.5", "-2.5"), "parcels[0].wait_ms", "-2.5", "greater than or equal to 0"),
    (GOOD.replace("2.5", "NaN"), "parcels[0].wait_ms", "NaN", "finite"),
    (GOOD.replace("2.5", "-Infinity"), "parcels[0].wait_ms", "-Infinity", "finite"),
    (GOOD.replace("2.5", "1e400"), "parcels[0].wait_ms", "1e400", "below 1e18"),
    (GOOD.replace("2.5", "1e19"), "parcels[0].wait_ms", "1e+19", "less than or equal to 1"),
    (GOOD.replace("9", "9" * 30), "length", "9" * 30, "less than or equal to 1000000000"),
    (GOOD.replace("9", "9" * 5000), "length", "a number of 5000 digits", "at most 18 digits"),
    (GOOD.replace("3.0", "0.0"), "rates.belt.per_s", "0.0", "equal to 0.000001"),
    (GOOD.replace('["hand"]', "NaN"), "provenance.by", "NaN", "finite"),
    # names and keys
    (GOOD.replace('"b"', '"a"'), "parcels[1].name", "'a'", "unique"),
    (GOOD.replace('"a"', '""'), "parcels[0].name", "''", "at least 1 character"),
    (GOOD.replace('"length": 9', '"length": 9, "length": 9'), "", "the key 'length' twice", "each key once"),
    (GOOD.replace('"wait_ms": 1', '"wait_ms": 1, "name": "c"'), "parcels[1]", "the key 'name' twice", "each key once"),
    (GOOD.replace('{"per_s": 3.0}', '{"per_s": 3.0}, "belt": {"per_s": 4.0}'), "rates", "the key 'belt' twice", "once"),
    (GOOD.replace('"a"', r'"\ud800"'), "parcels[0].name", r"'\ud800'", "only in pairs"),
    (GOOD.replace('"by"', r'"\udfff"'), "provenance", r"'\udfff'", "only in pairs"),
    # nesting
    (GOOD.replace('["hand"]', "[" * 150 + "]" * 150), "", "nesting too deep", "at most 100 levels"),
    (GOOD.replace('["hand"]', "[" * 940 + r'"\ud800", NaN' + "]" * 940), "", "nesting too deep", "at most 100 levels"),
    (GOOD.replace('["hand"]', '{"a":' * 960 + "1" + "}" * 960), "", "nesting too deep", "at most 100 levels"),
    (GOOD.replace('"length": 9', '"length": ' + "[" * 150 + "]" * 150), "", "nesting too deep", "at most 100 levels"),
]


@pytest.mark.parametrize(("text", "place", "found", "rule"), BAD)
def test_a_bad_document_is_refused(
    text: str | bytes, place: str, found: str, rule: str, read: Callable[[str | bytes], ShelfProblem]
) -> None:
    with pytest.raises(DocumentError) as caught:
        read(text)
    message = str(caught.value)
    assert caught.value.place.startswith(place)
    assert place or not caught.value.place
    assert found in caught.value.found
    assert rule in caught.value.rule
    assert caught.value.file in message
    assert "\n" not in message
    assert len(message) < 600


def test_several_faults_are_counted(read: Callable[[str | bytes], ShelfProblem]) -> None:
    with pytest.raises(DocumentError, match=r"length: found 0; .*\(and 1 more\)"):
        read(GOOD.replace("9", "0").replace("2.5", "-1"))


def test_paired_surrogates_are_whole_characters(read: Callable[[str | bytes], ShelfProblem]) -> None:
    assert read(GOOD.replace('"a"', r'"\ud83d\ude80"')).parcels[0].name == "🚀"


@pytest.mark.parametrize(
    ("name", "found"), [("nowhere.json", "No such file"), ("", "Is a directory"), ("folder/x.json", "No such file")]
)
def test_a_file_that_is_none(tmp_path: Path, name: str, found: str) -> None:
    with pytest.raises(DocumentError, match=found):
        read_document(tmp_path / name, {"shelf": ShelfProblem}, "solver-plan/problem")


def test_a_file_without_permission(read_only_folder: Path) -> None:
    secret = read_only_folder.parent / "secret.json"
    uid = os.geteuid()
    if uid == 65534:
        os.seteuid(0)
    secret.write_text(GOOD)
    secret.chmod(0)
    os.seteuid(uid)
    with pytest.raises(DocumentError, match="Permission denied"):
        read_document(secret, {"shelf": ShelfProblem}, "solver-plan/problem")


def test_a_pipe_is_read_like_a_file(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_text(GOOD))
    writer.start()
    assert read_document(pipe, {"shelf": ShelfProblem}, "solver-plan/problem").length == 9
    writer.join()


def test_a_plan_is_no_problem(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    write_document(ShelfPlan(problem_digest=None, order=("a",)), file)
    with pytest.raises(DocumentError, match="format: found 'solver-plan/plan'"):
        read_document(file, {"shelf": ShelfProblem}, "solver-plan/problem")
    assert read_document(file, {"shelf": ShelfPlan}, "solver-plan/plan").order == ("a",)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner),
    max_leaves=20,
)


@given(json_values)
def test_strict_parsing_agrees_with_the_standard_library(value: JsonValue) -> None:
    for ascii_only in (True, False):
        text = json.dumps(value, ensure_ascii=ascii_only)
        assert parse_json(text, "x") == json.loads(text)


@given(st.text())
def test_any_text_is_parsed_or_refused(text: str) -> None:
    try:
        parse_json(text, "x")
    except DocumentError as error:
        assert error.file == "x"  # noqa: PT017 - that it is the only exception is the point


@given(json_values, st.sampled_from(["length", "parcels", "rates", "kind", "version"]))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_json_is_read_or_refused_at_its_place(tmp_path: Path, value: JsonValue, key: str) -> None:
    file = tmp_path / "problem.json"
    file.write_text(json.dumps({**json.loads(GOOD), key: value}))
    try:
        problem = read_document(file, {"shelf": ShelfProblem}, "solver-plan/problem")
    except DocumentError as error:
        assert error.place.startswith(key)  # noqa: PT017 - that it is the only exception is the point
        assert "\n" not in str(error)  # noqa: PT017
    else:
        assert parse_json(document_text(problem), "again") is not None


def test_values_in_messages_are_short() -> None:
    assert len(short("x" * 1000)) == 58
    assert short({"a": [1, 2]}) == '{"a": [1, 2]}'
