"""Trains a model as a program says: builds this rank's part, and runs it step by step."""

import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from solver_plan.errors import InputError
from solver_plan.execution.actions import ActionKind
from solver_plan.execution.activity import ACTIVITY
from solver_plan.execution.checkpoint_state import Held, tensors_of
from solver_plan.execution.clock import StepClock
from solver_plan.execution.comparison import RankReport, Step
from solver_plan.execution.groups import create_groups
from solver_plan.execution.launch import require_world_size
from solver_plan.execution.measure import MemoryMeter
from solver_plan.execution.model import (
    Batch,
    Model,
    TensorShape,
    Values,
    boundary_shapes,
    place,
    require_one_number,
    require_same_operators,
    shared_users,
)
from solver_plan.execution.program import Program
from solver_plan.execution.sharding import Replicas, full, sum_shared_gradients
from solver_plan.execution.stage import StageModule, build_stage
from solver_plan.execution.torch_pipelining import (
    Peers,
    StageOptions,
    StagePeers,
    TeamRuntime,
    TeamStage,
    require_tested_version,
)
from solver_plan.execution.transfers import Transfer
from solver_plan.execution.verify import verify

MakeOptimizer = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]


def adamw(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW at a learning rate of 1e-4, the optimizer where none is given."""
    return torch.optim.AdamW(parameters, lr=1e-4)


class Executor:
    """This rank's part of a program.

    Every rank of the world makes one, after `torch.distributed` has been initialised, and calls `step` with the same
    batches. What does not fit is refused before any process group is made.

    Parameters
    ----------
    program
        From `compile_plan`.
    model
        The modules of its operators.
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
        If the world has another size, the model other operators, or PyTorch another version.
    """

    def __init__(
        self,
        program: Program,
        model: Model,
        *,
        optimizer: MakeOptimizer | None = adamw,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        require_tested_version()
        require_world_size(program.world_size, dist.get_world_size())
        require_same_operators(program, model)
        verify(program)
        self.program = program
        self.model = model
        self.rank = dist.get_rank()
        self.device = default_device() if device is None else device
        self.team = program.team_of_rank.get(self.rank)
        self.stage_indices = () if self.team is None else program.teams[self.team].stages
        self.steps: list[Step] = []
        self._clock = StepClock(self.device)
        # of all operators on every rank: what is wrong with any is refused by all, before a group is made
        shapes = boundary_shapes(model, dtype)
        groups = create_groups(program, self.device.type, timeout_s)
        self._shared_groups = [None if s.group is None else groups.group(s.group) for s in program.shared_weights]
        self.modules: dict[int, StageModule] = {}
        self.memory = MemoryMeter(
            self.device, [index for index in self.stage_indices if program.stages[index].sharding]
        )
        stages: list[TeamStage] = []
        for index in self.stage_indices:
            module = build_stage(program, model, index, groups, seed=seed, dtype=dtype, device=self.device)
            replicas = Replicas(program, index, module, groups)
            self.modules[index] = module
            for part in module.parts():
                part.keep = self.memory.keep
            options = _stage_options(program, index, self.rank, shapes, replicas.reduce)
            stages.append(TeamStage(module, options, groups.alone, self.device, self._clock, self.memory))
        self.seed_random(seed, 0)
        parameters = [parameter for module in self.modules.values() for parameter in module.parameters()]
        self.optimizer = optimizer(parameters) if optimizer is not None and parameters else None
        pipeline = [[a for a in actions if a.kind not in _AFTERWARDS] for actions in program.team_actions]
        self._afterwards = [action for action in program.actions_of(self.rank) if action.kind in _AFTERWARDS]
        self._runtime = TeamRuntime(stages, program.micro_batches, self._loss, pipeline) if stages else None

    def step(self, batch: Batch) -> Step:
        """Train on one global batch, the same on every rank; each takes the rows it needs."""
        self._require_whole(batch)
        began_s, began = time.time(), time.perf_counter()
        self._clock.begin()
        self.zero_gradients()
        self.memory.sample_state(self.modules.values(), self.optimizer)
        losses: list[torch.Tensor] = []
        if self._runtime is not None:
            first = 0 in self.modules
            last = len(self.program.stages) - 1 in self.modules
            losses = self._runtime.run(
                self._rows(batch.inputs, 0, 0) if first else None,
                self._rows(batch.targets, len(self.program.stages) - 1, -1) if last else None,
            )
            self.memory.sample_state(self.modules.values(), self.optimizer)
        for action in self._afterwards:
            start = self._clock.mark()
            with ACTIVITY.doing(str(action)):
                if action.kind is ActionKind.REDUCE_SHARED:
                    assert action.micro_batch is not None
                    self._sum_shared(action.micro_batch)
                elif self.optimizer is not None and action == self._afterwards[-1]:
                    # one optimizer holds the parameters of all stages of this rank
                    self.optimizer.step()
            self._clock.record(action, start)
        self.memory.sample_state(self.modules.values(), self.optimizer)
        loss = self._global_loss(losses)
        actions = self._clock.end()
        seconds = time.perf_counter() - began
        # counting takes time, and every step is alike
        self.memory.counting = False
        self.steps.append(Step(loss, began_s, seconds, actions))
        return self.steps[-1]

    def report(self) -> RankReport:
        """Return what this rank has measured so far."""
        memory = self.memory
        return RankReport(self.rank, tuple(self.steps), memory.state_bytes, memory.activation_bytes, memory.peak_bytes)

    def zero_gradients(self) -> None:
        """Drop the gradients of this rank's parameters."""
        for module in self.modules.values():
            for parameter in module.parameters():
                parameter.grad = None

    def gradients(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return the whole gradients of each operator of this rank's stages, by operator and parameter.

        All ranks of a team call this together.
        """
        return {
            name: {key: full(p.grad).cpu() for key, p in module.named_parameters() if p.grad is not None}
            for name, module in self.operators().items()
        }

    def weights(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return the whole weights of each operator of this rank's stages; all ranks of a team call this together."""
        return {
            name: {key: full(p.detach()).cpu() for key, p in module.named_parameters()}
            for name, module in self.operators().items()
        }

    def held(self) -> list[Held]:
        """Return the weights and persistent buffers of this rank, by names that no plan changes."""
        for stage_module in self.modules.values():
            for part in stage_module.modules():
                if isinstance(part, FSDPModule):
                    part.reshard()
        users = shared_users(self.model)
        found: list[Held] = []
        for operator, module in self._operator_modules().items():
            layer = self.model.layers[operator]
            shared = {path: name for name, path in layer.shared_weights.items()}
            stage, segment = place(self.program, operator)
            replica, _ = self.program.stages[stage].side(segment).place(self.rank)
            for key, tensor in tensors_of(module).items():
                first = users[shared[key]][0] if key in shared else operator
                owner = self.model.layers[first]
                path = owner.shared_weights[shared[key]] if key in shared else key
                # replicas hold the same weights, but each its own buffers
                speaks = first == operator and (replica == 0 or isinstance(tensor, nn.Parameter))
                if not any(tensor is other.tensor for other in found):
                    found.append(Held(f"{owner.name}/{path}", tensor, speaks))
        return found

    def operators(self) -> dict[str, nn.Module]:
        """Return the module of each operator of this rank's stages, by name."""
        return {self.program.operators[index]: module for index, module in self._operator_modules().items()}

    def _operator_modules(self) -> dict[int, nn.Module]:
        found: dict[int, nn.Module] = {}
        for stage, module in self.modules.items():
            found.update(zip(range(*self.program.stages[stage].operators), module.operators(), strict=True))
        return found

    def seed_random(self, seed: int, step: int) -> None:
        """Let the tensor ranks of a replica draw the same numbers: what each computes whole must stay equal on all.

        Replicas draw different ones, unless the stage's layout changes within it.
        """
        if self.team is None:
            return
        stage = self.program.stages[self.stage_indices[0]]
        replica = stage.side(0).place(self.rank)[0] if len(stage.segments) == 1 else 0
        torch.manual_seed((((step * 1_000_003 + seed) * 10_007 + self.team) * 10_007 + replica) % (1 << 63))

    def _require_whole(self, batch: Batch) -> None:
        """Refuse a batch of another size, on every rank: those that need no rows of it would wait for the others."""
        for value in (*batch.inputs, *batch.targets):
            samples = value.shape[0] if value.dim() else 0
            if samples != self.program.global_batch:
                raise InputError(
                    f"batch: {samples} samples, the plan's global batch is {self.program.global_batch}; "
                    "give each step a whole global batch"
                )

    def _rows(self, values: Values, stage: int, segment: int) -> list[Values]:
        """Cut this rank's rows of each micro-batch out of the global batch."""
        side = self.program.stages[stage].side(segment)
        size = self.program.micro_batch_size
        rows = size // side.data_parallel
        replica, _ = side.place(self.rank)
        starts = [index * size + replica * rows for index in range(self.program.micro_batches)]
        return [tuple(value[start : start + rows].to(self.device) for value in values) for start in starts]

    def _loss(self, outputs: Values, targets: Values) -> torch.Tensor:
        return require_one_number(self.model.loss(outputs, targets)) / self.program.global_batch

    def _global_loss(self, losses: Sequence[torch.Tensor]) -> float:
        """Sum the losses over micro-batches and replicas, and tell every rank."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        last = self.program.stages[-1]
        if losses and last.side(-1).place(self.rank)[1] == 0:
            for loss in losses:
                total += loss.double()
        dist.all_reduce(total)
        return float(total)

    def _sum_shared(self, number: int) -> None:
        shared = self.program.shared_weights[number]
        modules = self._operator_modules()
        copies: list[nn.Parameter] = []
        speaks: list[bool] = []
        for operator in shared.operators:
            if operator in modules:
                parameter = modules[operator].get_parameter(self.model.layers[operator].shared_weights[shared.name])
                if not any(parameter is copy for copy in copies):
                    stage, _ = place(self.program, operator)
                    copies.append(parameter)
                    speaks.append(self.program.stages[stage].devices[0] == self.rank)
        sum_shared_gradients(copies, speaks, self._shared_groups[number])


_AFTERWARDS = (ActionKind.REDUCE_SHARED, ActionKind.UPDATE)
"""What is done behind PyTorch's pipeline runtime."""


def default_device() -> torch.device:
    """Return the current CUDA device with NCCL, else the CPU."""
    if dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _stage_options(
    program: Program, stage: int, rank: int, shapes: Sequence[tuple[TensorShape, ...]], reduce: Callable[[], None]
) -> StageOptions:
    described = program.stages[stage]
    first, last = described.segments[0], described.segments[-1]
    actions = [action for action in program.team_actions[described.team] if action.stage == stage]
    splits = any(action.kind is ActionKind.BACKWARD_INPUT for action in actions)
    return StageOptions(
        index=stage,
        stages=len(program.stages),
        team=described.team,
        teams=len(program.teams),
        micro_batches=program.micro_batches,
        inputs=tuple(
            shape.meta(program.micro_batch_size // first.data_parallel) for shape in shapes[described.operators[0]]
        ),
        outputs=tuple(
            shape.meta(program.micro_batch_size // last.data_parallel) for shape in shapes[described.operators[1]]
        ),
        peers=_peers(program, stage, rank),
        backward_input_is_whole=splits and bool(described.recompute),
        splits_backward=splits,
        reduce=reduce,
    )


def _peers(program: Program, stage: int, rank: int) -> StagePeers:
    before = program.boundary_after(stage - 1, len(program.stages[stage - 1].segments) - 1) if stage else None
    after = program.boundary_after(stage, len(program.stages[stage].segments) - 1)

    def incoming(transfers: Sequence[Transfer]) -> Peers:
        return Peers(tuple((x.source, x.destination_rows) for x in transfers if x.destination == rank))

    def outgoing(transfers: Sequence[Transfer]) -> Peers:
        return Peers(tuple((x.destination, x.source_rows) for x in transfers if x.source == rank))

    return StagePeers(
        forward_from=incoming(before.forward) if before else Peers(),
        forward_to=outgoing(after.forward) if after else Peers(),
        backward_from=incoming(after.backward) if after else Peers(),
        backward_to=outgoing(before.backward) if before else Peers(),
    )
