"""Chapter "Solvers": bisection, and Newton's method for KL."""

from __future__ import annotations

import math
from itertools import pairwise, product

import numpy as np
import pytest
import torch
from claims_reference import NAMES, PROBABILITIES, b, g, log_r_lower, q_upper
from mpmath import exp, log, mp, mpf, sqrt

from bandpo.operator import band, log_band

TINY = mpf(10) ** -30


@pytest.mark.claim("C9", "thm-bisection")
@pytest.mark.parametrize("name", NAMES)
def test_bisection_halves_the_error_from_everywhere(name: str) -> None:
    p, radius = 0.37, 0.03
    root = q_upper(name, p, radius)
    for start, end in ((mpf(p), mpf("0.9999")), (mpf(p), root + mpf("1e-6"))):
        left, right = start, end
        for step in range(1, 41):
            middle = (left + right) / 2
            if b(name, p, middle) <= radius:
                left = middle
            else:
                right = middle
            assert left - TINY <= root <= right + TINY
            assert abs(right - left - (end - start) / 2**step) < TINY
        steps = math.ceil(math.log2(float(end - start) / 1e-9))
        assert float(end - start) / 2**steps <= 1e-9


@pytest.mark.claim("C9", "thm-bisection")
def test_a_tolerance_in_the_ratio_leaves_no_digit_in_the_tail() -> None:
    """A published sketch: bisect r in [0, 1] to an interval of 1e-6, return its upper end."""
    p, radius = 1e-4, 0.05
    left, right = 0.0, 1.0
    while right - left > 1e-6:
        middle = (left + right) / 2
        left, right = (left, middle) if g("kl", p, middle) <= radius else (middle, right)
    exact = log_r_lower("kl", p, radius)
    assert exact < math.log(1e-200)
    assert math.log(right) > -14
    assert 494 < float(band(p, "kl", radius)[1]) < 495


@pytest.mark.claim("C9", "thm-bisection", "lem-kl-complement")
def test_the_ratio_cannot_resolve_the_upper_bound_near_one() -> None:
    p, radius = mpf("0.999"), mpf("0.05")
    gap = 1 / p - q_upper("kl", p, radius) / p
    t = log_r_lower("kl", 1 - p, radius)
    assert abs(gap / ((1 - p) / p * exp(t)) - 1) < mpf(10) ** -8
    assert t < -radius / (1 - p)
    assert 0 < gap < mpf(10) ** -24
    assert np.spacing(1.0) > 2e-16


@pytest.mark.claim("lem-kl-complement")
@pytest.mark.parametrize("p", PROBABILITIES)
def test_upper_bound_of_kl_from_the_lower(p: float) -> None:
    for radius in (1e-3, 0.05, 1.0):
        t = log_r_lower("kl", 1 - mpf(p), radius)
        upper = 1 - (1 - mpf(p)) * exp(t)
        assert abs(upper - q_upper("kl", p, radius)) < mpf(10) ** -30
        found = float(log_band(torch.tensor(p, dtype=torch.float64).log(), "kl", radius)[1])
        assert found == pytest.approx(float(log(upper / mpf(p))), rel=1e-8)
        t = log_r_lower("kl", p, radius)
        residual = -p * t - (1 - mpf(p)) * log((1 - p * exp(t)) / (1 - mpf(p))) - radius
        assert abs(residual) < mpf(10) ** -25


def residual(p: mpf, t: mpf, radius: mpf) -> mpf:
    """F(t)."""
    return -p * t - (1 - p) * log((1 - p * exp(t)) / (1 - p)) - radius


def slope(p: mpf, t: mpf) -> mpf:
    """F'(t)."""
    return -p * (1 - exp(t)) / (1 - p * exp(t))


def curvature(p: mpf, t: mpf) -> mpf:
    """F''(t)."""
    return p * (1 - p) * exp(t) / (1 - p * exp(t)) ** 2


def start(p: mpf, radius: mpf) -> mpf:
    """The start t_0."""
    return -(radius / p + sqrt(2 * radius * (1 - p) / p))


GRID = list(
    product(
        [mpf(10) ** -k for k in range(1, 9)]
        + [mpf("0.2"), mpf("0.5"), mpf("0.8")]
        + [1 - mpf(10) ** -k for k in range(1, 8)],
        [mpf("0.001"), mpf("0.01"), mpf("0.05"), mpf("0.3"), mpf(2)],
    )
)


@pytest.mark.claim("thm-newton")
def test_derivatives_are_those_of_the_residual() -> None:
    for p, t in product((mpf("0.01"), mpf("0.5"), mpf("0.97")), (mpf(-4), mpf("-0.3"))):
        assert abs(mp.diff(lambda x, p=p: residual(p, x, mpf(0)), t) / slope(p, t) - 1) < 1e-12
        assert abs(mp.diff(lambda x, p=p: slope(p, x), t) / curvature(p, t) - 1) < 1e-12
        assert slope(p, t) < 0 < curvature(p, t)


@pytest.mark.claim("thm-newton")
def test_newton_starts_left_of_the_root_rises_to_it_and_is_quadratic() -> None:
    worst = [mpf(0)] * 7
    for p, radius in GRID:
        root = log_r_lower("kl", p, radius)
        t = start(p, radius)
        assert t < root
        assert residual(p, t, radius) > 0
        for step in range(1, 7):
            before, t = t, t - residual(p, t, radius) / slope(p, t)
            if root - before < mpf(10) ** -25 * -root:
                break
            assert before < t <= root * (1 - mpf(10) ** -30)
            steepest = max(curvature(p, before), curvature(p, root))
            rate = steepest / (2 * -slope(p, root))
            assert (
                root - t
                <= rate * (root - before) ** 2 * (1 + mpf(10) ** -8) - root * mpf(10) ** -30
            )
            worst[step] = max(worst[step], (root - t) / -root)
    assert 1e-5 < worst[2] < 4e-5
    assert 5e-11 < worst[3] < 3e-10
    assert worst[4] < 1e-14


@pytest.mark.claim("thm-newton")
def test_any_other_negative_start_would_do() -> None:
    p, radius = mpf("0.3"), mpf("0.05")
    root = log_r_lower("kl", p, radius)
    for t in (mpf("-1e-3"), root / 2, root * 3):
        steps = [t]
        for _ in range(40):
            steps.append(steps[-1] - residual(p, steps[-1], radius) / slope(p, steps[-1]))
        assert abs(steps[-1] - root) < mpf(10) ** -25
        tail = [x for x in steps[1:] if root - x > mpf(10) ** -25]
        assert all(one < other for one, other in pairwise(tail))


@pytest.mark.claim("thm-newton")
@pytest.mark.parametrize("radius", [1e-3, 0.05, 2.0])
def test_package_reaches_machine_precision(radius: float) -> None:
    for p in PROBABILITIES:
        logp = torch.tensor(p, dtype=torch.float64).log()
        exact = log_r_lower("kl", exp(mpf(float(logp))), radius)
        assert float(log_band(logp, "kl", radius)[0]) == pytest.approx(float(exact), rel=1e-12)
