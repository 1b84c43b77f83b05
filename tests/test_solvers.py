"""The solvers against one another, against SciPy, and the convergence that the book reports."""

from __future__ import annotations

import dataclasses
import math

import band_reference as reference
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import elementwise

from bandpo.divergences import Divergence, get_divergence
from bandpo.operator import log_band, log_band_side
from bandpo.solvers import (
    SOLVERS,
    bisection_steps,
    get_solver,
    kl_drop,
    textbook_bisection,
)
from bandpo.table import BandTable

LOGP = torch.tensor([-60.0, -20.0, -7.0, -2.3, -0.7, -0.1, -1e-3, -1e-9], dtype=torch.float64)
DEDICATED = ["kl", "tv", "chi2", "neyman", "hellinger", "le_cam"]
HOCKEY_STICK = Divergence("hockey_stick", lambda u: (u - 1.5).clamp(min=0), 0.0, 1.0)
KINKS = Divergence(
    "kinks",
    lambda u: (u - 1).abs() + (u - 0.5).abs() - 0.5 + (u - 3).clamp(min=0) * 2,
    1.0,
    4.0,
)


def close(found, expected, tolerance):
    for a, b in zip(found, expected, strict=True):
        resolved = b > -600  # r is zero to the generic solver below e^-700
        torch.testing.assert_close(a[resolved], b[resolved], rtol=tolerance, atol=1e-300)
        assert (a[~resolved] <= -600).all()


@pytest.mark.claim("C8", "C9")
@pytest.mark.parametrize("name", DEDICATED)
@pytest.mark.parametrize("radius", [1e-3, 0.05, 0.7])
def test_every_solver_gives_the_same(name, radius):
    auto = log_band(LOGP, name, radius)
    close(log_band(LOGP, name, radius, method="generic"), auto, 1e-11)
    close(log_band(LOGP, name, radius, method="brent"), auto, 1e-11)


@pytest.mark.parametrize("name", ["reverse_kl", "jensen_shannon", "alpha:0.3", "alpha:-2"])
def test_generic_is_brent(name):
    for radius in (1e-3, 0.3):
        brent = log_band(LOGP, name, radius, method="brent")
        close(log_band(LOGP, name, radius), brent, 1e-11)


@pytest.mark.parametrize("divergence", [HOCKEY_STICK, KINKS], ids=str)
def test_kinks_cost_nothing(divergence):
    # g is piecewise linear; the edges are found by a scan of a fine grid of q
    p, radius = 0.3, 0.2
    q = torch.linspace(0, 1, 2_000_001, dtype=torch.float64)
    g = p * divergence.f(q / p) + (1 - p) * divergence.f((1 - q) / (1 - p))
    inside = q[g <= radius]
    lower, upper = log_band(torch.tensor([math.log(p)]).double(), divergence, radius)
    assert lower.exp().item() * p == pytest.approx(inside[0].item(), abs=1e-6)
    assert upper.exp().item() * p == pytest.approx(inside[-1].item(), abs=1e-6)


@pytest.mark.parametrize("name", ["tv", "chi2", "neyman", "reverse_kl"])
def test_fewer_halvings_for_float32(name):
    logp = -torch.logspace(-12, 1.5, 501)
    for narrow, wide in zip(
        log_band(logp, name, 0.05, method="generic"),
        log_band(logp.double(), name, 0.05, method="generic"),
        strict=True,
    ):
        resolved = (wide != 0) & (wide > -5)  # else next to saturation
        error = (narrow[resolved] / wide[resolved] - 1).abs().max()
        assert 1e-7 < error < 1.1e-6


@settings(max_examples=60, deadline=None)
@given(st.floats(-12, -1e-3), st.floats(-6.5, 0.5).map(math.exp), st.sampled_from(DEDICATED))
def test_against_scipy_in_q(logp, radius, name):
    # SciPy's Chandrupatla on q itself, NumPy only
    p = math.exp(logp)
    f = {
        "kl": lambda u: -np.log(u),
        "tv": lambda u: abs(u - 1) / 2,
        "chi2": lambda u: (u - 1) ** 2,
        "neyman": lambda u: (u - 1) ** 2 / u,
        "hellinger": lambda u: (np.sqrt(u) - 1) ** 2,
        "le_cam": lambda u: (u - 1) ** 2 / (u + 1),
    }[name]

    def excess(q):
        return p * f(q / p) + (1 - p) * f((1 - q) / (1 - p)) - radius

    lower, upper = log_band(torch.tensor([logp], dtype=torch.float64), name, radius)
    for bound, bracket in ((lower, (p * 1e-290, p)), (upper, (p, 1 - 1e-16))):
        with np.errstate(all="ignore"):
            if excess(bracket[0]) * excess(bracket[1]) < 0:
                root = elementwise.find_root(excess, bracket).x
                q = math.exp(logp + bound.item())
                assert q == pytest.approx(float(root), rel=1e-8, abs=1e-13)


@pytest.mark.claim("C9")
def test_bisection_keeps_its_bound():
    logp = torch.tensor([-5.0, -1.0, -0.2], dtype=torch.float64)
    assert bisection_steps(1.0, 1e-6) == 20
    assert bisection_steps(math.exp(5) - 1, 1e-6) == 28
    for name in ("kl", "tv", "reverse_kl"):
        exact = log_band(logp, name, 0.05)
        for tolerance in (1e-3, 1e-6, 1e-9):
            found = textbook_bisection(get_divergence(name), logp, 0.05, tolerance)
            errors = [(a.exp() - b.exp()).abs().max() for a, b in zip(found, exact, strict=True)]
            assert max(errors) <= tolerance
            assert max(errors) > tolerance / 100  # and no more halvings than that
    ends = log_band(torch.tensor([-math.inf, 0.0]).double(), "kl", method="bisection")
    assert all(x.isnan().all() for x in ends)
    upward = torch.tensor([True, False, True])
    side = log_band_side(logp, upward, "kl", method="bisection")
    torch.testing.assert_close(side, log_band_side(logp, upward, "kl"), rtol=1e-9, atol=0)


@pytest.mark.claim("C9", "C12")
def test_kl_needs_one_step_in_float32_and_two_in_float64():
    logit = torch.linspace(-55, 55, 1501, dtype=torch.float64)[:, None]
    radius = torch.logspace(-6, math.log10(20), 60, dtype=torch.float64)
    w = torch.exp(-logit).expand(-1, 60)
    exact = kl_drop(w, radius, steps=4)
    errors = [(kl_drop(w, radius, n) / exact - 1).abs() for n in (0, 1, 2)]
    assert 1e-3 < errors[0].max() < 0.02
    assert 1e-9 < errors[1].max() < 1.1e-7
    assert errors[2][:, radius > 1e-3].max() < 1e-14
    # and the exact one is: 50 digits
    for logp, delta in ((-3.0, 0.05), (-0.01, 1.3), (-30.0, 0.001)):
        w = torch.expm1(torch.tensor([-logp], dtype=torch.float64))
        lower = reference.log_band("kl", logp, delta)[0]
        assert -kl_drop(w, delta, 2).item() == pytest.approx(float(lower), rel=1e-14)


def test_which_solver_auto_takes():
    assert get_solver("auto", get_divergence("kl")) is SOLVERS["newton"]
    assert get_solver("auto", get_divergence("tv")) is SOLVERS["closed_form"]
    assert get_solver("auto", get_divergence("reverse_kl")) is SOLVERS["generic"]
    no_form = dataclasses.replace(get_divergence("tv"), closed_form=None)
    assert get_solver("auto", no_form) is SOLVERS["generic"]


def test_no_step_more_for_any_data():
    # the same operations whatever the values: the traced graphs are equal
    def graph(logp):
        traced = torch.fx.experimental.proxy_tensor.make_fx(
            lambda x: log_band(x, "reverse_kl", 0.05, method="generic")
        )
        with torch.no_grad():
            return len(traced(logp).graph.nodes)

    easy = torch.full((4,), -1.0, dtype=torch.float64)
    hard = torch.tensor([-1e-16, -69.0, -math.inf, 0.0], dtype=torch.float64)
    assert graph(easy) == graph(hard)


@pytest.mark.parametrize("method", ["newton", "closed_form"])
def test_dedicated_solvers_never_leave_the_simplex(method):
    logp = -(torch.rand(100_000) ** 6) * 20
    divergences = ["kl"] if method == "newton" else DEDICATED[1:]
    for name in divergences:
        for radius in (1e-4, 0.05, 3.0):
            lower, upper = log_band(logp, name, radius, method=method)
            assert (lower <= 0).all()
            assert (upper >= 0).all()
            assert (upper <= -logp).all()


# --- the table ----------------------------------------------------------------------------------


@pytest.mark.claim("C12")
@pytest.mark.parametrize("name", ["kl", "tv", "reverse_kl", "chi2"])
def test_table_keeps_its_stated_error(name):
    table = BandTable.build(name, 0.05)
    assert table.error < 5e-5
    generator = torch.Generator().manual_seed(1)
    x = torch.exp(torch.rand(20_000, generator=generator) * 26 - 22)  # -log p up to e^4
    lower, upper = (bound.double() for bound in table.log_band(-x))
    exact_lower, exact_upper = log_band(-x.double(), name, 0.05)
    slack = 1.1 * table.error + 3e-7  # points between those measured, and float32
    shrink, exact_shrink = -torch.expm1(lower), -torch.expm1(exact_lower)
    assert ((shrink - exact_shrink).abs() <= slack * exact_shrink).all()
    assert ((upper - exact_upper).abs() <= slack * exact_upper).all()
    assert (upper <= x).all()
    upward = torch.rand(20_000, generator=generator) < 0.5
    side = table.log_band_side(-x, upward)
    assert side.equal(torch.where(upward, upper, lower).float())


def test_table_is_as_fine_as_asked():
    coarse, fine = BandTable.build("kl", 0.05, bits=4), BandTable.build("kl", 0.05, bits=7)
    assert 30 < coarse.error / fine.error < 130  # 4^3, but for float32
    with pytest.raises(ValueError, match="bits must be from 1 to 14, got 0"):
        BandTable.build("kl", 0.05, bits=0)
    with pytest.raises(TypeError, match="logp must be a floating-point tensor"):
        fine.log_band([0.5])


def test_table_at_the_edges_and_in_a_graph():
    table = BandTable.build("kl", 0.05)
    logp = torch.tensor([-math.inf, -300.0, -1.0, -1e-20, -0.0, 0.0, math.nan])
    compiled = torch.compile(table.log_band, fullgraph=True, backend="aot_eager")
    for found, again in zip(table.log_band(logp), compiled(logp), strict=True):
        torch.testing.assert_close(found, again, rtol=0, atol=0, equal_nan=True)
    lower, upper = table.log_band(logp)
    assert lower[0] == -math.inf
    assert upper[0] == math.inf
    assert lower[5].item() == pytest.approx(-0.05, rel=1e-5)
    assert upper[3:6].tolist() == pytest.approx([1e-20, 0, 0])
    assert upper[1].item() == pytest.approx(300 + math.log(-math.expm1(-0.05)), rel=1e-6)
    assert lower[6].isnan()
    assert upper[6].isnan()
