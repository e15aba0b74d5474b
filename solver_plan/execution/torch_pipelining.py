"""The only file that touches private names of PyTorch; pinned to the versions it was tested with.

PyTorch's pipeline runtime takes any order of actions, but one peer rank for each stage and losses in the order of
micro-batches. `TeamStage` gives a stage peers by the program's transfers and receives into buffers that live only as
long as they are needed; `TeamRuntime` keeps the losses by micro-batch. FSDP's reduction is called here too.
"""

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _Action, _PipelineScheduleRuntime
from torch.distributed.pipelining.stage import _RecvInfo

from solver_plan.errors import NotExecutableError, RunFailedError, SolverPlanError
from solver_plan.execution.actions import Action, ActionKind
from solver_plan.execution.activity import ACTIVITY
from solver_plan.execution.clock import StepClock

if TYPE_CHECKING:
    from solver_plan.execution.measure import MemoryMeter

TESTED_VERSIONS = ("2.13",)

# FSDP warns of outputs that are views, as in-place operations would lose its hooks: a stage's outputs see none
warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
# weights split over tensor ranks and sharded over replicas are gathered in two steps; nothing could be done about it
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
# where an action fails the runtime logs the whole schedule, once for each rank; the error itself is raised
logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.CRITICAL)

Values = tuple[torch.Tensor, ...]


def require_tested_version() -> None:
    """Raise `NotExecutableError` if this PyTorch is not one that the private names were tested with."""
    version = torch.__version__
    if not any(version == tested or version.startswith(f"{tested}.") for tested in TESTED_VERSIONS):
        raise NotExecutableError(
            f"torch: found {version}, execution is tested with {', '.join(TESTED_VERSIONS)}: install one of these"
        )


def settled(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose collective has ended: a send must not read it earlier."""
    return value.wait() if isinstance(value, AsyncCollectiveTensor) else value


@contextmanager
def failing_as(action: object) -> Iterator[None]:
    """Let what a user's module raises name step and action: PyTorch's message shows arguments and hides the cause."""
    try:
        with ACTIVITY.doing(str(action)):
            yield
    except SolverPlanError:
        raise
    except Exception as error:
        cause = error
        while isinstance(cause.__cause__, Exception):
            cause = cause.__cause__
        raise RunFailedError(f"{ACTIVITY}: {type(cause).__name__}: {cause}") from error


@dataclass(frozen=True)
class Peers:
    """Which of this rank's rows go to, or come from, which rank."""

    pieces: tuple[tuple[int, tuple[int, int]], ...] = ()
    """(global rank, rows)."""

    def operations(self, direction: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> list[dist.P2POp]:
        """Return the point-to-point operations for each tensor, piece by piece."""
        return [
            dist.P2POp(direction, tensor.detach()[slice(*rows)], peer)
            for tensor in tensors
            for peer, rows in self.pieces
        ]


@dataclass(frozen=True)
class StagePeers:
    """Peers of a stage on this rank, each way."""

    forward_from: Peers = Peers()
    forward_to: Peers = Peers()
    backward_from: Peers = Peers()
    backward_to: Peers = Peers()


@dataclass(frozen=True)
class StageOptions:
    """What a stage needs beside its module."""

    index: int
    stages: int
    team: int
    teams: int
    micro_batches: int
    inputs: Values
    """Meta tensors of this rank's rows, one micro-batch."""
    outputs: Values
    peers: StagePeers
    backward_input_is_whole: bool
    """Run I as the whole backward and W as nothing: recomputation would else run again for each group of weights."""
    splits_backward: bool
    """The order has I and W for this stage."""
    reduce: Callable[[], None]
    """Sum the stage's gradients over its replicas."""


class TeamStage(PipelineStage):
    """A stage whose replicas are a team of ranks; other stages may have other degrees."""

    def __init__(
        self,
        module: nn.Module,
        options: StageOptions,
        alone: dist.ProcessGroup,
        device: torch.device,
        clock: StepClock,
        memory: "MemoryMeter",
    ) -> None:
        def nothing() -> None:
            return None

        super().__init__(
            module,
            options.index,
            options.stages,
            device,
            input_args=options.inputs,
            output_args=options.outputs,
            group=alone,
            dw_builder=(lambda: nothing) if options.backward_input_is_whole else None,
        )
        self.options = options
        self.clock = clock
        self.memory = memory
        # one logical rank for each team; the base class only checks these against each other
        self.group_rank, self.group_size = options.team, options.teams

    # Shapes are known: there is nothing to vote on or to exchange before the first step.

    def _warmup_forward_vote(self, has_backward: bool, received_acc: torch.Tensor | None = None) -> torch.Tensor:
        return torch.ones(1, dtype=torch.int32)

    def _warmup_backward_result(self, received_result: torch.Tensor | None = None) -> torch.Tensor:
        return torch.ones(1, dtype=torch.int32)

    # Buffers: made when a receive is posted, dropped behind the backward.

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        first = self.is_first
        for chunk in range(num_microbatches):
            self.args_recv_info[chunk] = tuple(
                _RecvInfo(f"input {i}", None if first else self.stage_index - 1, None, meta, is_root_arg=first)
                for i, meta in enumerate(self._stage_meta.inputs or ())
            )

    def _create_grad_recv_info(self, act_send_info: Mapping[int, object]) -> tuple[_RecvInfo, ...]:
        if self.is_last:
            return ()
        metas = self._stage_meta.output_grads or ()
        return tuple(_RecvInfo(f"gradient {i}", self.stage_index + 1, None, meta) for i, meta in enumerate(metas))

    def _fresh(self, infos: Sequence[_RecvInfo], metas: Values) -> list[torch.Tensor]:
        """Give each receive that has a tensor to take a new buffer."""
        buffers = []
        for info, meta in zip(infos, metas, strict=True):
            if info.tensor_meta is not None:
                info.buffer = torch.empty(meta.shape, dtype=meta.dtype, device=self.device)
                buffers.append(info.buffer)
        return buffers

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Receive the inputs of a micro-batch."""
        buffers = self._fresh(self.args_recv_info[fwd_chunk_id], self.options.inputs)
        return self.options.peers.forward_from.operations(dist.irecv, buffers)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Send the outputs of a micro-batch."""
        outputs, _ = self.fwd_cache[fwd_chunk_id]
        tensors = [settled(output).detach().contiguous() for output in outputs]
        return self.options.peers.forward_to.operations(dist.isend, tensors)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Receive the gradients of the outputs."""
        if self.is_last:
            return []
        buffers = self._fresh(self.grad_recv_info[bwd_chunk_id], self.options.outputs)
        return self.options.peers.backward_from.operations(dist.irecv, buffers)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Send the gradients of the inputs."""
        gradients = self._gradients(self.bwd_cache.pop(bwd_chunk_id))
        if self.is_first:
            return []
        tensors = [settled(gradient).contiguous() for gradient in gradients if gradient is not None]
        return self.options.peers.backward_to.operations(dist.isend, tensors)

    def get_local_bwd_output(self, mb_index: int) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of the inputs, for the stage before on the same ranks."""
        return self._gradients(self.bwd_cache.pop(mb_index))

    def _gradients(self, found: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
        """Return a gradient for each input that takes one: what nothing used has gradient 0."""
        return tuple(
            (torch.zeros(meta.shape, dtype=meta.dtype, device=self.device) if gradient is None else gradient)
            if meta.requires_grad
            else None
            for gradient, meta in zip(found, self.options.inputs, strict=True)
        )

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[torch.Tensor | None, ...], mb_index: int) -> None:
        """Take the gradients of the outputs from the stage behind on the same ranks."""
        for info, gradient in zip(self.grad_recv_info[mb_index], next_stage_bwd_outputs, strict=True):
            info.buffer = gradient

    def _drop_buffers(self, micro_batch: int) -> None:
        for info in (*self.args_recv_info[micro_batch], *self.grad_recv_info[micro_batch]):
            info.buffer = None

    # Computation, with its time taken.

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Values:
        """Run the module.

        After I the runtime detaches the outputs in place. W still needs those that operators of the stage have saved,
        and views cannot be detached so: where the order has I and W, the outputs are copies.
        """
        outputs: Values = super().forward_maybe_with_nosync(*args, **kwargs)  # type: ignore[no-untyped-call]
        return tuple(output.clone() for output in outputs) if self.options.splits_backward else outputs

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Values:
        """Run the forward of a micro-batch."""
        action = Action(self.stage_index, ActionKind.FORWARD, fwd_chunk_id)
        began = self.clock.mark()
        with failing_as(action), self.memory.forward(self.stage_index, fwd_chunk_id, self.submod):
            outputs = cast("Values", super().forward_one_chunk(fwd_chunk_id, *args, **kwargs))
        self.clock.record(action, began)
        return outputs

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: torch.Tensor | None = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        """Run B or I of a micro-batch."""
        kind = ActionKind.BACKWARD if full_backward else ActionKind.BACKWARD_INPUT
        action = Action(self.stage_index, kind, bwd_chunk_id)
        began = self.clock.mark()
        with failing_as(action):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        self._drop_buffers(bwd_chunk_id)
        self.memory.backward(self.stage_index, bwd_chunk_id, self.submod)
        self.clock.record(action, began)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Run W of a micro-batch."""
        action = Action(self.stage_index, ActionKind.BACKWARD_WEIGHT, bwd_chunk_id)
        began = self.clock.mark()
        with failing_as(action):
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        self.memory.backward(self.stage_index, bwd_chunk_id, self.submod)
        self.clock.record(action, began)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Sum the gradients over the replicas."""
        began = self.clock.mark()
        action = Action(self.stage_index, ActionKind.REDUCE)
        with ACTIVITY.doing(str(action)):
            self.options.reduce()
        self.clock.record(action, began)


class TeamRuntime(_PipelineScheduleRuntime):
    """Runs a rank's actions of one step, in the order of the program."""

    def __init__(
        self,
        stages: Sequence[TeamStage],
        micro_batches: int,
        loss: Callable[[Values, Values], torch.Tensor],
        teams: Sequence[Sequence[Action]],
    ) -> None:
        super().__init__(  # type: ignore[no-untyped-call]
            list(stages), micro_batches, loss_fn=loss, scale_grads=False
        )
        self._prepare_schedule_with_comms(
            {team: [_Action.from_str(str(action)) for action in actions] for team, actions in enumerate(teams)},
            format="compute_comms",
        )
        self.loss_of: dict[int, torch.Tensor] = {}
        self.loss_values: dict[int, torch.Tensor] = {}

    def run(self, inputs: Sequence[Values] | None, targets: Sequence[Values] | None) -> list[torch.Tensor]:
        """Run one step.

        Parameters
        ----------
        inputs
            This rank's rows of each micro-batch; None where it does not run the first stage.
        targets
            The same for the last stage.

        Returns
        -------
        list
            Loss of this rank's rows of each micro-batch, in order; empty where it does not run the last stage.
        """
        self.loss_of.clear()
        self.loss_values.clear()
        for stage in self._stages:
            stage.has_backward = True
            stage.clear_runtime_states()
        self._step_microbatches(
            None if inputs is None else list(inputs), None, None if targets is None else list(targets), None, False
        )
        return [self.loss_values[micro_batch] for micro_batch in sorted(self.loss_values)]

    def _maybe_compute_loss(
        self, stage: PipelineStage, output: Values, target_mbs: list[Values], mb_index: int, loss_kwargs: object = None
    ) -> None:
        if stage.is_last:
            assert self._loss_fn is not None
            loss = self._loss_fn(output, target_mbs[mb_index])
            self.loss_of[mb_index] = loss
            self.loss_values[mb_index] = loss.detach().clone()

    def _maybe_get_loss(self, stage: PipelineStage, mb_index: int) -> torch.Tensor | None:
        return self.loss_of.pop(mb_index) if stage.is_last else None

    def _update_losses(self, stages: object, losses: object) -> None:
        """Losses are kept by micro-batch."""


def shard_over(module: nn.Module, mesh: DeviceMesh) -> None:
    """Shard a module's weights, gradients and optimizer state over a mesh, gradients summed and not averaged."""
    fully_shard(module, mesh=mesh, reshard_after_forward=False)
    assert isinstance(module, FSDPModule)
    module.set_gradient_divide_factor(1.0)
    # in 32 and 16 bit FSDP would fold the factor into the reduction, which gloo cannot do
    module.set_force_sum_reduction_for_comms(True)


def reduce_scatter_gradients(module: nn.Module, *, keep_weights: bool) -> None:
    """Sum a sharded module's gradients since the last call; each rank adds its share to its sharded gradient.

    What `PipelineStage.perform_reduce_grad` does at the end of a step, callable after any backward.
    """
    assert isinstance(module, FSDPModule)
    module.set_is_last_backward(True)
    module.set_reshard_after_backward(not keep_weights)
    module.set_requires_gradient_sync(True)
    root = fully_shard.state(module)  # type: ignore[attr-defined]
    for state in root._state_ctx.all_states:
        for group in state._fsdp_param_groups:
            group.post_backward()
    root._root_post_backward_final_callback()


def join_fake_world(rank: int, world_size: int) -> None:
    """Join a world in which nobody else exists and collectives do nothing; once in a process."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
