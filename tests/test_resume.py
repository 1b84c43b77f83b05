"""A run killed at any moment goes on with the same command, and ends as if nothing had happened."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from bandpo.base_models import base_model
from bandpo.launch import last_checkpoint
from bandpo.train import checkpoint_to_resume
from bandpo.trainer import BandPOConfig

STEPS, CYCLE = 24, 4


def command(output_dir: Path) -> list[str]:
    flags = {
        "task": "scratchpad",
        "output_dir": output_dir,
        "resume_from_checkpoint": "auto",
        "num_iterations": CYCLE,
        "per_device_train_batch_size": 32,
        "max_completion_length": 8,
        "learning_rate": 1e-3,
        "max_steps": STEPS,
        "save_steps": CYCLE,
        "logging_steps": 1,
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
    }
    arguments = [part for key, value in flags.items() for part in (f"--{key}", str(value))]
    return [sys.executable, "-m", "bandpo.train", *arguments]


def start(output_dir: Path) -> subprocess.Popen[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.Popen(
        command(output_dir),
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(output_dir: Path) -> str:
    process = start(output_dir)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    return output


def steps(output_dir: Path) -> list[int]:
    file = output_dir / "metrics.jsonl"
    text = file.read_text() if file.exists() else ""
    return [json.loads(line)["step"] for line in text.splitlines(keepends=True) if line[-1] == "\n"]


def kill_after(output_dir: Path, step: int) -> None:
    """Start the run and send SIGKILL as soon as this step is in the metrics file."""
    process = start(output_dir)
    deadline = time.monotonic() + 300
    # The file first shows the steps before the last kill, until training goes on.
    while process.poll() is None and time.monotonic() < deadline:
        if max(steps(output_dir), default=0) >= step:
            break
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    output, _ = process.communicate()
    assert process.returncode == -signal.SIGKILL, output


def metrics(output_dir: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k != "step_time"} for row in rows]


@pytest.mark.slow
def test_killed_twice_equals_uninterrupted(tmp_path: Path) -> None:
    """TRL #3148, #3185, #3247: bit-identical weights and metrics from a cycle boundary on."""
    base_model("scratchpad")  # so that the kills fall into the training
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    kill_after(killed, 6)
    assert 6 <= max(steps(killed)) < STEPS
    first = last_checkpoint(killed)
    assert first is not None
    kill_after(killed, 15)
    assert max(steps(killed)) < STEPS
    finish(killed)
    finish(whole)

    assert steps(killed) == list(range(1, STEPS + 1))
    assert metrics(killed) == metrics(whole)
    assert any(row["band/clip_rate"] > 0 for row in metrics(whole))
    weights = load_file(whole / "model" / "model.safetensors")
    resumed = load_file(killed / "model" / "model.safetensors")
    assert weights.keys() == resumed.keys()
    assert all(torch.equal(weights[name], resumed[name]) for name in weights)
    start_weights = load_file(base_model("scratchpad") / "model.safetensors")
    assert not all(torch.equal(weights[name], start_weights[name]) for name in weights)
    for name in ("config.json", "provenance.json"):
        json.loads((killed / name).read_text())


def checkpoint(folder: Path, step: int, state: str | None) -> Path:
    path = folder / f"checkpoint-{step}"
    path.mkdir(parents=True)
    if state is not None:
        (path / "trainer_state.json").write_text(state)
    return path


def test_a_checkpoint_cut_off_by_the_kill_is_passed_over(tmp_path: Path) -> None:
    checkpoint(tmp_path, 4, "{}")
    good = checkpoint(tmp_path, 8, '{"global_step": 8}')
    checkpoint(tmp_path, 12, None)
    checkpoint(tmp_path, 100, '{"global_st')
    (tmp_path / "checkpoint-final").mkdir()
    assert last_checkpoint(tmp_path) == good


def config(output_dir: Path, resume: str | None) -> BandPOConfig:
    return BandPOConfig(str(output_dir), resume_from_checkpoint=resume, use_cpu=True, bf16=False)


@pytest.mark.parametrize("resume", ["auto", "true", "True"])
def test_auto_starts_anew_or_goes_on(tmp_path: Path, resume: str) -> None:
    assert checkpoint_to_resume(config(tmp_path / "new", resume)) is None
    path = checkpoint(tmp_path, 4, "{}")
    assert checkpoint_to_resume(config(tmp_path, resume)) == str(path)


def test_a_named_checkpoint_must_be_whole(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, 4, "{}")
    assert checkpoint_to_resume(config(tmp_path / "elsewhere", str(path))) == str(path)
    torn = checkpoint(tmp_path, 8, None)
    with pytest.raises(ValueError, match="folder of a whole checkpoint"):
        checkpoint_to_resume(config(tmp_path, str(torn)))


def test_a_fresh_start_never_mixes_with_an_earlier_run(tmp_path: Path) -> None:
    checkpoint(tmp_path, 4, "{}")
    with pytest.raises(ValueError, match="holds checkpoints of an earlier run"):
        checkpoint_to_resume(config(tmp_path, None))
