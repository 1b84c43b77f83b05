"""Chapter "A radius for each token": budget, order, scale, and what spreading the radii costs."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from claims_reference import NAMES, bounds, divergence, g, policies

from bandpo.adaptive import AdaptiveBand, centered_ranks, get_signal
from bandpo.clipping import Band, clipped_surrogate
from bandpo.operator import band

torch.set_num_threads(1)

#: Signals without ties, with ties, with infinities, and all equal.
BATCHES = {
    "distinct": np.random.default_rng(0).normal(size=37),
    "tied": np.random.default_rng(1).integers(0, 4, size=40).astype(float),
    "infinite": np.array([-math.inf, 0.0, math.inf, math.inf, -2.0]),
    "equal": np.full(9, 0.3),
    "one": np.array([1.5]),
}
every_batch = pytest.mark.parametrize("x", BATCHES.values(), ids=BATCHES)


def ranks(x: np.ndarray) -> list[Fraction]:
    """The definition, in fractions."""
    return [Fraction(int((x < y).sum()) - int((x > y).sum()), len(x)) for y in x]


def radii(x: np.ndarray, kappa: float, radius: float = 0.05) -> np.ndarray:
    signal = torch.tensor(x)
    return AdaptiveBand("kl", radius, None, adaptivity=kappa).radii(signal, signal).numpy()


@pytest.mark.claim("C22", "def-adaptive")
@every_batch
@pytest.mark.parametrize("kappa", [0.8, 0.0, -0.5])
def test_radii_are_those_of_the_definition(x: np.ndarray, kappa: float) -> None:
    signal = torch.tensor(x)
    assert centered_ranks(signal, signal).tolist() == [float(rank) for rank in ranks(x)]
    expected = [0.05 * (1 + kappa * float(rank)) for rank in ranks(x)]
    np.testing.assert_allclose(radii(x, kappa), expected, rtol=1e-15)


@pytest.mark.claim("C22", "def-adaptive")
def test_signals_of_the_package() -> None:
    (old,) = policies(5, 1, 0)
    logp = torch.tensor(np.log(old))
    batch = {"old_per_token_logps": logp, "entropies": -(logp.exp() * logp).sum().expand(5)}
    assert (get_signal("surprisal")(batch).exp() * logp.exp()).tolist() == pytest.approx([1.0] * 5)
    assert get_signal("entropy")(batch)[0].item() == pytest.approx(-(old * np.log(old)).sum())


@pytest.mark.claim("C22", "prop-adaptive")
@every_batch
@pytest.mark.parametrize("kappa", [0.9, 0.3, -0.3, -0.9])
def test_budget_limits_and_order(x: np.ndarray, kappa: float) -> None:
    assert sum(ranks(x)) == 0
    delta = radii(x, kappa)
    assert math.fsum(delta) / len(x) == pytest.approx(0.05, rel=1e-15)
    if len(set(x)) > 1:
        assert (1 - abs(kappa)) * 0.05 < delta.min() < 0.05 < delta.max()
        assert delta.max() < (1 + abs(kappa)) * 0.05
    for (s, one), (t, other) in itertools.product(zip(x, delta, strict=True), repeat=2):
        if s == t:
            assert one == other
        elif s < t:
            gap = (other - one) * math.copysign(1, kappa)
            assert gap >= 2 * abs(kappa) * 0.05 / len(x) * (1 - 1e-12)


@pytest.mark.claim("C22", "prop-adaptive")
@pytest.mark.parametrize("name", NAMES)
def test_equal_signals_or_no_adaptivity_are_band(name: str) -> None:
    logp = torch.linspace(-9, -0.01, 50, dtype=torch.float64)
    expected = Band(name, 0.05).log_bounds(logp)
    for signal, kappa in ((torch.ones_like(logp), 0.9), (logp, 0.0)):
        rule = AdaptiveBand(name, 0.05, adaptivity=kappa)
        found = rule.with_radius(rule.radii(signal, signal)).log_bounds(logp)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    rule = AdaptiveBand(name, 0.05, adaptivity=0.9)
    other = rule.with_radius(rule.radii(logp, logp)).log_bounds(logp)
    assert not torch.equal(other[1], expected[1])


@pytest.mark.claim("C22", "prop-adaptive")
@every_batch
def test_only_the_order_of_the_signal_matters(x: np.ndarray) -> None:
    expected = radii(x, 0.7)
    for transform in (lambda y: 3 * y - 5, np.tanh, lambda y: np.exp(-np.exp(-y))):
        changed = transform(np.clip(x, -3, 3))  # so that no function runs into its limit
        np.testing.assert_array_equal(radii(changed, 0.7), expected)
    np.testing.assert_allclose(radii(-x, 0.7), radii(x, -0.7), rtol=1e-15)
    n = len(x)
    if len(set(x)) == n:
        values = [0.05 * (1 + 0.7 * (2 * k - n - 1) / n) for k in range(1, n + 1)]
        np.testing.assert_allclose(np.sort(expected), values, rtol=1e-15)


@pytest.mark.claim("C22", "prop-adaptive-chain")
def test_divergence_of_completions_is_the_expected_sum_over_positions() -> None:
    """Completions of three tokens from {0, 1, 2}, each position with policies of its own."""
    contexts = [c for k in range(3) for c in itertools.product(range(3), repeat=k)]
    old = dict(zip(contexts, policies(3, len(contexts), 0), strict=True))
    new = dict(zip(contexts, policies(3, len(contexts), 1), strict=True))
    whole = expected = 0.0
    for y in itertools.product(range(3), repeat=3):
        prefixes = [y[:k] for k in range(3)]
        p = math.prod(old[c][y[k]] for k, c in enumerate(prefixes))
        q = math.prod(new[c][y[k]] for k, c in enumerate(prefixes))
        whole += p * math.log(p / q)
        expected += p * sum(divergence("kl", new[c], old[c]) for c in prefixes)
    assert whole == pytest.approx(expected, rel=1e-12)
    assert whole > 0.5
    for kappa in (0.8, -0.8):  # the budget of a batch of positions does not depend on the rule
        assert math.fsum(radii(BATCHES["distinct"], kappa)) == pytest.approx(37 * 0.05, rel=1e-14)


@pytest.mark.claim("C22", "prop-adaptive-surprisal")
@pytest.mark.parametrize("name", NAMES)
def test_surprisal_keeps_the_order_of_the_band(name: str) -> None:
    logp = torch.linspace(-12, -1e-3, 300, dtype=torch.float64)  # p rises
    rule = AdaptiveBand(name, 0.05, None, "surprisal", adaptivity=0.9)
    radius = rule.radii(-logp, -logp)
    assert (radius.diff() < 0).all()
    lower, upper = (bound.exp() for bound in rule.with_radius(radius).log_bounds(logp))
    assert (upper.diff() < 0).all()
    assert ((lower.diff() > 0) | (lower[1:] == 0)).all()
    # steeper than Band: wider for the rarer half, narrower for the other
    plain = Band(name, 0.05, None).log_bounds(logp)[1].exp()
    assert (upper[:140] > plain[:140]).all()
    unsaturated = upper * logp.exp() < 1 - 1e-9
    assert (upper[160:] < plain[160:])[unsaturated[160:]].all()


@pytest.mark.claim("C22", "prop-adaptive-surprisal")
def test_turned_surprisal_can_turn_the_order() -> None:
    p = torch.tensor([0.1, 0.2], dtype=torch.float64)
    rule = AdaptiveBand("tv", 0.05, None, "surprisal", adaptivity=-0.8)
    radius = rule.radii(-p.log(), -p.log())
    assert radius.tolist() == pytest.approx([0.6 * 0.05, 1.4 * 0.05])
    lower, upper = (bound.exp().tolist() for bound in rule.with_radius(radius).log_bounds(p.log()))
    assert upper == pytest.approx([1 + 6 * 0.05, 1 + 7 * 0.05])
    assert lower == pytest.approx([1 - 6 * 0.05, 1 - 7 * 0.05])


@pytest.mark.claim("C22", "prop-adaptive-concave")
@pytest.mark.parametrize("name", NAMES)
def test_bounds_are_concave_in_the_radius(name: str) -> None:
    grid = np.linspace(0.002, 0.4, 200)
    for p in (1e-4, 0.02, 0.3, 0.8, 0.99):
        lower, upper = band(np.full(200, p), name, grid)
        for bound in (upper, -lower, np.minimum(upper, 2.0)):
            assert (np.diff(bound) >= -1e-12 * abs(bound[1:])).all()
            assert (np.diff(bound, 2) <= 1e-9 * abs(bound).max()).all()
        # and a few chords with the reference at 40 digits
        (_, low), (_, middle), (_, high) = (bounds(name, p, d) for d in (0.01, 0.05, 0.09))
        assert (low + high) / 2 <= middle * (1 + 1e-12)
    if name == "tv":
        _, upper = band(np.full(200, 0.5), name, grid)
        np.testing.assert_allclose(np.diff(upper, 2), 0, atol=1e-14)


@pytest.mark.claim("C22", "prop-adaptive-concave")
@pytest.mark.parametrize("name", ["kl", "chi2"])
@pytest.mark.parametrize("kappa", [0.5, 0.8, -0.8])
def test_equal_mean_radius_is_less_room(name: str, kappa: float) -> None:
    x = np.random.default_rng(3).normal(size=1001)
    spread = radii(x, kappa, radius=0.001)
    for p in (0.1, 0.5):
        one = np.array(band(p, name, 0.001))
        lower, upper = band(np.full(1001, p), name, spread)
        kept = (upper.mean() - lower.mean()) / (one[1] - one[0])
        assert kept == pytest.approx(1 - kappa**2 / 24, abs=0.005)
        assert kept < 1 - kappa**2 / 26


@pytest.mark.claim("C22", "prop-adaptive-mask")
@pytest.mark.parametrize("name", ["kl", "tv", "chi2", "jensen_shannon"])
def test_the_gradient_needs_no_root(name: str) -> None:
    rng = np.random.default_rng(5)
    p, r, a = rng.uniform(0.02, 0.9, 300), rng.uniform(0.3, 2.5, 300), rng.normal(size=300)
    r = np.minimum(r, 0.999 / p)
    rule = AdaptiveBand(name, 0.05, None, adaptivity=0.8)
    signal = torch.tensor(rng.normal(size=300))
    radius = rule.radii(signal, signal)
    old = torch.tensor(np.log(p))
    logp = torch.tensor(np.log(p * r), requires_grad=True)
    clipped_surrogate(logp, old, torch.tensor(a), rule.with_radius(radius)).sum().backward()
    outside = np.array([g(name, *pair) > d for *pair, d in zip(p, r, radius.tolist(), strict=True)])
    removed = (a * (r - 1) > 0) & outside
    np.testing.assert_array_equal(logp.grad == 0, removed)
    same_radius = np.array([g(name, *pair) > 0.05 for pair in zip(p, r, strict=True)])
    assert (same_radius != outside).sum() > 10
