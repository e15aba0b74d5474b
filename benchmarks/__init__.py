"""Benchmarks of the planners: registered cases, baselines and published figures beside them."""
