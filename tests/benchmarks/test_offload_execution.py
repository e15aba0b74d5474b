"""The benchmark of the offload executor runs, and its updates are AdamW's."""

import pytest

pytest.importorskip("torch")

from benchmarks.offload_execution import main


def test_smoke(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--smoke", "--workers", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in lines if line.startswith(("emulated", "model"))]
    assert [row[0] for row in rows] == ["emulated-equal", "emulated-unequal", "model-smoke"]
    assert {row[-1] for row in rows} == {"0.0e+00"}
