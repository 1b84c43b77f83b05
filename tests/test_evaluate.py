"""``python -m bandpo.train`` and then ``python -m bandpo.evaluate``: a folder that pages read."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

import bandpo.evaluate
import bandpo.evaluation
from bandpo.base_models import base_model
from bandpo.cells import parse
from bandpo.clipping import Band, make_rule
from bandpo.data import load_task
from bandpo.evaluate import load_trained, main, read_trained
from bandpo.evaluation import finish_run, right_answers, sample_completions
from bandpo.outcomes import OUTCOMES, later_steps
from bandpo.params import read_defaults
from bandpo.provenance import ROOT
from bandpo.runs import read_run, read_runs
from bandpo.summary import summarize, unfinished_runs
from bandpo.train import main as train

STEPS, UPDATES, PROMPTS, SAMPLES = 8, 2, 12, 4
FIELDS: dict[str, Any] = {
    "task": "scratchpad",
    "eval_size": PROMPTS,
    "num_iterations": UPDATES,
    "per_device_train_batch_size": 64,
    "max_completion_length": 8,
    "learning_rate": 1e-2,
    "lr_scheduler_type": "constant",
    "max_steps": STEPS,
    "save_steps": UPDATES,
    "resume_from_checkpoint": "auto",
    "report_to": "none",
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "disable_tqdm": True,
}

LORA = {"use_peft": True, "lora_target_modules": "q_proj v_proj", "lora_r": 4}


def flags(output_dir: Path, seed: int, **changes: Any) -> list[str]:
    fields = FIELDS | {"output_dir": output_dir, "seed": seed} | changes
    return [part for key, value in fields.items() for part in (f"--{key}", *str(value).split())]


def evaluate(run: Path, *options: str) -> int:
    return main([str(run), "--samples", str(SAMPLES), *options])


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test waits for a network: what is not on this machine counts as not reachable."""
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two trained runs that differ in their seed."""
    root = tmp_path_factory.mktemp("trained")
    for seed in (1, 2):
        train(flags(root / f"scratchpad-kl-band-{seed}", seed))
    return root


@pytest.fixture
def root(trained: Path, tmp_path: Path) -> Path:
    """A copy of it, for one test."""
    return Path(shutil.copytree(trained, tmp_path / "runs"))


@pytest.fixture
def run(root: Path) -> Path:
    return root / "scratchpad-kl-band-1"


# --- what the pages read -------------------------------------------------------------------------


def test_train_and_evaluate_leave_what_the_pages_read(root: Path) -> None:
    assert unfinished_runs(root) == ["scratchpad-kl-band-1", "scratchpad-kl-band-2"]
    for run in root.iterdir():
        assert evaluate(run) == 0
    runs = read_runs(root)
    assert [run.seed for run in runs] == [1, 2]
    for run in runs:
        assert [row["step"] for row in run.metrics] == list(range(1, STEPS + 1))
        assert later_steps(run) == [2, 4, 6, 8]
        assert all(row["band/clip_rate"] == 0 for row in run.metrics[::UPDATES])
        for name, outcome in OUTCOMES.items():
            assert np.isfinite(outcome.measure(run)), name
    (cell,) = parse(summarize(runs, unfinished_runs(root))).cells.values()
    assert (cell.task, cell.variant, cell.seeds) == ("scratchpad", "kl-band", (1, 2))
    assert cell.outcomes.keys() == OUTCOMES.keys()
    rule = make_rule(
        cell.config["clip_rule"],
        clip_rule_below=cell.config["clip_rule_below"],
        epsilon=cell.config["epsilon"],
        epsilon_high=cell.config["epsilon_high"],
        divergence=cell.config["band_divergence"],
        radius=cell.config["band_radius"],
        max_ratio=cell.config["band_max_ratio"],
    )
    assert rule == Band("kl", 0.05, 10.0)


def test_settings_have_the_names_of_notebook_07(run: Path) -> None:
    text = (ROOT / "notebooks" / "07_train.ipynb").read_text(encoding="utf-8")
    named = read_defaults(json.loads(text)).keys()
    config = json.loads((run / "config.json").read_text())
    # lengths are max_steps and save_steps here, and the samples those of the evaluation
    assert named - config.keys() == {"generations", "checkpoint_every", "eval_samples"}
    assert (config["model"], Path(config["run_dir"]).name) == ("base", run.name)
    assert config.keys().isdisjoint({"output_dir", "resume_from_checkpoint"})


def test_completions_and_counts_are_those_of_the_two_models(run: Path) -> None:
    assert evaluate(run) == 0
    data = load_task("scratchpad", eval_size=PROMPTS)
    rows = [json.loads(line) for line in (run / "completions.jsonl").read_text().splitlines()]
    assert [row["prompt"] for row in rows] == list(data.eval["prompt"])
    evaluation = read_run(run).evaluation
    for when, folder in (("before", base_model("scratchpad")), ("after", run / "model")):
        texts = sample_completions(
            AutoModelForCausalLM.from_pretrained(folder),
            AutoTokenizer.from_pretrained(folder),
            data.eval["prompt"],
            SAMPLES,
            max_new_tokens=8,
            seed=1,
        )
        assert [row[when] for row in rows] == texts
        right = right_answers(texts, data.eval["answer"], data.reward_funcs[0])
        assert evaluation[f"right_{when}"] == right.sum(axis=1).tolist()
    assert evaluation["right_before"] != evaluation["right_after"]
    assert evaluation["seconds"] == json.loads((run / "training.json").read_text())["seconds"] > 0
    assert (evaluation["samples"], evaluation["sampler"]) == (SAMPLES, "transformers")
    assert evaluation["provenance"]["package"] == read_run(run).provenance["package"]


def test_an_adapter_is_loaded_onto_its_base(tmp_path: Path) -> None:
    run = tmp_path / "lora-1"
    train(flags(run, 1, **LORA))
    assert (run / "model" / "adapter_config.json").is_file()
    model = load_trained(read_trained(run))
    base = AutoModelForCausalLM.from_pretrained(base_model("scratchpad"))
    ids = torch.tensor([[3, 4, 5, 6]])
    with torch.no_grad():
        before = base(ids).logits
        wanted = PeftModel.from_pretrained(base, run / "model")(ids).logits
        found = model(ids).logits
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert (found - before).abs().max() > 1e-2
    assert evaluate(run) == 0
    assert read_run(run).config["lora_r"] == 4


@pytest.mark.slow
def test_two_processes_leave_one_run(tmp_path: Path) -> None:
    run = tmp_path / "scratchpad-kl-band-1"
    arguments = flags(run, 1, per_device_train_batch_size=32, processes=2)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*launcher, "--nproc_per_node=2", "-m", "bandpo.train", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    for said in ("train_runtime", "trained already"):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.count(said) == 1
    assert evaluate(run) == 0
    found = read_run(run)
    assert found.config["processes"] == 2
    assert found.config["prompts"] == 8
    assert "rare_strategy" not in found.metrics[-1]
    assert np.isfinite(OUTCOMES["clip_rate"].measure(found))


# --- again ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", [f"checkpoint-{STEPS}", "model"])
def test_an_interrupted_training_goes_on_and_says_so(
    run: Path, lost: str, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, weights = read_lines(run), (run / "model" / "model.safetensors").read_bytes()
    shutil.rmtree(run / lost)
    (run / "training.json").unlink()
    assert evaluate(run) == 2
    assert "training has not come to its end" in capsys.readouterr().err
    train(flags(run, 1))
    assert read_lines(run) == whole
    assert (run / "model" / "model.safetensors").read_bytes() == weights
    assert evaluate(run) == 0
    assert read_run(run).evaluation["resumed"] is True


def test_a_trained_run_is_left_as_it_is(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate(run) == 0
    before = contents(run)
    train(flags(run, 1))
    assert "trained already" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"bandpo\.train: .* holds a finished run with other"):
        train(flags(run, 1, band_radius=0.1))
    assert contents(run) == before


def test_more_training_needs_another_evaluation(run: Path) -> None:
    more = flags(run, 1, max_steps=STEPS + 2)
    train(more)
    assert evaluate(run) == 0
    (run / "evaluation.json").unlink()
    train(flags(run, 1, max_steps=STEPS + 4))
    assert [row["step"] for row in read_lines(run)] == list(range(1, STEPS + 5))
    assert evaluate(run) == 0


def test_the_same_evaluation_is_not_made_twice(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate(run) == 0
    before = contents(run)
    assert evaluate(run) == 0
    assert "evaluated already" in capsys.readouterr().out
    assert contents(run) == before


def read_lines(run: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k != "step_time"} for row in rows]


def contents(run: Path) -> dict[str, tuple[int, bytes]]:
    return {
        path.name: (path.stat().st_mtime_ns, path.read_bytes())
        for path in sorted(run.iterdir())
        if path.is_file()
    }


@pytest.mark.parametrize("moment", ["sampling", "writing"])
def test_an_interrupted_evaluation_leaves_no_result(
    run: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    before = contents(run).keys()
    with monkeypatch.context() as patch:
        if moment == "sampling":
            patch.setattr(bandpo.evaluate, "load_trained", stop)
        else:
            patch.setattr(bandpo.evaluation, "write_json", stop)
        with pytest.raises(KeyboardInterrupt):
            evaluate(run)
    left = contents(run).keys() - before
    assert left == ({"completions.jsonl"} if moment == "writing" else set())
    with pytest.raises(FileNotFoundError, match="no finished run"):
        read_run(run)
    assert evaluate(run) == 0
    assert len(read_run(run).evaluation["right_after"]) == PROMPTS


def test_results_of_another_number_of_prompts_are_refused(tmp_path: Path) -> None:
    data = load_task("scratchpad", eval_size=3)
    with pytest.raises(ValueError, match="longer"):
        finish_run(tmp_path, data, [["T0"]] * 3, [["T0"]] * 2, seconds=1.0, resumed=False)
    assert list(tmp_path.iterdir()) == []


# --- refusals ------------------------------------------------------------------------------------


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda run: shutil.rmtree(run), "is no run folder: it has no config.json"),
        (lambda run: (run / "training.json").unlink(), "training.json is missing"),
        (lambda run: edit(run / "config.json", eval_size=0), "has no held-out prompts"),
        (lambda run: edit(run / "config.json", load_in_4bit=True), "trained with load_in_4bit"),
        (lambda run: edit(run / "config.json", task="scratchpat"), "scratchpat"),
        (lambda run: edit(run / "config.json", model="no/such"), "model_name_or_path 'no/such'"),
        (lambda run: main([str(run), "--samples", "2"]), "with 2 samples of each prompt by tran"),
    ],
    ids=["folder", "training", "prompts", "quantized", "task", "model", "samples"],
)
def test_refusals(run: Path, change: Any, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    change(run)
    before = contents(run) if run.exists() else None
    assert evaluate(run) == 2
    error = capsys.readouterr().err
    assert "error: " in error
    assert message in error
    assert (contents(run) if run.exists() else None) == before


@pytest.mark.parametrize(
    ("options", "message"),
    [(["--samples", "0"], "not a whole number"), (["--batch_size", "x"], "not a whole number")],
)
def test_refused_options(run: Path, options: list[str], message: str, capsys: Any) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([str(run), *options])
    assert message in capsys.readouterr().err


def test_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    said = capsys.readouterr().out
    for name in ("run_dir", "--samples", "--vllm", "--batch_size", "default: 32"):
        assert name in said


# --- vLLM, which is not at hand ------------------------------------------------------------------


def stand_in(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    (folder / "vllm.py").write_text(text)
    monkeypatch.syspath_prepend(str(folder))  # the sampling processes inherit it


def test_vllm_where_it_is_missing(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in(tmp_path, monkeypatch, "raise ModuleNotFoundError('vllm')")
    before = contents(run)
    assert evaluate(run, "--vllm") == 2
    assert "needs vLLM and a GPU" in capsys.readouterr().err
    assert contents(run) == before


ENGINE = """\
import json, os
from types import SimpleNamespace as Some
SamplingParams = Some
class LLM:
    def __init__(self, **given):
        self.given = given | {"process": os.getpid(), "files": os.listdir(given["model"])}
    def get_tokenizer(self):
        return None
    def generate(self, prompts, params):
        text = json.dumps(self.given | vars(params))
        return [Some(outputs=[Some(text=text)] * params.n) for _ in prompts]
"""


def answers(run: Path) -> list[dict[str, Any]]:
    """What the stand-in for vLLM's engine was given before and after."""
    first = json.loads((run / "completions.jsonl").read_text().splitlines()[0])
    return [json.loads(first[when][0]) for when in ("before", "after")]


def test_vllm_is_given_both_models_and_the_settings_of_the_run(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its engine cannot run here; this one answers with what it was given."""
    stand_in(tmp_path, monkeypatch, ENGINE)
    edit(run / "config.json", bf16=True, vllm_max_model_length=64, vllm_tensor_parallel_size=2)
    assert evaluate(run, "--vllm") == 0
    before, after = answers(run)
    assert before["process"] != after["process"]
    assert (before["model"], before["revision"]) == (str(base_model("scratchpad")), "main")
    assert after["model"] == str(run / "model")
    for given in (before, after):
        assert given["dtype"] == "bfloat16"
        assert (given["max_model_len"], given["tensor_parallel_size"]) == (64, 2)
        assert (given["n"], given["max_tokens"], given["seed"]) == (SAMPLES, 8, 1)
        assert (given["temperature"], given["top_p"]) == (1.0, 1.0)
    assert read_run(run).evaluation["sampler"] == "vllm"


def test_vllm_is_given_an_adapter_merged_into_its_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(tmp_path, monkeypatch, ENGINE)
    run = tmp_path / "lora-1"
    train(flags(run, 1, **LORA))
    assert evaluate(run, "--vllm") == 0
    _, after = answers(run)
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(after["files"])
    assert "adapter_config.json" not in after["files"]
    assert not Path(after["model"]).exists()
