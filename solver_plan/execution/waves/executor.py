"""Trains a multi-task model as a wavefront program says: builds this rank's part, and runs it step by step."""

import time
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn

from solver_plan.errors import InputError
from solver_plan.execution.checkpoint_state import Held
from solver_plan.execution.clock import StepClock
from solver_plan.execution.comparison import RankReport, Step
from solver_plan.execution.executor import MakeOptimizer, adamw, default_device
from solver_plan.execution.groups import new_groups
from solver_plan.execution.launch import require_world_size
from solver_plan.execution.measure import MemoryMeter
from solver_plan.execution.model import Values
from solver_plan.execution.sharding import full
from solver_plan.execution.torch_pipelining import require_tested_version
from solver_plan.execution.waves.model import (
    MultitaskBatch,
    MultitaskModel,
    require_same_components,
    shapes_between,
)
from solver_plan.execution.waves.program import WaveProgram
from solver_plan.execution.waves.running_step import RankPart, RunningStep
from solver_plan.execution.waves.verify import verify_waves
from solver_plan.execution.waves.weights import RankWeights


class WaveExecutor:
    """This rank's part of a wavefront program.

    Every rank of the world makes one, after `torch.distributed` has been initialised, and calls `step` with the same
    batches. What does not fit is refused before any process group is made.

    Parameters
    ----------
    program
        From `compile_waves`.
    model
        The layers of its components.
    optimizer
        Makes the optimizer of this rank's parameters; None: gradients only.
    seed
        Of the initial weights.
    dtype
        Of weights and activations.
    device
        Where to run; by default the current CUDA device with NCCL, else the CPU.
    timeout_s
        After which a collective gives up.

    Raises
    ------
    NotExecutableError
        If the world has another size, the model other components, or PyTorch another version.
    """

    def __init__(
        self,
        program: WaveProgram,
        model: MultitaskModel,
        *,
        optimizer: MakeOptimizer | None = adamw,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        require_tested_version()
        require_world_size(program.world_size, dist.get_world_size())
        require_same_components(program, model)
        verify_waves(program)
        self.program = program
        self.rank = dist.get_rank()
        self.device = default_device() if device is None else device
        self.steps: list[Step] = []
        # of all components on every rank: what is wrong with any is refused by all, before a group is made
        shapes = shapes_between(program, model, dtype)
        groups = new_groups(program.groups, timeout_s)
        weights = RankWeights(program, model, groups, rank=self.rank, seed=seed, dtype=dtype, device=self.device)
        parameters = weights.parameters()
        self.optimizer = optimizer(parameters) if optimizer is not None and parameters else None
        self.part = RankPart(
            program=program,
            model=model,
            rank=self.rank,
            device=self.device,
            groups=groups,
            weights=weights,
            shapes=shapes,
            clock=StepClock(self.device),
            memory=MemoryMeter(self.device, ()),
            optimizer=self.optimizer,
        )
        self._actions = program.actions_of(self.rank)
        self._counted: set[frozenset[str]] = set()
        """Sets of tasks whose memory has been counted."""
        self.seed_random(seed, 0)

    def seed_random(self, seed: int, step: int) -> None:
        """Seed torch's generators of this rank for the steps from `step` on."""
        torch.manual_seed(((step * 1_000_003 + seed) * 10_007 + self.rank) % (1 << 63))

    def step(self, batch: MultitaskBatch) -> Step:
        """Train on the samples of the tasks that a batch names, the same on every rank; each takes the rows it needs.

        Raises
        ------
        InputError
            If the batch does not fit the program, or the ranks were given batches of different tasks.
        """
        self._require_whole(batch)
        seed = self._agree(batch)
        # counting takes time, and steps of the same tasks are alike
        self.part.memory.counting = self.device.type != "cuda" and frozenset(batch) not in self._counted
        began_s, began = time.time(), time.perf_counter()
        self.part.clock.begin()
        self.zero_gradients()
        self.part.sample_memory()
        running = RunningStep(self.part, batch, seed)
        for action in self._actions:
            running.run(action)
        running.end()
        self.part.sample_memory()
        losses = self._global_losses(running.losses)
        actions = self.part.clock.end()
        seconds = time.perf_counter() - began
        self._counted.add(frozenset(batch))
        of_tasks = {loss.task: losses[n] for n, loss in enumerate(self.program.losses) if loss.task in batch}
        self.steps.append(Step(sum(losses), began_s, seconds, actions, of_tasks))
        return self.steps[-1]

    def report(self) -> RankReport:
        """Return what this rank has measured so far."""
        memory = self.part.memory
        return RankReport(self.rank, tuple(self.steps), memory.state_bytes, memory.activation_bytes, memory.peak_bytes)

    def zero_gradients(self) -> None:
        """Drop the gradients of this rank's parameters."""
        for module in self.part.weights.modules():
            for parameter in module.parameters():
                parameter.grad = None

    def gradients(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return the whole gradients of each layer on this rank, by ``WEIGHTS.LAYER`` and parameter.

        All ranks call this together.
        """
        return {
            name: {key: full(p.grad).cpu() for key, p in module.named_parameters() if p.grad is not None}
            for name, module in self.part.weights.layers()
        }

    def weights(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return the whole weights of each layer on this rank; all ranks call this together."""
        return {
            name: {key: full(p.detach()).cpu() for key, p in module.named_parameters()}
            for name, module in self.part.weights.layers()
        }

    def held(self) -> list[Held]:
        """Return the weights and persistent buffers of this rank, by names that no plan changes."""
        return self.part.weights.held()

    def operators(self) -> dict[str, nn.Module]:
        """Return the module of each layer on this rank, by ``WEIGHTS.LAYER``."""
        return dict(self.part.weights.layers())

    def _require_whole(self, batch: MultitaskBatch) -> None:
        """Refuse a batch that does not fit, on every rank: those that need nothing of it would wait for the others."""
        program = self.program
        unknown = sorted(set(batch) - set(program.tasks))
        if unknown:
            raise InputError(f"batch: found task {unknown[0]!r}; the plan has {', '.join(program.tasks)}")
        if not batch:
            raise InputError("batch: found no task; name at least one")
        for before, after in program.edges:
            one, other = (program.components[index].task for index in (before, after))
            if (one in batch) != (other in batch):
                raise InputError(
                    f"batch: found one of the tasks {one!r} and {other!r}; a component of one takes what one of the "
                    "other gives: name both or neither"
                )
        for component in program.components:
            task = batch.get(component.task)
            if task is None:
                continue
            found = task.inputs.get(component.name, ())
            shapes = self.part.shapes.data[component.name]
            if [tuple(value.shape[1:]) for value in found] != [shape.sample for shape in shapes]:
                given = ", ".join(str(list(value.shape)) for value in found) or "nothing"
                right = ", ".join(str([component.batch, *shape.sample]) for shape in shapes) or "nothing"
                raise InputError(
                    f"batch: task {component.task!r} has tensors of shape {given} for {component.name!r}, which takes "
                    f"{right}; give samples like those of the model's make_batch"
                )
            self._require_samples((*found, *task.targets), component.task, component.batch)

    def _require_samples(self, values: Values, task: str, planned: int) -> None:
        for value in values:
            samples = value.shape[0] if value.dim() else 0
            if samples != planned:
                raise InputError(
                    f"batch: {samples} samples of task {task!r}, the plan's batch is {planned}; give a step all of "
                    "a task's samples, or none"
                )

    def _agree(self, batch: MultitaskBatch) -> int:
        """Return a seed that all ranks have for this step: the first one draws it from its generator.

        Refuses, on every rank, a step whose tasks are not the same on all: they would wait for each other.
        """
        there = [task in batch for task in self.program.tasks]
        drawn = int(torch.randint(1 << 31, ())) if self.rank == 0 else 0
        told = torch.tensor([*there, drawn], dtype=torch.int64, device=self.device)
        dist.all_reduce(told)
        *counts, seed = told.tolist()
        for task, ranks in zip(self.program.tasks, counts, strict=True):
            if ranks not in (0, self.program.world_size):
                raise InputError(
                    f"batch: task {task!r} is there on {ranks} of {self.program.world_size} ranks; give every rank the "
                    "same batches"
                )
        return int(seed)

    def _global_losses(self, losses: Mapping[int, torch.Tensor]) -> list[float]:
        """Sum each task's loss over its ranks, and tell every rank."""
        total = torch.zeros(len(self.program.losses), dtype=torch.float64, device=self.device)
        for number, loss in losses.items():
            total[number] = loss.double()
        dist.all_reduce(total)
        return [float(loss) for loss in total.tolist()]
