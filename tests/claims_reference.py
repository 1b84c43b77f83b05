"""Definitions of the book, written a second time with mpmath and NumPy, for the claim tests.

Nothing here uses the package: generators are typed from the table of the theory chapters, and
bounds come from plain bisection of the binary divergence in q at 40 digits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from mpmath import inf, log, mp, mpf, sqrt

mp.dps = 40

EXACT = 1e-11  # relative, for float64 against 40 digits


@dataclass(frozen=True)
class Generator:
    """f for mpmath numbers u > 0, its limits, its curvature at 1 (None: none)."""

    f: Callable[[Any], Any]
    at_zero: Any
    slope: Any
    curvature: float | None
    strict: bool = True  # strictly convex

    def __call__(self, u: Any) -> Any:
        return self.at_zero if u == 0 else self.f(u)


def alpha(a: float) -> Generator:
    a_ = mpf(a)
    return Generator(
        lambda u: (u**a_ - a_ * u + a_ - 1) / (a_ * (a_ - 1)),
        1 / a_ if a > 0 else inf,
        1 / (1 - a_) if a < 1 else inf,
        1.0,
    )


HALF_LOG_2 = log(mpf(2)) / 2
GENERATORS = {
    "kl": Generator(lambda u: -log(u), inf, mpf(0), 1.0),
    "reverse_kl": Generator(lambda u: u * log(u), mpf(0), inf, 1.0),
    "tv": Generator(lambda u: abs(u - 1) / 2, mpf(1) / 2, mpf(1) / 2, None, strict=False),
    "chi2": Generator(lambda u: (u - 1) ** 2, mpf(1), inf, 2.0),
    "neyman": Generator(lambda u: (1 - u) ** 2 / u, inf, mpf(1), 2.0),
    "hellinger": Generator(lambda u: (sqrt(u) - 1) ** 2, mpf(1), mpf(1), 0.5),
    "le_cam": Generator(lambda u: (u - 1) ** 2 / (u + 1), mpf(1), mpf(1), 1.0),
    "jensen_shannon": Generator(
        lambda u: (u * log(u) - (1 + u) * log((1 + u) / 2)) / 2, HALF_LOG_2, HALF_LOG_2, 0.25
    ),
    "alpha:0.3": alpha(0.3),
    "alpha:3": alpha(3.0),
    "alpha:-0.5": alpha(-0.5),
}
NAMES = tuple(GENERATORS)


def g(name: str, p: Any, r: Any) -> Any:
    """Binary divergence p f(r) + (1-p) f(c), in mpmath."""
    p, r = mpf(p), mpf(r)
    f, c = GENERATORS[name], (1 - p * r) / (1 - p)
    return p * f(r) + (1 - p) * f(c if c > mpf(10) ** -35 else mpf(0))


def b(name: str, p: Any, q: Any) -> Any:
    """The same as a function of q."""
    p, q = mpf(p), mpf(q)
    f = GENERATORS[name]
    return p * f(q / p) + (1 - p) * f((1 - q) / (1 - p))


def bisect(admissible: Callable[[Any], Any], inside: Any, outside: Any, steps: int = 130) -> Any:
    """The edge of an interval, from a point inside and one outside."""
    for _ in range(steps):
        middle = (inside + outside) / 2
        if admissible(middle):
            inside = middle
        else:
            outside = middle
    return inside


def q_upper(name: str, p: Any, radius: Any) -> Any:
    """Largest q with b(p, q) <= radius; bisection of log(1-q), so that it resolves 1-q."""
    p, radius = mpf(p), mpf(radius)
    if b(name, p, mpf(1)) <= radius:
        return mpf(1)
    far = mpf(1)
    while b(name, p, 1 - (1 - p) * mp.exp(-far)) <= radius:
        far *= 2
    return 1 - (1 - p) * mp.exp(
        -bisect(lambda x: b(name, p, 1 - (1 - p) * mp.exp(-x)) <= radius, mpf(0), far)
    )


def log_r_lower(name: str, p: Any, radius: Any) -> Any:
    """Logarithm of the smallest ratio, by bisection of log r."""
    p, radius = mpf(p), mpf(radius)
    if g(name, p, 0) <= radius:
        return -inf
    far = mpf(1)
    while g(name, p, mp.exp(-far)) <= radius:
        far *= 2
    return -bisect(lambda x: g(name, p, mp.exp(-x)) <= radius, mpf(0), far)


def bounds(name: str, p: Any, radius: Any) -> tuple[float, float]:
    """The band (lower, upper) as floats."""
    return float(mp.exp(log_r_lower(name, p, radius))), float(q_upper(name, p, radius) / mpf(p))


def divergence(name: str, new: np.ndarray, old: np.ndarray) -> float:
    """D_f(Q || P) of two distributions with full support of P."""
    f = GENERATORS[name]
    terms = [mpf(o) * f(mpf(float(n)) / mpf(float(o))) for n, o in zip(new, old, strict=True)]
    return float(mp.fsum(terms))


def policies(tokens: int, count: int, seed: int, spread: float = 1.0) -> list[np.ndarray]:
    """Random distributions: softmax of normal logits."""
    logits = np.random.default_rng(seed).normal(size=(count, tokens)) * spread
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    return list(weights / weights.sum(axis=1, keepdims=True))


#: Old probabilities that reach both ends of the simplex.
PROBABILITIES = (1e-8, 1e-4, 0.003, 0.02, 0.1, 0.25, 0.5, 0.77, 0.9, 0.98, 0.999, 1 - 1e-7)
RADII = (1e-3, 0.05, 0.3)


def float_or_inf(x: Any) -> float:
    return math.inf if x == inf else float(x)
