"""From a model of several tasks and a described cluster to a wavefront problem: shapes and a roofline alone.

Layers are priced whole (`from_operators`): matrix products at the cluster's efficiency for large shapes, falling with
the tokens on a device, and a floor of launches. That is coarser than `analytic`: it compares plans, it does not promise
milliseconds.
"""

from collections.abc import Sequence

import networkx as nx

from solver_plan.documents import computed_from
from solver_plan.errors import InputError
from solver_plan.profiles.cluster import ClusterDescription
from solver_plan.profiles.description import DataType
from solver_plan.profiles.multitask import MultitaskDescription
from solver_plan.wavefront.from_operators import Accelerator, problem_from_operators
from solver_plan.wavefront.problem import Cluster, Phases, WavefrontProblem

KERNELS_OF_A_LAYER = 60
"""Forward and backward of a transformer layer, about."""
DATA_TYPES: tuple[DataType, ...] = ("bfloat16", "float16")


def profile_wavefront(
    description: MultitaskDescription,
    cluster: ClusterDescription,
    *,
    phases: Phases = "fused",
    tensor_parallel: Sequence[int] = (1,),
    model: str | None = None,
) -> WavefrontProblem:
    """Return the problem of training a model of several tasks on a cluster.

    Parameters
    ----------
    description
        Its operators, with the batch of each task.
    cluster
        What it is trained on.
    phases
        Of the problem.
    tensor_parallel
        Degrees to offer.
    model
        What the problem names for execution, as ``models/multitask_clip.py:clip4``.

    Raises
    ------
    InputError
        If the operators are no graph, the device has no 16-bit arithmetic, or no degree fits a component.
    """
    if not isinstance(description.operators, nx.DiGraph):
        found_type = type(description.operators).__name__
        raise InputError(f"{description.name}: operators: found {found_type}; make them with operator_graph")
    device = cluster.device
    found = next((device.arithmetic[kind] for kind in DATA_TYPES if kind in device.arithmetic), None)
    if found is None:
        raise InputError(f"{cluster.name}: found no arithmetic of {' or '.join(DATA_TYPES)}; describe one of them")
    with computed_from(f"{description.name} on {cluster.name}"):
        return problem_from_operators(
            description.operators,
            Cluster(
                devices=cluster.nodes * cluster.devices_per_node,
                devices_per_node=cluster.devices_per_node,
                memory_bytes_per_device=int(device.memory_bytes * (1 - device.memory_margin)),
                intra_node_bytes_per_s=cluster.intra_node.bytes_per_s,
                inter_node_bytes_per_s=cluster.inter_node.bytes_per_s if cluster.nodes > 1 else None,
            ),
            accelerator=Accelerator(
                peak_flops_per_s=found.peak_flops_per_s,
                efficiency=found.matrix_efficiency.values[-1][-1],
                launch_ms=KERNELS_OF_A_LAYER * device.launch_ms,
            ),
            phases=phases,
            model=model,
            tensor_parallel=tensor_parallel,
        )
