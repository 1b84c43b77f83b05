"""What a divergence is: generators, limits, names."""

from __future__ import annotations

import dataclasses
import math

import band_reference as reference
import mpmath as mp
import pytest
import torch

from bandpo.divergences import (
    KL,
    REVERSE_KL,
    Divergence,
    alpha_divergence,
    get_divergence,
    list_divergences,
)

NAMES = [*list_divergences(), "alpha:0.5", "alpha:-1.5", "alpha:3", "alpha:0.9375"]
JEFFREYS = Divergence("jeffreys", lambda u: (u - 1) * u.log(), math.inf, math.inf)
U = torch.tensor(
    [1e-12, 1e-3, 0.2, 0.9, 1 - 1e-6, 1 + 1e-9, 1.1, 3.0, 50.0, 1e8], dtype=torch.float64
)


def test_the_nine_are_registered():
    assert list_divergences() == (
        "kl", "reverse_kl", "tv", "chi2", "neyman", "hellinger", "le_cam", "jensen_shannon",
    )  # fmt: skip
    assert get_divergence("alpha:0.5").name == "alpha:0.5"


@pytest.mark.parametrize("name", NAMES)
def test_generator_matches_its_definition(name):
    values = get_divergence(name).f(U)
    for u, value in zip(U.tolist(), values.tolist(), strict=True):
        with mp.workdps(50):
            exact = reference.F[name](mp.mpf(u))
        # every generator is free of cancellation but for terms linear in u - 1
        assert value == pytest.approx(float(exact), rel=1e-13, abs=1e-15 * abs(u - 1))


@pytest.mark.parametrize("name", NAMES)
def test_generator_is_convex_and_zero_at_one(name):
    divergence = get_divergence(name)
    u = torch.logspace(-6, 6, 4001, dtype=torch.float64)
    f = divergence.f(u)
    assert divergence.f(torch.ones(1, dtype=torch.float64)).item() == 0
    chord, middle = 0.5 * (f[1:] + f[:-1]), divergence.f(0.5 * (u[1:] + u[:-1]))
    assert (middle <= chord + 1e-15 * (1 + chord.abs())).all()


@pytest.mark.parametrize("name", NAMES)
def test_limits_are_those_of_the_generator(name):
    divergence = get_divergence(name)
    small = torch.tensor([1e-150, 1e-200], dtype=torch.float64)
    large = torch.tensor([1e80, 1e100], dtype=torch.float64)
    at_zero, slope = divergence.f(small), divergence.f(large) / large
    for found, limit in ((at_zero, divergence.f_at_zero), (slope, divergence.slope_at_infinity)):
        if math.isinf(limit):
            assert found[1] > found[0] > 10
        else:
            assert found.tolist() == pytest.approx([limit] * 2, rel=2e-5)
    assert divergence.at(torch.zeros(1).double()).item() == divergence.f_at_zero


def test_alpha_contains_its_relatives():
    for alpha, name, factor in ((2, "chi2", 0.5), (0.5, "hellinger", 2), (-1, "neyman", 0.5)):
        expected = factor * get_divergence(name).f(U)
        torch.testing.assert_close(alpha_divergence(alpha).f(U), expected, rtol=1e-8, atol=1e-15)
    assert get_divergence("alpha:0") is KL
    assert get_divergence("alpha:1") is REVERSE_KL
    # near its limits the family joins them, up to a multiple of u - 1
    near_zero, near_one = alpha_divergence(1e-9).f(U), alpha_divergence(1 - 1e-9).f(U)
    torch.testing.assert_close(near_zero, KL.f(U) + U - 1, rtol=1e-6, atol=1e-14)
    torch.testing.assert_close(near_one, REVERSE_KL.f(U) - U + 1, rtol=1e-6, atol=1e-14)


def test_import_path_and_object():
    assert get_divergence("bandpo.divergences:CHI2") is get_divergence("chi2")
    assert get_divergence("test_divergences:JEFFREYS").f(U).shape == U.shape
    assert get_divergence(JEFFREYS) is JEFFREYS
    with pytest.raises(dataclasses.FrozenInstanceError):
        JEFFREYS.name = "other"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("spec", "error", "words"),
    [
        ("kll", ValueError, "unknown divergence 'kll'; known are kl, reverse_kl"),
        ("alpha:two", ValueError, "'alpha:two'.*must be a finite number"),
        ("alpha:nan", ValueError, "'alpha:nan'"),
        ("no.such.module:F", ValueError, "cannot be imported"),
        ("bandpo.divergences:NONE", ValueError, "cannot be imported"),
        (":F", ValueError, "cannot be imported"),
        ("math:pi", TypeError, "must name a Divergence, got 3.14"),
        (3, TypeError, "must be a name or a Divergence, got 3"),
        (None, TypeError, "got None"),
    ],
)
def test_unknown_divergence(spec, error, words):
    with pytest.raises(error, match=words):
        get_divergence(spec)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (("", torch.log, 0.0, 0.0), ValueError, "name must not be empty"),
        ((1, torch.log, 0.0, 0.0), TypeError, "name must be a string, got 1"),
        (("d", "log", 0.0, 0.0), TypeError, "f must be a function"),
        (("d", torch.log, math.nan, 0.0), ValueError, "f_at_zero must be finite"),
        (("d", torch.log, 0.0, -math.inf), ValueError, "slope_at_infinity must be finite"),
        (("d", torch.log, "inf", 0.0), TypeError, "f_at_zero must be a number, got 'inf'"),
    ],
)
def test_bad_divergence(arguments, error, words):
    with pytest.raises(error, match=words):
        Divergence(*arguments)
