"""Chapter "Band": Lemma 1, scalarization, saturation, against full-simplex convex programs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import cvxpy as cp
import numpy as np
import pytest
import torch
from claims_reference import GENERATORS, NAMES, PROBABILITIES, RADII, b, divergence, g, policies

from bandpo.divergences import get_divergence
from bandpo.operator import band, binary_divergence, saturation

#: The same divergences once more, in the atoms of a convex solver (Q variable, P constant).
CONVEX: dict[str, Callable[[cp.Expression, np.ndarray], cp.Expression]] = {
    "kl": lambda q, p: cp.sum(cp.rel_entr(p, q)),
    "reverse_kl": lambda q, p: cp.sum(cp.rel_entr(q, p)),
    "tv": lambda q, p: cp.norm1(q - p) / 2,
    "chi2": lambda q, p: cp.sum_squares(cp.multiply(q - p, p**-0.5)),
    "neyman": lambda q, p: cp.sum(cp.multiply(p, cp.inv_pos(cp.multiply(q, 1 / p)))) - 1,
    "hellinger": lambda q, p: 2 - 2 * cp.sum(cp.multiply(p**0.5, cp.sqrt(q))),
    "le_cam": lambda q, p: cp.sum(cp.multiply(4 * p, cp.inv_pos(cp.multiply(q, 1 / p) + 1))) - 2,
    "jensen_shannon": lambda q, p: (
        (cp.sum(cp.rel_entr(q, (q + p) / 2)) + cp.sum(cp.rel_entr(p, (q + p) / 2))) / 2
    ),
}


def extreme_probability(name: str, policy: np.ndarray, radius: float, sign: int) -> float:
    """max (sign 1) or min (sign -1) of Q(a) over the ball, a the first token, by Clarabel."""
    new = cp.Variable(policy.size, nonneg=True)
    problem = cp.Problem(
        cp.Maximize(sign * new[0]), [cp.sum(new) == 1, CONVEX[name](new, policy) <= radius]
    )
    problem.solve(solver=cp.CLARABEL)
    assert problem.status in ("optimal", "optimal_inaccurate")
    return float(new.value[0])


@pytest.mark.claim("C3", "C4", "thm-scalarization", "lem-rescaling")
@pytest.mark.parametrize("sign", [1, -1], ids=["upper", "lower"])
@pytest.mark.parametrize("tokens", [3, 10, 100])
@pytest.mark.parametrize("name", CONVEX)
def test_scalar_root_is_the_optimum_over_the_whole_simplex(
    name: str, tokens: int, sign: int
) -> None:
    for seed, radius in enumerate((0.01, 0.05, 0.3)):
        (policy,) = policies(tokens, 1, seed + tokens, spread=1.2)
        low, high = band(policy[0], name, radius)
        expected = policy[0] * (high if sign > 0 else low)
        found = extreme_probability(name, policy, radius, sign)
        assert found == pytest.approx(float(expected), rel=2e-4, abs=2e-6)


@pytest.mark.claim("C3", "C4", "thm-scalarization", "lem-rescaling")
@pytest.mark.parametrize("name", ["kl", "tv", "chi2"])
def test_the_same_with_a_thousand_tokens(name: str) -> None:
    (policy,) = policies(1000, 1, seed=0, spread=1.5)
    high = float(band(policy[0], name, 0.05)[1])
    found = extreme_probability(name, policy, 0.05, 1)
    assert found == pytest.approx(policy[0] * high, rel=1e-3)


@pytest.mark.claim("C3", "lem-rescaling")
@pytest.mark.parametrize("name", NAMES)
def test_uniform_rescaling_is_optimal_and_for_strictly_convex_f_alone(name: str) -> None:
    rng = np.random.default_rng(2)
    for seed in range(6):
        (old,) = policies(8, 1, seed)
        for q in (0.3 * old[0], 0.5 * (1 + old[0])):
            rest = old[1:] * (1 - q) / (1 - old[0])
            rescaled = np.concatenate([[q], rest])
            least = float(
                binary_divergence(*torch.tensor([[old[0]], [q]], dtype=torch.float64).log(), name)
            )
            assert least == pytest.approx(float(b(name, old[0], q)), rel=1e-10)
            assert divergence(name, rescaled, old) == pytest.approx(least, rel=1e-10)
            for _ in range(5):
                other = rest * np.exp(rng.normal(size=7))
                other = np.concatenate([[q], other * (1 - q) / other.sum()])
                above = divergence(name, other, old) - least
                assert above > 1e-9 if GENERATORS[name].strict else above > -1e-12


@pytest.mark.claim("C3", "prop-tv-nonunique")
def test_for_total_variation_other_policies_are_optimal_too() -> None:
    old = np.array([0.2, 0.5, 0.3])
    proportional, other = np.array([0.3, 0.4375, 0.2625]), np.array([0.3, 0.4, 0.3])
    assert not np.allclose(other[1:] / old[1:], other[1] / old[1])
    for q in (proportional, other):
        assert divergence("tv", q, old) == pytest.approx(0.1, rel=1e-12)
    logs = torch.tensor([[0.2], [0.3]], dtype=torch.float64).log()
    assert float(binary_divergence(*logs, "tv")) == pytest.approx(0.1, rel=1e-12)


@pytest.mark.claim("C3", "prop-tv-nonunique")
@pytest.mark.parametrize("seed", range(6))
def test_any_one_sided_move_is_optimal_for_total_variation(seed: int) -> None:
    rng = np.random.default_rng(seed)
    (old,) = policies(9, 1, seed)
    moves = rng.uniform(size=8)
    down = np.concatenate([[0.0], old[1:] * (1 - moves)])
    down[0] = 1 - down.sum()
    up = old[1:] + old[0] * 0.7 * moves / moves.sum()
    up = np.concatenate([[1 - up.sum()], up])
    for new in (down, up):
        assert divergence("tv", new, old) == pytest.approx(abs(new[0] - old[0]), rel=1e-9)
    # if one of the others rises as well it costs its rise: no optimum
    rise = 0.1 * down[2:].sum()
    mixed = np.concatenate([down[:1], [old[1] + rise], down[2:] * 0.9])
    mixed[0] += 1 - mixed.sum()
    assert divergence("tv", mixed, old) == pytest.approx(mixed[0] - old[0] + rise, rel=1e-9)


@pytest.mark.claim("lem-g")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("p", [1e-3, 0.2, 0.7, 0.97])
def test_shape_of_the_binary_divergence(name: str, p: float) -> None:
    r = np.linspace(1e-4, 1 / p * (1 - 1e-9), 4001)
    logp = torch.full((r.size,), math.log(p), dtype=torch.float64)
    values = binary_divergence(logp, torch.from_numpy(np.log(p * r).clip(max=0)), name).numpy()
    slopes = np.diff(values) / np.diff(r)
    scale = np.abs(slopes).max() * 1e-9
    assert np.all(np.diff(slopes) > -scale)
    if GENERATORS[name].strict:
        assert np.all(np.diff(slopes)[5:-5] > 0)
    left, right = r[1:] < 1, r[:-1] > 1
    assert np.all(slopes[left] < 0)
    assert np.all(slopes[right] > 0)
    assert np.all(values[np.abs(r - 1) > 1e-3] > 0)
    at_one = binary_divergence(logp[:1], logp[:1], name)
    assert float(at_one) == pytest.approx(0, abs=1e-15)


def roots(name: str, p: float, radius: float) -> int:
    """Sign changes of g - radius over [0, 1/p], ends included, counted in mpmath."""
    grid = [k / 600 / p for k in range(601)]
    signs = [g(name, p, r) > radius for r in grid]
    return sum(one != other for one, other in itertools.pairwise(signs))


@pytest.mark.claim("C4", "thm-scalarization")
def test_two_roots_one_or_none() -> None:
    # chi2 is strictly convex, as the theorem is said to assume
    assert roots("chi2", 0.5, 1.5) == 0
    assert max(g("chi2", 0.5, 0), g("chi2", 0.5, 2)) == 1
    low, high = band(0.5, "chi2", 1.5)
    assert (float(low), float(high)) == (0.0, pytest.approx(2.0))
    assert roots("chi2", 0.02, 0.05) == 1
    assert float(g("chi2", 0.02, 0)) == pytest.approx(0.0204, abs=5e-5)
    low, high = band(0.02, "chi2", 0.05)
    assert (float(low), float(high)) == (0.0, pytest.approx(2.565, abs=5e-4))
    for name in NAMES:  # two for every radius exactly if f(0) is infinite
        always = [roots(name, 0.3, radius) == 2 for radius in (1e-3, 0.1, 0.5, 3.0)]
        assert all(always) == math.isinf(GENERATORS[name].at_zero)


@pytest.mark.claim("C4", "thm-scalarization")
@pytest.mark.parametrize("name", NAMES)
def test_bounds_are_the_edge_of_the_sublevel_set(name: str) -> None:
    p, radius = (x.ravel() for x in np.meshgrid(PROBABILITIES[1:-1], RADII))
    low, high = band(p, name, radius)
    assert np.all(low < 1)
    assert np.all(high > 1)
    for one in zip(p, radius, low, high, strict=True):
        p_, radius_, low_, high_ = map(float, one)
        saturated_above = b(name, p_, 1) <= radius_
        saturated_below = g(name, p_, 0) <= radius_
        assert (low_ == 0) == saturated_below or low_ < 1e-300
        if saturated_above:
            assert high_ == pytest.approx(1 / p_, rel=1e-12)
        else:
            # inside just within the bound, outside just beyond it, in the room left to 1/p
            inside, outside = 1 + (high_ - 1) * (1 - 1e-8), 1 + (high_ - 1) * (1 + 1e-8)
            assert g(name, p_, inside) < radius_
            if outside < 1 / p_:
                assert g(name, p_, outside) > radius_
        if low_ > 1e-300:
            assert g(name, p_, low_ + (1 - low_) * 1e-8) < radius_
            assert g(name, p_, low_ * (1 - 1e-8)) > radius_


THRESHOLDS = {
    "reverse_kl": lambda d: math.exp(-d),
    "tv": lambda d: 1 - d,
    "chi2": lambda d: 1 / (1 + d),
    "hellinger": lambda d: (1 - d / 2) ** 2,
    "le_cam": lambda d: (2 - d) / (2 + d),
}


@pytest.mark.claim("C7", "prop-saturation")
@pytest.mark.parametrize("radius", [0.01, 0.05, 0.4])
@pytest.mark.parametrize("name", THRESHOLDS)
def test_saturation_thresholds(name: str, radius: float) -> None:
    threshold = THRESHOLDS[name](radius)
    below, above = saturation(name, radius)
    assert above == pytest.approx(threshold, rel=1e-9)
    assert below + above == pytest.approx(1, rel=1e-12)
    if (name, radius) == ("chi2", 0.05):
        assert (below, above) == (pytest.approx(0.0476, abs=5e-5), pytest.approx(0.9524, abs=5e-5))
    p = np.array([threshold - 1e-4, threshold + 1e-4])
    _, high = band(p, name, radius)
    assert high[0] < (1 - 1e-12) / p[0]
    assert high[1] == pytest.approx(1 / p[1], rel=1e-12)
    p = np.array([1 - threshold - 1e-5, 1 - threshold + 1e-5])
    low, _ = band(p, name, radius)
    assert low[0] == 0
    assert low[1] > 0


@pytest.mark.claim("C7", "prop-saturation")
def test_saturation_of_jensen_shannon_and_of_those_that_never_saturate() -> None:
    below, p = saturation("jensen_shannon", 0.05)
    h = math.log(2) + (p * math.log(p) - (1 + p) * math.log(1 + p)) / 2
    assert h == pytest.approx(0.05, rel=1e-9)
    assert below + p == pytest.approx(1)
    for name in ("kl", "neyman"):
        assert saturation(name, 5.0) == (0.0, 1.0)
        assert math.isinf(get_divergence(name).f_at_zero)


@pytest.mark.claim("C7", "prop-saturation")
@pytest.mark.parametrize("name", [n for n in NAMES if GENERATORS[n].at_zero < 1e9])
def test_cost_of_taking_all_mass_falls_with_p(name: str) -> None:
    p = np.linspace(1e-6, 1 - 1e-6, 300)
    logp = torch.from_numpy(np.log(p))
    h = binary_divergence(logp, torch.zeros_like(logp), name).numpy()
    np.testing.assert_allclose(h[::37], [float(b(name, x, 1)) for x in p[::37]], rtol=1e-8)
    assert np.all(np.diff(h) < 0)
    assert np.all(np.diff(h, 2) > -1e-9)
    nothing = torch.full_like(logp, -math.inf)
    mirrored = binary_divergence(torch.from_numpy(np.log1p(-p)), nothing, name).numpy()
    np.testing.assert_allclose(mirrored, h, rtol=1e-9)
