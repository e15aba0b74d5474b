"""What the README tells people to type exists."""

import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.registry import GROUPS, MEASUREMENTS
from solver_plan.cli import build_parser, main
from tests.conftest import PROJECT

README = (PROJECT / "README.md").read_text(encoding="utf-8")
COMMANDS = sorted(
    set(re.findall(r"^(?:\| `)?((?:solver-plan|make|python -m benchmarks) [^`#\n]+)", README, re.MULTILINE))
)


def test_there_are_commands() -> None:
    assert len(COMMANDS) > 8


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_readme_exists(command: str) -> None:
    words = shlex.split(command)
    if words[0] == "solver-plan":
        assert callable(build_parser().parse_args(words[1:]).run)
    elif words[0] == "make":
        assert re.search(rf"^{words[1]}:", (PROJECT / "Makefile").read_text(), re.MULTILINE)
    else:
        assert words[3] in (*GROUPS, *MEASUREMENTS)


def test_every_option_of_the_readme_exists() -> None:
    parser = subprocess.run(
        [sys.executable, "-m", "solver_plan", "plan", "--help"], capture_output=True, text=True, check=True, cwd=PROJECT
    )
    row = next(line for line in README.splitlines() if line.startswith("| `solver-plan plan"))
    for option in re.findall(r"--[a-z-]+", row):
        assert option in parser.stdout, option


def test_the_example_of_the_readme_runs(tmp_path: Path) -> None:
    example = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert example is not None
    assert len(example[1].strip().splitlines()) <= 15
    here = f"import os, sys; sys.path.insert(0, {str(PROJECT)!r}); os.chdir({str(PROJECT)!r})\n"
    written = str(tmp_path / "plan.json")
    quick = example[1].replace("time_limit_s=30", "heuristic='grid'").replace("plan.json", written)
    shown = subprocess.run([sys.executable, "-c", here + quick], capture_output=True, text=True, check=False)
    assert shown.returncode == 0, shown.stderr
    assert "bound" in shown.stdout
    assert (tmp_path / "plan.json").exists()


def test_the_offload_commands_of_the_readme_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    section = README.split("## Offload")[1].split("\n## ")[0]
    commands = re.findall(r"^solver-plan (.+)$", section, re.MULTILINE)
    assert len(commands) > 5
    monkeypatch.chdir(tmp_path)
    for command in commands:
        words = [word.replace("models/", f"{PROJECT}/models/") for word in shlex.split(command)]
        assert main(words) == 0, command
    assert "<svg" in (tmp_path / "offload.html").read_text()
    assert "<svg" in (tmp_path / "curve.svg").read_text()


def test_the_offload_training_example_of_the_readme_runs() -> None:
    pytest.importorskip("torch")
    example = next(each for each in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "OffloadOptimizer" in each)
    prelude = (
        "import torch\n"
        "torch.set_num_threads(1)\n"
        "model = torch.nn.Sequential()\n"
        "for name in ('embed', 'block0', 'block1', 'head'): model.add_module(name, torch.nn.Linear(8, 8))\n"
        "loss = torch.nn.functional.mse_loss\n"
        "x, y = torch.randn(4, 8), torch.randn(4, 8)\n"
        "loader = [(x, y)] * 3\n"
    )
    quick = example.replace("time_limit_s=10", "heuristic='prefix'").replace(
        "gpu_state_bytes=",
        "host=solver_plan.measure_host(repetitions=1, parameters=99, copied_bytes=99), gpu_state_bytes=",
    )
    here = f"import sys; sys.path.insert(0, {str(PROJECT)!r})\n"
    shown = subprocess.run([sys.executable, "-c", here + prelude + quick], capture_output=True, text=True, check=False)
    assert shown.returncode == 0, shown.stderr
    assert "OffloadReport(steps=3" in shown.stdout


def test_the_wavefront_example_of_the_readme_runs(tmp_path: Path) -> None:
    examples = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    example = next(each for each in examples if "wavefront" in each)
    here = f"import os, sys; sys.path.insert(0, {str(PROJECT)!r}); os.chdir({str(tmp_path)!r})\n"
    quick = example.replace("time_limit_s=20", "heuristic='spindle'")
    shown = subprocess.run([sys.executable, "-c", here + quick], capture_output=True, text=True, check=False)
    assert shown.returncode == 0, shown.stderr
    assert "bound" in shown.stdout
    assert "<svg" in (tmp_path / "clip4.html").read_text()


def test_the_wavefront_commands_of_the_readme_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    section = README.split("## Several tasks")[1].split("\n## ")[0]
    commands = [each for each in re.findall(r"^solver-plan (.+)$", section, re.MULTILINE) if "tiny" in each]
    assert [command.split()[0] for command in commands] == ["profile", "plan", "compile", "run"]
    monkeypatch.chdir(tmp_path)
    for typed in commands:
        command = typed.replace("--time-limit 2", "--heuristic spindle")
        words = [word.replace("models/", f"{PROJECT}/models/") for word in shlex.split(command)]
        assert main(words) == 0, command
    assert (tmp_path / "tiny.trace.json").exists()


def test_the_example_of_an_own_model_is_planned_and_runs(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    examples = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    (tmp_path / "mine.py").write_text(next(each for each in examples if "def mlp" in each))
    one = (PROJECT / "solver_plan" / "clusters" / "v100_4x32gb.toml").read_text()
    (tmp_path / "one.toml").write_text(one.replace("devices_per_node = 4", "devices_per_node = 1"))
    problem, plan = str(tmp_path / "mlp.json"), str(tmp_path / "mlp.plan.json")
    described = ["profile", f"{tmp_path / 'mine.py'}:mlp", "--cluster", str(tmp_path / "one.toml")]
    assert main([*described, "--global-batch", "8", "--out", problem]) == 0
    assert main(["plan", problem, "--heuristic", "grid", "--out", plan]) == 0
    prelude = (
        "import torch\n"
        "from torch.nn import Linear\n"
        "embed, block0, head = Linear(8, 16), Linear(16, 16), Linear(16, 4)\n"
        "def summed_loss(outputs, targets):\n"
        "    return torch.nn.functional.cross_entropy(*outputs, *targets, reduction='sum')\n"
        "x, y = torch.randn(8, 8), torch.arange(8) % 4\n"
        "loader = [(x, y)] * 3\n"
    )
    assert _losses(prelude + next(each for each in examples if "import Executor" in each), tmp_path) == 3


def test_the_example_of_several_own_tasks_is_planned_and_runs(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    written = re.search(r"```json\n(.*?)```", README, re.DOTALL)
    assert written is not None
    problem, plan = tmp_path / "caption.json", str(tmp_path / "caption.plan.json")
    problem.write_text(written[1])
    assert main(["plan", str(problem), "--heuristic", "spindle", "--out", plan]) == 0
    problem.write_text(written[1].replace('"devices": 4, "devices_per_node": 4', '"devices": 1, "devices_per_node": 1'))
    assert main(["plan", str(problem), "--heuristic", "sequential", "--out", plan]) == 0
    prelude = (
        "import torch\n"
        "from solver_plan.execution.model import Layer\n"
        "class Words(torch.nn.Module):\n"
        "    def forward(self, image, word): return image + word\n"
        "def linear(): return torch.nn.Linear(4, 4)\n"
        "vision_layers = [Layer('v0', linear), Layer('v1', linear)]\n"
        "text_layers = [Layer('t0', Words), Layer('t1', linear)]\n"
        "def summed_loss(given, targets): return ((given['caption/text'][0] - targets[0]) ** 2).sum()\n"
        "def random_samples(samples, generator):\n"
        "    drawn = [torch.randn(samples['caption'], 4, generator=generator) for _ in range(3)]\n"
        "    inputs = {'caption/vision': (drawn[0],), 'caption/text': (drawn[1],)}\n"
        "    return {'caption': TaskBatch(inputs, (drawn[2],))}\n"
        "loader = [tuple(torch.randn(8, 4) for _ in range(3))] * 3\n"
    )
    examples = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert _losses(prelude + next(each for each in examples if "import WaveExecutor" in each), tmp_path) == 3


def _losses(script: str, folder: Path) -> int:
    """Run a script as the one rank that torchrun has started, and return how many losses it prints."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    here = f"import sys; sys.path.insert(0, {str(PROJECT)!r})\n"
    shown = subprocess.run(
        [sys.executable, "-c", here + script],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env={**os.environ, **rank, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert shown.returncode == 0, shown.stderr
    return len([float(line) for line in shown.stdout.split()])


def test_the_commands_of_a_run_in_the_readme_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    section = README.split("**As a run**")[1].split("**As a benchmark**")[0]
    commands = re.findall(r"^solver-plan ([^#\n]+)", section, re.MULTILINE)
    assert [command.split()[0] for command in commands] == ["profile", "plan", "compile", "run", "run", "run"]
    monkeypatch.chdir(tmp_path)
    for typed in commands[:5]:
        command = typed.replace("--time-limit 5", "--heuristic grid").replace("--steps 1000", "--steps 2")
        words = [word.replace("models/", f"{PROJECT}/models/") for word in shlex.split(command)]
        assert main(words) == 0, command
    assert (tmp_path / "saved" / "step-00000002").is_dir()
