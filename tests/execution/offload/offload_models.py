"""Models, plans and training loops for the tests of the offload executor."""

import copy
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from solver_plan.execution.offload.optimizer import OffloadOptimizer
from solver_plan.offload.assemble import Candidate, plan_document
from solver_plan.offload.flow import Rule, run_rule
from solver_plan.offload.plan import OffloadPlan, Place
from solver_plan.offload.problem import BytesPerParameter, Layer, OffloadProblem, Rates
from solver_plan.offload.streaming import streamed_timing

VOCABULARY, LENGTH = 37, 6
STREAMED: Place = "gpu_streamed"
Layers = dict[str, nn.Module]


class Block(nn.Module):
    """Attention and MLP with residuals."""

    def __init__(self, hidden: int, wide: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)
        self.mlp = nn.Sequential(nn.LayerNorm(hidden), nn.Linear(hidden, wide), nn.GELU(), nn.Linear(wide, hidden))

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        queries, keys, values = self.qkv(self.norm(stream)).chunk(3, dim=-1)
        stream = stream + self.out(nn.functional.scaled_dot_product_attention(queries, keys, values, is_causal=True))
        return stream + self.mlp(stream)


class Head(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.linear = nn.Linear(hidden, VOCABULARY, bias=False)

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        return self.linear(self.norm(stream))


class Gpt(nn.Module):
    """Embedding, blocks of the given widths, head; none of the sizes is a multiple of a vector."""

    def __init__(self, widths: Sequence[int] = (44, 44, 44), *, hidden: int = 22, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, hidden)
        self.blocks = nn.ModuleList(Block(hidden, wide) for wide in widths)
        self.head = Head(hidden)
        if tied:
            self.head.linear.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        stream = self.embed(tokens)
        for block in self.blocks:
            stream = block(stream)
        return self.head(stream)

    def layers(self) -> Layers:
        blocks = {f"block{index}": block for index, block in enumerate(self.blocks)}
        return {"embed": self.embed, **blocks, "head": self.head}


def gpt() -> Gpt:
    torch.manual_seed(0)
    return Gpt()


def unequal() -> Gpt:
    """Layers of very different sizes, and a head tied to the embedding."""
    torch.manual_seed(1)
    return Gpt((7, 300, 19, 120), tied=True)


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens[:, :-1]).float()
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def batch(number: int, samples: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 + number)
    return torch.randint(VOCABULARY, (samples, LENGTH + 1), generator=generator)


def problem_of(
    layers: Mapping[str, nn.Module | Sequence[nn.Parameter]],
    *,
    chunks: int = 3,
    accumulation: int = 1,
    clip: bool = False,
    streamed_layers: int = 2,
    rates: tuple[float, float, float, float] = (1e6, 1e8, 1e8, 1e8),
) -> OffloadProblem:
    """Describe a model: every layer computes 10 ms forward and 20 ms backward."""
    seen: set[nn.Parameter] = set()
    counts: list[int] = []
    for given in layers.values():
        own = [p for p in (given.parameters() if isinstance(given, nn.Module) else given) if p not in seen]
        seen.update(own)
        counts.append(sum(parameter.numel() for parameter in own if parameter.requires_grad))
    return OffloadProblem(
        layers=tuple(
            Layer(name=name, parameters=count, forward_ms=10.0, backward_ms=20.0)
            for name, count in zip(layers, counts, strict=True)
        ),
        rates=Rates(
            cpu_update_parameters_per_s=rates[0],
            gpu_update_parameters_per_s=rates[1],
            d2h_bytes_per_s=rates[2],
            h2d_bytes_per_s=rates[3],
        ),
        bytes_per_parameter=BytesPerParameter(gradient=4, weight=4, optimizer_state=12),
        gpu_state_bytes=12 * sum(counts),
        staging_bytes=12 * streamed_layers * max(counts),
        chunks_per_layer=chunks,
        accumulation_steps=accumulation,
        clip_gradients=clip,
    )


def plan_of(problem: OffloadProblem, *places: Place) -> OffloadPlan:
    """Plan a placement; the last place given holds for all further layers."""
    count = len(problem.layers)
    placement = (*places, *([places[-1]] * (count - len(places))))
    if STREAMED in placement:
        timing = streamed_timing(problem, placement, serial=False)
        assert timing is not None
    else:
        timing = run_rule(problem, placement, Rule())[1]
    return plan_document(problem, Candidate(placement, timing))


MIXED: tuple[Place, ...] = ("gpu", "cpu", "gpu_streamed", "cpu")


class Reference:
    """The same training with `torch.optim.AdamW`; 16-bit parameters are updated through 32-bit copies."""

    def __init__(
        self,
        model: nn.Module,
        *,
        max_norm: float | None = None,
        accumulation: int = 1,
        fused: bool = True,
        loss_scale: float = 1.0,
        groups: Callable[[nn.Module], list[dict[str, object]]] | None = None,
        **options: float,
    ) -> None:
        self.model = copy.deepcopy(model)
        self.max_norm, self.accumulation, self.loss_scale = max_norm, accumulation, loss_scale
        self.masters: dict[nn.Parameter, nn.Parameter] = {
            parameter: parameter
            if parameter.dtype == torch.float32
            else nn.Parameter(parameter.detach().float(), parameter.requires_grad)
            for parameter in self.model.parameters()
        }
        given = [*self.masters.values()] if groups is None else groups(self.model)
        self.optimizer = torch.optim.AdamW(given, fused=fused, **options)  # type: ignore[arg-type]

    def step(self, number: int, loss: Callable[[nn.Module, torch.Tensor], torch.Tensor] = loss_of) -> None:
        for micro in range(self.accumulation):
            (loss(self.model, batch(number * self.accumulation + micro)) * self.loss_scale).backward()
        for parameter, master in self.masters.items():
            if master is not parameter and parameter.grad is not None:
                master.grad = parameter.grad.float() / self.loss_scale
                parameter.grad = None
        if self.max_norm is not None:
            self.norm = nn.utils.clip_grad_norm_(self.masters.values(), self.max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            for parameter, master in self.masters.items():
                if master is not parameter:
                    parameter.copy_(master)


def train(
    model: nn.Module,
    optimizer: OffloadOptimizer,
    numbers: range,
    *,
    accumulation: int = 1,
    speculated: bool = False,
    loss: Callable[[nn.Module, torch.Tensor], torch.Tensor] = loss_of,
) -> None:
    for number in numbers:
        for micro in range(accumulation):
            loss(model, batch(number * accumulation + micro)).backward()
        if speculated:
            until_speculated(optimizer)
        optimizer.step()
    optimizer.synchronize()


def until_speculated(optimizer: OffloadOptimizer) -> None:
    """Wait until an update has been done before the step was decided, if the step speculates."""
    step = optimizer._steps.current
    assert step is not None
    if step.speculating:
        optimizer._engine.lanes.wait(lambda: any(each.phase == "done" for each in step.passes))


def assert_same_weights(model: nn.Module, other: nn.Module) -> None:
    for (name, mine), (_, theirs) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(mine, theirs), f"{name}: differs by {(mine - theirs).abs().max()}"
