"""Wavefront problems from a model of several tasks and a described cluster."""

import dataclasses
import json
from pathlib import Path

import pytest

from models import multitask_clip, qwen_val
from solver_plan.errors import InputError
from solver_plan.profiles.cluster import read_cluster
from solver_plan.profiles.wavefront import profile_wavefront
from tests.conftest import PROJECT, Run

CLIP = f"{PROJECT}/models/multitask_clip.py:clip4"


def test_times_memory_and_links_are_those_of_the_cluster() -> None:
    cluster = read_cluster("a100_8nodes_8x80gb")
    problem = profile_wavefront(multitask_clip.clip4(), cluster)
    assert (problem.cluster.devices, problem.cluster.devices_per_node) == (64, 8)
    assert problem.cluster.memory_bytes_per_device == int(cluster.device.memory_bytes * 0.92)
    assert problem.cluster.intra_node_bytes_per_s == cluster.intra_node.bytes_per_s
    vision = problem.component_of["vision-depth/vision"]
    assert vision.layer_ms is not None
    # forward and backward of 64 samples of 257 tokens at 80 % of the peak, which 16448 tokens nearly reach
    tokens = 64 * 257
    flops = 3 * 64 * (2 * 257 * 12 * 1280**2 + 4 * 257**2 * 1280)
    expected = 0.36 + 1000 * flops / (312e12 * 0.805 * tokens / (tokens + 512))
    assert vision.layer_ms["1"] == pytest.approx(expected, rel=0.05)


def test_frozen_encoders_and_tensor_parallel_degrees() -> None:
    problem = profile_wavefront(
        qwen_val.qwen_val_7b_frozen(), read_cluster("a100_8x80gb"), phases="forward_backward", tensor_parallel=(2, 4)
    )
    modes = problem.component_of["VL/vit"].modes
    assert modes is not None
    assert {mode.backward_ms for mode in modes} == {0.0}
    degrees = {(mode.degrees or {})["tensor_parallel"] for mode in problem.component_of["VL/llm"].modes or ()}
    assert degrees == {2, 4}


def test_on_the_command_line(run: Run) -> None:
    code, out, err = run("profile", CLIP, "--kind", "wavefront", "--cluster", "a100_8x80gb", "--out", "problem.json")
    assert (code, err) == (0, "")
    assert out == "multitask-clip-4: 4 tasks, 8 components, 8 devices\n"
    problem = json.loads(Path("problem.json").read_text())
    assert problem["model"] == CLIP
    assert {component["batch"] for component in problem["components"]} == {96, 64, 128}
    assert run("plan", "problem.json", "--heuristic", "spindle", "--out", "plan.json")[0] == 0
    assert run("compile", "problem.json", "plan.json", "--out", "program.json")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            [CLIP, "--kind", "wavefront", "--global-batch", "8"],
            "--global-batch: found 8; the model says the batch",
        ),
        ([CLIP], "--global-batch: found none; give it with kind parallelism"),
        ([CLIP, "--global-batch", "8"], "found MultitaskDescription returned; the function returns a ModelDescription"),
        (
            [f"{PROJECT}/models/gpt.py:tiny", "--kind", "wavefront"],
            "for several tasks the function returns",
        ),
        ([CLIP, "--global-batch", "8", "--phases", "fused"], "--phases is for wavefront problems"),
        ([CLIP, "--kind", "wavefront", "--chunks", "8"], "--chunks is for offload problems"),
    ],
)
def test_what_does_not_fit_is_refused(arguments: list[str], told: str, run: Run) -> None:
    code, out, err = run("profile", *arguments, "--cluster", "a100_8x80gb", "--out", "problem.json")
    assert (code, out) == (2, "")
    assert told in err
    assert err.count("\n") == 1
    assert not Path("problem.json").exists()


def test_a_device_without_16_bit_is_refused() -> None:
    cluster = read_cluster("a100_8x80gb")
    device = dataclasses.replace(cluster.device, arithmetic={"float32": cluster.device.arithmetic["float16"]})
    with pytest.raises(InputError, match="found no arithmetic of bfloat16 or float16"):
        profile_wavefront(multitask_clip.tiny(), dataclasses.replace(cluster, device=device))
