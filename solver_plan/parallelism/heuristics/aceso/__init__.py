"""Aceso's search: iterative bottleneck alleviation (Liu et al., EuroSys 2024), a baseline and a warm start."""

from solver_plan.parallelism.heuristics.aceso.search import AcesoSearch, aceso_search

__all__ = ["AcesoSearch", "aceso_search"]
