"""Two processes (gloo, CPU) give the loss, the metrics and the weights of one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed_script import RUNS
from tiny import save_model

SCRIPT = Path(__file__).parent / "distributed_script.py"
NOISY = {"step_time", "step", "epoch"}


def launch(folder: Path, model: str, processes: int) -> None:
    command = [sys.executable]
    if processes > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    command += [str(SCRIPT), model, str(folder), str(processes)]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TRL_EXPERIMENTAL_SILENCE": "1",
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_two_processes_equal_one(tmp_path: Path) -> None:
    """TRL #3175 and #6369: sums and counts of tokens are added over processes, then divided."""
    model = save_model(tmp_path / "model")
    launch(tmp_path / "one", model, 1)
    launch(tmp_path / "two", model, 2)
    for run in RUNS:
        one, two = tmp_path / "one" / run, tmp_path / "two" / run
        assert [row["step"] for row in rows(one)] == [row["step"] for row in rows(two)] != []
        for ours, theirs in zip(rows(one), rows(two), strict=True):
            assert ours.keys() == theirs.keys()
            assert ours["ratio_histogram"] == theirs["ratio_histogram"]
            for name in ours.keys() - NOISY - {"ratio_histogram"}:
                assert theirs[name] == pytest.approx(ours[name], rel=2e-4, abs=2e-5), name
        # the steps of a generation on which the ratio has left 1 do clip, on both sides
        assert any(row["band/clip_high"] > 0 for row in rows(one))
        assert any(row["band/clip_low"] > 0 for row in rows(one))
        weights = torch.load(one / "weights.pt"), torch.load(two / "weights.pt")
        for name, value in weights[0].items():
            torch.testing.assert_close(weights[1][name], value, rtol=1e-3, atol=1e-4, msg=name)
    # ranked among the tokens of both processes; ranks among each one's own would differ above
    for row in rows(tmp_path / "two" / "adaptive"):
        assert row["band/radius_mean"] == pytest.approx(0.05, rel=1e-12)
        assert row["band/tail_radius"] != pytest.approx(0.05, rel=1e-3)
