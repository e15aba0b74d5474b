"""Runs a multi-task model in one process and a program in several, and compares losses and gradients of three steps."""

from collections.abc import Sequence

import torch
from torch import nn

from solver_plan.execution.model import Values, build_module
from solver_plan.execution.waves.executor import WaveExecutor
from solver_plan.execution.waves.model import MultitaskBatch, MultitaskModel, TaskBatch
from solver_plan.execution.waves.program import WaveProgram
from tests.execution.equality import DTYPE, STEPS, Gradients, Trained, sgd


def batches(model: MultitaskModel, program: WaveProgram, absent: Sequence[str] = ()) -> list[MultitaskBatch]:
    """Three batches; of the tasks named, the first is absent from the second step, the second from the third…"""
    samples = {component.task: component.batch for component in program.components}
    generator = torch.Generator().manual_seed(1)
    made = []
    for step in range(STEPS):
        whole = model.make_batch(samples, generator)
        gone = absent[step - 1 : step] if step else ()
        made.append({task: _in_type(batch) for task, batch in whole.items() if task not in gone})
    return made


def _in_type(batch: TaskBatch) -> TaskBatch:
    def cast(values: Values) -> Values:
        return tuple(value.to(DTYPE) if value.is_floating_point() else value for value in values)

    return TaskBatch({name: cast(values) for name, values in batch.inputs.items()}, cast(batch.targets))


def alone(model: MultitaskModel, program: WaveProgram, absent: Sequence[str] = ()) -> Trained:
    """Train in this process, knowing of the program the components and their edges."""
    cpu = torch.device("cpu")
    modules = {
        name: [build_module(layer, model.layer_number(name, n), 0, DTYPE, cpu) for n, layer in enumerate(layers)]
        for name, layers in model.weights.items()
    }
    trained = {component.weights for component in model.components.values() if component.trained}
    for name, chain in modules.items():
        for module in chain:
            module.requires_grad_(name in trained)
    optimizer = sgd([p for chain in modules.values() for m in chain for p in m.parameters() if p.requires_grad])
    losses: list[float] = []
    gradients: list[Gradients] = []
    for batch in batches(model, program, absent):
        optimizer.zero_grad()
        total = torch.zeros((), dtype=DTYPE)
        for task in batch:
            loss = _loss_of(model, program, modules, task, batch[task])
            loss.backward()
            total += loss.detach()
        losses.append(float(total))
        gradients.append(
            {
                f"{name}.{n}": {key: p.grad.clone() for key, p in module.named_parameters() if p.grad is not None}
                for name, chain in modules.items()
                for n, module in enumerate(chain)
            }
        )
        optimizer.step()
    return Trained(losses, gradients)


def _loss_of(
    model: MultitaskModel, program: WaveProgram, modules: dict[str, list[nn.Module]], task: str, batch: TaskBatch
) -> torch.Tensor:
    left: dict[int, Values] = {}
    followed = {before for before, _ in program.edges}
    for index, component in enumerate(program.components):
        if component.task != task:
            continue
        described = model.components[component.name]
        given = {program.components[a].name: left[a] for a, b in program.edges if b == index}
        values = described.enter(given, batch.inputs.get(component.name, ()))
        with torch.set_grad_enabled(described.trained):
            for module in modules[described.weights]:
                values = module(*values)
        left[index] = values
    ends = {program.components[i].name: values for i, values in left.items() if i not in followed}
    samples = next(component.batch for component in program.components if component.task == task)
    return model.objectives[task].loss(ends, batch.targets) / samples


def together(program: WaveProgram, model: MultitaskModel, absent: Sequence[str] = ()) -> Trained:
    """Train as this rank's part of a program."""
    executor = WaveExecutor(program, model, optimizer=sgd, dtype=DTYPE, timeout_s=60)
    losses: list[float] = []
    gradients: list[Gradients] = []
    for batch in batches(model, program, absent):
        losses.append(executor.step(batch).loss)
        gradients.append(executor.gradients())
    return Trained(losses, gradients)
