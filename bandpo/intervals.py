"""Estimates with confidence intervals, over problems or seeds, and paired comparisons.

A figure with problems or seeds as its independent parts uses :func:`mean_interval`, a curve over
seeds :func:`interquartile_mean_interval`, two settings run on the same seeds
:func:`paired_comparison`. Resampling is by scipy.stats and deterministic by seed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Interval:
    """An estimate and its confidence interval."""

    value: float
    low: float
    high: float


def mean_interval(
    values: ArrayLike,
    *,
    confidence: float = 0.95,
    within: tuple[float, float] = (-math.inf, math.inf),
) -> Interval:
    """Mean of independent values (problems or seeds) with Student's interval.

    Parameters
    ----------
    values : array_like (n,)
        At least two, for example ``pass_at_k(...)``: samples of one problem are not independent
        evidence about the benchmark, problems are.
    confidence : float
        Level of the interval: exact for normally distributed values, however few, and for any
        others as their number grows. A bootstrap is not, for few values: its intervals are too
        narrow.
    within : (float, float)
        What the mean can be, for example (0, 1) for a share. The interval is cut to it, which
        leaves its level as it is.

    Returns
    -------
    Interval
    """
    x = _sample(values, "values")
    mean = float(x.mean())
    half = float(stats.t.ppf((1 + confidence) / 2, len(x) - 1) * stats.sem(x))
    return Interval(mean, max(mean - half, within[0]), min(mean + half, within[1]))


def proportion_interval(successes: int, n: int, *, confidence: float = 0.95) -> Interval:
    """Share of successes in n independent trials with Wilson's interval.

    Parameters
    ----------
    successes, n : int
        Successes among n trials.
    confidence : float
        Level of the interval.

    Returns
    -------
    Interval
    """
    found = stats.binomtest(successes, n)
    ci = found.proportion_ci(confidence, method="wilson")
    return Interval(successes / n, float(ci.low), float(ci.high))


def interquartile_mean_interval(
    strata: Sequence[ArrayLike],
    *,
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> tuple[Floats, Floats, Floats]:
    """Interquartile mean over runs, with a stratified percentile bootstrap, as in [1]_.

    A quarter of the runs is cut off at each end, and runs are resampled within each stratum.

    Parameters
    ----------
    strata : sequence of array_like (runs, ...)
        One array for each task or setting; runs (seeds) come first, further axes (steps) are kept
        and agree between strata. One stratum: ``[rewards]``.
    confidence : float
        Level of the interval.
    resamples : int
        Bootstrap resamples.
    seed : int
        Of the resampling.

    Returns
    -------
    value, low, high : ndarray (...)

    References
    ----------
    .. [1] R. Agarwal et al., "Deep Reinforcement Learning at the Edge of the Statistical
       Precipice", NeurIPS 2021, arXiv:2108.13264.
    """
    arrays = tuple(np.asarray(s, dtype=float) for s in strata)
    if not arrays or any(a.ndim == 0 or len(a) < 2 for a in arrays):
        raise ValueError(
            f"strata must be arrays of at least 2 runs; got shapes {[a.shape for a in arrays]}"
        )

    def statistic(*samples: Floats, axis: int = 0) -> Floats:
        return stats.trim_mean(np.concatenate(samples, axis=axis), 0.25, axis=axis)

    found = stats.bootstrap(
        arrays,
        statistic,
        axis=0,
        vectorized=True,
        confidence_level=confidence,
        n_resamples=resamples,
        method="percentile",
        rng=seed,
    )
    low, high = found.confidence_interval
    return statistic(*arrays), np.asarray(low), np.asarray(high)


@dataclass(frozen=True)
class Comparison:
    """Two settings on the same seeds or problems; positive where the first has more.

    Parameters
    ----------
    difference : Interval
        Mean of a - b.
    effect_size : float
        Mean difference over the standard deviation of the differences (Cohen's d_z); infinite
        where all differences are one number.
    wins : float
        Share of pairs with a > b, a tie counting one half.
    p_value : float
        Two-sided sign-flip permutation test: exact for up to about a dozen pairs.
    pairs : int
        How many pairs.
    """

    difference: Interval
    effect_size: float
    wins: float
    p_value: float
    pairs: int


def paired_comparison(
    a: ArrayLike,
    b: ArrayLike,
    *,
    confidence: float = 0.95,
    resamples: int = 9999,
    seed: int = 0,
) -> Comparison:
    """Compare two settings pair by pair.

    Parameters
    ----------
    a, b : array_like (n,)
        Values of the same seeds or problems in the same order; at least two.
    confidence : float
        Level of the interval of the difference, which is Student's.
    resamples : int
        Most sign flips to draw; all are taken if that is no more.
    seed : int
        Of the drawing.

    Returns
    -------
    Comparison
        With n pairs the p-value cannot be below 2^(1-n): five seeds reach 0.0625 at best.
    """
    x, y = _sample(a, "a"), _sample(b, "b")
    if x.shape != y.shape:
        raise ValueError(f"a and b must pair up; got {len(x)} and {len(y)} values")
    d = x - y
    test = stats.permutation_test(
        (d,), np.mean, permutation_type="samples", n_resamples=resamples, rng=seed
    )
    return Comparison(
        difference=mean_interval(d, confidence=confidence),
        effect_size=_ratio(float(d.mean()), float(d.std(ddof=1))),
        wins=float((np.sign(d).mean() + 1) / 2),
        p_value=float(test.pvalue),
        pairs=len(d),
    )


def _ratio(mean: float, spread: float) -> float:
    if spread > 0:
        return mean / spread
    return math.copysign(math.inf, mean) if mean else 0.0


def _sample(values: ArrayLike, argument: str) -> Floats:
    x = np.asarray(values, dtype=float)
    if x.ndim != 1 or len(x) < 2 or not np.isfinite(x).all():
        raise ValueError(f"{argument} must be at least two finite numbers in a row; got {x}")
    return x
