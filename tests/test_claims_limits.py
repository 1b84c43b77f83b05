"""Chapter "Limits and monotonicity": mirror, monotonicity, room, limits, what fails at p -> 1."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise, product

import numpy as np
import pytest
import torch
from claims_reference import (
    EXACT,
    GENERATORS,
    NAMES,
    PROBABILITIES,
    bisect,
    bounds,
    float_or_inf,
    g,
    log_r_lower,
    q_upper,
)
from flint import arb, ctx
from mpmath import inf, mp, mpf

from bandpo.operator import band, binary_divergence, limits, log_band, saturation

P = np.concatenate([np.geomspace(1e-7, 0.4, 120), 1 - np.geomspace(0.6, 1e-7, 120)[1:]])


@pytest.mark.claim("prop-mirror")
@pytest.mark.parametrize("name", NAMES)
def test_mirror_identity(name: str) -> None:
    # left side: bisection at 40 digits; right side: the package
    for p, radius in product((1e-4, 0.03, 0.4, 0.9, 0.999), (0.01, 0.3)):
        upper = q_upper(name, p, radius)
        lower = mpf(float(band(1 - p, name, radius)[0]))
        assert float(upper + (1 - mpf(p)) * lower - 1) == pytest.approx(0, abs=1e-9)
        exact = mp.exp(log_r_lower(name, 1 - mpf(p), radius))
        assert abs(upper + (1 - mpf(p)) * exact - 1) < mpf(10) ** -30


@pytest.mark.claim("prop-mirror")
@pytest.mark.parametrize("name", NAMES)
def test_token_and_complement_may_be_exchanged(name: str) -> None:
    for p, r in ((0.1, 2.5), (0.6, 0.3), (0.99, 1.005)):
        c = (1 - mpf(p) * mpf(r)) / (1 - mpf(p))
        assert abs(g(name, p, r) - g(name, 1 - mpf(p), c)) < mpf(10) ** -35


@pytest.mark.claim("C6", "prop-monotone")
@pytest.mark.parametrize("name", NAMES)
def test_divergence_at_a_fixed_ratio_grows_at_least_in_proportion_to_p(name: str) -> None:
    for r in (0.05, 0.7, 1.1, 4.0):
        grid = [x for x in (1e-6, 1e-3, 0.1, 0.2, 0.24, 0.5, 0.9, 0.99) if x * r < 1]
        for p, larger in pairwise(grid):
            assert g(name, p, r) <= mpf(p) / mpf(larger) * g(name, larger, r) * (1 + EXACT)


@pytest.mark.claim("C6", "prop-monotone")
@pytest.mark.parametrize("radius", [0.003, 0.05, 0.4])
@pytest.mark.parametrize("name", NAMES)
def test_band_opens_strictly_toward_the_tail(name: str, radius: float) -> None:
    low, high = log_band(torch.from_numpy(np.log(P)), name, radius)
    # near 1 compare what is left: log of the excess for the upper bound
    excess = np.log(np.expm1(high.numpy()))
    assert np.all(np.diff(excess) < 0)
    until, _ = saturation(name, radius)
    flat = until >= P
    assert np.all(low.numpy()[flat] == -math.inf)
    rest = low.numpy()[~flat]
    assert np.all(np.diff(rest) > 0)
    assert np.all(np.isfinite(rest))


def ball(low: float, high: float) -> arb:
    """The interval [low, high] as a ball."""
    return arb((low + high) / 2, (high - low) / 2 * (1 + 1e-12))


def divergence_kl(p: arb, log_r: arb) -> arb:
    """g for KL in ball arithmetic, from log r."""
    return -p * log_r - (1 - p) * ((1 - p * log_r.exp()) / (1 - p)).log()


def one_minus_x(p: arb, r: arb) -> arb:
    """1 - r/c = (1-r)/(1-pr). For KL, dg/dp = x - 1 - log x with x = r/c: positive unless x = 1."""
    return (1 - r) / (1 - p * r)


@pytest.mark.claim("C6", "prop-monotone")
def test_bregman_form_of_the_slope() -> None:
    for p, r in ((0.1, 2.5), (0.6, 0.3), (0.01, 40.0)):
        for name in ("kl", "chi2", "hellinger"):
            f = GENERATORS[name]
            c = (1 - mpf(p) * mpf(r)) / (1 - mpf(p))
            bregman = f(mpf(r)) - f(c) - mp.diff(f, c) * (mpf(r) - c)
            assert bregman > 0
            assert mp.diff(lambda x, n=name, r=r: g(n, x, r), p) == pytest.approx(
                float(bregman), rel=1e-8
            )
        x = 1 - float(one_minus_x(arb(p), arb(r)))
        assert x - 1 - math.log(x) == pytest.approx(
            float(mp.diff(lambda x, r=r: g("kl", x, r), p)), rel=1e-8
        )


#: Cells that cover 1e-4 <= p <= 1 - 1e-4, 1e-3 <= radius <= 1 without a gap.
P_EDGES = np.concatenate([np.geomspace(1e-4, 0.5, 60), 1 - np.geomspace(0.5, 1e-4, 60)[1:]])
RADIUS_EDGES = np.geomspace(1e-3, 1, 13)


def cells(p: np.ndarray, seed: int) -> Iterator[tuple[float, ...]]:
    """Corners (p1, p2, d1, d2), the KL bounds at (p1, d2) and (p2, d1), and at a point inside."""
    low, high = (
        x.numpy()
        for x in log_band(
            torch.from_numpy(np.log(p))[:, None], "kl", torch.from_numpy(RADIUS_EDGES)[None, :]
        )
    )
    draw = np.random.default_rng(seed).uniform(size=(2, p.size - 1, RADIUS_EDGES.size - 1))
    at_p = p[:-1, None] + draw[0] * np.diff(p)[:, None]
    at_radius = RADIUS_EDGES[None, :-1] + draw[1] * np.diff(RADIUS_EDGES)[None, :]
    inside = log_band(torch.from_numpy(np.log(at_p)), "kl", torch.from_numpy(at_radius))
    for i, j in np.ndindex(at_p.shape):
        corner = (p[i], p[i + 1], RADIUS_EDGES[j], RADIUS_EDGES[j + 1])
        for side, bound in enumerate((low, high)):
            here = inside[side][i, j]
            yield side, *map(float, (*corner, bound[i, j + 1], bound[i + 1, j], here))


@pytest.mark.claim("C6", "C5", "prop-monotone", "prop-limits")
def test_kl_lower_bound_is_enclosed_at_every_point_of_the_square() -> None:
    """Ball arithmetic: a proof by computation for all (p, radius) of each cell.

    In a cell, dg/dp > 0 is certified at the two candidate ratios, so g over the cell is extreme at
    its ends, where its sign against the radius is certified. This encloses the lower bound between
    its values at two corners, for every point of the cell: it rises with p and falls with radius.
    """
    ctx.prec = 128
    for side, p1, p2, d1, d2, at_least, at_most, inside in cells(P_EDGES, seed=0):
        if side == 1:
            continue
        at_least, at_most = at_least * (1 + 1e-12), at_most * (1 - 1e-12)
        assert at_least < at_most < 0
        for log_r in (at_least, at_most):
            assert one_minus_x(ball(p1, p2), arb(log_r).exp()) > 0
        assert divergence_kl(arb(p1), arb(at_least)) > d2
        assert divergence_kl(arb(p2), arb(at_most)) < d1
        assert at_most <= -d1 * (1 - 1e-9)  # never above e^-radius
        assert at_least <= inside <= at_most


@pytest.mark.claim("C6", "C5", "prop-monotone", "prop-limits")
def test_kl_upper_bound_is_enclosed_at_every_point_up_to_nine_tenths() -> None:
    """The same for the upper bound; above 0.9 it is the mirror of the lower one."""
    ctx.prec = 256
    for side, p1, p2, d1, d2, at_most, at_least, inside in cells(P_EDGES[P_EDGES < 0.9], seed=1):
        if side == 0:
            continue
        most = arb(at_most) * (1 + arb("1e-13"))
        least = arb(at_least) * (1 - arb("1e-13"))
        assert one_minus_x(ball(p1, p2), least.exp()) < 0
        # out of reach at p1, hence by monotonicity wherever in the cell the ratio exists at all
        assert divergence_kl(arb(p1), most) > d2
        assert divergence_kl(arb(p2), least) < d1
        assert at_least <= inside <= at_most


@pytest.mark.claim("prop-room")
@pytest.mark.parametrize("radius", [0.01, 0.05, 0.5])
@pytest.mark.parametrize("name", NAMES)
def test_room_is_concave_and_never_below_its_chord(name: str, radius: float) -> None:
    low, high = band(P, name, radius)
    top, bottom = P * high, P * low
    assert np.all(np.diff(top) >= -1e-15)
    free = top < 1 - 1e-12
    assert np.all(np.diff(top[free]) > 0)
    assert np.all(np.diff(bottom) >= -1e-15)
    rng = np.random.default_rng(3)
    one, other, weight = rng.uniform(size=(3, 300))
    between = weight * one + (1 - weight) * other

    def q(p: np.ndarray, side: int) -> np.ndarray:
        return p * band(p, name, radius)[side]

    chord = [weight * q(one, side) + (1 - weight) * q(other, side) for side in (0, 1)]
    assert np.all(q(between, 1) >= chord[1] - 1e-9)
    assert np.all(q(between, 0) <= chord[0] + 1e-9)
    assert np.all(top - P >= (1 - P) * star(name, radius) - 1e-9)


@pytest.mark.claim("prop-room")
def test_every_token_may_grow_under_kl() -> None:
    assert 0.0487 < star("kl", 0.05) < 0.0488


STARS = {
    "kl": lambda d: 1 - math.exp(-d),
    "tv": lambda d: d,
    "neyman": lambda d: d / (1 + d),
    "hellinger": lambda d: d - d * d / 4,
    "le_cam": lambda d: 2 * d / (2 + d),
    "chi2": lambda d: 0.0,
    "reverse_kl": lambda d: 0.0,
}


def star(name: str, radius: float) -> float:
    """q*: the largest q in [0, 1] with q f'(inf) + f(1-q) <= radius, by bisection."""
    f = GENERATORS[name]
    if f.slope == inf:
        return 0.0
    if f.slope + f.at_zero <= radius:
        return 1.0
    return float(bisect(lambda q: q * f.slope + f(1 - q) <= radius, mpf(0), mpf(1)))


@pytest.mark.claim("C5", "prop-limits")
@pytest.mark.parametrize("radius", [0.01, 0.05, 0.4])
@pytest.mark.parametrize("name", NAMES)
def test_limits_at_both_ends(name: str, radius: float) -> None:
    limit = star(name, radius)
    if name in STARS:
        assert limit == pytest.approx(STARS[name](radius), rel=1e-12, abs=1e-15)
    assert (limit > 0) == (GENERATORS[name].slope != inf)
    assert limits(name, radius)["room_at_zero"] == pytest.approx(limit, rel=1e-7, abs=1e-9)
    assert limits(name, radius)["lower_at_one"] == pytest.approx(1 - limit, rel=1e-7)

    tiny = 10.0 ** -np.arange(2, 15, dtype=float)
    low, high = band(tiny, name, radius)
    assert np.all(np.diff(high) > 0)
    assert high[-1] > 1e3
    assert low[-1] < 1e-3
    mass = tiny * high
    assert np.all(mass >= limit * (1 - 1e-9))
    if name == "reverse_kl":  # the logarithm makes it slow
        assert mass[-1] < mass[0] / 3
    else:
        assert mass[-1] == pytest.approx(limit, abs=2e-4)

    low, high = band(1 - tiny[:10], name, radius)
    np.testing.assert_allclose(high, 1, atol=0.011)
    assert high[-1] == pytest.approx(1, abs=1e-9)
    assert np.all(low <= (1 - limit) * (1 + 1e-12))
    if name != "reverse_kl":
        assert low[-1] == pytest.approx(1 - limit, abs=2e-3)
    assert low[-1] > low[0]


@pytest.mark.claim("C5", "prop-limits")
@pytest.mark.parametrize("name", NAMES)
def test_price_of_mass_on_a_token_that_had_none(name: str) -> None:
    # phi(q) = q f'(inf) + f(1-q) is the binary divergence at p = 0
    f = GENERATORS[name]
    for q in (0.01, 0.3, 0.9):
        logs = torch.tensor([0.0, q], dtype=torch.float64).log()
        expected = float_or_inf(q * f.slope + f(1 - mpf(q)))
        assert float(binary_divergence(*logs, name)) == pytest.approx(expected, rel=1e-9)


@pytest.mark.claim("C5", "cor-lower-limit")
@pytest.mark.parametrize("radius", [0.01, 0.05, 0.3])
def test_lower_bound_of_kl_and_tv_stays_away_from_one(radius: float) -> None:
    p = np.concatenate([P, 1 - np.geomspace(1e-8, 1e-15, 20), [1.0]])
    low_kl, _ = band(p, "kl", radius)
    low_tv, _ = band(p, "tv", radius)
    assert np.all(low_kl <= math.exp(-radius) * (1 + 1e-14))
    assert np.all(low_tv <= (1 - radius) * (1 + 1e-14))
    assert np.all(low_kl[P.size // 2 : P.size - 20] < math.exp(-radius))
    assert low_kl[-1] == pytest.approx(math.exp(-radius), rel=1e-12)
    assert low_tv[-1] == pytest.approx(1 - radius, rel=1e-12)
    if radius == 0.05:
        assert low_kl[-1] == pytest.approx(0.9512, abs=5e-5)


@pytest.mark.claim("C5", "cor-lower-limit")
def test_certified_for_every_p_near_one() -> None:
    """For *all* p in [0, 1] and radius >= 0.04, KL's lower bound is below 0.97.

    g(p, r) = -p log r + (1-p) log((1-p)/(1-pr)), and for r < 1 the second term is <= 0.
    """
    everywhere = ball(0.0, 1.0)
    assert -everywhere * arb("0.97").log() < arb("0.04")
    for p in (0.9, 0.999, 1 - 1e-9):
        assert g("kl", p, 0.97) < 0.04
        assert band(p, "kl", 0.04)[0] < 0.97


@pytest.mark.claim("cor-starve")
def test_chi2_room_falls_like_the_root_of_p() -> None:
    radius = 0.05
    p = np.geomspace(1e-12, 1 / 1.05 * (1 - 1e-9), 100)
    room = p * (band(p, "chi2", radius)[1] - 1)
    np.testing.assert_allclose(room, np.sqrt(radius * p * (1 - p)), rtol=1e-4)
    np.testing.assert_allclose(room[:20] / room[1:21], np.sqrt(p[:20] / p[1:21]), rtol=1e-2)
    assert band(1e-10, "chi2", radius)[1] > 1e4  # the ratio is unbounded all the same


@pytest.mark.claim("cor-starve")
@pytest.mark.parametrize("name", ["reverse_kl", "alpha:3", "chi2"])
def test_infinite_slope_starves_the_tail(name: str) -> None:
    p = 10.0 ** -np.arange(1, 13, dtype=float)
    room = p * (band(p, name, 0.05)[1] - 1)
    assert np.all(np.diff(room) < 0)
    if name == "reverse_kl":
        p = mpf(10) ** -3000
        top = q_upper(name, p, 0.05)
        assert float(top * mp.log(top / p)) == pytest.approx(0.05, rel=1e-3)
        assert float(top / (mpf("0.05") / mp.log(1 / p))) == pytest.approx(1, abs=5e-3)


@pytest.mark.claim("C5", "prop-limits")
@pytest.mark.parametrize("name", NAMES)
def test_package_against_forty_digits(name: str) -> None:
    for p, radius in product(PROBABILITIES, (0.01, 0.3)):
        low, high = bounds(name, p, radius)
        found = band(p, name, radius)
        assert float(found[0]) == pytest.approx(low, rel=1e-8, abs=1e-300)
        assert float(found[1]) == pytest.approx(high, rel=1e-8)
