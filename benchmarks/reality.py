"""Holds the `full` cost model against published training runs: `python -m benchmarks.reality`.

Each run that the model can express is predicted in its own published configuration: step time uncalibrated, then with one
factor on the speed of computation for each kind of GPU, fitted to the runs of that kind. Runs that trained must be
predicted to fit their memory.
"""

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

from benchmarks.uniform import Configuration, Prediction, Recompute, predict
from models.gpt import describe
from models.transformer import FUSED, Transformer
from solver_plan.errors import InputError
from solver_plan.profiles.cluster import ClusterDescription, read_cluster
from solver_plan.profiles.description import ADAM_16_BIT_GRADIENTS_32_BIT, BytesPerParameter, DataType

ROOT = Path(__file__).parents[1]
DEFAULT_DATA = ROOT.parent / "shared" / "data"

CLUSTERS = {
    "A100-SXM-80GB": "a100_8x80gb",
    "H100-SXM-80GB": "h100_8x80gb",
    "H100-SXM-96GB-HBM2e-500W": "h100_8x96gb_hbm2e",
    "H100-SXM-95GB-HBM2e": "h100_8x96gb_hbm2e",
    "H200-SXM-141GB": "h200_8x141gb",
    "B200-SXM": "b200_8x180gb",
    "B200-SXM, power-limited": "b200_8x180gb",
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
    step_time_s: float | None
    peak_mem_gib: float | None
    fits: bool | None


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A run beside its prediction."""

    run: PublishedRun
    cluster: ClusterDescription
    configuration: Configuration
    prediction: Prediction

    @property
    def error(self) -> float:
        """Relative error of the predicted step time; positive: too slow."""
        assert self.run.step_time_s is not None
        return self.prediction.step_ms / 1e3 / self.run.step_time_s - 1

    @property
    def fits(self) -> bool:
        """Whether the predicted memory fits the device."""
        device = self.cluster.device
        return self.prediction.memory_bytes <= device.memory_bytes * (1 - device.memory_margin)


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
        return "GPU without a cluster file"
    if run.precision not in PRECISIONS:
        return "4-bit, micro-scaled or row-wise scaled precision"
    if run.source_key == "automodel":
        return "several pipeline passes in a step"
    if run.kind == "run" and run.step_time_s is None and run.peak_mem_gib is None:
        return "nothing measured"
    return None


def compare(run: PublishedRun, speed: float = 1.0) -> Compared:
    """Predict a run in its own configuration; what is not published is chosen for the best prediction that fits."""
    cluster = read_cluster(CLUSTERS[run.gpu_type])
    description = describe(_shape(run))
    found = [
        Compared(
            run=run,
            cluster=cluster,
            configuration=configuration,
            prediction=predict(description, cluster, configuration, speed),
        )
        for configuration in _configurations(run)
    ]
    return min(found, key=lambda each: (not each.fits, each.prediction.step_ms))


def calibrate(compared: Sequence[Compared]) -> dict[str, float]:
    """Return for each kind of GPU the factor on the speed of computation that makes its median error zero."""
    factors: dict[str, float] = {}
    for gpu in sorted({each.cluster.device.name for each in compared}):
        mine = [each.run for each in compared if each.cluster.device.name == gpu]
        low, high = 0.3, 3.0
        for _ in range(20):
            middle = (low * high) ** 0.5
            if statistics.median(compare(run, middle).error for run in mine) > 0:
                low = middle
            else:
                high = middle
        factors[gpu] = (low * high) ** 0.5
    return factors


def report(runs: Sequence[PublishedRun]) -> Iterator[str]:
    """Return the lines of the report."""
    inside = [run for run in runs if outside(run) is None]
    compared = [compare(run) for run in inside]
    timed = [each for each in compared if each.run.step_time_s is not None]
    factors = calibrate(timed)
    yield f"{'run':28} {'model':16} {'GPUs':>5} {'GPU':22} {'t':>2} {'p':>3} {'v':>3} {'d':>3} {'b':>3} {'N':>4}  measured s  predicted s  error  calibrated  memory GiB"
    after: list[float] = []
    for each in compared:
        run, chosen = each.run, each.configuration
        columns = (
            f"{run.id:28} {run.model:16} {run.gpus:5} {each.cluster.device.name:22} {run.tp:2} {run.pp:3} "
            f"{chosen.virtual_stages:3} {run.dp:3} {chosen.micro_batch:3} {chosen.micro_batches:4} "
        )
        if run.step_time_s is None:
            columns += f"{'-':>11} {each.prediction.step_ms / 1e3:12.3f} {'':18}"
        else:
            error = compare(run, factors[each.cluster.device.name]).error
            after.append(abs(error))
            columns += f"{run.step_time_s:11.3f} {each.prediction.step_ms / 1e3:12.3f} {each.error:+6.1%} {error:+11.1%} "
        measured = "" if run.peak_mem_gib is None else f" (measured {run.peak_mem_gib:.1f})"
        fit = "fits" if each.fits else "does not fit"
        wrong = " WRONG" if run.kind == "run" and not each.fits else ""
        yield f"{columns} {each.prediction.memory_bytes / 2**30:7.1f} {fit}{wrong}{measured}"
    yield ""
    yield f"median error of {len(timed)} step times: uncalibrated {statistics.median(abs(each.error) for each in timed):.1%}"
    yield f"with one factor a GPU kind: {statistics.median(after):.1%}; factors: " + ", ".join(
        f"{gpu} {factor:.3f}" for gpu, factor in factors.items()
    )
    for gpu in factors:
        mine = [each for each in timed if each.cluster.device.name == gpu]
        yield f"  {gpu}: {len(mine)} runs, median error {statistics.median(abs(each.error) for each in mine):.1%}"
    trained = [each for each in compared if each.run.kind == "run"]
    yield f"runs that trained and are predicted not to fit: {sum(not each.fits for each in trained)} of {len(trained)}"
    failed = [each for each in compared if each.run.kind == "oom"]
    yield f"runs that ran out of memory and are predicted so: {sum(not each.fits for each in failed)} of {len(failed)}"
    yield "outside:"
    for reason, count in Counter(outside(run) for run in runs if outside(run)).most_common():
        yield f"  {count:3} {reason}"


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
    fsdp = run.sharding == "fsdp"
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
        passes=replace(FUSED, residual=(3.5, 2.5)) if eager else replace(FUSED, gradient_sum=0) if fsdp else FUSED,
        data_type=PRECISIONS[run.precision],
        bytes_per_parameter=BytesPerParameter(weight=2, gradient=2, optimizer_state=12)
        if run.id == "bridge-verification-001"
        else ADAM_16_BIT_GRADIENTS_32_BIT,
    )


def _configurations(run: PublishedRun) -> Iterator[Configuration]:
    """Yield the run's configuration, or every one that its published part leaves open."""
    open_recompute = run.recompute is None
    per_stage = run.layers // run.pp
    virtual = [run.vp] if run.vp else [v for v in range(1, per_stage + 1) if per_stage % v == 0 and run.pp > 1] or [1]
    engine = run.source_key in TRANSFORMER_ENGINE
    megatron = engine or run.source_key == "megatron-readme-h100"
    for micro_batch in [run.micro_batch] if run.micro_batch else [1, 2, 4, 8]:
        if run.global_batch % (micro_batch * run.dp):
            continue
        for stages in virtual:
            for recompute, share in [("none", 0.0), ("attention", 0.0), ("blocks", 1.0)] if open_recompute else [_recompute(run)]:
                yield Configuration(
                    tensor_parallel=run.tp,
                    pipeline=run.pp,
                    virtual_stages=stages,
                    data_parallel=run.dp,
                    micro_batch=micro_batch,
                    micro_batches=run.global_batch // (micro_batch * run.dp),
                    sequence_parallel=bool(run.sequence_parallel),
                    tensor_parallel_overlap=engine if run.tp_overlap is None else run.tp_overlap,
                    transfer_overlap=megatron and stages > 1,
                    reduction_overlap=run.source_key not in ("korthikanti-mlsys23", "narayanan-sc21"),
                    sharding=SHARDING[run.sharding],
                    recompute=recompute,  # type: ignore[arg-type]
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
