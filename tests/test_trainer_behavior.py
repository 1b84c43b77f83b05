"""Situations that have gone wrong in TRL or beside it, each by the number of its thread.

Numbers are issues of huggingface/trl unless a repository is named.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from tiny import digit_reward, loss_and_gradients, micro_batch, prompts, save_model, settings
from trl import GRPOConfig, GRPOTrainer

from bandpo.clipping import Band, Fixed
from bandpo.config import BandPOConfig
from bandpo.divergences import Divergence
from bandpo.metrics import BAND_METRICS
from bandpo.trainer import BandPOTrainer

Make = Callable[..., Any]
TIMES = {"step_time", "train_runtime", "train_samples_per_second", "train_steps_per_second"}
EVAL_TIMES = {"eval_runtime", "eval_samples_per_second", "eval_steps_per_second"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def make(model: str, tmp_path: Path) -> Make:
    def make(trainer: type, config: type, peft_config: Any = None, **changes: Any) -> Any:
        torch.manual_seed(0)  # adapters start from random weights
        args = config(**settings(tmp_path / "out", **changes))
        evaluate = prompts(16) if args.eval_strategy != "no" else None
        return trainer(
            model,
            digit_reward,
            args,
            train_dataset=prompts(),
            eval_dataset=evaluate,
            peft_config=peft_config,
        )

    return make


def lora(**changes: Any) -> Any:
    from peft import LoraConfig

    return LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, **changes)


def history(trainer: Any) -> list[dict[str, Any]]:
    rows = trainer.state.log_history
    return [{k: v for k, v in row.items() if k not in TIMES | EVAL_TIMES} for row in rows]


SITUATIONS: dict[str, dict[str, Any]] = {
    "iterations": {"num_iterations": 3},
    # 6024, 5619: the normalizer when generation and update do not coincide
    "dapo-generation-spans-updates": {
        "num_iterations": 1,
        "steps_per_generation": 4,
        "gradient_accumulation_steps": 2,
    },
    "grpo-generation-spans-updates": {
        "loss_type": "grpo",
        "num_iterations": 1,
        "steps_per_generation": 4,
        "gradient_accumulation_steps": 2,
    },
    "misaligned": {"steps_per_generation": 3, "gradient_accumulation_steps": 2, "max_steps": 3},
    "reference-kl": {"beta": 0.05},
    "temperature": {"temperature": 0.7},
    "masked-truncated": {"mask_truncated_completions": True},
    "entropy-bonus": {"entropy_coef": 0.01},
    "high-entropy-tokens": {"top_entropy_quantile": 0.5},
    "bf16-autocast": {"bf16": True},
    "bf16-weights": {"model_init_kwargs": {"dtype": "bfloat16"}, "learning_rate": 0.1},
    "gradient-checkpointing": {"gradient_checkpointing": True},
    "unscaled-advantages": {"scale_rewards": "none", "loss_type": "dr_grpo"},
    "evaluation": {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 8},
    "lora": {"peft_config": lora},
    "lora-reference-kl": {"peft_config": lora, "beta": 0.05},
}


def situation(name: str) -> dict[str, Any]:
    changes = dict(SITUATIONS[name])
    if "peft_config" in changes:
        changes["peft_config"] = changes["peft_config"]()
    return changes


@pytest.mark.parametrize("name", SITUATIONS)
def test_whole_runs_with_constant_bounds_are_bit_identical(make: Make, name: str) -> None:
    """Four steps of GRPOTrainer and of BandPOTrainer with the fixed rule end in equal weights."""
    theirs = make(GRPOTrainer, GRPOConfig, **situation(name))
    theirs.train()
    ours = make(BandPOTrainer, BandPOConfig, clip_rule="fixed", **situation(name))
    ours.train()
    expected, weights = theirs.model.state_dict(), ours.model.state_dict()
    assert expected.keys() == weights.keys()
    assert all(torch.equal(weights[key], expected[key]) for key in expected)
    plain = [{k: v for k, v in row.items() if "band/" not in k} for row in history(ours)]
    assert plain == history(theirs)
    # and the clip has acted, or equality would say nothing
    assert any(row.get("clip_ratio/region_mean", 0) > 0 for row in plain)


@pytest.mark.parametrize("name", SITUATIONS)
def test_band_trains_in_every_situation(make: Make, name: str) -> None:
    trainer = make(BandPOTrainer, BandPOConfig, **situation(name))
    before = {key: value.clone() for key, value in trainer.model.state_dict().items()}
    trainer.train()
    after = trainer.model.state_dict()
    assert any(not torch.equal(before[key], after[key]) for key in before)
    assert all(torch.isfinite(value).all() for value in after.values())
    rows = [row for row in history(trainer) if "loss" in row]
    assert len(rows) == trainer.args.max_steps
    for row in rows:
        assert math.isfinite(row["loss"])
        if trainer.args.gradient_accumulation_steps == 1:  # TRL does not weight micro-batches
            assert row["band/clip_rate"] == pytest.approx(row["clip_ratio/region_mean"], rel=1e-6)
        assert row["band/kl_old_new"] >= 0
        assert row.get("band/upper_mean", 1) >= 1 >= row.get("band/lower_mean", 1)
    assert any(row["band/mass_moved"] > 1e-3 for row in rows)


def test_purely_on_policy_settings_warn_once_and_say_what_to_set(make: Make) -> None:
    """3120, 3757: with TRL's defaults the ratio is always 1 and users think that clipping fails."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = make(BandPOTrainer, BandPOConfig, num_iterations=1)
        trainer.train()
    messages = [str(w.message) for w in caught if "can never act" in str(w.message)]
    assert len(messages) == 1
    assert "Set num_iterations above 1, or steps_per_generation" in messages[0]
    assert not any(key.startswith("band/") for row in history(trainer) for key in row)


@pytest.mark.parametrize(
    ("changes", "acts", "cycle"),
    [
        ({"num_iterations": 1}, False, 1),
        ({"num_iterations": 2}, True, 2),
        ({"num_iterations": 1, "gradient_accumulation_steps": 4}, False, 1),
        (
            {"num_iterations": 1, "gradient_accumulation_steps": 4, "steps_per_generation": 2},
            False,
            1,
        ),
        (
            {"num_iterations": 1, "gradient_accumulation_steps": 2, "steps_per_generation": 8},
            True,
            4,
        ),
        (
            {"num_iterations": 1, "gradient_accumulation_steps": 2, "steps_per_generation": 3},
            True,
            3,
        ),
        ({"num_iterations": 3, "gradient_accumulation_steps": 2}, True, 3),
    ],
)
def test_when_a_rule_can_act(
    make: Make, tmp_path: Path, changes: dict[str, Any], acts: bool, cycle: int
) -> None:
    """5757: exactly where TRL computes old log-probabilities."""
    args = BandPOConfig(**settings(tmp_path, **changes))
    assert args.rule_can_act is acts
    assert args.steps_per_cycle == cycle
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        trainer = make(BandPOTrainer, BandPOConfig, max_steps=1, **changes)
        seen = []
        inner = trainer._compute_loss
        trainer._compute_loss = lambda model, inputs: (
            seen.append(inputs.get("old_per_token_logps") is not None) or inner(model, inputs)
        )
        trainer.train()
    assert set(seen) == {acts}


def test_clip_metrics_condition_on_the_sign_of_the_advantage(make: Make) -> None:
    """3144, 3175, 3289: a ratio above its bound is clipped only if the advantage is positive."""
    trainer = make(BandPOTrainer, BandPOConfig, clip_rule="fixed")
    inputs = micro_batch(trainer)
    rates = {}
    for sign in (1.0, -1.0):
        inputs["advantages"] = torch.full_like(inputs["advantages"], sign)
        loss_and_gradients(trainer, inputs)
        logs: dict[str, float] = {}
        trainer.log(logs)
        rates[sign] = logs
    assert rates[1.0]["band/clip_high"] == pytest.approx(rates[1.0]["clip_ratio/high_mean"])
    assert rates[1.0]["band/clip_high"] > 0.1
    assert "band/clip_low" not in rates[1.0]
    assert rates[-1.0]["band/clip_low"] == pytest.approx(rates[-1.0]["clip_ratio/low_mean"])
    assert rates[-1.0]["band/clip_low"] > 0.1
    assert "band/clip_high" not in rates[-1.0]


@pytest.mark.parametrize("garbage", [-60.0, 3.0, -1e4])
def test_padding_enters_neither_bounds_nor_metrics(make: Make, garbage: float) -> None:
    """6369: TRL gives padding a log-probability of 0 today and gave it other values before."""
    trainer = make(BandPOTrainer, BandPOConfig)
    inputs = micro_batch(trainer)
    loss, gradients, _ = loss_and_gradients(trainer, inputs)
    logs: dict[str, float] = {}
    trainer.log(logs)

    mask = inputs["completion_mask"].bool()
    assert not mask.all()
    inputs["old_per_token_logps"] = inputs["old_per_token_logps"].masked_fill(~mask, garbage)
    other_loss, other_gradients, _ = loss_and_gradients(trainer, inputs)
    other_logs: dict[str, float] = {}
    trainer.log(other_logs)
    assert torch.equal(other_loss, loss)
    assert all(torch.equal(other_gradients[name], gradients[name]) for name in gradients)
    assert {k: v for k, v in other_logs.items() if "band/" in k} == {
        k: v for k, v in logs.items() if "band/" in k
    }
    assert sum(map(sum, trainer.histograms()["ratio_histogram"])) == mask.sum()

    class Recording(Fixed):
        def log_bound(self, old_logps: torch.Tensor, upward: torch.Tensor) -> torch.Tensor:
            assert (old_logps[~mask] == 0).all()
            assert (old_logps[mask] < 0).all()
            return super().log_bound(old_logps, upward)

    trainer.rule = Recording()
    loss_and_gradients(trainer, inputs)
    positive = mask & (inputs["advantages"] > 0).unsqueeze(1)
    assert trainer.histograms()["tokens"]["band/clip_rate"] == mask.sum()
    assert trainer.histograms()["tokens"]["band/clip_high"] == positive.sum()


def test_tool_tokens_enter_neither_bounds_nor_metrics(make: Make) -> None:
    """Tokens that a tool wrote are no choices of the policy."""
    trainer = make(BandPOTrainer, BandPOConfig)
    inputs = micro_batch(trainer)
    inputs["tool_mask"] = torch.ones_like(inputs["completion_mask"])
    inputs["tool_mask"][:, 1:3] = 0
    loss_and_gradients(trainer, inputs)
    trainer.log({})
    count = sum(map(sum, trainer.histograms()["ratio_histogram"]))
    assert count == (inputs["completion_mask"] * inputs["tool_mask"]).sum()
    assert count < inputs["completion_mask"].sum()


def test_masked_truncated_completions_enter_no_metric(make: Make) -> None:
    """6369: with mask_truncated_completions, a completion without an end counts nowhere."""
    trainer = make(BandPOTrainer, BandPOConfig, mask_truncated_completions=True, max_steps=2)
    kept, whole = [], []
    inner = trainer._compute_loss

    def spy(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        kept.append(int(inputs["completion_mask"].sum()))
        whole.append(int((inputs["completion_ids"] != 0).sum()))
        return inner(model, inputs)

    trainer._compute_loss = spy
    trainer.train()
    assert 0 < kept[-1] < whole[-1]
    assert sum(map(sum, trainer.histograms()["ratio_histogram"])) == kept[-1]


def test_no_nan_gradient_from_an_overflowing_branch(make: Make) -> None:
    """MakazhanAlpamys/Soup#342: exp overflows in the branch that min does not take; 0 * inf."""
    trainer = make(BandPOTrainer, BandPOConfig)
    inputs = micro_batch(trainer)
    inputs["advantages"] = torch.ones_like(inputs["advantages"])
    inputs["old_per_token_logps"][0, 0] = -120.0
    loss, gradients, _ = loss_and_gradients(trainer, inputs)
    assert torch.isfinite(loss)
    assert all(torch.isfinite(gradient).all() for gradient in gradients.values())
    # TRL's own trainer does produce it, so the case is real
    stock = make(GRPOTrainer, GRPOConfig)
    assert not all(
        torch.isfinite(gradient).all() for gradient in loss_and_gradients(stock, inputs)[1].values()
    )


def test_cap_bounds_the_loss_of_rare_tokens(make: Make) -> None:
    """3435: the exact upper bound of a rare token grows like 1/p; band_max_ratio stops it."""
    losses = {}
    for cap in (None, 10.0):
        trainer = make(BandPOTrainer, BandPOConfig, band_max_ratio=cap, loss_type="bnpo")
        inputs = micro_batch(trainer)
        inputs["advantages"] = torch.ones_like(inputs["advantages"])
        inputs["old_per_token_logps"][0, 0] = -30.0
        losses[cap] = loss_and_gradients(trainer, inputs)[0].item()
    assert losses[None] < -1e6
    assert -10 < losses[10.0] < 0


def test_temperature_is_part_of_the_probability(make: Make) -> None:
    """4159: p is the probability under which the token was sampled, softmax(logits / T)."""
    trainer = make(BandPOTrainer, BandPOConfig, temperature=0.6)
    inputs = micro_batch(trainer)
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    n = inputs["completion_ids"].size(1)
    logps = trainer._get_per_token_logps_and_entropies(trainer.model, ids, attention, n)[0]
    logits = trainer.model(ids, attention_mask=attention).logits[:, -n - 1 : -1] / 0.6
    expected = logits.log_softmax(-1).gather(-1, inputs["completion_ids"].unsqueeze(-1))[..., 0]
    mask = inputs["completion_mask"].bool()
    torch.testing.assert_close(logps[mask], expected[mask], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("off", [True, False])
def test_dropout_is_off_by_default(make: Make, off: bool) -> None:
    """With dropout, the old policy differs from itself and a rule would clip the noise."""
    changes = {} if off else {"disable_dropout": False}
    trainer = make(
        BandPOTrainer, BandPOConfig, peft_config=lora(lora_dropout=0.5), max_steps=1, **changes
    )
    trainer.train()
    moved = history(trainer)[0]["band/mass_moved"]
    assert (moved < 1e-6) is off


def test_evaluation_logs_its_own_metrics(make: Make) -> None:
    trainer = make(
        BandPOTrainer,
        BandPOConfig,
        eval_strategy="steps",
        eval_steps=2,
        per_device_eval_batch_size=8,
        max_steps=2,
    )
    trainer.train()
    evaluation = next(row for row in history(trainer) if "eval_loss" in row)
    assert evaluation["eval_band/clip_rate"] == 0  # fresh completions: every ratio is 1
    assert evaluation["eval_band/mass_moved"] < 1e-6
    assert not any(
        key.startswith("eval_") for row in history(trainer) if "loss" in row for key in row
    )


@pytest.mark.parametrize("rule", ["band", "adaptive_band"])
def test_metrics_are_logged_under_their_registered_names(make: Make, rule: str) -> None:
    trainer = make(BandPOTrainer, BandPOConfig, clip_rule=rule, num_iterations=4, learning_rate=0.1)
    trainer.train()
    logged = {key for row in history(trainer) for key in row if key.startswith("band/")}
    of_radii = {"band/radius_mean", "band/tail_radius"}
    assert logged == set(BAND_METRICS) - (of_radii if rule == "band" else set())


def test_step_metrics_are_token_weighted_over_micro_batches(make: Make) -> None:
    """One step of two micro-batches logs the rate over all its tokens, not a mean of two rates."""
    trainer = make(BandPOTrainer, BandPOConfig, clip_rule="fixed")
    halves = [micro_batch(trainer, rows=4, length=length, seed=length) for length in (12, 4)]
    clipped = tokens = 0.0
    for inputs in halves:
        _, _, metrics = loss_and_gradients(trainer, inputs)
        n = inputs["completion_mask"].sum().item()
        clipped += metrics["clip_ratio/region_mean"][0] * n
        tokens += n
    logs: dict[str, float] = {}
    trainer.log(logs)
    assert logs["band/clip_rate"] == pytest.approx(clipped / tokens, rel=1e-6)


def test_a_divergence_object_can_be_trained_with_and_saved(make: Make, tmp_path: Path) -> None:
    """The configuration is saved as JSON and pickle, which a lambda does not survive."""
    pearson = Divergence("my_chi2", lambda u: (u - 1) ** 2, 1.0, math.inf)
    mine = make(BandPOTrainer, BandPOConfig, band_divergence=pearson, max_steps=2)
    mine.train()
    mine.save_model(str(tmp_path / "saved"))
    assert mine.args.to_dict()["band_divergence"] == "my_chi2"
    named = make(BandPOTrainer, BandPOConfig, band_divergence="chi2", max_steps=2)
    named.train()
    for row, expected in zip(history(mine)[:-1], history(named)[:-1], strict=True):
        assert row["loss"] == pytest.approx(expected["loss"], rel=1e-4, abs=1e-6)


def test_conversational_prompts(make: Make, model: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}="
    dataset = prompts().map(lambda row: {"prompt": [{"role": "user", "content": row["prompt"]}]})
    trainer = BandPOTrainer(
        model,
        lambda completions, **_: [float(c[0]["content"][:1] in "01234") for c in completions],
        BandPOConfig(**settings(tmp_path)),
        train_dataset=dataset,
        processing_class=tokenizer,
    )
    trainer.train()
    assert "band/clip_rate" in history(trainer)[0]


def test_the_class_swapped_in_trls_own_script(
    monkeypatch: pytest.MonkeyPatch, model: str, tmp_path: Path
) -> None:
    """trl.scripts.grpo, with the trainer and the configuration replaced and nothing else."""
    from trl import DatasetMixtureConfig, ModelConfig, TrlParser
    from trl.scripts import grpo

    trained = []

    class Swapped(BandPOTrainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            trained.append(self)

    monkeypatch.setattr(trl, "GRPOTrainer", Swapped)
    prompts().to_json(tmp_path / "data" / "train.json")
    flags = settings(tmp_path / "out") | {
        "model_name_or_path": model,
        "dtype": "float32",
        "dataset_name": str(tmp_path / "data"),
        "reward_funcs": "tiny.digit_reward",
        "clip_rule": "band",
        "band_divergence": "tv",
    }
    arguments = [part for key, value in flags.items() for part in (f"--{key}", str(value))]
    parser = TrlParser((grpo.GRPOScriptArguments, BandPOConfig, ModelConfig, DatasetMixtureConfig))
    grpo.main(*parser.parse_args_and_config(arguments))
    assert (tmp_path / "out" / "model.safetensors").exists()
    (trainer,) = trained
    assert trainer.rule == Band("tv", 0.05, 10.0)
    assert any(row.get("band/clip_rate", 0) > 0 for row in history(trainer))
