"""``python -m bandpo.train``: recipes, dry runs, and errors that come before the model loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from tiny import save_model

import bandpo.train
from bandpo.clipping import DCPO, Band, Fixed, RelaxedBand
from bandpo.command_line import parse
from bandpo.plotting import names
from bandpo.settings import settings
from bandpo.train import main
from tools.recipes import MODELS, RECIPES, RULES, recipes

CPU = ["--use_cpu", "true", "--bf16", "false", "--gradient_checkpointing", "false"]
ALL = sorted(recipes())


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test waits for a network: what is not on this machine counts as not reachable."""
    import datasets.config
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def loaded(*_: Any, **__: Any) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(bandpo.train, "BandPOTrainer", loaded)


def write(folder: Path, **fields: Any) -> list[str]:
    recipe = folder / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(fields))
    return ["--config", str(recipe), *CPU]


# --- recipes -------------------------------------------------------------------------------------


def test_recipes_are_those_of_the_script() -> None:
    on_disk = {
        str(path.relative_to(RECIPES)): path.read_text()
        for path in RECIPES.rglob("*.yaml")
        if path.parent.name != "accelerate"
    }
    assert on_disk == recipes()
    assert len(MODELS) * len(RULES) == 28


def test_a_plan_for_a_gpu_is_printed_where_there_is_none(
    capsys: pytest.CaptureFixture[str],
) -> None:
    recipe = str(RECIPES / "one_gpu" / "qwen2.5-0.5b.yaml")
    main(["--config", recipe, "--dry_run"])
    assert "rule can act  yes" in capsys.readouterr().out


def test_a_dry_run_may_be_asked_for_in_the_recipe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = (RECIPES / "one_gpu" / "qwen2.5-0.5b.yaml").read_text()
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(plain + "\ndry_run: true\n")
    main(["--config", str(recipe)])
    assert "rule can act  yes" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "flags", "message"),
    [
        (None, [], "there is no file"),
        ("task: scratchpad\n  x: [1\n", [], "is no YAML: mapping values are not allowed"),
        ("- task\n", [], "must hold lines of the form `name: value`"),
        ("band_raduis: 0.1\n", [], "band_raduis is no field .* did you mean band_radius"),
        ("task: scratchpad\n", ["--band_raduis", "0.1"], "did you mean band_radius"),
        ("task: scratchpad\n", ["--band_raduis=0.1"], "did you mean band_radius"),
        ("task: scratchpad\n", ["--zzz"], "--zzz is no field of a run, BandPOConfig or Mod.*g$"),
    ],
)
def test_a_recipe_that_cannot_be_read_is_refused_in_one_line(
    text: str | None, flags: list[str], message: str, tmp_path: Path
) -> None:
    recipe = tmp_path / "recipe.yaml"
    if text is not None:
        recipe.write_text(text)
    with pytest.raises(SystemExit, match=f"^bandpo.train: .*{message}") as refused:
        main(["--config", str(recipe), *flags, *CPU])
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("path", ALL)
def test_every_recipe_parses_and_its_dry_run_adds_up(
    path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--config", str(RECIPES / path), *CPU]
    run, config, model = parse(arguments)
    assert config.cautions() == []
    written = settings(run, config, model)
    assert written["inner_epochs"] * written["mini_batches"] == config.updates_per_generation > 1
    assert written["epsilon_high"] == pytest.approx(config.epsilon_high or config.epsilon)
    # of one cell with the runs of other seeds, and found by `make record PROFILE=...`
    folder = Path(written["run_dir"])
    assert folder.parent.parent == Path("build/runs")
    assert folder.name.removesuffix(f"-{config.seed}") in names()
    main([*arguments, "--dry_run", "--tokens_per_second", "1e4"])
    out = capsys.readouterr().out
    assert "rule can act  yes" in out
    assert f"processes     {run.processes}" in out
    if path.startswith("published/"):
        assert "256 prompts x 16 completions = 4,096 completions, at most 16,777,216 token" in out
        assert "4 optimizer steps a generation, 1,024 completions each" in out
        assert "4,080 optimizer steps, 1,020 generations" in out
        assert f"at most {1020 * 16777216 / 1e4 / 3600:,.1f} h" in out
    else:
        assert "32 prompts x 8 completions = 256 completions" in out


def test_published_rules() -> None:
    expected = {
        "grpo": Fixed(0.2, 0.2),
        "clip-higher": Fixed(0.2, 0.28),
        "dcpo": DCPO(0.16, 0.2, 10.0),
        "kl-band": Band("kl", 0.05, 10.0),
        "tv-band": Band("tv", 0.05, 10.0),
        "chi2-band": Band("chi2", 0.05, 10.0),
        "relaxed-band": RelaxedBand(Band("kl", 0.05, 10.0), Fixed(0.2, 0.28)),
    }
    for rule, value in expected.items():
        path = RECIPES / "published" / "qwen2.5-3b" / f"{rule}.yaml"
        _, config, model = parse(["--config", str(path), *CPU])
        assert config.rule() == value
        assert config.delta == 10
        assert model.model_name_or_path == "Qwen/Qwen2.5-3B-Instruct"


@pytest.mark.parametrize(
    ("name", "kind"), [("ddp", "MULTI_GPU"), ("fsdp2", "FSDP"), ("zero3", "DEEPSPEED")]
)
def test_accelerate_reads_its_configurations(name: str, kind: str) -> None:
    loaded = load_config_from_file(str(RECIPES / "accelerate" / f"{name}.yaml"))
    assert loaded.distributed_type == kind
    assert loaded.mixed_precision == "bf16"


# --- dry run -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_model")
def test_dry_run_counts_weights_and_starts_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = save_model(tmp_path / "model")
    fields = {
        "task": "scratchpad",
        "model_name_or_path": model,
        "output_dir": str(tmp_path / "run"),
        "per_device_train_batch_size": 32,
        "num_train_epochs": 2,
        "num_iterations": 4,
        "max_completion_length": 8,
        "beta": 0.1,
    }
    main([*write(tmp_path, **fields), "--dry_run", "--tokens_per_second", "500"])
    out = capsys.readouterr().out
    weights = json.loads((tmp_path / "model" / "config.json").read_text())
    hidden, inner, vocab = (
        weights["hidden_size"],
        weights["intermediate_size"],
        weights["vocab_size"],
    )
    layer = 4 * hidden**2 + 3 * hidden * inner + 2 * hidden
    assert f"{2 * vocab * hidden + 2 * layer + hidden:,} parameters" in out
    assert "4 prompts x 8 completions = 32 completions, at most 256 tokens" in out
    # 2,500 prompts, 4 a generation, 2 epochs, 4 updates each
    assert "5,000 optimizer steps, 1,250 generations" in out
    assert "at most 0.2 h at 500 tokens a second" in out
    assert "AdamW and the reference" in out
    assert not (tmp_path / "run").exists()


def test_dry_run_says_when_the_rule_cannot_act(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main([*write(tmp_path, task="no_tail", output_dir=str(tmp_path)), "--dry_run"])
    out = capsys.readouterr().out
    assert "rule can act  no" in out
    assert "caution: The clip rule can never act" in out


def test_flags_override_the_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = write(tmp_path, task="no_tail", output_dir=str(tmp_path), band_radius=0.1)
    main([*recipe, "--dry_run", "--band_radius", "0.2", "--band_divergence", "tv"])
    assert "Band(divergence='tv', radius=0.2, max_ratio=10.0)" in capsys.readouterr().out


# --- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"band_raduis": 0.1}, "band_raduis"),
        ({"band_radius": 0.0}, "radius must be a positive finite number; got 0.0"),
        ({"clip_rule": "bands"}, "clip_rule must be one of"),
        ({"loss_type": "cispo"}, "'cispo' does not"),
        ({"task": "scratchpat"}, "scratchpat"),
        ({"task": "file:no/such.json"}, "no/such.json"),
        ({"task": "math", "model_name_or_path": "m"}, "cannot be reached"),
        ({"train_size": 10**6}, "train_size must be between 0 and"),
        ({"train_size": 2, "per_device_train_batch_size": 32}, "has 2 training prompts"),
        ({"eval_strategy": "steps", "eval_steps": 1, "eval_size": 0}, "no evaluation prompts"),
        ({"model_name_or_path": "no/such-model"}, "model_name_or_path 'no/such-model'"),
        ({"processes": 8}, "meant for 8 processes, and 1 are running"),
        ({"processes": 0}, "processes must be at least 1"),
        ({"tokens_per_second": -1.0}, "tokens_per_second must be positive"),
        ({"logging_steps": 10}, "logging_steps 1: .*; got 'steps' and 10"),
        ({"logging_strategy": "epoch"}, "logging_strategy must be 'steps'"),
        (
            {"gradient_accumulation_steps": 2, "steps_per_generation": 3},
            "a multiple of gradient_accumulation_steps: .*; got 3 and 2",
        ),
        ({"resume_from_checkpoint": "no/such"}, "folder of a whole checkpoint; got 'no/such'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
@pytest.mark.usefixtures("no_model")
def test_errors_come_before_the_model(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    run = tmp_path / "run"
    with pytest.raises(SystemExit, match=message) as stopped:
        main(write(tmp_path, **{"task": "scratchpad", "output_dir": str(run)} | fields))
    assert str(stopped.value).startswith("bandpo.train: ")
    assert not run.exists()


@pytest.mark.usefixtures("no_model")
def test_a_file_task_needs_a_model(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        "".join(json.dumps({"prompt": f"{i}+1", "answer": f"{i + 1}"}) + "\n" for i in range(9))
    )
    with pytest.raises(SystemExit, match="model_name_or_path must be set: task 'file:"):
        main(write(tmp_path, task=f"file:{rows}", output_dir=str(tmp_path / "run")))


@pytest.mark.usefixtures("no_model")
def test_a_missing_recipe_and_an_unknown_flag(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"no-such\.yaml"):
        main(["--config", str(tmp_path / "no-such.yaml")])
    with pytest.raises(SystemExit, match="--band_raduis"):
        main(["--task", "no_tail", "--output_dir", str(tmp_path), *CPU, "--band_raduis", "0.1"])
