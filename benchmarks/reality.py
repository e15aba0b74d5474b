"""Holds the `full` cost model against published training runs: `python -m benchmarks.reality`.

Each run that the model can express is predicted in its own published configuration: step time uncalibrated, then with
one factor on the speed of computation for each kind of GPU, fitted to the runs of that kind. Runs that trained must be
predicted to fit their memory.
"""

import itertools
import json
import os
import statistics
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, TypeAdapter
from pydantic.dataclasses import dataclass as validated

from benchmarks.uniform import Configuration, Recompute, UniformPipeline, uniform_pipeline
from models.gpt import describe
from models.transformer import FUSED, Passes, Transformer
from solver_plan.errors import InputError
from solver_plan.profiles.cluster import ClusterDescription, read_cluster
from solver_plan.profiles.description import ADAM_16_BIT, ADAM_16_BIT_GRADIENTS_32_BIT, DataType

ROOT = Path(__file__).parents[1]
DEFAULT_DATA = ROOT.parent / "shared" / "data"

CLUSTERS = {
    "A100-SXM-80GB": "a100_8x80gb",
    "H100-SXM-80GB": "h100_8x80gb",
    "H100-SXM-96GB-HBM2e-500W": "h100_8x96gb_hbm2e",
    "H100-SXM-95GB-HBM2e": "h100_8x96gb_hbm2e",
    "H200-SXM-141GB": "h200_8x141gb",
    "B200-SXM": "b200_8x180gb",
}
PRECISIONS: dict[str, DataType] = {"fp16": "float16", "bf16": "bfloat16", "fp8": "float8"}
SHARDING = {"none": 0, "zero1": 1, "zero2": 2, "fsdp": 3}
TRANSFORMER_ENGINE = ("megatron-bridge", "bridge-ablation", "bridge-verification", "nemo-24.07")
"""Sources whose recipes overlap tensor-parallel collectives and transfers by default."""

Whole = Annotated[int, Field(strict=True)]


@validated(frozen=True, kw_only=True, config=ConfigDict(extra="ignore"))
class PublishedRun:
    """The fields of a published run that a prediction needs; see the data's README."""

    id: str
    source_key: str
    kind: Literal["run", "oom", "memory_model"]
    model: str
    model_kind: Literal["dense", "moe", "hybrid"]
    layers: Whole
    hidden: Whole
    heads: Whole | None
    kv_heads: Whole | None
    head_dim: Whole | None
    ffn: Whole | None
    gated_mlp: bool | None
    vocab: Whole
    tied_embeddings: bool | None
    seq_len: Whole
    gpus: Whole
    gpu_type: str
    precision: str
    tp: Whole
    pp: Whole
    vp: Whole | None
    dp: Whole
    cp: Whole
    global_batch: Whole
    micro_batch: Whole | None
    sharding: str
    recompute: str | None
    recompute_detail: str | None
    sequence_parallel: bool | None
    tp_overlap: bool | None
    compile: bool | None
    step_time_s: float | None
    peak_mem_gib: float | None
    mem_states_gib: float | None
    mem_act_gib: float | None
    fits: bool | None


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A run beside the pipelines that its published part leaves open; mostly one."""

    run: PublishedRun
    cluster: ClusterDescription
    candidates: tuple[UniformPipeline, ...]

    def best(self, speed: float = 1.0) -> UniformPipeline:
        """Return the fastest candidate, of those that fit if any does."""
        return min(self.candidates, key=lambda each: (not self._fit(each), each.predict(speed).step_ms))

    def error(self, speed: float = 1.0) -> float:
        """Relative error of the predicted step time; positive: too slow."""
        assert self.run.step_time_s is not None
        return self.best(speed).predict(speed).step_ms / 1e3 / self.run.step_time_s - 1

    @property
    def fits(self) -> bool:
        """Whether the predicted memory fits the device."""
        return self._fit(self.best())

    def _fit(self, pipeline: UniformPipeline) -> bool:
        device = self.cluster.device
        return pipeline.memory_bytes <= device.memory_bytes * (1 - device.memory_margin)


def data_folder() -> Path:
    """Return the folder of the reference data: `SOLVER_PLAN_DATA`, or beside the repository."""
    return Path(os.environ.get("SOLVER_PLAN_DATA", DEFAULT_DATA))


def read_runs(file: Path) -> list[PublishedRun]:
    """Read the published runs. Raises `InputError` if the file cannot be read."""
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"{file}: cannot read ({error.strerror}); set SOLVER_PLAN_DATA") from None
    return TypeAdapter(list[PublishedRun]).validate_python(json.loads(text))


def outside(run: PublishedRun) -> str | None:
    """Return why the model cannot express a run; None if it can."""
    if run.kind == "memory_model":
        return "memory by a formula, not measured"
    if run.model_kind != "dense":
        return "experts or state-space layers"
    if run.cp > 1:
        return "context parallel"
    if run.gpu_type not in CLUSTERS:
        return "GPU whose kind or power limit is not published, or without a cluster file"
    if run.precision not in PRECISIONS:
        return "4-bit, micro-scaled or row-wise scaled precision"
    if run.source_key == "automodel":
        return "several pipeline passes in a step"
    if run.kind == "run" and run.step_time_s is None and run.peak_mem_gib is None:
        return "nothing measured"
    return None


def compare(run: PublishedRun) -> Compared:
    """Put a run beside its own configuration; what is not published stays open."""
    cluster = read_cluster(CLUSTERS[run.gpu_type])
    description = describe(_shape(run))
    candidates = tuple(uniform_pipeline(description, cluster, configuration) for configuration in _configurations(run))
    return Compared(run=run, cluster=cluster, candidates=candidates)


def calibrate(compared: Sequence[Compared]) -> dict[str, float]:
    """Return for each kind of GPU the factor on the speed of computation that makes its median error zero."""
    factors: dict[str, float] = {}
    for gpu in sorted({each.cluster.device.name for each in compared}):
        mine = [each for each in compared if each.cluster.device.name == gpu]
        low, high = 0.3, 3.0
        for _ in range(12):
            middle = (low * high) ** 0.5
            if statistics.median(each.error(middle) for each in mine) > 0:
                low = middle
            else:
                high = middle
        factors[gpu] = (low * high) ** 0.5
    return factors


def report(runs: Sequence[PublishedRun]) -> Iterator[str]:
    """Return the lines of the report."""
    compared = [compare(run) for run in runs if outside(run) is None]
    timed = [each for each in compared if each.run.step_time_s is not None]
    factors = calibrate(timed)
    yield (
        f"{'run':25} {'model':16} {'GPU':21} GPUs  t  p  v    d  b    N  measured  predicted  error  calibrated  memory"
    )
    for each in compared:
        yield _line(each, factors)
    yield ""
    yield "| GPU | runs | median error | factor | median error with it | and fitted without the run |"
    yield "|---|---|---|---|---|---|"
    plain: list[float] = []
    fitted: list[float] = []
    held_out: list[float] = []
    for gpu, factor in factors.items():
        mine = [each for each in timed if each.cluster.device.name == gpu]
        errors = [abs(each.error()) for each in mine]
        after = [abs(each.error(factor)) for each in mine]
        others = [_held_out_error(each, mine) for each in mine] if len(mine) > 1 else []
        plain, fitted, held_out = plain + errors, fitted + after, held_out + others
        yield f"| {gpu} | {len(mine)} | {_median(errors)} | {factor:.2f} | {_median(after)} | {_median(others)} |"
    yield f"| all | {len(timed)} | {_median(plain)} | | {_median(fitted)} | {_median(held_out)} |"
    yield ""
    trained = [each for each in compared if each.run.kind == "run"]
    yield f"runs that trained and are predicted not to fit: {sum(not each.fits for each in trained)} of {len(trained)}"
    failed = [each for each in compared if each.run.fits is False]
    caught = sum(not each.fits for each in failed)
    yield f"runs that ran out of memory, not by fragmentation alone, and are predicted so: {caught} of {len(failed)}"
    yield "outside:"
    for reason, count in Counter(outside(run) for run in runs if outside(run)).most_common():
        yield f"  {count:3} {reason}"


def _held_out_error(held_out: Compared, same_gpu: Sequence[Compared]) -> float:
    """Return the error of a run with the factor that all other runs of its GPU give."""
    (factor,) = calibrate([each for each in same_gpu if each is not held_out]).values()
    return abs(held_out.error(factor))


def _median(errors: Sequence[float]) -> str:
    return f"{statistics.median(errors):.1%}" if errors else "-"


def _line(each: Compared, factors: dict[str, float]) -> str:
    run, best = each.run, each.best()
    chosen, predicted_s = best.configuration, best.predict().step_ms / 1e3
    gpu = each.cluster.device.name
    columns = (
        f"{run.id:25} {run.model:16} {gpu:21} {run.gpus:4} {run.tp:2} {run.pp:2} {chosen.virtual_stages:2} {run.dp:4} "
        f"{chosen.micro_batch:2} {chosen.micro_batches:4} "
    )
    if run.step_time_s is None:
        columns += f"{'-':>9} {predicted_s:10.3f} {'':18}"
    else:
        columns += f"{run.step_time_s:9.3f} {predicted_s:10.3f} {each.error():+6.1%} {each.error(factors[gpu]):+11.1%}"
    measured = "" if run.peak_mem_gib is None else f" (measured {run.peak_mem_gib:.1f})"
    wrong = " WRONG" if run.kind == "run" and not each.fits else ""
    return f"{columns} {best.memory_bytes / 2**30:7.1f} GiB{'' if each.fits else ' does not fit'}{wrong}{measured}"


def main() -> int:
    """Print the report."""
    try:
        runs = read_runs(data_folder() / "published_runs" / "runs.json")
    except InputError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    for line in report(runs):
        print(line)
    return 0


def _shape(run: PublishedRun) -> Transformer:
    assert run.heads is not None
    eager = run.gpu_type.startswith("A100") and run.source_key in ("korthikanti-mlsys23", "narayanan-sc21")
    return Transformer(
        name=run.model,
        layers=run.layers,
        hidden=run.hidden,
        heads=run.heads,
        key_value_heads=run.kv_heads or run.heads,
        head_dim=run.head_dim or run.hidden // run.heads,
        feed_forward=run.ffn or 4 * run.hidden,
        sequence=run.seq_len,
        vocabulary=run.vocab,
        gated=bool(run.gated_mlp),
        learned_positions=eager,
        tied_head=bool(run.tied_embeddings),
        dropout=eager,
        attention="eager" if eager else "flash",
        passes=_kernels(run),
        data_type=PRECISIONS[run.precision],
        bytes_per_parameter=ADAM_16_BIT if run.id == "bridge-verification-001" else ADAM_16_BIT_GRADIENTS_32_BIT,
    )


MEGATRON = replace(FUSED, loss=(9.5, 3.5))
"""Fused kernels but for the loss over the vocabulary's shards, which casts, subtracts the maximum, exponentiates, sums
and divides one after the other: 38 bytes for each logit forward, 14 backward."""
MEGATRON_DROPOUT = replace(MEGATRON, residual=(3.5, 2.5))
COMPILED = replace(FUSED, gradient_sum=0)
"""torch.compile under FSDP, whose gradients are reduced rather than summed."""
EAGER = replace(COMPILED, norm=(12, 16), qkv=(8, 8), gated=(5, 8), loss=(9.5, 5))
"""PyTorch without compilation: RMS normalisation and rotation as single operations in 32 bit."""


def _kernels(run: PublishedRun) -> Passes:
    if run.source_key == "torchtitan":
        return COMPILED if run.compile else EAGER
    return MEGATRON_DROPOUT if run.source_key in ("korthikanti-mlsys23", "narayanan-sc21") else MEGATRON


def _configurations(run: PublishedRun) -> Iterator[Configuration]:
    """Yield the run's configuration, or every one that its published part leaves open."""
    recomputes: list[tuple[Recompute, float]]
    recomputes = [("none", 0.0), ("attention", 0.0), ("blocks", 1.0)] if run.recompute is None else [_recompute(run)]
    per_stage = run.layers // run.pp
    virtual = [run.vp] if run.vp else [v for v in range(1, per_stage + 1) if per_stage % v == 0 and run.pp > 1] or [1]
    engine = run.source_key in TRANSFORMER_ENGINE
    megatron = engine or run.source_key == "megatron-readme-h100"
    micro_batches = [run.micro_batch] if run.micro_batch else [1, 2, 4, 8]
    if run.source_key == "torchtitan" and not run.micro_batch:
        micro_batches = [run.global_batch // (run.dp * run.pp)]  # its default: as many micro-batches as stages
    for micro_batch, stages, (recompute, share) in itertools.product(micro_batches, virtual, recomputes):
        if run.global_batch % (micro_batch * run.dp):
            continue
        count = run.global_batch // (micro_batch * run.dp)
        if stages > 1 and count % run.pp and run.vp is None:
            continue  # interleaving takes micro-batches in groups of the pipeline's size
        yield Configuration(
            tensor_parallel=run.tp,
            pipeline=run.pp,
            virtual_stages=stages,
            data_parallel=run.dp,
            micro_batch=micro_batch,
            micro_batches=count,
            sequence_parallel=bool(run.sequence_parallel),
            tensor_parallel_overlap=engine if run.tp_overlap is None else run.tp_overlap,
            transfer_overlap=megatron and stages > 1,
            reduction_overlap=run.source_key not in ("korthikanti-mlsys23", "narayanan-sc21"),
            sharding=SHARDING[run.sharding],
            recompute=recompute,
            recomputed_share=share,
        )


def _recompute(run: PublishedRun) -> tuple[Recompute, float]:
    detail = run.recompute_detail or ""
    if run.recompute == "none":
        return "none", 0.0
    if run.recompute == "full":
        return "blocks", 1.0
    if run.recompute == "partial":
        return "blocks", 0.5 if "second" in detail else 5 / (run.layers / run.pp)
    if "mlp" in detail:
        return "mlp", 0.0
    return ("every_other_product", 0.0) if "SDPA" in detail else ("attention", 0.0)


if __name__ == "__main__":
    sys.exit(main())
