"""A radius a token, through TRL's buffering: computed once a generation, from all its tokens."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from test_trainer_behavior import history, lora
from test_trainer_exactness import kl_bounds, matches_dense
from tiny import digit_reward, loss_and_gradients, micro_batch, prompts, save_model, settings
from torch import Tensor
from trl import GRPOTrainer

from bandpo.clipping import AdaptiveBand, Band
from bandpo.trainer import BandPOConfig, BandPOTrainer

Make = Callable[..., Any]


def constant(batch: Mapping[str, Tensor]) -> Tensor:
    return torch.full_like(batch["entropies"], 0.7)


def position(batch: Mapping[str, Tensor]) -> Tensor:
    mask = batch["completion_mask"]
    return torch.arange(mask.shape[1], device=mask.device).expand_as(mask).double()


def one_a_sequence(batch: Mapping[str, Tensor]) -> Tensor:
    return batch["advantages"]


def not_a_number(batch: Mapping[str, Tensor]) -> Tensor:
    return torch.full_like(batch["entropies"], math.nan)


def a_list(batch: Mapping[str, Tensor]) -> Any:
    return batch["entropies"].tolist()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def make(model: str, tmp_path: Path) -> Make:
    def make(peft_config: Any = None, **changes: Any) -> Any:
        torch.manual_seed(0)  # adapters start from random weights
        args = BandPOConfig(**settings(tmp_path / "out") | {"clip_rule": "adaptive_band"} | changes)
        return BandPOTrainer(
            model,
            digit_reward,
            args,
            train_dataset=prompts(),
            eval_dataset=prompts(16) if args.eval_strategy != "no" else None,
            peft_config=peft_config,
        )

    return make


def shared(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Logged rows without the metrics that only this rule has."""
    return [{k: v for k, v in row.items() if "radius" not in k} for row in rows]


SITUATIONS: dict[str, dict[str, Any]] = {
    "iterations": {"num_iterations": 3},
    "accumulation": {
        "num_iterations": 2,
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "steps_per_generation": 4,
    },
    "generation-spans-updates": {"num_iterations": 1, "steps_per_generation": 4},
    "misaligned": {"steps_per_generation": 3, "gradient_accumulation_steps": 2, "max_steps": 3},
    "reference-kl": {"beta": 0.05},
    "lora-reference-kl": {"peft_config": lora, "beta": 0.05},
    "masked-truncated": {"mask_truncated_completions": True},
    "gradient-checkpointing": {"gradient_checkpointing": True},
    "evaluation": {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 8},
}


def situation(name: str) -> dict[str, Any]:
    changes = dict(SITUATIONS[name])
    if "peft_config" in changes:
        changes["peft_config"] = changes["peft_config"]()
    return changes


def watch(trainer: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Keep what each generation produces and what each call of the loss gets."""
    generations, batches = [], []
    generate, loss = trainer._generate_and_score_completions, trainer._compute_loss

    def generating(inputs: Any) -> dict[str, Any]:
        output = generate(inputs)
        generations.append({k: v.clone() for k, v in output.items() if torch.is_tensor(v)})
        return output

    def losing(model: Any, inputs: dict[str, Any]) -> Tensor:
        batches.append(inputs)
        return loss(model, inputs)

    trainer._generate_and_score_completions = generating
    trainer._compute_loss = losing
    return generations, batches


@pytest.mark.claim("C22", "prop-adaptive")
@pytest.mark.parametrize("name", SITUATIONS)
def test_a_constant_signal_is_band_to_the_bit(make: Make, name: str) -> None:
    """Whole runs: losses, gradient norms, every metric and the weights at the end."""
    band = make(clip_rule="band", **situation(name))
    band.train()
    ours = make(band_signal=f"{__name__}:constant", band_adaptivity=0.9, **situation(name))
    ours.train()
    expected, weights = band.model.state_dict(), ours.model.state_dict()
    assert expected.keys() == weights.keys()
    assert all(torch.equal(weights[key], expected[key]) for key in expected)
    assert shared(history(ours)) == shared(history(band))
    assert any(row.get("band/clip_rate", 0) > 0 for row in history(ours))
    # and the same run with a signal that varies is another one
    other = make(band_signal="entropy", band_adaptivity=0.9, **situation(name))
    other.train()
    assert not all(torch.equal(other.model.state_dict()[key], expected[key]) for key in expected)


@pytest.mark.claim("C22", "prop-adaptive")
@pytest.mark.parametrize("name", SITUATIONS)
@pytest.mark.parametrize("adaptivity", [0.8, -0.8])
def test_the_mean_radius_is_kept(make: Make, name: str, adaptivity: float) -> None:
    """Over a generation, over the micro-batches that use it, and in the logged metric."""
    trainer = make(band_adaptivity=adaptivity, **situation(name))
    generations, batches = watch(trainer)
    trainer.train()
    assert generations
    for output in generations:
        mask = output["completion_mask"].bool()
        radius = output["band_radius"]
        assert radius.shape == mask.shape
        assert radius.dtype == torch.float64
        assert radius[mask].mean().item() == pytest.approx(0.05, rel=1e-14)
        assert (radius[~mask] == 0.05).all()
        assert radius[mask].min() > 0.05 * 0.2 - 1e-15
        assert radius[mask].max() < 0.05 * 1.8 + 1e-15
        assert radius[mask].std() > 0.01
    # every use of a row meets the radius that its generation gave it
    known = {
        _row(output, i): output["band_radius"][i] for output in generations for i in _rows(output)
    }
    seen = defaultdict(int)
    for inputs in batches:
        for i in _rows(inputs):
            key = _row(inputs, i)
            assert torch.equal(inputs["band_radius"][i], known[key])
            seen[key] += 1
    assert len(seen) > 8


def _rows(inputs: dict[str, Any]) -> range:
    return range(inputs["completion_ids"].shape[0])


def _row(inputs: dict[str, Any], i: int) -> tuple[Any, ...]:
    """What identifies a completion of a run: its old log-probabilities, at least."""
    names = ("prompt_ids", "completion_ids", "completion_mask", "old_per_token_logps")
    return tuple(tuple(inputs[name][i].tolist()) for name in names)


def test_logged_radii_average_to_the_given_one_over_a_cycle(make: Make) -> None:
    """Steps differ, because each holds a part of the generation; their mean does not."""
    trainer = make(**SITUATIONS["accumulation"], max_steps=4)
    counts = []
    log = trainer.log
    trainer.log = lambda *args: (log(*args), counts.append(trainer.histograms()["tokens"]))
    trainer.train()
    rows = [row for row in history(trainer) if "band/radius_mean" in row]
    assert trainer.args.steps_per_cycle == len(rows) == 4
    tokens = [count["band/radius_mean"] for count in counts[:4]]
    means = [row["band/radius_mean"] for row in rows]
    assert max(means) > min(means)
    total = sum(mean * n for mean, n in zip(means, tokens, strict=True))
    assert total / sum(tokens) == pytest.approx(0.05, rel=1e-12)
    assert all(row["band/tail_radius"] > row["band/radius_mean"] for row in rows)


@pytest.mark.parametrize("peft_config", [None, lora])
def test_entropies_are_those_of_the_old_policy(make: Make, peft_config: Any) -> None:
    """Not those of the reference, which TRL scores next, and not those at a later inner epoch."""
    trainer = make(peft_config=peft_config and peft_config(), beta=0.05, num_iterations=3)
    seen: list[Tensor] = []
    rule = trainer._adaptive

    class Recording(AdaptiveBand):
        def measure(self, batch: Mapping[str, Tensor], mask: Tensor) -> Tensor:
            ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
            attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
            n = batch["completion_ids"].shape[1]
            with torch.no_grad():
                logits = trainer.model(ids, attention_mask=attention).logits[:, -n - 1 : -1]
            logps = logits.log_softmax(-1)
            entropy = -(logps.exp() * logps).sum(-1)
            torch.testing.assert_close(batch["entropies"][mask], entropy[mask])
            torch.testing.assert_close(super().measure(batch, mask), batch["entropies"])
            seen.append(entropy)
            return super().measure(batch, mask)

    trainer._adaptive = Recording(rule.divergence, rule.radius, rule.max_ratio)
    trainer.train()
    assert len(seen) == 2  # four steps, three uses of each generation


def test_surprisal_and_a_function_of_ones_own(make: Make) -> None:
    trainer = make(band_signal="surprisal", max_steps=1)
    generations, _ = watch(trainer)
    trainer.train()
    mask = generations[0]["completion_mask"].bool()
    logps, radius = generations[0]["old_per_token_logps"][mask], generations[0]["band_radius"][mask]
    assert (radius[logps.argsort()].diff() <= 0).all()

    trainer = make(band_signal=f"{__name__}:position", band_adaptivity=-0.6, max_steps=1)
    generations, _ = watch(trainer)
    trainer.train()
    mask = generations[0]["completion_mask"].bool()
    columns = generations[0]["band_radius"].where(mask, math.nan)
    means = columns.nanmean(0)
    assert (means.diff() < 0).all()  # the sign turns the order: less room further on
    assert columns[:, 0].nan_to_num(means[0]).unique().numel() == 1  # ties share a radius


@pytest.mark.parametrize("below", [None, "fixed"])
def test_loss_and_gradient_match_the_definition(make: Make, below: str | None) -> None:
    """Token by token in float64, with SciPy's root at each token's own radius."""
    trainer = make(loss_type="bnpo", clip_rule_below=below)
    inputs = micro_batch(trainer)
    generator = torch.Generator().manual_seed(3)
    shape = inputs["completion_ids"].shape
    inputs["band_radius"] = 0.05 * (0.2 + 1.6 * torch.rand(shape, generator=generator).double())
    mask = inputs["completion_mask"].bool()
    radii = iter(inputs["band_radius"][mask].tolist())  # dense() goes row by row

    def bounds(p: float, _radius: float, cap: float) -> tuple[float, float]:
        lower, upper = kl_bounds(p, next(radii), cap)
        return (lower if below is None else 0.8), upper

    expected, _, _ = matches_dense(trainer, inputs, bounds, "bnpo")
    assert next(radii, None) is None
    # the radii matter: at the mean radius the loss is another
    inputs["band_radius"] = torch.full_like(inputs["band_radius"], 0.05)
    assert loss_and_gradients(trainer, inputs)[0].item() != pytest.approx(expected, rel=1e-3)


def test_a_fixed_bound_below_a_band_that_adapts(make: Make) -> None:
    trainer = make(clip_rule="fixed", clip_rule_below="adaptive_band")
    assert trainer._adaptive == AdaptiveBand()
    trainer.train()
    assert any("band/radius_mean" in row for row in history(trainer))


def test_tool_tokens_have_no_part_in_the_budget(make: Make) -> None:
    trainer = make()
    inputs = micro_batch(trainer)
    mask = inputs["completion_mask"].clone()
    inputs["tool_mask"] = torch.ones_like(mask)
    inputs["tool_mask"][:, 1:3] = 0
    chosen = (mask * inputs["tool_mask"]).bool()
    entropies = torch.rand(mask.shape, generator=torch.Generator().manual_seed(0))
    scores = [inputs["old_per_token_logps"], entropies.masked_fill(~chosen, math.nan)]
    radius = trainer._radii(trainer._adaptive, inputs, scores)
    assert radius[chosen].mean().item() == pytest.approx(0.05, rel=1e-14)
    assert (radius[~chosen] == 0.05).all()
    others = radius[chosen]
    inputs["completion_mask"] = inputs["completion_mask"] * inputs["tool_mask"]
    del inputs["tool_mask"]
    assert torch.equal(trainer._radii(trainer._adaptive, inputs, scores)[chosen], others)


def test_purely_on_policy_no_radius_is_chosen(make: Make) -> None:
    with pytest.warns(UserWarning, match="can never act"):
        trainer = make(num_iterations=1, max_steps=2)
    generations, _ = watch(trainer)
    trainer.train()
    assert len(generations) == 2
    assert not any("band_radius" in output for output in generations)


def test_a_resumed_run_equals_an_uninterrupted_one(make: Make, tmp_path: Path) -> None:
    same = {"num_iterations": 2, "save_strategy": "steps", "save_steps": 2, "max_steps": 6}
    whole = make(**same, output_dir=str(tmp_path / "whole"))
    whole.train()
    again = make(**same, output_dir=str(tmp_path / "again"))
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    expected, weights = whole.model.state_dict(), again.model.state_dict()
    assert all(torch.equal(weights[key], expected[key]) for key in expected)
    rows = [row for row in history(whole) if "loss" in row]
    resumed = [row for row in history(again) if "loss" in row]
    assert [row["band/radius_mean"] for row in resumed] == [row["band/radius_mean"] for row in rows]


@pytest.mark.parametrize(
    ("signal", "error", "message"),
    [
        ("one_a_sequence", ValueError, r"one number a token, shape \(16, \d+\); got shape \(16,\)"),
        ("not_a_number", ValueError, "not_a_number' is NaN at a completion token"),
        ("a_list", TypeError, "a_list' must return a tensor"),
    ],
)
def test_a_signal_that_is_none_stops_training(
    make: Make, signal: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make(band_signal=f"{__name__}:{signal}").train()


def test_training_stops_if_trl_scores_in_another_order(make: Make) -> None:
    class Moved(GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
            output = super()._generate_and_score_completions(inputs)
            return output | {"old_per_token_logps": output["old_per_token_logps"].clone()}

    class Broken(BandPOTrainer, Moved):
        pass

    trainer = make()
    trainer.__class__ = Broken
    with pytest.raises(RuntimeError, match="in another order than expected"):
        trainer.train()


def test_without_its_radii_the_rule_refuses_to_act(make: Make) -> None:
    """Micro-batches that lost the radii on their way would train a plain band."""
    trainer = make()
    with pytest.raises(TypeError, match="no bounds before each token has its radius"):
        loss_and_gradients(trainer, micro_batch(trainer))
    assert trainer.rule.with_radius(torch.tensor(0.05)) == Band("kl", torch.tensor(0.05), 10.0)
