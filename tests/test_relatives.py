"""Known divergences beside a new one: curvature, equal strictness, distance, intervals."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

from bandpo.divergences import Divergence, get_divergence, list_divergences
from bandpo.operator import band
from bandpo.relatives import curvature, equivalent_radius, nearest

JEFFREYS = Divergence("jeffreys", lambda u: (u - 1) * u.log(), math.inf, math.inf)
HOCKEY_STICK = Divergence("hockey_stick", lambda u: (u - 1.5).clamp(min=0), 0.0, 1.0)


@pytest.mark.parametrize(
    ("divergence", "expected"),
    [
        ("kl", 1), ("reverse_kl", 1), ("chi2", 2), ("neyman", 2), ("hellinger", 0.5),
        ("le_cam", 1), ("jensen_shannon", 0.25), ("alpha:-0.7", 1), (JEFFREYS, 2),
        (HOCKEY_STICK, 0),
    ],
)  # fmt: skip
def test_curvature_is_the_second_derivative(divergence, expected):
    assert curvature(divergence) == pytest.approx(expected, rel=1e-6)
    if isinstance(divergence, str):
        u = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
        (slope,) = torch.autograd.grad(get_divergence(divergence).f(u), u, create_graph=True)
        assert torch.autograd.grad(slope, u)[0].item() == pytest.approx(expected, rel=1e-9)


def test_a_kink_has_no_curvature():
    assert curvature("tv") is None


@pytest.mark.parametrize("name", [*list_divergences(), JEFFREYS], ids=str)
def test_equal_strictness_is_equal_bounds_at_one_half(name):
    radius = equivalent_radius("kl", 0.05, name)
    np.testing.assert_allclose(band(0.5, name, radius), band(0.5, "kl", 0.05), rtol=1e-9)
    assert equivalent_radius(name, radius, "kl") == pytest.approx(0.05, rel=1e-9)


def test_for_small_radii_equal_strictness_is_the_ratio_of_curvatures():
    for name in ("chi2", "hellinger", "jensen_shannon", "reverse_kl"):
        ratio = equivalent_radius("kl", 1e-6, name) / 1e-6
        assert ratio == pytest.approx(curvature(name), rel=1e-3)


def test_the_nearest_of_a_known_one_is_itself():
    for name in (*list_divergences(), "alpha:1.5"):
        first, second, *_ = nearest(name, 0.03)
        assert (first.name, first.radius) == (name, pytest.approx(0.03, rel=1e-9))
        assert first.distance < 1e-12 <= second.distance


def test_distance_is_the_largest_gap_on_either_side():
    p = 1 / (1 + np.exp(-np.linspace(-14, 14, 20001)))
    found = {one.name: one for one in nearest(JEFFREYS, 0.1, ["kl", "chi2"])}
    assert [*found] == sorted(found, key=lambda name: found[name].distance)
    for name, one in found.items():
        for ours, theirs in zip(band(p, JEFFREYS, 0.1), band(p, name, one.radius), strict=True):
            gap = np.abs(p * ours - p * theirs)
            assert one.distance == pytest.approx(gap.max(), rel=1e-3)
        at = np.subtract(band(one.p, JEFFREYS, 0.1), band(one.p, name, one.radius))
        assert one.p * abs(at[1]) == pytest.approx(one.distance, rel=1e-9)


def test_draws_make_the_known_interval():
    """With that many draws the library's interval is the band."""
    found = {one.name: one for one in nearest(JEFFREYS, 0.1, ["chi2", "neyman", "hellinger"])}
    z, p = stats.norm.ppf(0.975), 0.3
    n = found["chi2"].draws
    half = z * math.sqrt(p * (1 - p) / n)
    np.testing.assert_allclose(
        p * np.array(band(p, "chi2", found["chi2"].radius)), [p - half, p + half]
    )
    n = found["neyman"].draws
    center, spread = p + z**2 / (2 * n), z * math.sqrt(p * (1 - p) / n + z**2 / (4 * n**2))
    np.testing.assert_allclose(
        p * np.array(band(p, "neyman", found["neyman"].radius)),
        [(center - spread) / (1 + z**2 / n), (center + spread) / (1 + z**2 / n)],
    )
    n = found["hellinger"].draws
    angle = math.asin(math.sqrt(p))
    np.testing.assert_allclose(
        p * np.array(band(p, "hellinger", found["hellinger"].radius)),
        [math.sin(angle + side * z / (2 * math.sqrt(n))) ** 2 for side in (-1, 1)],
    )


@pytest.mark.parametrize(
    ("name", "order"),
    [("kl", 0), ("reverse_kl", -1), ("alpha:1.5", -1.5), ("alpha:-0.5", 0.5)],
)
def test_draws_make_the_known_test(name, order):
    """At the end of the band the library's statistic is its critical value."""
    (one,) = nearest(JEFFREYS, 0.1, [name])
    p = 0.4
    for r in band(p, name, one.radius):
        q = p * r
        observed, expected = np.array([p, 1 - p]), np.array([q, 1 - q])
        statistic = one.draws * stats.power_divergence(observed, expected, lambda_=order)[0]
        assert statistic == pytest.approx(stats.chi2.ppf(0.95, 1), rel=1e-9)
    if name.startswith("alpha"):
        assert one.interval == f"Cressie-Read, λ = {order:g}"


def test_draws_of_the_others():
    found = {one.name: one for one in nearest(JEFFREYS, 0.1)}
    radius, n = found["tv"].radius, found["tv"].draws
    assert 2 * math.exp(-2 * n * radius**2) == pytest.approx(0.05)  # Hoeffding
    z2 = stats.chi2.ppf(0.95, 1)
    p, q = 0.4, 0.4 * band(0.4, "le_cam", found["le_cam"].radius)[1]
    pooled = (p + q) / 2
    statistic = (q - p) ** 2 / (pooled * (1 - pooled) * 2 / found["le_cam"].draws)
    assert statistic == pytest.approx(z2, rel=1e-9)
    q = 0.4 * band(0.4, "jensen_shannon", found["jensen_shannon"].radius)[1]
    table = found["jensen_shannon"].draws * np.array([[p, 1 - p], [q, 1 - q]])
    statistic = stats.chi2_contingency(table, correction=False, lambda_="log-likelihood").statistic
    assert statistic == pytest.approx(z2, rel=1e-9)


def test_a_radius_that_holds_nothing_is_refused():
    with pytest.raises(ValueError, match=r"radius must be below 0\.5 for 'tv', got 0\.6"):
        nearest("tv", 0.6)
