"""Errors of a worker process reach its parent whole."""

import pickle

from solver_plan.errors import DocumentError, InvalidPlanError


def test_errors_survive_pickling() -> None:
    document = pickle.loads(pickle.dumps(DocumentError("p.json", "layers[0]", "-1", "at least 0")))
    assert (document.file, document.place, document.found, document.rule) == ("p.json", "layers[0]", "-1", "at least 0")
    plan = pickle.loads(pickle.dumps(InvalidPlanError(("one", "two"))))
    assert plan.violations == ("one", "two")
    assert str(plan) == "one; two"
