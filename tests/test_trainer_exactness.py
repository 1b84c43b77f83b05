"""The hook changes the bounds of TRL's loss and nothing else.

Constant bounds must reproduce GRPOTrainer to the last bit; any rule must match loss and gradient
computed from the definition with NumPy and SciPy.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import brentq
from tiny import digit_reward, loss_and_gradients, micro_batch, prompts, save_model, settings
from trl import GRPOConfig, GRPOTrainer

from bandpo.neighbors import dppo_surrogate
from bandpo.trainer import BandPOConfig, BandPOTrainer

LOSS_TYPES = ["grpo", "bnpo", "dr_grpo", "dapo"]
CLIP_METRICS = ["low_mean", "high_mean", "region_mean", "low_min", "high_max"]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    folder = tmp_path_factory.mktemp("tiny")
    model = save_model(folder / "model")

    def make(trainer: type, config: type, **changes: Any) -> Any:
        args = config(**settings(folder / "out", **changes))
        return trainer(model, digit_reward, args, train_dataset=prompts())

    return make


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize(
    "epsilons",
    # the last pair comes out one unit in the last place off if bounds are formed in float32
    [(0.2, None), (0.2, 0.28), (0.34, 0.43)],
    ids=["grpo", "clip-higher", "wide"],
)
def test_constant_bounds_are_bit_identical_to_grpo(
    make: Callable[..., Any], loss_type: str, epsilons: tuple[float, float | None]
) -> None:
    """Every feature of TRL's loss that multiplies or adds to the clipped term is on."""
    epsilon, epsilon_high = epsilons
    same = {
        "loss_type": loss_type,
        "epsilon": epsilon,
        "epsilon_high": epsilon_high,
        "beta": 0.04,
        "temperature": 0.9,
        "gradient_accumulation_steps": 2,
        "steps_per_generation": 4,
        "top_entropy_quantile": 0.7,
        "delta": 2.0,
    }
    theirs = make(GRPOTrainer, GRPOConfig, **same)
    ours = make(BandPOTrainer, BandPOConfig, clip_rule="fixed", **same)
    inputs = micro_batch(theirs)
    inputs["ref_per_token_logps"] = inputs["old_per_token_logps"] - 0.1
    loss, gradients, metrics = loss_and_gradients(theirs, inputs)
    our_loss, our_gradients, our_metrics = loss_and_gradients(ours, inputs)

    assert torch.equal(our_loss, loss)
    assert our_gradients.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert torch.equal(our_gradients[name], gradient), name
    assert 0 < metrics["clip_ratio/region_mean"][0] < 1
    for name in CLIP_METRICS:
        assert our_metrics[f"clip_ratio/{name}"] == metrics[f"clip_ratio/{name}"], name
    assert our_metrics == metrics


def test_sampler_correction_is_left_to_trl(make: Callable[..., Any]) -> None:
    """The ratio trainer/sampler multiplies the loss after the clip, with vLLM (TRL #4159)."""
    theirs = make(GRPOTrainer, GRPOConfig)
    ours = make(BandPOTrainer, BandPOConfig, clip_rule="fixed")
    inputs = micro_batch(theirs)
    plain = loss_and_gradients(ours, inputs)[0]
    generator = torch.Generator().manual_seed(1)
    correction = 1 + 0.3 * torch.randn(inputs["completion_ids"].shape, generator=generator)
    for trainer in (theirs, ours):
        trainer.use_vllm = trainer.vllm_importance_sampling_correction = True
    inputs["importance_sampling_ratio"] = correction
    loss, gradients, _ = loss_and_gradients(theirs, inputs)
    our_loss, our_gradients, _ = loss_and_gradients(ours, inputs)
    assert torch.equal(our_loss, loss)
    assert not torch.equal(loss, plain)
    assert all(torch.equal(our_gradients[name], gradients[name]) for name in gradients)


# --- DPPO ----------------------------------------------------------------------------------------


class DPPOTrainer(GRPOTrainer):
    """TRL's trainer with DPPO's objective in place of the clipped one."""

    divergence: str
    dropped = 0

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        mask = inputs["completion_mask"]
        logps = self._get_per_token_logps_and_entropies(
            model,
            torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1),
            torch.cat([inputs["prompt_mask"], mask], 1),
            mask.shape[1],
        )[0]
        old = inputs["old_per_token_logps"]
        advantages = inputs["advantages"].unsqueeze(1).expand_as(logps)
        kept = dppo_surrogate(logps, old, advantages, self.divergence, 0.05) * mask
        plain = torch.exp(logps - old) * advantages * mask
        self.dropped += int((kept != plain).sum())
        return -(kept.sum(1) / mask.sum(1)).mean()


@pytest.mark.claim("B2", "cor-dppo")
@pytest.mark.parametrize("divergence", ["kl", "tv"])
def test_a_training_run_by_band_is_one_by_dppo(make: Callable[..., Any], divergence: str) -> None:
    """Three generations, four updates on each: the weights at the end agree."""
    same = {"loss_type": "grpo", "num_iterations": 4, "max_steps": 12}

    def trained(trainer: Any) -> dict[str, torch.Tensor]:
        trainer.train()
        return {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}

    dppo = make(DPPOTrainer, GRPOConfig, **same)
    dppo.divergence = divergence
    theirs = trained(dppo)
    assert dppo.dropped > 50  # the mask has acted
    rule = {"band_divergence": divergence, "band_max_ratio": None}
    ours = trained(make(BandPOTrainer, BandPOConfig, **rule, **same))
    fixed = trained(make(BandPOTrainer, BandPOConfig, clip_rule="fixed", **same))
    for name, weight in theirs.items():
        torch.testing.assert_close(ours[name], weight, rtol=1e-3, atol=1e-4)
    assert any(not torch.allclose(fixed[n], w, rtol=0, atol=1e-2) for n, w in theirs.items())


# --- an independent computation ------------------------------------------------------------------


def kl_bounds(p: float, radius: float, cap: float) -> tuple[float, float]:
    """Roots in q of KL(Bernoulli(p), Bernoulli(q)) = radius, bracketed in the logit of q."""

    def excess(logit: float) -> float:
        log_q, log_not_q = -np.logaddexp(0, -logit), -np.logaddexp(0, logit)
        return p * (np.log(p) - log_q) + (1 - p) * (np.log1p(-p) - log_not_q) - radius

    at = np.log(p) - np.log1p(-p)
    low = brentq(excess, at - 2 * radius / p - 50, at, xtol=1e-13)
    high = brentq(excess, at, at + 2 * radius / (1 - p) + 50, xtol=1e-13)
    return 1 / (1 + np.exp(-low)) / p, min(1 / (1 + np.exp(-high)) / p, cap)


def tv_bounds(p: float, radius: float, cap: float) -> tuple[float, float]:
    return max(1 - radius / p, 0), min(1 + radius / p, 1 / p, cap)


def chi2_bounds(p: float, radius: float, cap: float) -> tuple[float, float]:
    half = np.sqrt(radius * (1 - p) / p)
    return max(1 - half, 0), min(1 + half, 1 / p, cap)


def dense(
    logps: np.ndarray, inputs: dict[str, Any], bounds: Callable[..., Any], loss_type: str
) -> tuple[float, np.ndarray, dict[str, float]]:
    """Loss, its derivative by each log-probability and clip rates, token by token in float64."""
    mask = inputs["completion_mask"].numpy().astype(float)
    old = inputs["old_per_token_logps"].double().numpy()
    rows, length = logps.shape
    loss, gradient = np.zeros_like(logps), np.zeros_like(logps)
    high = low = 0
    for i in range(rows):
        a = float(inputs["advantages"][i])
        for t in range(length):
            if not mask[i, t]:
                continue
            r = np.exp(logps[i, t] - old[i, t])
            lower, upper = bounds(np.exp(old[i, t]), 0.05, 10.0)
            loss[i, t] = -min(r * a, np.clip(r, lower, upper) * a)
            above, below = a > 0 and r > upper, a < 0 and r < lower
            high, low = high + above, low + below
            gradient[i, t] = 0 if above or below else -r * a
    weights = {
        "grpo": mask / mask.sum(1, keepdims=True) / rows,
        "bnpo": mask / mask.sum(),
        "dr_grpo": mask / (rows * 6),  # max_completion_length
        "dapo": mask / mask.sum(),
    }[loss_type]
    rates = {"high_mean": high / mask.sum(), "low_mean": low / mask.sum()}
    return float((loss * weights).sum()), gradient * weights, rates


def new_logps(trainer: Any, inputs: dict[str, Any]) -> torch.Tensor:
    """Log-probabilities of the completion tokens under the model as it is, with their graph."""
    return trainer._get_per_token_logps_and_entropies(
        trainer.model,
        torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1),
        torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1),
        inputs["completion_ids"].size(1),
    )[0]


def matches_dense(
    trainer: Any, inputs: dict[str, Any], bounds: Callable[..., Any], loss_type: str
) -> tuple[float, dict[str, float], Any]:
    """Assert the loss and every gradient of `dense`; return its loss and rates, and TRL's metrics.

    Tokens are clipped on both sides, or nothing would be compared.
    """
    loss, gradients, metrics = loss_and_gradients(trainer, inputs)

    trainer.model.zero_grad()
    logps = new_logps(trainer, inputs)
    expected, by_logp, rates = dense(logps.detach().double().numpy(), inputs, bounds, loss_type)
    (logps * torch.tensor(by_logp, dtype=logps.dtype)).sum().backward()

    assert loss.item() == pytest.approx(expected, rel=1e-5, abs=1e-6)
    for name, weight in trainer.model.named_parameters():
        scale = weight.grad.abs().max().item()
        torch.testing.assert_close(gradients[name], weight.grad, rtol=1e-4, atol=1e-5 * scale)
    assert rates["high_mean"] > 0
    assert rates["low_mean"] > 0
    return expected, rates, metrics


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize(
    ("divergence", "bounds"),
    [("kl", kl_bounds), ("tv", tv_bounds), ("chi2", chi2_bounds)],
    ids=["kl", "tv", "chi2"],
)
def test_band_matches_an_independent_computation(
    make: Callable[..., Any], loss_type: str, divergence: str, bounds: Callable[..., Any]
) -> None:
    trainer = make(BandPOTrainer, BandPOConfig, loss_type=loss_type, band_divergence=divergence)
    inputs = micro_batch(trainer)
    _, rates, metrics = matches_dense(trainer, inputs, bounds, loss_type)
    for name, rate in rates.items():
        assert metrics[f"clip_ratio/{name}"][0] == pytest.approx(rate, abs=1e-6), name


@pytest.mark.parametrize("clip_rule", ["dcpo", "relaxed_band", "band"])
@pytest.mark.parametrize("below", [None, "fixed"])
def test_trainer_equals_clipped_surrogate(
    make: Callable[..., Any], clip_rule: str, below: str | None
) -> None:
    """Every other rule: TRL's loss with the hook equals the rule in a hand-written loop."""
    from bandpo.clipping import clipped_surrogate

    trainer = make(
        BandPOTrainer, BandPOConfig, loss_type="bnpo", clip_rule=clip_rule, clip_rule_below=below
    )
    inputs = micro_batch(trainer)
    loss, gradients, _ = loss_and_gradients(trainer, inputs)
    trainer.model.zero_grad()
    logps = new_logps(trainer, inputs)
    mask = inputs["completion_mask"]
    objective = clipped_surrogate(
        logps, inputs["old_per_token_logps"], inputs["advantages"].unsqueeze(1), trainer.rule
    )
    expected = -(objective * mask).sum() / mask.sum()
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-6, atol=1e-7)
    for name, weight in trainer.model.named_parameters():
        scale = weight.grad.abs().max().item()
        torch.testing.assert_close(gradients[name], weight.grad, rtol=1e-5, atol=1e-6 * scale)


def test_delta_is_dual_clipping(make: Callable[..., Any]) -> None:
    """TRL #3435: with delta at least the cap, A < 0 is bounded by delta and A > 0 is untouched."""
    c = 1.6
    plain = make(BandPOTrainer, BandPOConfig, loss_type="bnpo", band_max_ratio=1.5)
    dual = make(BandPOTrainer, BandPOConfig, loss_type="bnpo", band_max_ratio=1.5, delta=c)
    inputs = micro_batch(plain)
    mask, a = inputs["completion_mask"].double(), inputs["advantages"].double().unsqueeze(1)
    with torch.no_grad():
        logps = plain._get_per_token_logps_and_entropies(
            plain.model,
            torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1),
            torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1),
            mask.size(1),
        )[0].double()
    old = inputs["old_per_token_logps"].double()
    lower, upper = (bound.exp() for bound in plain.rule.log_bounds(old))
    r = (logps - old).exp()
    clipped = torch.minimum(r * a, torch.clamp(r, lower, upper) * a)
    expected = torch.where(a < 0, torch.maximum(clipped, c * a), clipped)
    loss, _, _ = loss_and_gradients(dual, inputs)
    assert loss.item() == pytest.approx(-((expected * mask).sum() / mask.sum()).item(), rel=1e-5)
    assert loss.item() != pytest.approx(loss_and_gradients(plain, inputs)[0].item(), rel=1e-3)


# --- when TRL changes ----------------------------------------------------------------------------


def test_training_stops_if_trl_no_longer_reads_the_hook(make: Callable[..., Any]) -> None:
    class Moved(GRPOTrainer):
        """What a TRL that kept its clip range elsewhere would look like."""

        def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
            low, high = self.args.epsilon, self.args.epsilon
            logps = self._get_per_token_logps_and_entropies(
                model,
                torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1),
                torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1),
                inputs["completion_ids"].size(1),
            )[0]
            ratio = torch.exp(logps - inputs["old_per_token_logps"])
            return -torch.clamp(ratio, 1 - low, 1 + high).mean()

    class Broken(BandPOTrainer, Moved):
        pass

    # GRPOTrainer stands behind Moved in the method order, as a changed TRL would.
    assert Broken.__mro__.index(Moved) < Broken.__mro__.index(GRPOTrainer)
    trainer = make(Broken, BandPOConfig)
    inputs = micro_batch(trainer)
    with pytest.raises(RuntimeError, match="without reading the bounds"):
        loss_and_gradients(trainer, inputs)
    assert trainer.epsilon_low == 0.2  # the hook is closed again


def test_the_hook_closes_when_the_loss_fails(make: Callable[..., Any]) -> None:
    trainer = make(BandPOTrainer, BandPOConfig)
    inputs = micro_batch(trainer)
    del inputs["prompt_ids"]
    with pytest.raises(KeyError, match="prompt_ids"):
        loss_and_gradients(trainer, inputs)
    assert trainer._bounds is None


def test_model_card_cites_the_paper(make: Callable[..., Any], tmp_path: Path) -> None:
    trainer = make(BandPOTrainer, BandPOConfig)
    trainer.args.output_dir = str(tmp_path)
    trainer.create_model_card(model_name="tiny")
    card = (tmp_path / "README.md").read_text()
    assert "2603.04918" in card
    assert "DeepSeekMath" not in card
