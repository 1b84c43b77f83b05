"""Chapter "What Band does not promise": counterexamples, and where the rule is looser."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
import torch
from claims_reference import GENERATORS, NAMES, divergence, g, policies
from mpmath import inf, mpf
from scipy.optimize import brentq

from bandpo.clipping import Band, Fixed, PerSide, RelaxedBand, clipped_surrogate
from bandpo.operator import band

torch.set_num_threads(1)


@pytest.mark.claim("C21", "prop-necessary")
@pytest.mark.parametrize("name", NAMES)
def test_inside_the_ball_means_inside_every_band(name: str) -> None:
    for seed in range(10):
        new, old = policies(6, 2, seed)
        new = 0.4 * new + 0.6 * old
        radius = divergence(name, new, old) * (1 + 1e-9)
        low, high = band(old, name, radius)
        assert np.all(low <= new / old)
        assert np.all(new / old <= high)


@pytest.mark.claim("C21", "prop-necessary")
def test_inside_every_band_and_outside_the_ball() -> None:
    old, new = np.full(4, 0.25), np.array([0.35, 0.35, 0.15, 0.15])
    low, high = band(old, "kl", 0.05)
    assert np.all(low < new / old)
    assert np.all(new / old < high)
    assert divergence("kl", new, old) == pytest.approx(0.0871, abs=1e-4)
    assert float(g("kl", 0.25, 1.4)) == pytest.approx(0.0232, abs=1e-4)
    assert float(g("kl", 0.25, 0.6)) == pytest.approx(0.0339, abs=1e-4)


@pytest.mark.claim("C21", "prop-unbounded")
@pytest.mark.parametrize("name", NAMES)
def test_any_profile_of_ratios_fits_into_the_bands_of_many_rare_tokens(name: str) -> None:
    f = GENERATORS[name]
    for rho in (0.5, 1e-3):
        expected = float((f(mpf(rho)) + f(2 - mpf(rho))) / 2)
        fits = []
        for n in (1, 10**3, 10**6):
            low, high = band(1 / (2 * n), name, 0.001)
            fits.append(bool(low <= rho and 2 - rho <= high))
            if n < 10**4:
                old = np.full(2 * n, 1 / (2 * n))
                new = old * np.where(np.arange(2 * n) < n, rho, 2 - rho)
                assert divergence(name, new, old) == pytest.approx(expected, rel=1e-9)
        assert not fits[0]
        assert fits[-1]
    if name == "kl":
        assert f.at_zero == inf
        assert (f(mpf(10) ** -1000) + f(mpf(2))) / 2 > 1000


@pytest.mark.claim("prop-no-projection")
@pytest.mark.parametrize("rule", [Fixed(0.2, 0.2), Band("kl"), Band("tv"), Band("chi2")], ids=repr)
def test_one_large_step_overshoots_and_nothing_pulls_back(rule) -> None:
    old = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    logits = old.log().clone().requires_grad_()

    def gradient() -> torch.Tensor:
        objective = clipped_surrogate(
            logits.log_softmax(0)[:1], old[:1].log(), torch.ones(1, dtype=torch.float64), rule
        )
        return torch.autograd.grad(objective.sum(), logits)[0]

    first = gradient()
    torch.testing.assert_close(first, torch.tensor([0.8, -0.5, -0.3], dtype=torch.float64))
    logits = (logits + 5 * first).detach().requires_grad_()
    ratio = logits.softmax(0)[0] / 0.2
    assert ratio > rule.log_bounds(old[:1].log())[1].exp() * 1.5
    assert torch.equal(gradient(), torch.zeros(3, dtype=torch.float64))


@pytest.mark.claim("prop-no-projection")
@pytest.mark.parametrize("seed", range(12))
def test_other_tokens_push_a_masked_token_further(seed: int) -> None:
    (policy,) = policies(5, 1, seed, spread=1.0)
    q = torch.from_numpy(policy)
    for a, other in product(range(5), range(5)):
        if a == other:
            continue
        logits = q.log().requires_grad_()
        logq = logits.log_softmax(0)
        # b has a negative advantage and ratio 1: unmasked
        (step,) = torch.autograd.grad(-(logq[other] - logq[other].detach()).exp(), logits)
        moved = (q.log() + 1e-6 * step).softmax(0)
        rises = bool(moved[a] > q[a])
        assert rises == bool(q[a] + q[other] > (q**2).sum())
        if q[a] + q[other] >= q.max():
            assert rises


@pytest.mark.claim("B8", "prop-downward")
def test_kl_band_is_looser_downward_too() -> None:
    def low(p: float) -> float:
        return float(band(p, "kl", 0.05)[0])

    def high(p: float) -> float:
        return float(band(p, "kl", 0.05)[1])

    assert brentq(lambda p: low(p) - 0.8, 0.1, 0.99) == pytest.approx(0.751, abs=5e-4)
    assert brentq(lambda p: high(p) - 1.28, 0.1, 0.99) == pytest.approx(0.540, abs=5e-4)
    assert brentq(lambda p: high(p) - 1.2, 0.1, 0.99) == pytest.approx(0.671, abs=5e-4)
    assert low(0.1) == pytest.approx(0.313, abs=5e-4)
    assert low(0.01) == pytest.approx(0.0025, abs=5e-5)
    grid = np.linspace(1e-4, 1 - 1e-4, 999)
    lows, highs = band(grid, "kl", 0.05)
    assert np.sum(np.diff(np.sign(lows - 0.8)) != 0) == 1
    assert np.sum(np.diff(np.sign(highs - 1.28)) != 0) == 1
    # from the radius log(1/0.8) on the lower bound is looser at every p
    lows, _ = band(grid, "kl", math.log(1 / 0.8))
    assert np.all(lows < 0.8)
    lows, _ = band(grid, "kl", math.log(1 / 0.8) - 1e-3)
    assert np.any(lows > 0.8)
    # Band above and fixed below keeps the one and drops the other
    split = PerSide(above=Band("kl", 0.05, None), below=Fixed(0.2, 0.2))
    logp = torch.from_numpy(np.log(grid))
    bounds = [x.exp().numpy() for x in split.log_bounds(logp)]
    np.testing.assert_allclose(bounds[0], 0.8, rtol=1e-12)
    np.testing.assert_allclose(bounds[1], highs, rtol=1e-12)


@pytest.mark.claim("B9", "C11", "prop-cap")
@pytest.mark.parametrize("name", ["kl", "tv", "chi2"])
def test_cap_makes_growth_linear_again(name: str) -> None:
    threshold = brentq(lambda p: float(band(p, name, 0.05)[1]) - 10, 1e-6, 0.5, xtol=1e-14)
    if name == "kl":
        assert threshold == pytest.approx(0.00714, abs=5e-6)
    p = np.geomspace(1e-9, 0.5, 400)
    capped = Band(name, 0.05, 10.0).log_bounds(torch.from_numpy(np.log(p)))[1].exp().numpy()
    below = p < threshold
    np.testing.assert_allclose((p * (capped - 1))[below], 9 * p[below], rtol=1e-12)
    np.testing.assert_allclose(capped[~below], band(p[~below], name, 0.05)[1], rtol=1e-12)
    assert 9 / 0.2 == 45


@pytest.mark.claim("prop-relaxed")
def test_relaxed_band_leaves_the_simplex_and_the_ball() -> None:
    p = np.linspace(1e-3, 1 - 1e-6, 2001)
    rule = RelaxedBand(Band("kl", 0.05, None), Fixed(0.2, 0.28))
    lower, upper = (x.exp().numpy() for x in rule.log_bounds(torch.from_numpy(np.log(p))))
    np.testing.assert_allclose(lower, np.minimum(band(p, "kl", 0.05)[0], 0.8), rtol=1e-12)
    np.testing.assert_array_equal(upper > 1 / p * (1 + 1e-12), p > 1 / 1.28)
    assert 1 / 1.28 == 0.78125
    high = band(p, "kl", 0.05)[1]
    for one in p[high < 1.28][::150]:
        admitted = min(1.28, 1 / one) * (1 - 1e-9)
        assert admitted > float(band(one, "kl", 0.05)[1]) * (1 + 1e-9)
        assert g("kl", one, admitted) > 0.05
