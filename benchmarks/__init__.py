"""Solver benchmarks, and the cost models held against reality."""
