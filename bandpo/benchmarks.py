"""What a published benchmark average can say: its error, its arithmetic, and what a test costs.

A benchmark reports one number: the mean, over problems, of the share of right samples. The error
of that number depends on how the chances of success are spread over problems, which an average
does not tell. The functions here give the least and the greatest error that fit the average.
"""

from __future__ import annotations

import itertools
import math
import re
from fractions import Fraction

from scipy import stats


def score_variance(mean: float, samples: int) -> tuple[float, float]:
    """Return the least and greatest variance of one problem's score, over problems and samples.

    Parameters
    ----------
    mean : float
        Mean score of the benchmark, between 0 and 1.
    samples : int
        Samples of each problem.

    Returns
    -------
    low, high : float
        Low if every problem has the same chance of success; high if each is always or never
        solved. A mean over m problems has the m-th part of the variance.
    """
    _check(mean, "mean")
    _check_samples(samples)
    spread = mean * (1 - mean)
    return spread / samples, spread


def difference_variance(a: float, b: float, samples: int) -> tuple[float, float]:
    """Return the least and greatest variance of a difference of scores on the same problem.

    Parameters
    ----------
    a, b : float
        Mean scores of two models on one benchmark, between 0 and 1.
    samples : int
        Samples of each problem by each model.

    Returns
    -------
    low, high : float
        Low if the better model is better by the same chance on every problem, one of the two
        being sure of its result; high if the models are sure everywhere and solve as few
        problems in common as the two averages allow. Both are attained.
    """
    _check(a, "a")
    _check(b, "b")
    _check_samples(samples)
    gap = abs(a - b)
    crossed = min(a, b, 1 - a, 1 - b)  # share of problems that only the worse model solves
    return gap * (1 - gap) / samples, gap + 2 * crossed - gap**2


def least_evaluations(percent: float, total: int, decimals: int = 2) -> int:
    """Return the smallest number of evaluations whose average can be printed as ``percent``.

    Parameters
    ----------
    percent : float
        A published share in percent, as it was printed.
    total : int
        Samples in one evaluation, problems times samples of each.
    decimals : int
        Decimals that were printed.

    Returns
    -------
    int
        1 if one evaluation can give the number.
    """
    _check(percent / 100, "percent / 100")
    _check_samples(total)
    share = Fraction(str(percent)) / 100
    half_unit = Fraction(1, 2 * 10 ** (decimals + 2))
    for evaluations in itertools.count(1):
        parts = evaluations * total
        if abs(Fraction(round(share * parts), parts) - share) <= half_unit:
            return evaluations
    raise AssertionError("a finer grid meets every number")


def seeds_needed(gain: float, deviation: float, *, power: float = 0.8, level: float = 0.05) -> int:
    """Return the seeds that each of two rules needs for a gain to be told from chance.

    Parameters
    ----------
    gain : float
        Difference of the means that is to be found.
    deviation : float
        Standard deviation between seeds of one rule, in the unit of ``gain``.
    power : float
        Chance that the test finds the gain.
    level : float
        Chance that a two-sided t test finds a gain where there is none.

    Returns
    -------
    int
        Seeds of each rule, at least 2. Normal scatter of equal width is assumed.
    """
    if not gain > 0 or not deviation > 0:
        raise ValueError(f"gain and deviation must be positive; got {gain} and {deviation}")
    for seeds in itertools.count(2):
        freedom = 2 * (seeds - 1)
        shift = gain / deviation * math.sqrt(seeds / 2)
        if stats.nct.sf(stats.t.isf(level / 2, freedom), freedom, shift) >= power:
            return seeds
    raise AssertionError("power tends to 1")


def launches(command: str) -> int:
    """Return how many runs a register's command starts: the product of its loops' lengths."""
    return math.prod(
        len(values.split()) for values in re.findall(r"\bfor \w+ in ([^;]+);", command)
    )


def _check(share: float, argument: str) -> None:
    if not 0 <= share <= 1:
        raise ValueError(f"{argument} must be a share between 0 and 1; got {share}")


def _check_samples(samples: int) -> None:
    if samples < 1:
        raise ValueError(f"there must be at least 1 sample; got {samples}")
