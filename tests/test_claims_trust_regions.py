"""Chapter "Trust regions": properties of f-divergences and of their balls."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch
from claims_reference import GENERATORS, NAMES, divergence, float_or_inf, policies
from mpmath import mpf

from bandpo.divergences import get_divergence
from bandpo.operator import band, binary_divergence


def of_package(name: str, new: np.ndarray, old: np.ndarray) -> float:
    """D_f with the package's generator; P has full support."""
    f = get_divergence(name)
    return float((torch.from_numpy(old) * f.at(torch.from_numpy(new / old))).sum())


@pytest.mark.claim("lem-f-basics")
@pytest.mark.parametrize("name", NAMES)
def test_first_properties(name: str) -> None:
    for seed in range(8):
        p1, q1, p2, q2 = policies(6, 4, seed)
        here = of_package(name, q1, p1)
        assert here == pytest.approx(divergence(name, q1, p1), rel=1e-9)
        assert here > 0
        assert of_package(name, p1, p1) == pytest.approx(0, abs=1e-15)
        for weight in (0.2, 0.5):
            q, p = weight * q1 + (1 - weight) * q2, weight * p1 + (1 - weight) * p2
            joint = weight * here + (1 - weight) * of_package(name, q2, p2)
            assert of_package(name, q, p) <= joint + 1e-12


@pytest.mark.claim("lem-f-basics")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("k", [-0.4, 2.5])
def test_adding_a_multiple_of_u_minus_one_changes_nothing(name: str, k: float) -> None:
    f = get_divergence(name)
    shifted = dataclasses.replace(
        f,
        name="shifted",
        f=lambda u: f.f(u) + k * (u - 1),
        f_at_zero=f.f_at_zero - k,
        slope_at_infinity=f.slope_at_infinity + k,
        closed_form=None,
    )
    logp = torch.tensor([1e-6, 0.01, 0.3, 0.9], dtype=torch.float64).log()
    logq = torch.tensor([0.2, 0.003, 0.5, 0.99], dtype=torch.float64).log()
    torch.testing.assert_close(
        binary_divergence(logp, logq, shifted),
        binary_divergence(logp, logq, f),
        rtol=1e-9,
        atol=1e-12,
    )
    p = np.array([1e-3, 0.2, 0.95])
    for one, other in zip(band(p, shifted, 0.05), band(p, f, 0.05), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-7, atol=1e-9)


@pytest.mark.claim("lem-f-basics", "lem-range")
@pytest.mark.parametrize("name", NAMES)
def test_the_limits_of_f_belong_to_f(name: str) -> None:
    f, table = get_divergence(name), GENERATORS[name]
    assert f.f_at_zero == pytest.approx(float_or_inf(table.at_zero))
    assert f.slope_at_infinity == pytest.approx(float_or_inf(table.slope))
    small, large = f.f(torch.tensor([1e-250, 1e200], dtype=torch.float64)).tolist()
    if math.isfinite(f.f_at_zero):
        assert small == pytest.approx(f.f_at_zero, abs=1e-9)
    else:
        assert small > 500
    if math.isfinite(f.slope_at_infinity):
        assert large / 1e200 == pytest.approx(f.slope_at_infinity, abs=1e-9)
    else:
        assert large / 1e200 > 400


@pytest.mark.claim("lem-range")
@pytest.mark.parametrize("name", [n for n in NAMES if GENERATORS[n].at_zero < 1e9])
def test_range(name: str) -> None:
    top = float_or_inf(GENERATORS[name].at_zero + GENERATORS[name].slope)
    for seed in range(6):
        new, old = policies(5, 2, seed, spread=4.0)
        assert divergence(name, new, old) <= top
    if math.isfinite(top):
        # nearly disjoint supports come close to it
        old, new = np.array([1e-14, 1 - 1e-14]), np.array([1 - 1e-14, 1e-14])
        assert divergence(name, new, old) == pytest.approx(top, rel=1e-3)
        p = np.array([1e-6, 0.3, 0.97])
        low, high = band(p, name, top)
        np.testing.assert_array_equal(low, 0)
        np.testing.assert_allclose(high, 1 / p, rtol=1e-12)
        low, high = band(p, name, 0.9 * top)
        assert np.any(low > 0) or np.any(high < 0.999 / p)


def merge(weights: np.ndarray, blocks: np.ndarray) -> np.ndarray:
    return np.bincount(blocks, weights)


@pytest.mark.claim("lem-dpi")
@pytest.mark.parametrize("name", NAMES)
def test_merging_tokens_never_raises_the_divergence(name: str) -> None:
    rng = np.random.default_rng(5)
    for seed in range(12):
        new, old = policies(12, 2, seed, spread=1.5)
        blocks = rng.integers(0, 4, size=12)
        blocks[:4] = range(4)
        fine = of_package(name, new, old)
        coarse = of_package(name, merge(new, blocks), merge(old, blocks))
        assert coarse <= fine + 1e-12
        if GENERATORS[name].strict:
            assert coarse < fine - 1e-9
        # a constant ratio on each block attains equality
        flat = old * (merge(new, blocks) / merge(old, blocks))[blocks]
        assert of_package(name, flat, old) == pytest.approx(coarse, rel=1e-10)


def divergence_of_any(name: str, new: np.ndarray, old: np.ndarray) -> float:
    """D_f where the old policy may be zero: the definition with its two limits."""
    f, total = GENERATORS[name], mpf(0)
    for q, p in zip(map(mpf, new), map(mpf, old), strict=True):
        if p > 0:
            total += p * f(q / p)
        elif q > 0:
            total += q * f.slope
    return float_or_inf(total)


@pytest.mark.claim("lem-dpi", "lem-f-basics")
@pytest.mark.parametrize("name", NAMES)
def test_tokens_that_the_old_policy_did_not_have(name: str) -> None:
    rng = np.random.default_rng(6)
    blocks = np.array([0, 1, 2, 0, 1, 2, 2])
    for seed in range(8):
        pairs = []
        for new, old in (policies(7, 2, seed), policies(7, 2, seed + 100)):
            old[:2] = 0  # of these the new policy has one
            new[1] = 0
            pairs.append((new / new.sum(), old / old.sum()))
        (q1, p1), (q2, p2) = pairs
        fine = divergence_of_any(name, q1, p1)
        assert fine > 0
        assert math.isinf(fine) == math.isinf(GENERATORS[name].slope)
        assert divergence_of_any(name, merge(q1, blocks), merge(p1, blocks)) <= fine + 1e-12
        weight = rng.uniform()
        mixed = [weight * x + (1 - weight) * y for x, y in ((q1, q2), (p1, p2))]
        joint = weight * fine + (1 - weight) * divergence_of_any(name, q2, p2)
        assert divergence_of_any(name, *mixed) <= joint + 1e-12
        # the limit by which the proofs get there
        near = sum(
            float((mpf(p) + 1e-9) * GENERATORS[name]((mpf(q) + 1e-9) / (mpf(p) + 1e-9)))
            for q, p in zip(q1, p1, strict=True)
        )
        if math.isfinite(fine):
            assert near == pytest.approx(fine, abs=1e-3)


@pytest.mark.claim("prop-ball")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("radius", [0.02, 0.3])
def test_ball_is_convex_and_surrounds_the_old_policy(name: str, radius: float) -> None:
    old, *others = policies(4, 41, seed=11)

    def on_the_edge(target: np.ndarray, radius: float = radius) -> np.ndarray:
        inside, outside = 0.0, 1.0
        if of_package(name, target, old) <= radius:
            return target
        for _ in range(50):
            middle = (inside + outside) / 2
            point = old + middle * (target - old)
            inside, outside = (
                (middle, outside) if of_package(name, point, old) <= radius else (inside, middle)
            )
        assert inside > 0  # a neighborhood of P is inside
        return old + inside * (target - old)

    edge = [on_the_edge(target) for target in others]
    for one, other in itertools.pairwise(edge):
        for weight in (0.1, 0.5, 0.8):
            assert of_package(name, weight * one + (1 - weight) * other, old) <= radius * (1 + 1e-9)
    # a larger radius admits strictly more, along every segment that left the ball
    left = [(q, target) for q, target in zip(edge, others, strict=True) if q is not target]
    assert left
    for q, target in left:
        assert of_package(name, q, old) == pytest.approx(radius, rel=1e-6)
        further = of_package(name, on_the_edge(target, 1.1 * radius), old)
        assert further > radius
        assert further == pytest.approx(min(1.1 * radius, of_package(name, target, old)), rel=1e-6)


@pytest.mark.claim("prop-local")
@pytest.mark.parametrize("name", [n for n in NAMES if GENERATORS[n].curvature])
def test_divergences_agree_locally_up_to_the_curvature(name: str) -> None:
    curvature = GENERATORS[name].curvature
    assert curvature is not None
    for seed in range(4):
        new, old = policies(6, 2, seed)
        near = old + 1e-6 * (new - old)
        chi2 = float(((near - old) ** 2 / old).sum())
        assert divergence(name, near, old) / chi2 == pytest.approx(curvature / 2, rel=2e-3)
    p, radius = np.array([0.05, 0.4, 0.8]), 1e-8
    step = np.sqrt(2 * radius / curvature * (1 - p) / p)
    low, high = band(p, name, radius)
    np.testing.assert_allclose(high - 1, step, rtol=2e-3)
    np.testing.assert_allclose(1 - low, step, rtol=2e-3)
