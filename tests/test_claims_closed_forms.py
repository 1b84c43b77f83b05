"""Chapter "Closed forms": five solutions, and bands as binomial confidence intervals."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
from claims_reference import PROBABILITIES, b, log_r_lower, q_upper
from mpmath import acos, asin, mp, mpf, sin, sqrt
from scipy.optimize import brentq
from scipy.stats import binom, norm
from statsmodels.stats.proportion import proportion_confint, proportion_effectsize

from bandpo.operator import band


def tv(p: mpf, d: mpf, sign: int) -> mpf:
    return p + sign * d


def chi2(p: mpf, d: mpf, sign: int) -> mpf:
    return p + sign * sqrt(d * p * (1 - p))


def neyman(p: mpf, d: mpf, sign: int) -> mpf:
    return (2 * p + d + sign * sqrt(d * d + 4 * d * p * (1 - p))) / (2 * (1 + d))


def hellinger(p: mpf, d: mpf, sign: int) -> mpf:
    angle = asin(sqrt(p)) + sign * acos(1 - d / 2)
    return sin(min(max(angle, mpf(0)), mp.pi / 2)) ** 2


def le_cam(p: mpf, d: mpf, sign: int) -> mpf:
    return (2 * p + d * (1 - p) + sign * sqrt(d * d + 8 * d * p * (1 - p))) / (2 + d)


FORMS: dict[str, Callable[[mpf, mpf, int], mpf]] = {
    "tv": tv,
    "chi2": chi2,
    "neyman": neyman,
    "hellinger": hellinger,
    "le_cam": le_cam,
}


def check_closed_form(name: str) -> None:
    for p, radius in product(PROBABILITIES, (1e-3, 0.05, 0.7)):
        low, high = (FORMS[name](mpf(p), mpf(radius), sign) for sign in (-1, 1))
        low, high = max(low, mpf(0)), min(high, mpf(1))
        exact_low = mpf(p) * mp.exp(log_r_lower(name, p, radius))
        assert abs(low - exact_low) < mpf(10) ** -30
        assert abs(high - q_upper(name, p, radius)) < mpf(10) ** -30
        found = band(p, name, radius)
        assert float(found[0]) == pytest.approx(float(low / mpf(p)), rel=1e-8, abs=1e-300)
        assert float(found[1]) == pytest.approx(float(high / mpf(p)), rel=1e-11)


@pytest.mark.claim("C8", "prop-closed-tv")
def test_total_variation() -> None:
    check_closed_form("tv")
    assert b("tv", 0.3, 0.37) == pytest.approx(0.07)


@pytest.mark.claim("C8", "prop-closed-chi2")
def test_chi2() -> None:
    check_closed_form("chi2")
    p, q = mpf("0.3"), mpf("0.37")
    assert abs(b("chi2", p, q) - (q - p) ** 2 / (p * (1 - p))) < mpf(10) ** -35


@pytest.mark.claim("prop-closed-neyman")
def test_neyman() -> None:
    check_closed_form("neyman")
    p, q = mpf("0.3"), mpf("0.37")
    assert abs(b("neyman", p, q) - (q - p) ** 2 / (q * (1 - q))) < mpf(10) ** -35
    ends = np.array([1e-9, 0.5, 0.9999])
    low, high = band(ends, "neyman", 2.0)
    assert np.all(low > 0)
    assert np.all(high * ends < 1)


@pytest.mark.claim("prop-closed-hellinger")
def test_hellinger() -> None:
    check_closed_form("hellinger")
    p, q = mpf("0.3"), mpf("0.37")
    angle = asin(sqrt(q)) - asin(sqrt(p))
    assert abs(b("hellinger", p, q) - (2 - 2 * mp.cos(angle))) < mpf(10) ** -35


@pytest.mark.claim("prop-closed-lecam")
def test_le_cam() -> None:
    check_closed_form("le_cam")
    p, q = mpf("0.3"), mpf("0.37")
    expected = 2 * (q - p) ** 2 / ((p + q) * (2 - p - q))
    assert abs(b("le_cam", p, q) - expected) < mpf(10) ** -35


TRIALS = [(20, 7), (38, 2), (100, 50), (400, 9)]
LEVEL = 0.05
Z = float(norm.isf(LEVEL / 2))


def interval(p: float, name: str, radius: float) -> tuple[float, float]:
    low, high = band(p, name, radius)
    return p * float(low), p * float(high)


@pytest.mark.claim("B3", "prop-ci")
@pytest.mark.parametrize(("n", "k"), TRIALS)
@pytest.mark.parametrize(("name", "method"), [("chi2", "normal"), ("neyman", "wilson")])
def test_wald_and_wilson_against_statsmodels(name: str, method: str, n: int, k: int) -> None:
    expected = proportion_confint(k, n, alpha=LEVEL, method=method)
    assert interval(k / n, name, Z**2 / n) == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.claim("B3", "prop-ci")
@pytest.mark.parametrize(("n", "k"), TRIALS)
def test_likelihood_ratio_interval_against_scipy(n: int, k: int) -> None:
    def deviance(q: float) -> float:
        return 2 * (binom.logpmf(k, n, k / n) - binom.logpmf(k, n, q)) - Z**2

    expected = (brentq(deviance, 1e-12, k / n), brentq(deviance, k / n, 1 - 1e-12))
    assert interval(k / n, "kl", Z**2 / (2 * n)) == pytest.approx(expected, rel=1e-8)


@pytest.mark.claim("B3", "prop-ci")
@pytest.mark.parametrize(("n", "k"), TRIALS)
def test_chernoff_bound_holds_at_the_ends_of_the_kl_interval(n: int, k: int) -> None:
    beta = math.log(1 / LEVEL)
    low, high = interval(k / n, "kl", beta / n)
    # P(frequency <= k/n) <= exp(-n kl) = LEVEL under the upper end, and likewise below
    assert binom.cdf(k, n, high) <= LEVEL
    assert binom.sf(k - 1, n, low) <= LEVEL
    kl = (k / n) * math.log(k / n / high) + (1 - k / n) * math.log((1 - k / n) / (1 - high))
    assert n * kl == pytest.approx(beta, rel=1e-9)


@pytest.mark.claim("B3", "prop-ci")
@pytest.mark.parametrize(("n", "k"), TRIALS)
def test_arcsine_interval(n: int, k: int) -> None:
    width = Z / (2 * math.sqrt(n))
    center = math.asin(math.sqrt(k / n))
    expected = [math.sin(max(center - width, 0)) ** 2, math.sin(center + width) ** 2]
    found = interval(k / n, "hellinger", 2 - 2 * math.cos(width))
    assert found == pytest.approx(expected, rel=1e-8, abs=1e-12)
    # Cohen's h is twice the difference of the angles
    for end in found:
        if end > 0:
            assert abs(proportion_effectsize(end, k / n)) == pytest.approx(2 * width, rel=1e-7)


@pytest.mark.claim("B3", "prop-ci")
@pytest.mark.parametrize(("n", "k"), TRIALS)
def test_hoeffding_interval(n: int, k: int) -> None:
    width = math.sqrt(math.log(2 / LEVEL) / (2 * n))
    expected = (max(k / n - width, 0), min(k / n + width, 1))
    assert interval(k / n, "tv", width) == pytest.approx(expected, abs=1e-12)
    # Hoeffding's inequality at the ends
    assert binom.cdf(k, n, k / n + width) <= LEVEL / 2
    assert binom.sf(k - 1, n, max(k / n - width, 0)) <= LEVEL / 2


@pytest.mark.claim("B3", "prop-ci")
@pytest.mark.parametrize(
    ("name", "radius"),
    [("kl", math.log(2 / LEVEL) / 50), ("tv", math.sqrt(math.log(2 / LEVEL) / 100))],
    ids=["Chernoff", "Hoeffding"],
)
def test_exact_coverage_is_not_below_the_promise(name: str, radius: float) -> None:
    n = 50
    low, high = np.array([interval(k / n, name, radius) for k in range(1, n)]).T
    # when nothing was seen the interval ends at the limit q* for p -> 0; and the mirror image
    end = {"kl": 1 - math.exp(-radius), "tv": radius}[name]
    low, high = np.r_[0, low, 1 - end], np.r_[end, high, 1]
    for q in np.linspace(0.003, 0.997, 200):
        inside = (low <= q) & (q <= high)
        assert binom.pmf(np.arange(n + 1), n, q)[inside].sum() >= 1 - LEVEL


@pytest.mark.claim("B3", "prop-ci")
def test_radius_as_a_number_of_trials() -> None:
    assert round(1.96**2 / (2 * 0.05)) == 38
    assert round(1.96**2 / 0.05) == 77
    # nothing seen in n trials: Wald has no width, Wilson and KL have
    wald, wilson, kl = (1e-12 * float(band(1e-12, n, 0.05)[1]) for n in ("chi2", "neyman", "kl"))
    assert wald < 1e-6
    assert wilson == pytest.approx(0.05 / 1.05, rel=1e-6)
    assert kl == pytest.approx(1 - math.exp(-0.05), rel=1e-6)
