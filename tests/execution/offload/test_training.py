"""`run` of offload plans, and problems measured here."""

import dataclasses
from pathlib import Path

import pytest
import torch

from solver_plan.cli import main
from solver_plan.errors import InputError, NotExecutableError, RunFailedError
from solver_plan.execution.model import Model
from solver_plan.execution.offload.optimizer import OffloadOptimizer
from solver_plan.execution.offload.training import OffloadTraining, OperatorChain, train_offloaded
from solver_plan.execution.run import load_model
from solver_plan.kinds import read_problem
from solver_plan.offload.plan import OffloadPlan, Place
from solver_plan.offload.problem import OffloadProblem
from solver_plan.profiles.cluster import read_cluster
from solver_plan.profiles.loading import load_description
from solver_plan.profiles.measured import HostRates, measure_host, measure_layers, measure_offload
from solver_plan.profiles.offload import profile_offload
from tests.conftest import Run
from tests.execution.offload.offload_models import Gpt, Reference, batch, gpt, loss_of, plan_of, problem_of

ROOT = Path(__file__).parents[3]
MODEL = "models/gpt.py:tiny"


def described(*, accumulation: int = 1) -> OffloadProblem:
    return profile_offload(
        load_description(MODEL),
        read_cluster("a100_8x80gb"),
        2 * accumulation,
        micro_batch=2,
        staging_bytes=10**6,
        chunks_per_layer=2,
        clip_gradients=False,
    )


@pytest.fixture(autouse=True)
def in_project(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("places", [("cpu",), ("gpu", "cpu", "gpu_streamed", "cpu")])
def test_a_described_model_trains_like_adamw(places: tuple[Place, ...]) -> None:
    problem = described(accumulation=2)
    description, model = load_description(MODEL), load_model(MODEL)
    training = OffloadTraining(steps=3, micro_batch=2, max_norm=1.0, lr=1e-2)
    torch.manual_seed(0)  # dropout
    ran = train_offloaded(problem, plan_of(problem, *places), description, model, training)
    torch.manual_seed(0)
    chain = OperatorChain(description, model, 0, torch.float32)
    optimizer = torch.optim.AdamW(chain.parameters(), lr=1e-2, fused=True)
    losses = []
    for number in range(3):
        generator = torch.Generator().manual_seed(number)
        total = torch.zeros(())
        for _ in range(2):
            made = model.make_batch(2, generator)
            loss = model.loss(chain(*made.inputs), made.targets) / 4
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(chain.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total))
    assert ran.losses == tuple(losses)
    assert ran.report.steps == 3
    assert "period (ms)" in ran.table()


def test_sizes_that_make_no_sense_are_refused() -> None:
    problem = described()
    for training, message in (
        (OffloadTraining(steps=0, micro_batch=1), "steps: found 0"),
        (OffloadTraining(steps=1, micro_batch=0), "micro-batch: found 0"),
    ):
        with pytest.raises(InputError, match=message):
            train_offloaded(problem, plan_of(problem, "cpu"), load_description(MODEL), load_model(MODEL), training)
    with pytest.raises(NotExecutableError, match="describes 29 operators, its modules are"):
        OperatorChain(load_description(MODEL), load_model("models/llama.py:tiny"), 0, torch.float32)


def test_what_a_model_does_wrong_is_told_with_its_step() -> None:
    problem, model = described(), load_model(MODEL)
    assert isinstance(model, Model)

    def fail(*given: object) -> torch.Tensor:
        raise ArithmeticError("broken")

    def train(changed: Model) -> None:
        training = OffloadTraining(steps=1, micro_batch=1)
        train_offloaded(problem, plan_of(problem, "cpu"), load_description(MODEL), changed, training)

    with pytest.raises(RunFailedError, match=r"^step 1: ArithmeticError: broken"):
        train(dataclasses.replace(model, loss=fail))
    with pytest.raises(InputError, match=r"^loss: found a tensor of shape"):
        train(dataclasses.replace(model, loss=lambda outputs, targets: outputs[0]))
    with pytest.raises(InputError, match="`make_batch` raised ArithmeticError: broken"):
        train(dataclasses.replace(model, make_batch=fail))  # type: ignore[arg-type]


def test_profile_plan_and_run_commands(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(ROOT)
    problem, plan = str(tmp_path / "problem.json"), str(tmp_path / "plan.json")
    rates = HostRates(
        device="a device",
        emulated=False,
        workers=3,
        cpu_update_parameters_per_s=1e8,
        gpu_update_parameters_per_s=2e8,
        d2h_bytes_per_s=3e9,
        h2d_bytes_per_s=4e9,
        both_d2h_bytes_per_s=5e8,
        both_h2d_bytes_per_s=6e8,
    )
    monkeypatch.setattr("solver_plan.profiles.measured.measure_host", lambda speculate: rates)
    words = ["profile", MODEL, "--cluster", "a100_8x80gb", "--global-batch", "2", "--out", problem]
    code, _, err = run(*words, "--measure-host")
    assert code == 2
    assert "--measure-host is for offload problems" in err
    code, out, _ = run(*words, "--kind", "offload", "--no-clip", "--measure-host", "--gpu-state-bytes", "600000")
    assert code == 0
    assert "3.00 GB/s alone, 0.50 with both directions busy" in out
    found = read_problem(problem)
    assert isinstance(found, OffloadProblem)
    assert found.rates == rates.rates
    assert found.rates.d2h_bytes_per_s == 5e8
    assert run("plan", problem, "--out", plan, "--heuristic", "prefix")[0] == 0
    code, _, err = run("compile", problem, plan, "--out", str(tmp_path / "program.json"))
    assert (code, err.count("\n")) == (2, 1)
    assert "found kind offload, which has no program; run it as it is" in err
    code, out, err = run(
        "run", problem, plan, "--steps", "2", "--model", MODEL, "--max-norm", "1", "--micro-batch", "2"
    )
    assert code == 0
    assert err.startswith("step 1: loss ")
    assert out.splitlines()[1].startswith("period (ms)")
    for options, message in (
        ([], "model: an offload problem names none"),
        (["--model", MODEL, "--local", "2"], "--local is not for offload plans"),
        (["--model", MODEL, "--trace", "t.json"], "--trace is not for offload plans"),
        (["--model", MODEL, "--dtype", "float64"], "--dtype: found float64"),
        (["--model", MODEL, "--max-norm", "-1"], "max_norm: found -1.0"),
        (["--model", "models/llama.py:tiny"], "planned"),
    ):
        code, _, err = run("run", problem, plan, "--steps", "1", *options)
        assert code == 2
        assert message in err
        assert err.count("\n") == 1


def test_offload_options_do_not_go_with_parallelism_plans(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    problem = str(tmp_path / "problem.json")
    words = ["profile", MODEL, "--cluster", "v100_4x32gb", "--global-batch", "4", "--out", problem]
    assert main(words) == 0
    assert main(["plan", problem, "--out", str(tmp_path / "plan.json"), "--heuristic", "grid"]) == 0
    assert main(["run", problem, str(tmp_path / "plan.json"), "--steps", "1", "--max-norm", "1"]) == 2
    assert "--max-norm is for offload plans" in capfd.readouterr().err


def test_a_model_measured_here_is_planned_and_trained() -> None:
    model = gpt()
    reference = Reference(model)

    def micro_step() -> None:
        loss_of(model, batch(0)).backward()

    host = measure_host(workers=1, dtype=torch.float32, repetitions=1, parameters=1000, copied_bytes=1000)
    assert min(host.rates.cpu_update_parameters_per_s, host.rates.d2h_bytes_per_s, host.h2d_bytes_per_s) > 0
    assert "1 thread" in host.table()
    problem = measure_offload(model.layers(), micro_step, gpu_state_bytes=50_000, host=host, repetitions=2)
    described = problem_of(model.layers())
    assert [(layer.name, layer.parameters) for layer in problem.layers] == [
        (layer.name, layer.parameters) for layer in described.layers
    ]
    assert problem.bytes_per_parameter == described.bytes_per_parameter
    assert all(layer.forward_ms > 0 and layer.backward_ms > 0 for layer in problem.layers)
    assert all(parameter.grad is None for parameter in model.parameters())
    optimizer = OffloadOptimizer(
        model.parameters(), problem=problem, plan=_best(problem), layers=model.layers(), max_norm=1.0
    )
    loss_of(model, batch(0)).backward()
    optimizer.step()
    assert loss_of(model, batch(0)) < loss_of(reference.model, batch(0))


def _best(problem: OffloadProblem) -> OffloadPlan:
    import solver_plan

    found = solver_plan.plan(problem, heuristic="prefix")
    assert isinstance(found, OffloadPlan)
    return found


def test_what_cannot_be_measured_is_refused() -> None:
    model = Gpt()
    layers = model.layers() | {"unused": torch.nn.Linear(2, 2)}
    with pytest.raises(InputError, match="'unused' has no module that ran"):
        measure_layers(layers, lambda: loss_of(model, batch(0)).backward(), repetitions=1)
    model.requires_grad_(False)
    with pytest.raises(InputError, match="found no parameter that requires a gradient"):
        measure_offload(model.layers(), lambda: None, gpu_state_bytes=0)
    with pytest.raises(InputError, match="workers: found 0"):
        measure_host(workers=0)
