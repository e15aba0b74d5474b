"""Import of Aceso's profile database (EuroSys 2024 artifact, microsoft/SuperScaler, branch EuroSys24AE).

Files: ``{model}_{size}_mbs{M}_tp{T}_algo{K}.csv``, one row for each distinct operator, times in us and sizes in MB of
2^20 bytes; ``prim_{model}_{size}_{collective}_{G}gpus.csv``; ``p2p_{intra,inter}_node.csv``. A time of 1e7 us means
that the measurement ran out of memory: that choice is left out.
"""

import csv
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from solver_plan.errors import InputError
from solver_plan.parallelism.problem import (
    Cluster,
    CollectiveTimes,
    Link,
    Operator,
    ParallelismProblem,
    Profile,
    Resharding,
    Space,
    TableLink,
    TensorLayout,
)

MEGABYTE = 2**20
OUT_OF_MEMORY_US = 1e7
MOST_LAYERS = 100_000
"""A hundred times the deepest model anyone has planned; a chain of many more operators fits no memory."""
LARGEST_ARGUMENT = 10**9
COLUMNS = (
    "op_name",
    "forward-compute",
    "backward-compute",
    "input_size",
    "output_size",
    "weights",
    "activations",
    "fwd_reserved",
    "bwd_reserved",
)
COLLECTIVES: tuple[Literal["all_gather", "all_reduce", "all_to_all", "reduce_scatter"], ...] = (
    "all_gather",
    "all_reduce",
    "all_to_all",
    "reduce_scatter",
)
LAYERS = {"350M": 24, "1_3B": 24, "2_6B": 32, "6_7B": 32, "13B": 40}
"""GPT layers of each size (Aceso, section 5.1); T5 has 24 encoder and 24 decoder layers, 48 and 48 for 22B."""

Family = Literal["gpt", "t5", "resnet"]


@dataclass(frozen=True, slots=True)
class _Row:
    name: str
    forward_ms: float
    backward_ms: float
    input_bytes: int
    output_bytes: int
    weight_bytes: int
    activation_bytes: int
    forward_reserved_bytes: int
    backward_reserved_bytes: int

    @property
    def measured(self) -> bool:
        return max(self.forward_ms, self.backward_ms) * 1e3 < OUT_OF_MEMORY_US


def import_aceso(
    directory: str | Path,
    *,
    model: str,
    size: str,
    nodes: int,
    devices_per_node: int,
    memory_mb: int,
    global_batch: int,
    layers: int | None = None,
    micro_batches: Sequence[int] | None = None,
) -> ParallelismProblem:
    """Return the problem of one model of the database on a cluster, in Aceso's own space.

    The space: one (t, d) a stage with partition 0 for GPT and T5, a layout per operator for Wide-ResNet; stages of 1,
    2, 4 or 8 devices within a node, all devices used, any number of stages, any recomputed operators.

    Parameters
    ----------
    directory
        Folder of the CSV files.
    model, size
        ``gpt``, ``t5`` or ``resnet``, and a size such as ``1_3B``.
    nodes, devices_per_node, memory_mb
        The cluster; memory of a device in MB of 2^20 bytes.
    global_batch
        Samples of one iteration.
    layers
        Number of layers; needed for ``scale-layer`` alone, otherwise that of the published model.
    micro_batches
        Micro-batch sizes (all replicas together) to allow; None: all that the profiles allow.

    Raises
    ------
    InputError
        If the folder or a file is not as described.
    """
    for name, value in (
        ("nodes", nodes),
        ("devices_per_node", devices_per_node),
        ("memory_mb", memory_mb),
        ("global_batch", global_batch),
        *(("micro_batches", one) for one in micro_batches or ()),
    ):
        if not 1 <= value <= LARGEST_ARGUMENT:
            raise InputError(f"{name}: found {value}; a whole number from 1 to {LARGEST_ARGUMENT}")
    if micro_batches is not None and (not micro_batches or len(set(micro_batches)) < len(micro_batches)):
        raise InputError(f"micro_batches: found {list(micro_batches)}; at least one size, each once")
    folder = Path(directory)
    family = _family(model)
    tables = _read_tables(folder, f"{model}_{size}")
    base = tables.get((min(key[0] for key in tables), 1, 0))
    if base is None:
        raise InputError(
            f"{folder}: no {model}_{size} file with tp 1 and algo 0 for the smallest mbs; it gives the order"
        )
    names = [row.name for row in base]
    chain = _chain(family, names, _layer_count(family, size, layers))
    intra = _read_link(folder / "p2p_intra_node.csv")
    inter_path = folder / "p2p_inter_node.csv"
    profiles = _profiles(family, tables, set(chain))
    return ParallelismProblem(
        cost_model="aceso",
        global_batch=global_batch,
        cluster=Cluster(
            nodes=nodes,
            devices_per_node=devices_per_node,
            memory_bytes_per_device=memory_mb * MEGABYTE,
            intra_node=intra,
            inter_node=_read_link(inter_path) if inter_path.exists() else intra,
        ),
        operators=_operators(chain),
        profiles=profiles,
        space=Space(
            layout="operator" if family == "resnet" else "stage",
            max_stages=None,
            device_counts=tuple(count for count in (1, 2, 4, 8) if count <= devices_per_node),
            cross_node_stages=False,
            micro_batch_sizes=tuple(micro_batches) if micro_batches is not None else None,
            use_all_devices=True,
            recompute="operator",
            device_order="rank",
            partitions=None if family == "resnet" else (0,),
        ),
        state_bytes_per_weight_byte=4.0 if family == "resnet" else 8.0,
        resharding=None if family == "t5" else _read_collectives(folder, f"{model}_{size}"),
        provenance={"source": "Aceso profile database (EuroSys 2024 artifact)", "model": model, "size": size},
    )


def _family(model: str) -> Family:
    if model == "gpt":
        return "gpt"
    if model == "t5":
        return "t5"
    if model == "resnet":
        return "resnet"
    raise InputError(f"model: found {model!r}; the database has gpt, t5 and resnet")


def _layer_count(family: Family, size: str, layers: int | None) -> int:
    if layers is not None:
        if not 1 <= layers <= MOST_LAYERS:
            raise InputError(f"layers: found {layers}; a whole number from 1 to {MOST_LAYERS}")
        return layers
    if family == "resnet":
        return 1
    if family == "t5":
        return 48 if size == "22B" else 24
    if size not in LAYERS:
        raise InputError(f"layers: size {size} has no published number of layers; give --layers")
    return LAYERS[size]


def _read_tables(folder: Path, stem: str) -> dict[tuple[int, int, int], list[_Row]]:
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder; name the folder of the CSV files")
    pattern = re.compile(re.escape(stem) + r"_mbs(\d+)_tp(\d+)_algo(\d+)\.csv")
    tables = {}
    for path in sorted(folder.iterdir()):
        match = pattern.fullmatch(path.name)
        if match:
            batch, degree, partition = (int(group) for group in match.groups())
            tables[batch, degree, partition] = _read_profile(path)
    if not tables:
        raise InputError(f"{folder}: no file {stem}_mbs*_tp*_algo*.csv; check model and size")
    return tables


def _read_rows(path: Path) -> list[list[str]]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return [row for row in csv.reader(file) if row]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path}: cannot be read ({error}); the profile database needs it") from None


def _read_profile(path: Path) -> list[_Row]:
    rows = _read_rows(path)
    header = [name.strip() for name in rows[0]] if rows else []
    missing = [name for name in COLUMNS if name not in header]
    if missing:
        raise InputError(f"{path}: column {missing[0]} is missing; a profile has {', '.join(COLUMNS)}")
    at = {name: header.index(name) for name in COLUMNS}
    table = []
    seen: set[str] = set()
    for line, row in enumerate(rows[1:], start=2):
        if len(row) < len(header):
            raise InputError(f"{path}: line {line} has {len(row)} of {len(header)} columns; the file is truncated")
        values = [_number(path, line, name, row[at[name]]) for name in COLUMNS[1:]]
        name = row[at["op_name"]].strip()
        if not name or name in seen:
            raise InputError(f"{path}: line {line}: op_name {name!r} is empty or stands twice; one row an operator")
        seen.add(name)
        sizes = [round(value * MEGABYTE) for value in values[2:]]
        table.append(_Row(name, values[0] / 1e3, values[1] / 1e3, *sizes))
    if not table:
        raise InputError(f"{path}: no operators; the file is truncated")
    return table


def _number(path: Path, line: int, column: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e12:
        raise InputError(f"{path}: line {line}: {column} is {text.strip()!r}; a finite number, at least 0")
    return value


def _read_link(path: Path) -> Link:
    rows = _read_rows(path)
    if len(rows) < 2 or len(rows[0]) != len(rows[1]):
        raise InputError(f"{path}: needs a row of sizes in MB and a row of as many rates in GB/s")
    sizes = [_number(path, 1, "size", cell) for cell in rows[0]]
    rates = [_number(path, 2, "rate", cell) for cell in rows[1]]
    if min(rates) <= 0 or min(sizes) <= 0:
        raise InputError(f"{path}: a size or rate is 0; all are greater than 0")
    # Aceso takes 1 GB/s as 1e-3 MB/us with MB = 2^20 bytes
    rows_of_link = tuple(
        (round(size * MEGABYTE), rate * 1e3 * MEGABYTE) for size, rate in zip(sizes, rates, strict=True)
    )
    return TableLink(table=rows_of_link)


def _read_collectives(folder: Path, stem: str) -> Resharding:
    entries = []
    for collective in COLLECTIVES:
        for path in sorted(folder.glob(f"prim_{stem}_{collective}_*gpus.csv")):
            match = re.fullmatch(rf"prim_{re.escape(stem)}_{collective}_(\d+)gpus\.csv", path.name)
            if match is None:
                continue
            rows = _read_rows(path)[1:]
            times = [
                (
                    round(_number(path, line, "size", row[0])),
                    _number(path, line, "time", row[1] if len(row) > 1 else ""),
                )
                for line, row in enumerate(rows, start=2)
            ]
            entries.append(
                CollectiveTimes(collective=collective, devices=int(match.group(1)), table=tuple(sorted(times)))
            )
    return Resharding(collectives=tuple(entries))


def _chain(family: Family, rows: list[str], layers: int) -> list[str]:
    """Return the profile key of each operator, in order (see the README of the database)."""
    needed = {"gpt": 16, "t5": 38, "resnet": 1}[family]
    if len(rows) < needed:
        raise InputError(
            f"{family}: a profile has {len(rows)} operators, at least {needed} are needed: truncated file?"
        )
    if family == "gpt":
        return [rows[0], *(rows[1:14] * layers), *rows[14:]]
    if family == "t5":
        return [rows[0], *(rows[1:14] * layers), *rows[14:16], *(rows[16:37] * layers), *rows[37:]]
    return rows


def _is_block_start(key: str) -> bool:
    return key == "enc-1st-layernorm" or "-conv1" in key


def _activation_factor(key: str) -> float:
    """Return the share of the profiled activations that is held: softmax and dropout, bn and relu share a buffer."""
    if key == "enc-attention-dropout":
        return 1.5
    if key in ("enc-attention-softmax", "bn1") or "-bn3" in key:
        return 0.0
    return 0.0 if "-downsample" in key and "0-0" not in key else 1.0


def _operators(chain: list[str]) -> tuple[Operator, ...]:
    total: dict[str, int] = {}
    for key in chain:
        total[key] = total.get(key, 0) + 1
    seen: dict[str, int] = {}
    operators = []
    for key in chain:
        number = seen.get(key, 0)
        seen[key] = number + 1
        operators.append(
            Operator(
                name=f"{key}.{number}" if total[key] > 1 else key,
                profile=key,
                block_start=_is_block_start(key),
                activation_factor=_activation_factor(key),
            )
        )
    return tuple(operators)


def _profiles(
    family: Family, tables: dict[tuple[int, int, int], list[_Row]], needed: set[str]
) -> dict[str, tuple[Profile, ...]]:
    profiles: dict[str, list[Profile]] = {}
    for (batch, degree, partition), rows in sorted(tables.items()):
        absent = needed - {row.name for row in rows}
        if absent:
            raise InputError(
                f"profile mbs{batch}_tp{degree}_algo{partition}: operator {min(absent)} is missing: truncated file?"
            )
        for row in rows:
            if row.name not in needed or not row.measured:
                continue
            received, produced = _layouts(family, row.name, partition)
            profiles.setdefault(row.name, []).append(
                Profile(
                    batch=batch,
                    tensor_parallel=degree,
                    partition=partition,
                    forward_ms=row.forward_ms,
                    backward_ms=row.backward_ms,
                    input_bytes=row.input_bytes,
                    output_bytes=row.output_bytes,
                    weight_bytes=row.weight_bytes,
                    activation_bytes=row.activation_bytes,
                    forward_reserved_bytes=row.forward_reserved_bytes,
                    backward_reserved_bytes=row.backward_reserved_bytes,
                    input_layout=received,
                    output_layout=produced,
                )
            )
    never = needed - profiles.keys()
    if never:
        raise InputError(f"operator {min(never)} ran out of memory in every profile; profile it with a smaller mbs")
    return {key: tuple(profiles[key]) for key in sorted(profiles)}


_FIXED_LAYOUTS: dict[str, tuple[TensorLayout, TensorLayout]] = {
    "encoder-embedding": ("any", "replicated"),
    "enc-1st-layernorm": ("replicated", "replicated"),
    "enc-2nd-layernorm": ("replicated", "replicated"),
    "enc-post-attention-dropout": ("replicated", "replicated"),
    "enc-post-MLP-dropout": ("replicated", "replicated"),
    "enc-attention-score": ("split_heads", "split_scores"),
    "enc-attention-softmax": ("split_scores", "split_scores"),
    "enc-attention-dropout": ("split_scores", "split_scores"),
    "enc-attention-context": ("split_scores", "split_heads"),
    "enc-MLP-gelu": ("split_heads", "split_heads"),
    "final-layernorm": ("replicated", "batch_first"),
    "gpt-post-process": ("batch_first", "any"),
}


def _layouts(family: Family, key: str, partition: int) -> tuple[TensorLayout, TensorLayout]:
    """Return (input, output) layout of an operator, from the table in the database's README."""
    if family == "t5":
        return "any", "any"
    if family == "resnet":
        return "batch_first", "batch_first"
    if key in ("enc-attention-qkv", "enc-MLP-GEMM-1"):
        return ("replicated", "split_heads") if partition == 0 else ("split_heads", "replicated")
    if key in ("enc-attention-dense", "enc-MLP-GEMM-2"):
        return ("split_heads", "replicated") if partition == 0 else ("replicated", "split_heads")
    return _FIXED_LAYOUTS.get(key, ("any", "any"))
