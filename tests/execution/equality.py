"""Runs a model in one process and a program in several, and compares losses and gradients of three steps."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from solver_plan.execution.executor import Executor
from solver_plan.execution.model import Batch, Model, as_tuple, build_layer, shared_users
from solver_plan.execution.program import Program

STEPS = 3
DTYPE = torch.float64
Gradients = dict[str, dict[str, torch.Tensor]]


@dataclass(frozen=True)
class Trained:
    losses: list[float]
    gradients: list[Gradients]


def sgd(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def batches(model: Model, samples: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    made = [model.make_batch(samples, generator) for _ in range(STEPS)]
    return [
        Batch(*(tuple(v.to(DTYPE) if v.is_floating_point() else v for v in part) for part in (b.inputs, b.targets)))
        for b in made
    ]


def alone(model: Model, samples: int, micro_batch_size: int) -> Trained:
    """Train in this process, micro-batch by micro-batch."""
    cpu = torch.device("cpu")
    modules = [build_layer(model, index, 0, DTYPE, cpu) for index in range(len(model.layers))]
    for name, users in shared_users(model).items():
        owner = modules[users[0]].get_parameter(model.layers[users[0]].shared_weights[name])
        for user in users[1:]:
            parent, _, attribute = model.layers[user].shared_weights[name].rpartition(".")
            setattr(modules[user].get_submodule(parent), attribute, owner)
    optimizer = sgd(list(dict.fromkeys(p for module in modules for p in module.parameters())))
    losses: list[float] = []
    gradients: list[Gradients] = []
    for batch in batches(model, samples):
        optimizer.zero_grad()
        total = torch.zeros((), dtype=DTYPE)
        for start in range(0, samples, micro_batch_size):
            rows = slice(start, start + micro_batch_size)
            values = tuple(value[rows] for value in batch.inputs)
            for module in modules:
                values = as_tuple(module(*values))
            loss = model.loss(values, tuple(target[rows] for target in batch.targets)) / samples
            loss.backward()
            total += loss.detach()
        losses.append(float(total))
        gradients.append(
            {
                layer.name: {key: p.grad.clone() for key, p in module.named_parameters() if p.grad is not None}
                for layer, module in zip(model.layers, modules, strict=True)
            }
        )
        optimizer.step()
    return Trained(losses, gradients)


def together(program: Program, model: Model) -> Trained:
    """Train as this rank's part of a program."""
    executor = Executor(program, model, optimizer=sgd, dtype=DTYPE, timeout_s=60)
    losses: list[float] = []
    gradients: list[Gradients] = []
    for batch in batches(model, program.global_batch):
        losses.append(executor.step(batch).loss)
        gradients.append(executor.gradients())
    return Trained(losses, gradients)


def difference(reference: Trained, ranks: Sequence[Trained]) -> float:
    """Largest difference of any loss or gradient on any rank, relative to the largest value of its operator."""
    worst = 0.0
    for found in ranks:
        for mine, theirs in zip(reference.losses, found.losses, strict=True):
            worst = max(worst, abs(mine - theirs) / abs(mine))
        for expected, got in zip(reference.gradients, found.gradients, strict=True):
            for name, tensors in got.items():
                assert tensors.keys() == expected[name].keys(), name
                scale = max(float(tensor.abs().max()) for tensor in expected[name].values()) if tensors else 1.0
                for key, tensor in tensors.items():
                    distance = float((tensor - expected[name][key]).abs().max())
                    assert math.isfinite(distance), (name, key)
                    worst = max(worst, distance / scale)
    covered = {name for found in ranks for name in found.gradients[0]}
    assert covered == set(reference.gradients[0]), "some operator was run by no rank"
    return worst
