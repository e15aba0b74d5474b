"""Published and plain ways to a plan: baselines, and warm starts of the constraint program."""
