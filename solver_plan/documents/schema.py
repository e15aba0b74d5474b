"""JSON schema of documents, made from their types; descriptions are the docstrings of classes and fields.

A schema says what one field may hold. Rules that span fields (names used twice, references to nothing) are the
reader's alone.
"""

import json
from pathlib import Path

from pydantic import JsonValue, TypeAdapter
from pydantic.json_schema import GenerateJsonSchema

from solver_plan.documents.frame import PlanDocument, ProblemDocument

DIALECT = GenerateJsonSchema.schema_dialect
FOLDER = Path(__file__).parent.parent / "schemas"
"""Where the schema of each kind is kept, for readers and editors; `make schemas` writes them."""


def schema_text(document_type: type[ProblemDocument] | type[PlanDocument]) -> str:
    """Return the JSON schema of a document class as text."""
    schema: dict[str, JsonValue] = TypeAdapter(document_type).json_schema()
    required = schema.get("required")
    assert isinstance(required, list)
    # they have defaults in Python alone: in a file they say what it is
    schema["required"] = ["format", "version", "kind", *required]
    return json.dumps({"$schema": DIALECT, **_untitled(schema)}, indent=1, ensure_ascii=False) + "\n"


def schema_name(kind: str, document: str) -> str:
    """Return the file name of a schema in `FOLDER`; `document` is ``problem`` or ``plan``."""
    return f"{kind}-{document}.json"


def _untitled(schema: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """Drop the titles that only repeat the names of fields."""
    return {
        key: {name: _cleaned(value) for name, value in part.items()}
        if key in ("properties", "$defs") and isinstance(part, dict)
        else _cleaned(part)
        for key, part in schema.items()
        if key != "title"
    }


def _cleaned(part: JsonValue) -> JsonValue:
    if isinstance(part, dict):
        return _untitled(part)
    return [_cleaned(item) for item in part] if isinstance(part, list) else part
