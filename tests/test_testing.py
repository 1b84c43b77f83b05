"""The contract check accepts every good divergence and names what is wrong with others."""

from __future__ import annotations

import dataclasses
import math

import band_reference as reference
import mpmath as mp
import pytest
import torch

from bandpo import closed_forms
from bandpo.divergences import Divergence, get_divergence, list_divergences
from bandpo.operator import log_band
from bandpo.testing import ContractError, bounds, check_divergence
from bandpo.testing.checks import _BREAKS, _REQUIRES

INF = math.inf
CHI2 = get_divergence("chi2")
JEFFREYS = Divergence("jeffreys", lambda u: (u - 1) * u.log(), INF, INF)

GOOD = [
    JEFFREYS,
    Divergence("exponential", lambda u: torch.exp(u - 1) - u, math.exp(-1), INF),
    Divergence("symmetric chi2", lambda u: (u - 1) ** 2 * (u + 1) / u, INF, INF),
    Divergence("quartic", lambda u: (u - 1) ** 4, 1.0, INF),
    # kinks: at 1, to one side of it, two of them, and beside a smooth part
    Divergence("uneven tv", lambda u: torch.maximum(1 - u, 2 * (u - 1)), 1.0, 2.0),
    Divergence("hockey stick", lambda u: (u - 1.5).clamp(min=0), 0.0, 1.0),
    Divergence("tv and kl", lambda u: (u - 1).abs() - u.log(), INF, 1.0),
    Divergence(
        "huber",
        lambda u: torch.where((u - 1).abs() < 0.5, (u - 1) ** 2, (u - 1).abs() - 0.25),
        0.75,
        1.0,
    ),
    # as a textbook writes them, with whatever cancels
    Divergence("le_cam", lambda u: (u - 1) ** 2 / (u + 1), 1.0, 1.0),
    Divergence("power", lambda u: (u**0.3 - 0.3 * u - 0.7) / (0.3 * -0.7), 1 / 0.3, 1 / 0.7),
    Divergence(
        "jensen_shannon",
        lambda u: 0.5 * (u * u.log() - (1 + u) * ((1 + u) / 2).log()),
        0.5 * math.log(2),
        0.5 * math.log(2),
    ),
    # a multiple of u - 1 changes nothing but the limits
    Divergence("tilted", lambda u: (u - 1) ** 2 + 1000 * (u - 1), -999.0, INF),
]
ALPHAS = ["0.5", "-1.5", "3", "1e-4", "-1e-3", "0.01", "0.1", "0.999", "1.001", "10", "-5", "2"]


@pytest.mark.parametrize("name", [*list_divergences(), *(f"alpha:{alpha}" for alpha in ALPHAS)])
def test_the_registered_pass_at_any_radius(name):
    for radius in (1e-4, 0.05, 2.0):
        report = check_divergence(name, radius)
        assert report.passed
        assert report.violations == ()


@pytest.mark.parametrize("divergence", GOOD, ids=str)
def test_good_ones_pass(divergence):
    assert check_divergence(divergence).passed
    assert check_divergence(divergence, 0.5).passed


@pytest.mark.parametrize("scale", [1e-6, 1e-3, 1e3, 1e6])
@pytest.mark.parametrize("name", ["kl", "reverse_kl", "tv", "chi2", "hellinger", "jensen_shannon"])
def test_a_multiple_passes(name, scale):
    f, at_zero, slope = (get_divergence(name), *limits(name))
    scaled = Divergence("scaled", lambda u: scale * f.f(u), scale * at_zero, scale * slope)
    assert check_divergence(scaled).passed


def limits(name):
    divergence = get_divergence(name)
    return divergence.f_at_zero, divergence.slope_at_infinity


def changed(**fields):
    return dataclasses.replace(CHI2, **{"closed_form": None, **fields})


def kl(at_zero=INF, slope=0.0):
    return Divergence("kl", lambda u: -u.log(), at_zero, slope)


def lopsided(logp, radius):
    """The lower bound of one radius and the upper bound of another."""
    return closed_forms.chi2(logp, radius)[0], closed_forms.chi2(logp, 2 * radius)[1]


def beyond_the_simplex(logp, radius):
    step = torch.sqrt(radius * torch.expm1(-logp))
    return torch.log1p(-step.clamp(max=1)), torch.log1p(step)


def in_p_itself(logp, radius):
    """Right in float64; in float32 nothing is left of 1 - p near p = 1."""
    p = logp.exp()
    step = torch.sqrt(radius * (1 - p) / p)
    return torch.log1p(-step.clamp(max=1)), torch.minimum(torch.log1p(step), -logp)


# every wrong f, the checks that it must fail, and a part of what must be said
BAD = {
    "concave": (
        Divergence("d", lambda u: u.sqrt() - 1, -1.0, 0.0),
        {"convex"},
        r"convex: .* off by .* u = .* In training: .* clip",
    ),
    "dent": (
        changed(f=lambda u: (u - 1) ** 2 - 0.02 * torch.exp(-5000 * (u - 1.5) ** 2)),
        {"convex"},
        r"u = 1\.(4|5)",
    ),
    "concave far away": (
        Divergence("d", lambda u: torch.log1p((u - 1) ** 2), math.log(2), 0.0),
        {"convex", "monotone"},
        r"radius = 0\.5\. In training: a likelier token would get more room",
    ),
    "wave": (
        changed(f=lambda u: torch.sin(u - 1)),
        {"convex", "precision", "limit at 0", "slope", "monotone"},
        "tokens of nearly equal p",
    ),
    "f(1) not 0": (
        changed(f=lambda u: (u - 1) ** 2 + 0.1, f_at_zero=1.1),
        {"zero at one", "roots", "interval", "gradient"},
        r"off by 0\.1, allowed 5e-11; f\(1\) = 0\.1\. In training: the radius is off",
    ),
    "f(1) nearly 0": (
        changed(f=lambda u: (u - 1) ** 2 + 1e-6, f_at_zero=1 + 1e-6),
        {"zero at one"},
        r"f\(1\) = 1e-06",
    ),
    "kink at the wrong place": (
        Divergence("d", lambda u: (u - 1.2).abs() / 2, 0.6, 0.5),
        {"zero at one", "roots", "interval", "gradient"},
        r"f\(1\) = 0\.1",
    ),
    "branches that do not meet": (
        Divergence("d", lambda u: torch.where(u < 1.2, 1 - u, u - 1), 1.0, 1.0),
        {"convex", "roots"},
        r"convex: .* u = 1\.20",
    ),
    "kink the wrong way": (
        Divergence("d", lambda u: torch.minimum((u - 1) ** 2, (u - 1).abs() / 2), 0.5, 0.5),
        {"convex"},
        r"u = 1\.5",
    ),
    "jump": (
        changed(f=lambda u: (u - 1) ** 2 + (u < 0.5).double(), f_at_zero=2.0),
        {"convex", "roots", "monotone"},
        r"u = 0\.4995",
    ),
    "not a number": (
        Divergence("d", lambda u: (u - 0.5).log(), 0.0, 0.0),
        {"finite", "zero at one", "convex", "precision", "limit at 0"},
        r"f\(0\.49.*\) = nan",
    ),
    "overflow to NaN": (
        Divergence("d", lambda u: u * u.log() + 1 / u.exp() * u.exp() - 1, 0.0, INF),
        {"finite", "slope"},
        r"f\(71.*\) = nan",
    ),
    "overflow to infinity": (
        Divergence("d", lambda u: (u - 1).cosh().log(), math.log(math.cosh(1)), 1.0),
        {"finite", "slope"},
        r"f\(71.*\) = inf",
    ),
    "wall": (
        Divergence("d", lambda u: torch.where((u - 1).abs() < 0.5, 0 * u, INF), INF, INF),
        {"finite"},
        r"f\(1\.5.*\) = inf",
    ),
    "f(0) too large": (
        changed(f_at_zero=2.0),
        {"limit at 0"},
        r"f\(u\) has come to 1, declared limit 2",
    ),
    "f(0) too small": (
        changed(f_at_zero=0.5),
        {"limit at 0", "saturation"},
        r"saturation: .* p = 0\.0\d+, radius = 0\.0",
    ),
    "f(0) not infinite": (changed(f_at_zero=INF), {"limit at 0"}, "come to 1, declared limit inf"),
    "f(0) not finite": (kl(at_zero=1000.0), {"limit at 0"}, "has come to 300, declared limit 1000"),
    "slope not 1": (kl(slope=1.0), {"slope"}, r"f\(u\)/u has come to .*, declared limit 1\."),
    "slope not infinite": (kl(slope=INF), {"slope"}, "declared limit inf.*room that rare tokens"),
    "slope not finite": (changed(slope_at_infinity=1.0), {"slope"}, "declared limit 1"),
    "slope of u log u": (
        Divergence("d", lambda u: u * u.log(), 0.0, 300.0),
        {"slope"},
        "has come to 300, declared limit 300",
    ),
    "slow limit, wrong": (
        dataclasses.replace(get_divergence("alpha:0.01"), f_at_zero=97.0),
        {"limit at 0"},
        "declared limit 97",
    ),
    "mean of the batch": (
        changed(f=lambda u: (u - 1) ** 2 / u.mean()),
        {"elementwise"},
        "would depend on the other tokens of its batch",
    ),
    "neighbors": (
        changed(f=lambda u: (u - 1) ** 2 + 1e-9 * (u.roll(1) - u)),
        {"elementwise"},
        "would depend on the other tokens",
    ),
    "sum": (changed(f=lambda u: ((u - 1) ** 2).sum()), {"elementwise"}, r"shape \(\)"),
    "random": (
        changed(f=lambda u: (u - 1) ** 2 * (1 + 1e-6 * torch.rand_like(u))),
        {"elementwise"},
        "off by",
    ),
    "in place": (changed(f=lambda u: u.sub_(1).pow_(2)), {"elementwise"}, "writes into"),
    "branch": (
        Divergence("d", lambda u: u - 1 if u > 1 else 1 - u, 1.0, 1.0),
        {"elementwise"},
        "f raised RuntimeError: Boolean value of Tensor",
    ),
    "a number": (Divergence("d", lambda u: 0.0, 1.0, 1.0), {"elementwise"}, "no tensor but float"),
    "float32": (
        changed(f=lambda u: (u.float() - 1) ** 2),
        {"elementwise"},
        r"a tensor of torch\.float32",
    ),
    "float32 inside": (
        changed(f=lambda u: ((u.float() - 1) ** 2).double()),
        {"convex", "precision"},
        "bounds carry the noise of f",
    ),
    "linear": (Divergence("d", lambda u: u - 1, -1.0, 1.0), {"charges"}, "nothing is ever clipped"),
    "zero": (Divergence("d", lambda u: 0 * u, 0.0, 0.0), {"charges"}, "g_f is 0"),
    "closed form of another": (
        changed(closed_form=closed_forms.tv),
        {"roots", "interval", "saturation", "gradient", "closed form"},
        "clips elsewhere than f says",
    ),
    "closed form of another radius": (
        changed(closed_form=lambda logp, radius: closed_forms.chi2(logp, 1.01 * radius)),
        {"roots", "interval", "gradient", "closed form"},
        r"roots: .* off by 0\.01",
    ),
    "closed form that fails": (
        changed(closed_form=lambda logp: closed_forms.chi2(logp, 0.05)),
        {"closed form"},
        "closed_form raised TypeError",
    ),
    "two trust regions": (
        changed(closed_form=lopsided),
        {"roots", "interval", "gradient", "closed form", "mirror"},
        "held by two different trust regions",
    ),
    "out of the simplex": (
        changed(closed_form=beyond_the_simplex),
        {"simplex", "mirror", "closed form"},
        "a clip at a ratio that no policy can have",
    ),
    "closed form without digits": (
        changed(closed_form=in_p_itself),
        {"float32", "roots"},
        r"float32: .* p = 1 - ",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_is_wrong_is_named(case):
    divergence, violated, words = BAD[case]
    with pytest.raises(ContractError, match=words) as caught:
        check_divergence(divergence)
    report = caught.value.report
    assert {check.name for check in report.violations} == violated
    assert not report.passed
    for check in report.violations:  # by how much, where, and what it breaks
        assert check.size > check.tolerance
        assert check.where
        assert check.breaks
        assert str(check) in str(caught.value)


def test_every_check_can_fail(monkeypatch):
    seen = set().union(*(violated for _, violated, _ in BAD.values()))
    assert set(_REQUIRES) == set(_BREAKS) == seen | {"Brent"}
    # bounds that pass all else solve the equation, so here the reference itself is moved

    def moved(*arguments, method="auto"):
        found = log_band(*arguments, method=method)
        return tuple(bound * (1 + 1e-6) for bound in found) if method == "brent" else found

    monkeypatch.setattr(bounds, "log_band", moved)
    with pytest.raises(ContractError, match=r"Brent: .* off by 1e-06") as caught:
        check_divergence(JEFFREYS)
    assert [check.name for check in caught.value.report.violations] == ["Brent"]


@pytest.mark.parametrize("name", ["jeffreys", "kl", "chi2", "jensen_shannon", "alpha:-1.5"])
def test_bounds_that_pass_are_those_of_fifty_digits(name):
    divergence = JEFFREYS if name == "jeffreys" else get_divergence(name)
    check_divergence(divergence)
    for logp in (-9.0, -2.0, -0.5, -0.01):
        bounds = log_band(torch.tensor([logp], dtype=torch.float64), divergence, 0.05)
        for found, exact in zip(bounds, reference.log_band(name, logp, 0.05), strict=True):
            if mp.isfinite(exact):
                assert found.item() == pytest.approx(float(exact), rel=1e-9)
            else:
                assert found.item() == -INF


def test_the_report_is_a_table():
    report = check_divergence(JEFFREYS, 0.1)
    assert str(report) == "divergence 'jeffreys' keeps its contract: 17 checks"
    rows = report.rows()
    assert [row["check"] for row in rows] == [name for name in _REQUIRES if name != "closed form"]
    assert {row["verdict"] for row in rows} == {"holds"}
    assert all(row["largest error"] <= row["allowed"] for row in rows)
    with pytest.raises(ContractError) as caught:
        check_divergence(changed(f_at_zero=2.0))
    verdicts = {row["check"]: row["verdict"] for row in caught.value.report.rows()}
    assert [name for name, verdict in verdicts.items() if verdict != "holds"] == ["limit at 0"]


@pytest.mark.parametrize(
    ("radius", "error", "words"),
    [
        (0.0, ValueError, "radius must be positive and finite, got 0.0"),
        (math.nan, ValueError, "got nan"),
        (1e308, ValueError, "got 1e\\+308"),
        ("0.05", TypeError, "radius must be a number, got '0.05'"),
        (True, TypeError, "got True"),
    ],
)
def test_a_radius_that_is_none(radius, error, words):
    with pytest.raises(error, match=words):
        check_divergence("kl", radius)
