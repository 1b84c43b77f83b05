"""Chapter "The bottleneck": fixed clips are linear in p; updates needed; DCPO."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from bandpo.clipping import DCPO, Band, ClipRule, Fixed

P = np.concatenate([np.geomspace(1e-9, 0.5, 200), np.linspace(0.5, 1, 200)[1:-1]])


def upper(rule: ClipRule, p: np.ndarray) -> np.ndarray:
    return rule.log_bounds(torch.from_numpy(np.log(p)))[1].exp().numpy()


def lower(rule: ClipRule, p: np.ndarray) -> np.ndarray:
    return rule.log_bounds(torch.from_numpy(np.log(p)))[0].exp().numpy()


@pytest.mark.claim("C1", "prop-bottleneck")
@pytest.mark.parametrize(("low", "high"), [(0.2, 0.2), (0.2, 0.28), (0.5, 3.0)])
def test_fixed_clip_allows_a_change_linear_in_the_probability(low: float, high: float) -> None:
    rule = Fixed(low, high)
    np.testing.assert_allclose(P * (upper(rule, P) - 1), high * P, rtol=1e-12)
    np.testing.assert_allclose(P * (1 - lower(rule, P)), low * P, rtol=1e-12)
    room = np.minimum(P * upper(rule, P), 1) - P
    np.testing.assert_allclose(room, np.minimum(high * P, 1 - P), rtol=1e-9, atol=1e-15)


@pytest.mark.claim("C2", "prop-bottleneck", "prop-vacuous")
def test_the_papers_example() -> None:
    one_percent = np.array([0.01])
    assert 0.01 * (upper(Fixed(0.2, 0.2), one_percent)[0] - 1) == pytest.approx(0.002)
    assert 0.01 * (upper(Fixed(0.2, 10.0), one_percent)[0] - 1) == pytest.approx(0.1)
    assert 0.01 * (upper(Fixed(0.2, 9.99), one_percent)[0] - 1) < 0.1


@pytest.mark.claim("C2", "prop-vacuous")
@pytest.mark.parametrize("high", [0.2, 0.28, 10.0])
def test_fixed_clip_bounds_nothing_above_one_over_one_plus_epsilon(high: float) -> None:
    can_bind = upper(Fixed(0.2, high), P) < 1 / P
    np.testing.assert_array_equal(can_bind, 1 / (1 + high) > P)


def updates(rule: ClipRule, start: float, goal: float) -> int:
    p, count = np.array([start]), 0
    while p[0] < goal:
        p, count = np.minimum(p * upper(rule, p), 1 - 1e-12), count + 1
    return count


@pytest.mark.claim("prop-steps")
@pytest.mark.parametrize(
    ("rule", "from_1e4", "from_1e2"),
    [
        (Fixed(0.2, 0.2), 47, 22),
        (Fixed(0.2, 0.28), 35, 16),
        (DCPO(), 7, 5),
        (Band("chi2", 0.05, None), 9, 7),
        (Band("kl", 0.05, None), 5, 5),
        (Band("kl", 0.05, 10.0), 7, 5),
    ],
    ids=repr,
)
def test_table_of_updates(rule: ClipRule, from_1e4: int, from_1e2: int) -> None:
    assert updates(rule, 1e-4, 0.5) == from_1e4
    assert updates(rule, 1e-2, 0.5) == from_1e2
    if isinstance(rule, Fixed):
        for start, count in ((1e-4, from_1e4), (1e-2, from_1e2)):
            assert math.ceil(math.log(0.5 / start) / math.log(1 + rule.epsilon_high)) == count


@pytest.mark.claim("prop-steps")
@pytest.mark.parametrize("rule", [Fixed(0.2, 0.2), DCPO(), Band("kl"), Band("chi2")], ids=repr)
def test_no_admissible_sequence_is_faster_than_going_to_the_bound(rule: ClipRule) -> None:
    rng = np.random.default_rng(0)
    slow, fast = np.full(200, 1e-3), np.full(200, 1e-3)
    for _ in range(12):
        slow = slow * (1 + rng.uniform(-0.1, 1, size=200) * (upper(rule, slow) - 1))
        fast = fast * upper(rule, fast)
        slow, fast = np.minimum(slow, 1 - 1e-9), np.minimum(fast, 1 - 1e-9)
        assert np.all(slow <= fast * (1 + 1e-12))


@pytest.mark.claim("C10", "prop-dcpo")
@pytest.mark.parametrize("epsilon", [0.05, 0.2, 0.8])
def test_dcpo_solves_its_condition_and_leaves_the_simplex(epsilon: float) -> None:
    high = upper(DCPO(0.16, epsilon, None), P)
    np.testing.assert_allclose((high - 1) * high * P, epsilon, rtol=1e-7)
    np.testing.assert_allclose(P * (high - 1), epsilon / high, rtol=1e-6)
    tiny = np.array([1e-12])
    room = tiny * (upper(DCPO(0.16, epsilon, None), tiny) - 1)
    assert room[0] == pytest.approx(math.sqrt(epsilon * 1e-12), rel=1e-4)
    threshold = 1 / (1 + epsilon)
    np.testing.assert_array_equal(high > 1 / P, threshold < P)
    assert pytest.approx(5 / 6) == 1 / 1.2


@pytest.mark.claim("prop-dcpo")
@pytest.mark.parametrize(("epsilon", "cap"), [(0.2, 10.0), (0.05, 3.0)])
def test_cap_makes_dcpo_linear_again(epsilon: float, cap: float) -> None:
    binds = epsilon / (cap * (cap - 1)) > P
    capped = upper(DCPO(0.16, epsilon, cap), P)
    np.testing.assert_array_equal(capped < upper(DCPO(0.16, epsilon, None), P), binds)
    np.testing.assert_allclose((P * (capped - 1))[binds], (cap - 1) * P[binds], rtol=1e-12)
    assert pytest.approx(0.0022, abs=5e-5) == 0.2 / 90


@pytest.mark.claim("prop-steps")
@pytest.mark.parametrize(
    "rule",
    [DCPO(), DCPO(0.16, 0.2, None)]
    + [Band(name, 0.05, cap) for name in ("kl", "tv", "chi2") for cap in (None, 10.0)],
    ids=repr,
)
def test_reachable_probability_does_not_fall_with_p(rule: ClipRule) -> None:
    reachable = np.minimum(P * upper(rule, P), 1)
    assert np.all(np.diff(reachable) >= -1e-15)


@pytest.mark.claim("C10", "prop-dcpo")
def test_dcpo_below_one() -> None:
    epsilon = 0.16
    low = lower(DCPO(epsilon, 0.2, None), P)
    free = 4 * epsilon >= P
    r = np.linspace(0, 1, 1001)
    assert all(((1 - r) * r * p <= epsilon * (1 + 1e-12)).all() for p in P[free])
    assert all(((1 - r) * r * p > epsilon).any() for p in P[~free][1:])
    np.testing.assert_allclose(low[free], 0.5, rtol=1e-12)
    assert np.all(low >= 0.5 - 1e-12)
    np.testing.assert_allclose(((1 - low) * low * P)[~free], epsilon, rtol=1e-9)
