"""The stored JSON schemas are those of the types, and say what the reader demands."""

import json

import pytest

from solver_plan.documents.schema import FOLDER, schema_name, schema_text
from solver_plan.kinds import KINDS, plan_types, problem_types
from tests.shelf import ShelfProblem

TYPES = [(schema_name(kind, "problem"), cls) for kind, cls in problem_types().items()] + [
    (schema_name(kind, "plan"), cls) for kind, cls in plan_types().items()
]


@pytest.mark.parametrize(("name", "document_type"), TYPES, ids=[name for name, _ in TYPES])
def test_the_stored_schema_is_up_to_date(name: str, document_type: type) -> None:
    assert (FOLDER / name).read_text(encoding="utf-8") == schema_text(document_type), "run: make schemas"


def test_every_kind_has_its_schemas_and_no_other_is_stored() -> None:
    assert {path.name for path in FOLDER.glob("*.json")} == {name for name, _ in TYPES}
    assert set(problem_types()) == set(plan_types()) == set(KINDS)


def test_a_schema_demands_what_the_reader_demands() -> None:
    schema = json.loads(schema_text(ShelfProblem))
    assert schema["required"] == ["format", "version", "kind", "length", "parcels"]
    assert schema["additionalProperties"] is False
    assert schema["properties"]["length"] == {
        "description": "How long the shelf is.",
        "maximum": 10**9,
        "minimum": 1,
        "type": "integer",
    }
    assert schema["$defs"]["Parcel"]["required"] == ["name", "wait_ms"]
    assert schema["properties"]["kind"]["const"] == "shelf"
