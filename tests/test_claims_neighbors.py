"""Chapter "The neighbors in one frame": gradient weights, through TRL's loss where it has them."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from claims_reference import NAMES, b, bounds, divergence, policies
from scipy.integrate import quad
from tiny import save_model

from bandpo.clipping import DCPO, Band, Fixed, PerSide, RelaxedBand, clipped_surrogate
from bandpo.neighbors import Objective, dppo_surrogate, gradient_weight, smoothed_surrogate
from bandpo.trl_objective import TRLObjective

Trl = Callable[..., TRLObjective]


@pytest.fixture(scope="module")
def trl(tmp_path_factory: pytest.TempPathFactory) -> Trl:
    model = save_model(tmp_path_factory.mktemp("tiny") / "model")
    return partial(TRLObjective, model)


def column(*values: float) -> torch.Tensor:
    """One sequence a value, of one token each."""
    return torch.tensor(values, dtype=torch.float64).reshape(-1, 1)


P = (1e-4, 0.01, 0.1, 0.5, 0.9, 0.999)
R = (0.01, 0.1, 0.5, 0.79, 0.81, 0.999, 1.0005, 1.19, 1.21, 1.27, 1.29, 3.0, 4.9, 5.1, 9.9, 12.0)
PAIRS = [(p, r) for p in P for r in R if p * r < 1]


def weights(objective: Objective, sign: float) -> np.ndarray:
    """Weight at every pair of old probability and ratio."""
    p, r = (column(*values) for values in zip(*PAIRS, strict=True))
    found = gradient_weight(objective, (p * r).log(), p.log(), column(sign))
    return found.squeeze(1).numpy()


def expected(weight: Callable[[float, float], float]) -> np.ndarray:
    return np.array([weight(p, r) for p, r in PAIRS])


def rule(one: Any) -> Objective:
    return partial(clipped_surrogate, rule=one)


KL = Band("kl", 0.05)
RULES = [
    Fixed(0.2, 0.2),
    Fixed(0.2, 0.28),
    DCPO(),
    KL,
    Band("tv", 0.05),
    Band("chi2", 0.05, None),
    RelaxedBand(),
    PerSide(above=KL, below=Fixed()),
]


# --- the weight ----------------------------------------------------------------------------------


@pytest.mark.claim("prop-weight")
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize(
    ("objective", "jumps"),
    [
        (rule(Fixed(0.2, 0.28)), [0.8, 1.28]),
        (rule(KL), [*bounds("kl", 0.1, 0.05)]),
        (partial(smoothed_surrogate, alpha=0.1), []),
    ],
    ids=["clip", "band", "smoothing"],
)
def test_the_objective_is_the_integral_of_its_weight(
    objective: Objective, jumps: list[float], sign: float
) -> None:
    p = column(0.1)

    def weight(r: float) -> float:
        return gradient_weight(objective, (p * r).log(), p.log(), column(sign)).item()

    for r in (0.05, 0.7, 1.1, 2.5, 9.0):
        integral, _ = quad(weight, 1, r, points=[x for x in jumps if min(1, r) < x < max(1, r)])
        value = objective((p * r).log(), p.log(), column(sign)).item()
        assert value == pytest.approx(sign * (1 + integral), rel=1e-6)


# --- what fits an interval -----------------------------------------------------------------------


@pytest.mark.claim("prop-switch")
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("one", RULES, ids=str)
def test_a_clip_is_zero_or_one_and_one_inward(one: Any, sign: float) -> None:
    found = weights(rule(one), sign)
    inward = expected(lambda p, r: sign * (r - 1) < 0).astype(bool)
    whole = found.round()
    np.testing.assert_allclose(found, whole, atol=1e-12)
    assert set(whole) == {0, 1}
    assert (whole[inward] == 1).all()


@pytest.mark.claim("prop-switch")
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dapo"])
@pytest.mark.parametrize("high", [0.2, 0.28])
def test_trls_clip_is_ours(trl: Trl, loss_type: str, high: float, sign: float) -> None:
    theirs = weights(trl(loss_type=loss_type, epsilon=0.2, epsilon_high=high), sign)
    np.testing.assert_allclose(theirs, weights(rule(Fixed(0.2, high)), sign), atol=1e-12)
    stopped = (
        expected(lambda p, r: r > 1 + high) if sign > 0 else expected(lambda p, r: r < 0.8)
    ).astype(bool)
    np.testing.assert_allclose(theirs, ~stopped, atol=1e-12)


@pytest.mark.claim("prop-switch")
def test_dual_clipping_stops_a_far_token_with_negative_advantage(trl: Trl) -> None:
    dual = trl(loss_type="grpo", epsilon=0.2, delta=10.0)
    below = expected(lambda p, r: 0.8 < r < 10).astype(float)
    np.testing.assert_allclose(weights(dual, -1.0), below, atol=1e-12)
    np.testing.assert_allclose(weights(dual, 1.0), weights(rule(Fixed()), 1.0), atol=1e-12)


@pytest.mark.claim("prop-switch", "prop-smoothing")
def test_per_token_bounds_in_trls_loss_are_switches_whatever_they_are(trl: Trl) -> None:
    objective = trl(loss_type="grpo")
    rng = np.random.default_rng(0)
    for sign in (1.0, -1.0):
        objective._trainer.epsilon_low = column(*rng.uniform(0, 1, len(PAIRS)))
        objective._trainer.epsilon_high = column(*rng.exponential(2, len(PAIRS)))
        found = weights(objective, sign)
        assert set(found.round(12)) == {0.0, 1.0}


# --- DPPO ----------------------------------------------------------------------------------------


@pytest.mark.claim("B2", "cor-dppo")
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize(("name", "threshold"), [("kl", 0.05), ("tv", 0.15)])
def test_dppo_has_the_weights_of_band(name: str, threshold: float, sign: float) -> None:
    mask = partial(dppo_surrogate, divergence=name, threshold=threshold)
    by_mask = weights(mask, sign)
    by_band = weights(rule(Band(name, threshold, None)), sign)
    np.testing.assert_allclose(by_mask, by_band, atol=1e-12)
    far = expected(lambda p, r: sign * (r - 1) > 0 and b(name, p, p * r) > threshold)
    np.testing.assert_allclose(by_mask, 1 - far, atol=1e-12)


# --- CISPO ---------------------------------------------------------------------------------------


@pytest.mark.claim("prop-cispo")
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("ceiling", [5.0, 1.2])
def test_cispo_dims_by_the_ceiling_over_the_ratio(trl: Trl, ceiling: float, sign: float) -> None:
    found = weights(trl(loss_type="cispo", epsilon_high=ceiling), sign)
    np.testing.assert_allclose(found, expected(lambda p, r: min(1, ceiling / r)), rtol=1e-12)
    assert found.min() > 0


@pytest.mark.claim("prop-cispo")
def test_beyond_its_ceiling_cispo_climbs_a_logarithm(trl: Trl) -> None:
    c = 5.0

    def logarithm(logp: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
        r = (logp - old).exp()
        return torch.where(r <= c, r, c * (1 + (logp - old) - math.log(c))) * advantages

    for sign in (1.0, -1.0):
        theirs = weights(trl(loss_type="cispo", epsilon_high=c), sign)
        np.testing.assert_allclose(theirs, weights(logarithm, sign), rtol=1e-12)


@pytest.mark.claim("prop-cispo")
def test_cispos_ceiling_left_unset_in_trl_is_below_the_starting_ratio(trl: Trl) -> None:
    p = column(0.3)
    start = gradient_weight(trl(loss_type="cispo"), p.log(), p.log(), column(1.0))
    assert start.item() == pytest.approx(0.2, rel=1e-12)


# --- SAPO ----------------------------------------------------------------------------------------


@pytest.mark.claim("prop-sapo")
@pytest.mark.parametrize(("sign", "temperature"), [(1.0, 1.0), (-1.0, 1.05)])
def test_sapos_gate(trl: Trl, sign: float, temperature: float) -> None:
    found = weights(trl(loss_type="sapo"), sign)
    gate = expected(lambda p, r: math.cosh(temperature * (r - 1) / 2) ** -2)
    np.testing.assert_allclose(found, gate, rtol=1e-6)  # TRL holds 1.05 in float32
    assert ((found > 0) & (found < 1)).all()
    down = expected(lambda p, r: r <= 1).astype(bool)
    assert (found[down] >= math.cosh(temperature / 2) ** -2).all()
    up = expected(lambda p, r: 4 * math.exp(-temperature * (r - 1)))
    assert (found[~down] < up[~down]).all()


@pytest.mark.claim("prop-sapo")
def test_sapos_numbers(trl: Trl) -> None:
    sapo, p = trl(loss_type="sapo"), column(1e-3)

    def at(r: float, sign: float) -> float:
        return gradient_weight(sapo, (p * r).log(), p.log(), column(sign)).item()

    assert round(at(1e-9, 1.0), 3) == 0.786
    assert round(at(1e-9, -1.0), 3) == 0.768
    assert f"{at(10.0, -1.0):.1e}" == "3.1e-04"
    assert at(1.0, 1.0) == pytest.approx(1, abs=1e-12)
    assert at(1.4, 1.0) == pytest.approx(at(0.6, 1.0), rel=1e-12)


# --- GSPO ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gspo(trl: Trl) -> TRLObjective:
    return trl(
        loss_type="grpo", importance_sampling_level="sequence", epsilon=3e-4, epsilon_high=4e-4
    )


@pytest.mark.claim("prop-gspo")
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_gspo_pushes_all_tokens_of_a_sequence_alike(gspo: TRLObjective, sign: float) -> None:
    rng = np.random.default_rng(1)
    log_r = torch.from_numpy(rng.normal(scale=3e-3, size=(400, 7)))
    old = torch.from_numpy(np.log(rng.uniform(0.05, 0.9, size=(400, 7))))
    s = log_r.mean(1, keepdim=True).exp()
    keep = s < 1 + 4e-4 if sign > 0 else s > 1 - 3e-4
    assert 0.2 < keep.double().mean() < 0.9
    found = gradient_weight(gspo, old + log_r, old, column(sign))
    torch.testing.assert_close(found, keep * s / log_r.exp(), rtol=1e-9, atol=1e-12)


@pytest.mark.claim("prop-gspo")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("length", [2, 100])
def test_an_unclipped_sequence_may_hold_a_token_far_outside(
    gspo: TRLObjective, name: str, length: int
) -> None:
    p, radius = 0.05, 0.05
    upper = bounds(name, p, radius)[1]
    assert upper < 1 / p
    rho = math.sqrt(upper / p)  # between the bound and 1/p
    assert b(name, p, p * rho) > radius
    log_r = torch.full((1, length), -math.log(rho) / (length - 1), dtype=torch.float64)
    log_r[0, 0] = math.log(rho)
    old = torch.full_like(log_r, math.log(p))
    found = gradient_weight(gspo, old + log_r, old, column(1.0))
    assert found[0, 0].item() == pytest.approx(1 / rho, rel=1e-9)  # the push is 1, outward
    by_band = gradient_weight(rule(Band(name, radius, None)), old + log_r, old, column(1.0))
    assert by_band[0, 0] == 0


@pytest.mark.claim("prop-gspo")
def test_a_clipped_sequence_may_have_every_token_inside_its_band(gspo: TRLObjective) -> None:
    old = column(0.01, 0.3, 0.9).log().T
    new = old + math.log(1.01)
    assert (gradient_weight(gspo, new, old, column(1.0)) == 0).all()
    assert (gradient_weight(rule(KL), new, old, column(1.0)) > 0.999).all()


# --- probability smoothing -----------------------------------------------------------------------


@pytest.mark.claim("prop-smoothing")
@pytest.mark.parametrize("alpha", [0.0, 0.1, 0.6])
def test_smoothing_is_one_constant(trl: Trl, alpha: float) -> None:
    unclipped = trl(loss_type="grpo", epsilon=1.0, epsilon_high=1e9)
    smoothed = partial(smoothed_surrogate, alpha=alpha)
    for sign in (1.0, -1.0):
        np.testing.assert_allclose(weights(smoothed, sign), 1 - alpha, rtol=1e-12)
        np.testing.assert_allclose(
            weights(smoothed, sign), (1 - alpha) * weights(unclipped, sign), rtol=1e-12
        )


def train(objective: Objective, optimizer: Any, steps: int = 25, **options: float) -> torch.Tensor:
    """Logits after some steps on one batch of samples, from ratios away from 1."""
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    old = normal(20).log_softmax(0)
    logits = (old + 0.5 * normal(20)).requires_grad_()
    sample, advantages = torch.randint(20, (64,), generator=generator), normal(64)
    ascent = optimizer([logits], maximize=True, **options)
    for _ in range(steps):
        ascent.zero_grad()
        objective(logits.log_softmax(0)[sample], old[sample], advantages).mean().backward()
        ascent.step()
    return logits.detach()


def unclipped(logp: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    return (logp - old).exp() * advantages


@pytest.mark.claim("prop-smoothing")
def test_smoothing_is_a_step_size_and_to_adam_nothing() -> None:
    smoothed = partial(smoothed_surrogate, alpha=0.3)
    small = train(unclipped, torch.optim.SGD, lr=0.7 * 0.5)
    torch.testing.assert_close(train(smoothed, torch.optim.SGD, lr=0.5), small, rtol=1e-9, atol=0)
    plain = train(unclipped, torch.optim.SGD, lr=0.5)
    assert (plain - small).abs().max() > 0.01
    adam = [train(one, torch.optim.Adam, lr=0.05, eps=0.0) for one in (smoothed, unclipped)]
    torch.testing.assert_close(*adam, rtol=1e-9, atol=1e-12)


@pytest.mark.claim("prop-smoothing")
@pytest.mark.parametrize("name", NAMES)
def test_the_mixture_is_nearer_by_the_factor(name: str) -> None:
    alpha = 0.1
    for seed in range(5):
        new, old = policies(12, 2, seed, spread=2.0)
        mixed = divergence(name, (1 - alpha) * new + alpha * old, old)
        whole = divergence(name, new, old)
        assert mixed <= (1 - alpha) * whole * (1 + 1e-12)
        if name == "tv":
            assert mixed == pytest.approx((1 - alpha) * whole, rel=1e-12)
        else:
            assert mixed < (1 - alpha) * whole * 0.9999


@pytest.mark.claim("prop-smoothing")
def test_bounds_that_follow_the_ratio_smooth_one_side_only() -> None:
    alpha = 0.1

    def following(logp: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
        r = (logp - old).exp()
        smooth = (1 - alpha) * r + alpha
        side = {"max": smooth} if (advantages > 0).all() else {"min": smooth}
        return torch.minimum(r * advantages, torch.clamp(r, **side) * advantages)

    for sign in (1.0, -1.0):
        one_sided = expected(lambda p, r, sign=sign: 1 - alpha if sign * (r - 1) > 0 else 1.0)
        np.testing.assert_allclose(weights(following, sign), one_sided, rtol=1e-12)
