"""The module of a stage: its operators on this rank, with the planned recomputation and changes of layout."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

from solver_plan.execution.groups import TENSOR, ProcessGroups
from solver_plan.execution.model import Model, TensorParallel, Values, as_tuple, build_layer, shared_users
from solver_plan.execution.moving import begin_move
from solver_plan.execution.program import Boundary, Program
from solver_plan.execution.torch_pipelining import settled
from solver_plan.execution.transfers import Transfer

Splits = tuple[int | None, ...]
"""Dim over which each of several tensors is split among tensor ranks; None, or not named: whole."""


@dataclass(frozen=True)
class Resplit:
    """Brings tensors from the split that one operator leaves to the split that the next one takes."""

    mesh: DeviceMesh
    before: Splits
    after: Splits

    def __call__(self, values: Values) -> Values:
        """Return the tensors in their new split; collectives run on the tensor ranks."""
        return tuple(
            self._one(value, _split(self.before, index), _split(self.after, index))
            for index, value in enumerate(values)
        )

    def _one(self, value: torch.Tensor, before: int | None, after: int | None) -> torch.Tensor:
        if before == after:
            return value
        spread = DTensor.from_local(value, self.mesh, [_placement(before)], run_check=False)
        local = spread.redistribute(placements=[_placement(after)]).to_local()
        assert isinstance(local, torch.Tensor)
        return settled(local)


def _split(splits: Splits, index: int) -> int | None:
    return splits[index] if index < len(splits) else None


def _placement(dim: int | None) -> Placement:
    return Replicate() if dim is None else Shard(dim)


@dataclass(frozen=True)
class PlacedOperator:
    """An operator on this rank: its module, and what brings the tensors before it into the split that it takes."""

    module: nn.Module
    resplit: Resplit | None


class SegmentModule(nn.Module):
    """Operators of one layout; runs of them are recomputed in the backward."""

    def __init__(
        self, operators: Sequence[PlacedOperator], runs: Sequence[tuple[int, int, bool]], last: Resplit | None
    ) -> None:
        super().__init__()
        self.operators = nn.ModuleList([operator.module for operator in operators])
        self.runs = tuple((tuple(operators[first:end]), recomputed) for first, end, recomputed in runs)
        """Operators in order, and whether they are recomputed."""
        self.last = last
        self.keep: Callable[[Values], None] | None = None
        """Told the input of each recomputed run."""

    def forward(self, *values: torch.Tensor) -> Values:
        """Run the operators; whole tensors come in and go out."""
        for run, recomputed in self.runs:
            if recomputed and torch.is_grad_enabled():
                if self.keep is not None:
                    self.keep(values)
                values = checkpoint(_chain, run, *values, use_reentrant=False)
            else:
                values = _chain(run, *values)
        return values if self.last is None else self.last(values)


def _chain(operators: tuple[PlacedOperator, ...], *values: torch.Tensor) -> Values:
    for operator in operators:
        if operator.resplit is not None:
            values = operator.resplit(values)
        values = as_tuple(operator.module(*values))
    return values


class StageModule(nn.Module):
    """The segments of a stage, with the exchange of rows between them."""

    def __init__(self, segments: Sequence[SegmentModule], exchanges: Sequence["Exchange | None"]) -> None:
        super().__init__()
        self.segments = nn.ModuleList(segments)
        self.exchanges = tuple(exchanges)
        """Behind each segment but the last."""

    def parts(self) -> list[SegmentModule]:
        """Return the segments in order."""
        return [module for module in self.modules() if isinstance(module, SegmentModule)]

    def operators(self) -> list[nn.Module]:
        """Return the modules of the operators in order."""
        return [operator for segment in self.parts() for operator in segment.operators]

    def forward(self, *values: torch.Tensor) -> Values:
        """Run the stage on this rank's rows of a micro-batch."""
        for index, segment in enumerate(self.segments):
            values = segment(*values)
            exchange = self.exchanges[index] if index < len(self.exchanges) else None
            if exchange is not None:
                values = _ExchangeFunction.apply(exchange, *values)  # type: ignore[no-untyped-call]
        return values


@dataclass(frozen=True)
class Exchange:
    """Moves rows between the ranks of a stage where its layout changes."""

    boundary: Boundary
    rank: int
    rows_before: int
    rows_after: int


class _ExchangeFunction(torch.autograd.Function):
    """Rows go forward by the boundary's forward transfers, gradients come back by its backward ones."""

    @staticmethod
    def forward(ctx: Any, exchange: Exchange, *values: torch.Tensor) -> Values:  # torch passes an untyped context
        ctx.exchange = exchange
        moved = move(exchange.boundary.forward, exchange.rank, values, exchange.rows_after)
        ctx.mark_non_differentiable(*(value for value in moved if not value.is_floating_point()))
        ctx.floating = tuple(value.is_floating_point() for value in values)
        return moved

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        exchange: Exchange = ctx.exchange
        floating = tuple(g for g, kept in zip(gradients, ctx.floating, strict=True) if kept)
        moved = iter(move(exchange.boundary.backward, exchange.rank, floating, exchange.rows_before))
        return None, *(next(moved) if kept else None for kept in ctx.floating)


def move(transfers: Sequence[Transfer], rank: int, values: Values, rows: int) -> Values:
    """Send and receive rows of each tensor; returns this rank's `rows` rows of each."""
    results = tuple(value.new_empty((rows, *value.shape[1:])) for value in values)
    moving = begin_move(transfers, rank, values, results)
    moving.left()
    return moving.arrived()


def build_stage(
    program: Program,
    model: Model,
    stage: int,
    groups: ProcessGroups,
    *,
    seed: int,
    dtype: torch.dtype,
    device: torch.device,
) -> StageModule:
    """Build the operators of a stage on this rank: made whole one at a time, then split over the tensor ranks."""
    described = program.stages[stage]
    segments: list[SegmentModule] = []
    exchanges: list[Exchange | None] = []
    for index, segment in enumerate(described.segments):
        mesh = groups.mesh(stage, index)[TENSOR] if segment.tensor_parallel > 1 else None
        operators: list[PlacedOperator] = []
        left: Splits = ()
        for operator in range(*segment.operators):
            module = build_layer(model, operator, seed, dtype, device)
            _copy_shared(model, operator, module, seed, dtype, device)
            choice = None
            if mesh is not None:
                choice = model.layers[operator].tensor_parallel(segment.tensor_parallel, segment.partition)
                assert choice is not None
                parallelize(module, mesh, choice)
            placed, left = place_behind(left, module, mesh, choice)
            operators.append(placed)
        last = whole_again(left, mesh)
        tie(model, segment.operators, [placed.module for placed in operators])
        runs = _runs(segment.operators, described.recompute)
        segments.append(SegmentModule(operators, runs, last))
        if index + 1 < len(described.segments):
            exchanges.append(_exchange(program, stage, index, groups.rank))
    return StageModule(segments, exchanges)


def place_behind(
    left: Splits, module: nn.Module, mesh: DeviceMesh | None, choice: TensorParallel | None
) -> tuple[PlacedOperator, Splits]:
    """Place a module behind one that leaves its tensors split as `left`; returns the split that it leaves too."""
    if mesh is None or choice is None:
        return PlacedOperator(module, None), ()
    resplit = None if _same(left, choice.inputs) else Resplit(mesh, left, choice.inputs)
    return PlacedOperator(module, resplit), choice.outputs


def whole_again(left: Splits, mesh: DeviceMesh | None) -> Resplit | None:
    """Return what makes tensors whole that the last operator leaves split as `left`; None: they are."""
    return None if mesh is None or _same(left, ()) else Resplit(mesh, left, ())


def _same(before: Splits, after: Splits) -> bool:
    count = max(len(before), len(after))
    return all(_split(before, index) == _split(after, index) for index in range(count))


def parallelize(module: nn.Module, mesh: DeviceMesh, choice: TensorParallel) -> None:
    """Split the weights of a module, made whole and alike on every rank, over the tensor ranks."""
    for name, style in choice.styles.items():
        # every rank made the same weights: each keeps its shard, nothing is sent
        parallelize_module(module.get_submodule(name) if name else module, mesh, style, src_data_rank=None)


def _copy_shared(
    model: Model, operator: int, module: nn.Module, seed: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Start shared weights from those of the first operator that has them."""
    users = shared_users(model)
    for name, parameter in model.layers[operator].shared_weights.items():
        first = users[name][0]
        if first != operator:
            original = build_layer(model, first, seed, dtype, device)
            source = original.get_parameter(model.layers[first].shared_weights[name])
            with torch.no_grad():
                module.get_parameter(parameter).copy_(source)


def tie(model: Model, bounds: tuple[int, int], modules: Sequence[nn.Module]) -> None:
    """Let operators [first, end) that share weights use one tensor."""
    owners: dict[str, nn.Parameter] = {}
    for operator, module in zip(range(*bounds), modules, strict=True):
        for name, path in model.layers[operator].shared_weights.items():
            found = module.get_parameter(path)
            owner = owners.setdefault(name, found)
            if owner is not found:
                parent, _, attribute = path.rpartition(".")
                setattr(module.get_submodule(parent), attribute, owner)


def _runs(bounds: tuple[int, int], recompute: Sequence[tuple[int, int]]) -> list[tuple[int, int, bool]]:
    runs: list[tuple[int, int, bool]] = []
    at, end = bounds
    for first, stop in recompute:
        if bounds[0] <= first < end:
            if at < first:
                runs.append((at - bounds[0], first - bounds[0], False))
            runs.append((first - bounds[0], stop - bounds[0], True))
            at = stop
    if at < end:
        runs.append((at - bounds[0], end - bounds[0], False))
    return runs


def _exchange(program: Program, stage: int, segment: int, rank: int) -> Exchange | None:
    boundary = program.boundary_after(stage, segment)
    if boundary is None:
        return None
    before, after = (program.stages[stage].segments[index].data_parallel for index in (segment, segment + 1))
    return Exchange(boundary, rank, program.micro_batch_size // before, program.micro_batch_size // after)
