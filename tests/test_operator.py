"""The operator against 50-digit references, its contract at the edges, and its identities."""

from __future__ import annotations

import math

import band_reference as reference
import mpmath as mp
import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from bandpo.divergences import Divergence, get_divergence, list_divergences
from bandpo.operator import (
    band,
    binary_divergence,
    inside_band,
    limits,
    log_band,
    log_band_side,
    saturation,
    summary,
)

JEFFREYS = Divergence("jeffreys", lambda u: (u - 1) * u.log(), math.inf, math.inf)
NAMES = [*list_divergences(), "alpha:0.5", "alpha:-1.5", "alpha:3", "jeffreys"]
EXACT = {"kl", "tv", "chi2", "neyman", "hellinger", "le_cam"}
INF = math.inf

# p from 1e-30 to 1 - 1.1e-16, exact in float32 too
LOGP = torch.tensor(
    [-69.0776, -27.6, -11.5, -4.6, -2.3, -0.69314718, -0.105, -1e-3, -1e-8, -1.11e-16]
).tolist()


def named(name: str) -> Divergence:
    return JEFFREYS if name == "jeffreys" else get_divergence(name)


def tensor(values, dtype=torch.float64):
    return torch.tensor(values, dtype=dtype)


def assert_bound(name, value, exact, logp, radius, tolerance):
    """Right to the tolerance in log r, or exact for a radius right to the tolerance."""
    if value == float(exact) or abs(value - exact) <= tolerance * abs(exact):
        return
    if value == -INF and exact < -700:  # no float64 r is that small, or no float32 log r
        return
    at = reference.g(name, logp, value)
    # a bound of 0 is right where g_f(p, 0) reaches the radius, or all but
    wrong = at - radius if value == -INF else abs(at - radius)
    assert wrong <= tolerance * radius, (logp, radius, value, float(exact))


@pytest.mark.claim("C4", "C9")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("radius", [1e-4, 1e-3, 0.05, 0.5, 2.0])
def test_against_50_digits(name, radius):
    for dtype in (torch.float64, torch.float32):
        logp = tensor(LOGP, dtype)
        bounds = log_band(logp, named(name), radius)
        double = 1e-12 if name in EXACT else 1e-9
        tolerance = 1e-5 if dtype == torch.float32 else double
        for side in (0, 1):
            assert bounds[side].dtype == dtype
            for value, given_logp in zip(bounds[side].tolist(), logp.tolist(), strict=True):
                exact = reference.log_band(name, given_logp, radius)[side]
                assert_bound(name, value, exact, given_logp, radius, tolerance)


@pytest.mark.claim("C3", "C4")
def test_published_values():
    table = {
        "kl": [(0.01, 0.002497385718712505, 7.8098462896721115),
               (0.1, 0.31278396272279346, 2.2007860110692454),
               (0.5, 0.6915156698241549, 1.308484330175846),
               (0.99, 0.9312136738416958, 1.0100757839826398)],
        "reverse_kl": [(1e-4, 0.0, 129.05364342279418), (0.5, 0.6864368032700646,
                        1.313563196729932), (0.99, 0.9544300148862404, 1 / 0.99)],
        "jensen_shannon": [(0.01, 0.0, 17.929929843919883), (0.9, 0.7112015519458238, 1 / 0.9)],
    }  # fmt: skip
    for name, rows in table.items():
        for p, lower, upper in rows:
            found = band(np.array(p), name, 0.05)
            assert [x.item() for x in found] == pytest.approx([lower, upper], rel=2e-11)


@pytest.mark.parametrize("radius", [1e-6, 50.0])
def test_kl_beyond_the_contract(radius):
    logp = tensor(LOGP)
    for side, bounds in enumerate(log_band(logp, "kl", radius)):
        for value, given_logp in zip(bounds.tolist(), LOGP, strict=True):
            exact = reference.log_band("kl", given_logp, radius)[side]
            assert_bound("kl", value, exact, given_logp, radius, 1e-10)


# --- identities, over anything ------------------------------------------------------------------

logps = st.one_of(st.floats(-60, -1e-6), st.floats(-37, 0).map(lambda x: -math.exp(x)))
radii = st.floats(math.log(1e-3), math.log(3)).map(math.exp)
divergences = st.sampled_from(NAMES)


@settings(max_examples=300, deadline=None)
@given(logps, radii, divergences)
def test_bounds_solve_their_equation(logp, radius, name):
    divergence, x = named(name), tensor([logp])
    lower, upper = log_band(x, divergence, radius)
    assert (lower <= 0).all()
    assert (upper >= 0).all()
    assert (upper <= -x).all()
    for bound, saturated in ((lower, lower == -INF), (upper, upper == -x)):
        if saturated.item():
            edge = tensor([-INF if bound.item() < 0 else 0.0])
            if edge.item() == 0 and logp < -1:
                assert binary_divergence(x, edge, divergence).item() <= radius * (1 + 1e-9)
        else:  # g_f passes the radius within the rounding of the bound
            bound = mp.mpf(bound.item())
            slack = mp.mpf("1e-11")
            assert reference.g(name, logp, bound * (1 - slack)) < radius * (1 + 1e-11)
            assert reference.g(name, logp, bound * (1 + slack)) > radius * (1 - 1e-11)


@settings(max_examples=200, deadline=None)
@given(logps, radii, divergences)
@pytest.mark.claim("prop-mirror")
def test_mirror(logp, radius, name):
    # p upper(p) + (1 - p) lower(1 - p) = 1
    x = tensor([logp])
    other = torch.log(-torch.expm1(x)) if logp > -0.69 else torch.log1p(-x.exp())
    upper = log_band(x, named(name), radius)[1]
    lower = log_band(other, named(name), radius)[0]
    total = torch.exp(x + upper) + torch.exp(other + lower)
    assert total.item() == pytest.approx(1, abs=3e-12)


@settings(max_examples=200, deadline=None)
@given(logps, radii, st.floats(1.001, 3), divergences)
def test_monotone_in_radius_and_p(logp, radius, factor, name):
    divergence, x = named(name), tensor([logp])
    lower, upper = log_band(x, divergence, radius)
    wider_lower, wider_upper = log_band(x, divergence, radius * factor)
    assert wider_lower <= lower
    assert wider_upper >= upper
    rarer_lower, rarer_upper = log_band(x * factor, divergence, radius)
    slack = 1e-11
    assert rarer_upper >= upper * (1 - slack)
    assert rarer_lower <= lower * (1 - slack)


@settings(max_examples=200, deadline=None)
@given(logps, radii, divergences)
def test_float32_follows_float64(logp, radius, name):
    x = torch.tensor([logp], dtype=torch.float32)
    for narrow, wide in zip(
        log_band(x, named(name), radius), log_band(x.double(), named(name), radius), strict=True
    ):
        assert narrow.dtype == torch.float32
        if wide.item() > -5 or math.isinf(named(name).f_at_zero):  # else next to saturation
            assert narrow.item() == pytest.approx(wide.item(), rel=1e-5, abs=1e-37)


@settings(max_examples=200, deadline=None)
@given(logps, radii, divergences, st.floats(1e-6, 0.5), st.booleans())
def test_membership_agrees_with_the_bounds(logp, radius, name, step, dtype32):
    divergence = named(name)
    x = torch.tensor([logp], dtype=torch.float32 if dtype32 else torch.float64)
    step = max(step, 1e-3) if dtype32 else step
    lower, upper = log_band(x, divergence, radius)
    assume(lower.item() > -5)  # next to saturation a rounding of p moves log r at will
    just_in = x + torch.cat([lower, upper]) * (1 - step)
    just_out = x + torch.cat([lower, upper]) * (1 + step)
    inside = inside_band(x, just_in.clamp(max=0), divergence, radius)
    assert inside.all()
    outside = inside_band(x, just_out, divergence, radius) if (just_out <= 0).all() else None
    if outside is not None:
        # float resolves 1 - q no better than its own rounding
        resolved = -just_out > 64 * torch.finfo(x.dtype).eps
        assert not (outside & resolved).any()


# --- edges, by contract -------------------------------------------------------------------------


@pytest.mark.claim("C5", "prop-limits")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_ends_of_the_simplex(name, dtype):
    divergence = named(name)
    lower, upper = log_band(tensor([-INF, 0.0, -0.0], dtype), divergence, 0.05)
    assert upper.tolist() == [INF, 0.0, 0.0]
    assert lower[0] == -INF
    assert lower[1] == lower[2]
    slope = divergence.slope_at_infinity
    if math.isinf(slope):
        assert lower[1] == 0
    else:
        r = lower[1].double().exp()
        left = divergence.f(r) + (1 - r) * slope
        assert left.item() == pytest.approx(0.05, rel=1e-5 if dtype == torch.float32 else 1e-10)
    near = log_band(tensor([-1e-30], dtype), divergence, 0.05)[0]
    # with an endless slope the limit may be reached as slowly as 1 / log(1 - p)
    slack = 1e-6 if math.isfinite(slope) else 1e-3
    assert near.item() == pytest.approx(lower[1].item(), abs=slack)


@pytest.mark.parametrize("name", ["kl", "tv", "chi2", "neyman", "hellinger", "le_cam"])
def test_far_below_any_p_in_use(name):
    # log p = -200 underflows float32 and log p = -2000 float64; the bounds go on
    for dtype, logp in ((torch.float32, [-58.0, -200.0]), (torch.float64, [-330.0, -2000.0])):
        near, far = log_band(tensor(logp, dtype), name, 0.05)[1].tolist()
        power = 0.5 if name == "chi2" else 1.0
        assert far - near == pytest.approx(power * (logp[0] - logp[1]), rel=1e-6)
    lower = log_band(tensor([-95.0], torch.float32), "neyman", 0.05)[0].item()
    assert lower == pytest.approx(-95 - math.log(0.05), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_narrow_types(dtype):
    logp = torch.tensor([-9.0, -1.5, -0.25, -0.0078125], dtype=dtype)
    for name in NAMES:
        for narrow, wide in zip(
            log_band(logp, named(name)), log_band(logp.double(), named(name)), strict=True
        ):
            assert narrow.dtype == torch.float32
            torch.testing.assert_close(narrow, wide.float(), rtol=1e-5, atol=0)
    assert binary_divergence(logp, logp * 2).dtype == torch.float32


def test_a_few_roundings_above_zero():
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        above = torch.full((3,), 3 * torch.finfo(dtype).eps, dtype=dtype)
        assert log_band(above)[1].tolist() == [0, 0, 0]
        assert inside_band(above, above).all()


def test_subnormals():
    tiny = torch.tensor([-5e-324, -1e-310], dtype=torch.float64)
    for name in NAMES:
        lower, upper = log_band(tiny, named(name))
        assert (upper >= 0).all()
        assert (upper <= -tiny).all()
        assert not lower.isnan().any()


@pytest.mark.parametrize("name", NAMES)
def test_shapes_and_nan(name):
    divergence = named(name)
    logp = -torch.rand(6, 4, dtype=torch.float64)
    whole = log_band(logp, divergence)
    assert log_band(logp.T, divergence)[0].equal(whole[0].T)
    assert log_band(logp[::2, 1], divergence)[1].equal(whole[1][::2, 1])
    assert log_band(logp[0, 0], divergence)[0].shape == ()
    assert log_band(logp[:0], divergence)[0].shape == (0, 4)
    logp[2, 3] = math.nan
    for with_nan, without in zip(log_band(logp, divergence), whole, strict=True):
        assert with_nan.isnan().nonzero().tolist() == [[2, 3]]
        assert with_nan[:2].equal(without[:2])
    assert not inside_band(logp, logp, divergence)[2, 3]


def test_long_tensors_are_cut_and_joined():
    logp = -torch.rand(3, 70_001, dtype=torch.float64) * 9
    radius = torch.rand(70_001, dtype=torch.float64) + 0.01
    whole, rows = log_band(logp, "kl", radius), torch.tensor([0, 2])
    for column in (0, 32_768, 70_000):
        part = log_band(logp[rows, column], "kl", float(radius[column]))
        for side in (0, 1):
            torch.testing.assert_close(part[side], whole[side][rows, column], rtol=1e-13, atol=0)
    upward = torch.rand(3, 70_001) < 0.5
    side = log_band_side(logp, upward, "kl", radius)
    torch.testing.assert_close(side, torch.where(upward, whole[1], whole[0]), rtol=1e-13, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_one_side_is_that_of_both(name):
    logp = tensor([-INF, *LOGP, 0.0, math.nan])
    upward = torch.arange(13) % 2 == 0
    for dtype in (torch.float64, torch.float32):
        lower, upper = log_band(logp.to(dtype), named(name))
        for up in (upward, ~upward, torch.tensor(True)):
            side = log_band_side(logp.to(dtype), up, named(name))
            both = torch.where(up, upper, lower)
            torch.testing.assert_close(side, both, rtol=3e-7, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", NAMES)
def test_radius_per_token(name):
    radius = tensor([[0.01], [0.5]])
    logp = tensor(LOGP)
    lower, upper = log_band(logp, named(name), radius)
    assert lower.shape == (2, len(LOGP))
    for row in (0, 1):
        alone = log_band(logp, named(name), radius[row].item())
        torch.testing.assert_close(lower[row], alone[0], rtol=1e-14, atol=0)
        torch.testing.assert_close(upper[row], alone[1], rtol=1e-14, atol=0)
    inside = inside_band(logp, logp - 0.3, named(name), radius)
    assert inside.shape == lower.shape


def test_bounds_are_constants():
    logp = tensor(LOGP).requires_grad_()
    radius = tensor(0.05).requires_grad_()
    for name in NAMES:
        upward = torch.tensor(True)
        results = [
            *log_band(logp, named(name), radius),
            log_band_side(logp, upward, named(name), radius),
            binary_divergence(logp, logp, named(name)),
            *band(logp.exp(), named(name)),
        ]
        assert not any(x.requires_grad for x in results)


@pytest.mark.parametrize("name", NAMES)
def test_vmap(name):
    logp, upward = tensor(LOGP).reshape(5, 2), torch.arange(10).reshape(5, 2) % 3 == 0
    radius = tensor([0.01, 0.05, 0.1, 0.5, 1.0])

    def both(logp, upward, radius):
        return (*log_band(logp, named(name), radius),
                log_band_side(logp, upward, named(name), radius),
                inside_band(logp, logp - 0.1, named(name), radius))  # fmt: skip

    mapped = torch.func.vmap(both)(logp, upward, radius)
    for found, expected in zip(mapped, both(logp, upward, radius[:, None]), strict=True):
        assert found.equal(expected)


@pytest.mark.parametrize("name", NAMES)
def test_whole_graph(name):
    logp = tensor([-INF, *LOGP, 0.0, math.nan])

    def everything(logp):
        return (*log_band(logp, named(name)), log_band_side(logp, logp > -1, named(name)),
                binary_divergence(logp, logp - 0.1, named(name)))  # fmt: skip

    torch.compiler.reset()
    compiled = torch.compile(everything, fullgraph=True, backend="aot_eager")
    for found, expected in zip(compiled(logp), everything(logp), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-20, equal_nan=True)


@pytest.mark.slow
def test_compiled_code_is_as_exact():
    # Inductor's own expm1 would lose every digit near p = 1
    def everything(logp):
        return log_band_side(logp, logp > -1), binary_divergence(logp, 1.5 * logp)

    torch.compiler.reset()
    compiled = torch.compile(everything, fullgraph=True, dynamic=False)
    # a multiple of the vector length, so that the vectorized loop is what runs
    logp = tensor([*LOGP, -1e-5, -1e-6, -30.0, -0.5, -0.35, -0.01] * 4, torch.float32)
    bound, g = compiled(logp)
    exact_bound, exact_g = everything(logp.double())
    torch.testing.assert_close(bound, exact_bound.float(), rtol=1e-5, atol=0)
    torch.testing.assert_close(g, exact_g.float(), rtol=1e-5, atol=1e-7)


def test_outside_the_domain_where_values_cannot_be_read():
    logp = tensor([-1.0, 0.5])
    compiled = torch.compile(lambda x: log_band(x), fullgraph=True, backend="aot_eager")
    assert compiled(logp)[0].isnan().tolist() == [False, True]
    radius = tensor([0.05, -1.0])
    mapped = torch.func.vmap(lambda r: log_band(logp[:1], "tv", r)[0])(radius)
    assert mapped.flatten().isnan().tolist() == [False, True]


@pytest.mark.parametrize("device", ["cpu", *["cuda"] * torch.cuda.is_available()])
def test_every_device_gives_what_one_element_at_a_time_gives(device):
    logp = tensor([-INF, *LOGP, 0.0, math.nan])
    for name in NAMES:
        for dtype, rtol in ((torch.float64, 1e-11), (torch.float32, 3e-6)):
            one_by_one = zip(*(log_band(x, named(name)) for x in logp.to(dtype)), strict=True)
            at_once = log_band(logp.to(dtype).to(device), named(name))
            for alone, together in zip(one_by_one, at_once, strict=True):
                torch.testing.assert_close(
                    together.cpu(), torch.stack(alone), rtol=rtol, atol=0, equal_nan=True
                )


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda x: log_band([0.1]), TypeError, r"logp must be a floating-point tensor, got \[0.1"),
        (lambda x: log_band(torch.tensor([1])), TypeError, "got a tensor of torch.int64"),
        (lambda x: log_band(-x), ValueError, "at most 0; got 1.0"),
        (lambda x: inside_band(x, -x), ValueError, "logq must be a log probability.*got 1.0"),
        (lambda x: log_band(x, "kl", 0), ValueError, "radius must be finite and > 0, got 0"),
        (lambda x: log_band(x, "kl", -0.1), ValueError, "got -0.1"),
        (lambda x: log_band(x, "kl", INF), ValueError, "got inf"),
        (lambda x: log_band(x, "kl", math.nan), ValueError, "got nan"),
        (lambda x: inside_band(x, x, "kl", 0.0), ValueError, "got 0.0"),
        (lambda x: log_band(x, "kl", "0.05"), TypeError, "radius must be a number.*'0.05'"),
        (lambda x: log_band(x, "kl", True), TypeError, "got True"),
        (lambda x: log_band(x, "kl", tensor([0.1, 0.0])), ValueError, "radius.*got 0.0"),
        (lambda x: log_band(x, "kl", torch.tensor([1])), TypeError, "radius must be a floating"),
        (lambda x: log_band_side(x, x), TypeError, "upward must be a tensor of bool"),
        (lambda x: log_band_side(x, True), TypeError, "upward must be a tensor of bool, got True"),
        (lambda x: log_band(x, "nope"), ValueError, "unknown divergence 'nope'"),
        (lambda x: log_band(x, "kl", method="best"), ValueError, "unknown method 'best'; known"),
        (lambda x: log_band(x, "tv", method="newton"), ValueError, "forward KL only, not 'tv'"),
        (lambda x: log_band(x, "kl", method="closed_form"), ValueError, "no closed form"),
        (lambda x: band(np.array([0.5, 1.5])), ValueError, "p must be a probability.*got 1.5"),
        (lambda x: band(tensor([-0.5])), ValueError, "got -0.5"),
        (lambda x: band("0.5"), TypeError, "p must hold numbers, got '0.5'"),
        (lambda x: band(torch.tensor([True])), TypeError, "p must be a floating-point tensor"),
        (lambda x: saturation("kl", -1), ValueError, "radius must be finite and > 0, got -1"),
    ],
)
def test_bad_arguments(call, error, words):
    with pytest.raises(error, match=words):
        call(tensor([-1.0]))


# --- ratio space, thresholds, limits ------------------------------------------------------------


def test_band_in_ratio_space():
    p = np.array([[0.1, 0.5], [0.9, 1.0]])
    lower, upper = band(p, "tv", 0.05)
    assert isinstance(lower, np.ndarray)
    assert lower == pytest.approx(1 - 0.05 / p)
    assert upper == pytest.approx(np.minimum(1 + 0.05 / p, 1 / p))
    single = band(0.5, "tv")
    assert single[0].item() == pytest.approx(0.9)
    assert band([1, 0], "tv")[0].tolist() == pytest.approx([0.95, 0])
    assert band(np.float32([0.5]))[0].dtype == np.float32
    assert band(torch.tensor([0.5], dtype=torch.bfloat16))[1].dtype == torch.float32
    radii = np.array([0.05, 0.2])
    assert band(np.array([0.5]), "tv", radii)[0] == pytest.approx(1 - radii / 0.5)


@pytest.mark.claim("C7", "prop-saturation")
@pytest.mark.parametrize("radius", [0.01, 0.05, 0.3])
def test_saturation_is_where_the_bounds_say(radius):
    closed = {"reverse_kl": -math.expm1(-radius), "tv": radius, "chi2": radius / (1 + radius)}
    for name in NAMES:
        lower_until, upper_from = saturation(named(name), radius)
        assert upper_from == pytest.approx(1 - lower_until, abs=1e-15)
        if math.isinf(named(name).f_at_zero):
            assert (lower_until, upper_from) == (0, 1)
            continue
        if name in closed:
            assert lower_until == pytest.approx(closed[name], rel=1e-13)
        below, above = (
            band(tensor([lower_until * (1 - 1e-9)]), named(name), radius),
            band(tensor([lower_until * (1 + 1e-4)]), named(name), radius),
        )
        assert below[0].item() == 0 < above[0].item()
        p = tensor([upper_from + 1e-9, upper_from - 1e-4])
        upper = band(p, named(name), radius)[1]
        assert upper[0] == pytest.approx(1 / p[0].item(), rel=1e-13)
        assert upper[1] < 1 / p[1] * (1 - 1e-12)
    assert saturation("tv", 2.0) == (1.0, 0.0)


@pytest.mark.claim("C5", "prop-limits")
def test_limits_are_those_of_the_bounds():
    assert limits("kl", 0.05) == {
        "lower_at_one": pytest.approx(math.exp(-0.05)),
        "room_at_zero": pytest.approx(-math.expm1(-0.05)),
    }
    assert limits("chi2", 0.05) == {"lower_at_one": 1.0, "room_at_zero": 0.0}
    for name in NAMES:
        found = limits(named(name), 0.05)
        p = tensor([1e-25])
        room = (p * (band(p, named(name), 0.05)[1] - 1)).item()
        slow = 0.002 if math.isinf(named(name).slope_at_infinity) else 1e-9
        assert room == pytest.approx(found["room_at_zero"], abs=slow)


def test_summary_has_a_row_for_each_divergence():
    rows = {row["name"]: row for row in summary(0.05, p=(0.1, 0.5))}
    assert tuple(rows) == list_divergences()
    assert rows["tv"]["bounds"][1] == (0.5, pytest.approx(0.9), pytest.approx(1.1))
    assert rows["tv"]["lower_until"] == pytest.approx(0.05)
    assert rows["kl"]["closed_form"] is False
    assert rows["chi2"]["room_at_zero"] == 0


def test_binary_divergence_at_the_edges():
    p, q = tensor([-INF, -INF, 0.0, 0.0, -1.0, -1.0]), tensor([-INF, -1.0, 0.0, -1.0, -INF, 0.0])
    e = math.exp(-1)
    expected = {
        "kl": [0, -math.log(1 - e), 0, 1, INF, INF],
        "tv": [0, e, 0, 1 - e, e, 1 - e],
        "chi2": [0, INF, 0, INF, e + (1 - e) * (1 / (1 - e) - 1) ** 2,
                 e * (1 / e - 1) ** 2 + 1 - e],
    }  # fmt: skip
    for name, values in expected.items():
        found = binary_divergence(p, q, name).tolist()
        if name == "kl":  # q rounds to 1 before its complement is gone
            assert found.pop() > 10
            values.pop()
        assert found == pytest.approx(values, rel=1e-12)
