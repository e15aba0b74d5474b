"""JSON schemas of the documents of each kind, made from their types: `python -m solver_plan.schemas` writes them."""
