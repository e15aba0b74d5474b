"""What a plan costs: time and memory of its stages, evaluated one plan at a time and independently of every solver."""

from solver_plan.parallelism.costs.evaluation import Evaluation, evaluate
from solver_plan.parallelism.costs.stage import StageCost

__all__ = ["Evaluation", "StageCost", "evaluate"]
