"""One step on one rank, action by action: what it holds of each slice between forward and backward, and what moves.

Every slice is a piece of autograd graph of its own: what comes into it is a leaf, whose gradient goes back where the
leaf came from. Sends and receives begin where the order says and are waited for by the slice that needs what comes.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from solver_plan.execution.clock import StepClock
from solver_plan.execution.measure import MemoryMeter
from solver_plan.execution.model import Values, require_one_number
from solver_plan.execution.moving import Move, begin_move
from solver_plan.execution.torch_pipelining import failing_as
from solver_plan.execution.transfers import Side
from solver_plan.execution.waves.actions import WaveAction, WaveActionKind
from solver_plan.execution.waves.model import Given, ModelShapes, MultitaskBatch, MultitaskModel
from solver_plan.execution.waves.program import WaveProgram
from solver_plan.execution.waves.weights import RankWeights

MOVE_FORWARD, MOVE_BACKWARD = WaveActionKind.MOVE_FORWARD, WaveActionKind.MOVE_BACKWARD


@dataclass(frozen=True, kw_only=True)
class RankPart:
    """What a rank has for all its steps."""

    program: WaveProgram
    model: MultitaskModel
    rank: int
    device: torch.device
    groups: Sequence[dist.ProcessGroup]
    weights: RankWeights
    shapes: ModelShapes
    clock: StepClock
    memory: MemoryMeter
    optimizer: torch.optim.Optimizer | None

    def sample_memory(self) -> None:
        """Count weights, gradients and optimizer state as they are now."""
        self.memory.sample_state(self.weights.modules(), self.optimizer)


class RunningStep:
    """A step of the tasks that a batch names; actions of the others are passed over."""

    def __init__(self, part: RankPart, batch: MultitaskBatch, seed: int) -> None:
        self.losses: dict[int, torch.Tensor] = {}
        """This rank's share of the loss of each task, by the number of the loss."""
        self._part = part
        self._program = part.program
        self._batch = batch
        self._seed = seed
        self._leaves: dict[int, Values] = {}
        """Link -> the tensors that came over it; gradients are collected in them."""
        self._outputs: dict[int, Values] = {}
        """Slice -> what it made, with its graph."""
        self._moves: dict[WaveAction, Move] = {}

    def run(self, action: WaveAction) -> None:
        """Run one action. Raises `RunFailedError` that names it, if a module does."""
        if not self._is_present(action):
            return
        with failing_as(action):
            if action.kind is WaveActionKind.FORWARD:
                self._forward(action)
            elif action.kind is WaveActionKind.BACKWARD:
                self._backward(action)
            elif action.kind is WaveActionKind.LOSS:
                self._loss(action)
            elif action.kind in (MOVE_FORWARD, MOVE_BACKWARD):
                self._moves[action] = self._begin_move(action)
            else:
                self._finish(action)

    def end(self) -> None:
        """Wait until everything that this rank sent has left."""
        for move in self._moves.values():
            move.left()

    def _is_present(self, action: WaveAction) -> bool:
        program, number = self._program, action.number
        if action.kind in (WaveActionKind.FORWARD, WaveActionKind.BACKWARD):
            return program.task_of(number) in self._batch
        if action.kind is WaveActionKind.LOSS:
            return program.losses[number].task in self._batch
        if action.kind in (MOVE_FORWARD, MOVE_BACKWARD):
            return program.task_of(program.links[number].before) in self._batch
        return True

    def _forward(self, action: WaveAction) -> None:
        program, index = self._program, action.number
        piece = program.slices[index]
        component = program.components[piece.component]
        given = self._receive_all(index)
        start = self._part.clock.mark()
        module = self._part.weights.slices[index]
        rows = self._batch[component.task].inputs.get(component.name, ())
        with torch.set_grad_enabled(component.trained), self._random(index, piece.side):
            if piece.layers[0] == 0:
                own = self._rows(rows, piece.side, component.batch)
                values = self._part.model.components[component.name].enter(given, own)
            else:
                (values,) = given.values()
            with self._part.memory.forward(index, 0, module):
                self._outputs[index] = module(*values)
        self._part.clock.record(action, start)

    @contextmanager
    def _random(self, index: int, side: Side) -> Iterator[None]:
        """Let the tensor ranks of a replica draw the same numbers: what each computes whole stays equal on all."""
        if side.tensor_parallel == 1:
            yield
            return
        device = self._part.device
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed((self._seed * 10_007 + index) * 10_007 + side.place(self._part.rank)[0])
            yield

    def _receive_all(self, site: int) -> Given:
        """Return what came over each link into a site, by the component that it comes from."""
        program = self._program
        return {
            program.components[program.slices[program.links[link].before].component].name: self._receive(link)
            for link in program.links_into[site]
        }

    def _receive(self, link: int) -> Values:
        """Return what came over a link, as leaves."""
        described = self._program.links[link]
        if self._program.in_place(described):
            values = self._outputs[described.before]
        else:
            values = self._arrived(WaveAction(MOVE_FORWARD, link))
        back = self._comes_back(link)
        self._leaves[link] = tuple(
            value.detach().requires_grad_(needed) for value, needed in zip(values, back, strict=True)
        )
        return self._leaves[link]

    def _arrived(self, action: WaveAction) -> Values:
        """Wait for a move; the time it takes is that of the move's action."""
        start = self._part.clock.mark()
        values = self._moves[action].arrived()
        self._part.clock.record(action, start)
        return values

    def _comes_back(self, link: int) -> tuple[bool, ...]:
        """Tell of each tensor of a link whether a gradient comes back for it."""
        described = self._program.links[link]
        back = self._program.needs_gradient(described)
        return tuple(back and shape.requires_grad for shape in self._part.shapes.outputs[described.before])

    def _gradients_of(self, link: int) -> Values:
        """Return the gradients that go back over a link, from where it leads."""
        leaves = self._leaves.pop(link)
        return tuple(
            torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            for leaf, back in zip(leaves, self._comes_back(link), strict=True)
            if back
        )

    def _backward(self, action: WaveAction) -> None:
        program, index = self._program, action.number
        outputs = self._outputs.pop(index)
        gradients: list[torch.Tensor | None] = [None] * len(outputs)
        for link in program.links_out_of[index]:
            back = self._comes_back(link)
            if not any(back):
                continue
            in_place = program.in_place(program.links[link])
            found = iter(self._gradients_of(link) if in_place else self._arrived(WaveAction(MOVE_BACKWARD, link)))
            for place in (place for place, needed in enumerate(back) if needed):
                before, new = gradients[place], next(found)
                gradients[place] = new if before is None else before + new
        start = self._part.clock.mark()
        places = [place for place, gradient in enumerate(gradients) if gradient is not None]
        if places:
            torch.autograd.backward([outputs[place] for place in places], [gradients[place] for place in places])
        self._part.memory.backward(index, 0, self._part.weights.slices[index])
        self._part.clock.record(action, start)

    def _begin_move(self, action: WaveAction) -> Move:
        program, rank = self._program, self._part.rank
        link = program.links[action.number]
        shapes = self._part.shapes.outputs[link.before]
        source, destination, transfers = program.side(link.before), program.side(link.after), link.forward
        values: Values = ()
        if action.kind is MOVE_FORWARD:
            if rank in source.devices:
                values = tuple(value.detach() for value in self._outputs[link.before])
        else:
            source, destination, transfers = destination, source, link.backward
            shapes = tuple(s for s, back in zip(shapes, self._comes_back(action.number), strict=True) if back)
            if rank in source.devices:
                values = self._gradients_of(action.number)
        results: Values = ()
        if rank in destination.devices:
            rows = program.batch_of(link.before) // destination.data_parallel
            results = tuple(
                torch.empty((rows, *shape.sample), dtype=shape.dtype, device=self._part.device) for shape in shapes
            )
        return begin_move(transfers, rank, values, results)

    def _loss(self, action: WaveAction) -> None:
        program, number = self._program, action.number
        described = program.losses[number]
        site = len(program.slices) + number
        side, batch = program.side(site), program.batch_of(site)
        objective = self._part.model.objectives[described.task]
        outputs = self._receive_all(site)
        start = self._part.clock.mark()
        replica, tensor_rank = side.place(self._part.rank)
        targets = self._batch[described.task].targets
        if objective.whole_batch:
            group = described.data_groups[tensor_rank]
            if group is not None:
                outputs = {
                    name: _gathered(values, self._part.groups[group], replica) for name, values in outputs.items()
                }
            targets = tuple(value.to(self._part.device) for value in targets)
        else:
            targets = self._rows(targets, side, batch)
        loss = require_one_number(objective.loss(outputs, targets)) / batch
        if loss.requires_grad:
            # torch does not type it
            loss.backward()  # type: ignore[no-untyped-call]
        # each part of the loss is told by one rank
        if tensor_rank == 0 and not (objective.whole_batch and replica):
            self.losses[number] = loss.detach()
        self._part.clock.record(action, start)

    def _rows(self, values: Values, side: Side, batch: int) -> Values:
        """Cut this rank's rows out of the whole batch."""
        rows = batch // side.data_parallel
        first = side.place(self._part.rank)[0] * rows
        return tuple(value[first : first + rows].to(self._part.device) for value in values)

    def _finish(self, action: WaveAction) -> None:
        start = self._part.clock.mark()
        if action.kind is WaveActionKind.REDUCE:
            self._part.weights.reduce(self._program.reductions[action.number], self._batch)
        elif self._part.optimizer is not None:
            self._part.sample_memory()
            self._part.optimizer.step()
        self._part.clock.record(action, start)


def _gathered(values: Values, group: dist.ProcessGroup, replica: int) -> Values:
    """Return the rows of all replicas; each rank keeps the gradient of its own, since all compute the same loss."""
    return tuple(_GatherRows.apply(value, group, replica) for value in values)  # type: ignore[no-untyped-call]


class _GatherRows(torch.autograd.Function):
    """Rows of all ranks of a group."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, group: dist.ProcessGroup, replica: int) -> torch.Tensor:
        """Gather; every rank has as many rows."""
        ctx.rows = value.shape[0] * replica, value.shape[0] * (replica + 1)
        pieces = [torch.empty_like(value) for _ in range(group.size())]
        dist.all_gather(pieces, value.contiguous(), group=group)
        return torch.cat(pieces)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Keep the gradient of this rank's rows."""
        return gradients[0][slice(*ctx.rows)], None, None
