"""The radii of adaptive_band, against their definition in integers, and what is refused."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from bandpo.adaptive import SIGNALS, AdaptiveBand, centered_ranks, get_signal
from bandpo.clipping import Band, Fixed, PerSide, clipped_surrogate, make_rule
from bandpo.config import BandPOConfig
from bandpo.divergences import list_divergences
from bandpo.operator import band, log_band
from bandpo.testing import check_divergence

torch.set_num_threads(1)
NOT_A_FUNCTION = 3


def signals(n: int = 400, seed: int = 0) -> torch.Tensor:
    """Entropies as they are: many near 0, some large, some tied."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.empty(n, dtype=torch.float64).exponential_(0.5, generator=generator) ** 3
    x[::5] = x[3]
    x[7], x[11] = math.inf, 0.0
    return x


def test_ranks_match_their_definition() -> None:
    x = signals()
    expected = [sum((y < z) - (y > z) for y in x.tolist()) for z in x.tolist()]
    assert sum(expected) == 0
    np.testing.assert_array_equal(centered_ranks(x, x), np.array(expected) / len(x))
    # of some tokens among all, in any shape
    some = x[:40].reshape(5, 8).T
    assert torch.equal(centered_ranks(some, x), centered_ranks(x, x)[:40].reshape(5, 8).T)


@pytest.mark.parametrize("adaptivity", [0.9, 0.5, -0.5, -0.9])
def test_the_mean_radius_is_the_given_one(adaptivity: float) -> None:
    """Exactly, in fractions; and to rounding in the floats that come out."""
    x = signals()
    ranks = [Fraction(r).limit_denominator(len(x)) for r in centered_ranks(x, x).tolist()]
    assert sum(ranks) == 0
    radius = AdaptiveBand(radius=0.03, adaptivity=adaptivity).radii(x, x)
    assert math.fsum(radius.tolist()) / len(x) == pytest.approx(0.03, rel=1e-15)
    assert radius.min() > 0.03 * (1 - abs(adaptivity))
    assert radius.max() < 0.03 * (1 + abs(adaptivity))


@pytest.mark.parametrize("divergence", [*list_divergences(), "alpha:0.3"])
def test_equal_signals_give_the_bounds_of_band_to_the_bit(divergence: str) -> None:
    logp = -torch.linspace(0, 12, 301, dtype=torch.float64)
    rule = AdaptiveBand(divergence, 0.037, 10.0, adaptivity=0.7)
    radius = rule.radii(torch.full_like(logp, 1 / 3), torch.full_like(logp, 1 / 3))
    assert (radius == 0.037).all()
    expected = Band(divergence, 0.037, 10.0)
    for one, other in zip(
        rule.with_radius(radius).log_bounds(logp), expected.log_bounds(logp), strict=True
    ):
        assert torch.equal(one, other)
    upward = torch.arange(len(logp)) % 2 == 0
    assert torch.equal(
        rule.with_radius(radius).log_bound(logp, upward), expected.log_bound(logp, upward)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_floats(dtype: torch.dtype) -> None:
    """Bounds as right as those of Band in float32; radii that average as well as they can."""
    x = signals().float()
    logp = -torch.linspace(0.001, 12, 400).to(dtype)
    rule = AdaptiveBand("kl", 0.05, adaptivity=0.8)
    radius = rule.radii(x, x)
    assert radius.dtype == torch.float32
    assert radius.double().mean().item() == pytest.approx(0.05, rel=1e-6)
    wide = rule.with_radius(radius.double()).log_bounds(logp.double())
    for bound, exact in zip(rule.with_radius(radius).log_bounds(logp), wide, strict=True):
        assert bound.dtype == torch.float32
        torch.testing.assert_close(bound.double(), exact, rtol=1e-5, atol=1e-7)


def test_in_a_loop_of_ones_own() -> None:
    """The surrogate with this rule is that of one Band a token."""
    generator = torch.Generator().manual_seed(1)
    x = signals(60)
    old = -torch.empty(60, dtype=torch.float64).exponential_(0.5, generator=generator)
    new = (old + 0.5 * torch.randn(60, dtype=torch.float64, generator=generator)).clamp(max=0)
    advantages = torch.randn(60, dtype=torch.float64, generator=generator)
    rule = AdaptiveBand("kl", 0.05, adaptivity=0.8)
    for whole in (rule, PerSide(rule, Fixed()), PerSide(Fixed(), rule)):
        radius = rule.radii(x, x)
        got = clipped_surrogate(new, old, advantages, whole.with_radius(radius))
        for t in range(60):
            band = Band("kl", radius[t].item())
            one = {rule: band}.get(whole) or PerSide(
                band if whole.above is rule else Fixed(), band if whole.below is rule else Fixed()
            )
            expected = clipped_surrogate(new[t], old[t], advantages[t], one)
            torch.testing.assert_close(got[t], expected, rtol=1e-12, atol=0)


def test_rules_that_choose_no_radius_ignore_it() -> None:
    radius = torch.full((3,), 0.5)
    for name in ("fixed", "dcpo", "band", "relaxed_band"):
        rule = make_rule(name)
        assert rule.with_radius(radius) is rule
    assert make_rule("adaptive_band", signal="entropy").with_radius(radius).radius is radius


def test_a_signal_that_is_no_number_has_no_place_in_the_order() -> None:
    rule = AdaptiveBand("kl", 0.05, adaptivity=0.8)
    signal = torch.tensor([1.0, math.nan, 2.0, 3.0])
    with pytest.raises(ValueError, match="one of them is NaN"):
        rule.radii(signal, signal)
    # padding may hold anything, as long as the batch is that of the tokens that count
    counted = signal[~signal.isnan()]
    assert rule.radii(signal, counted)[~signal.isnan()].mean() == pytest.approx(0.05)


def test_an_empty_batch_has_no_radii() -> None:
    empty = torch.zeros(0, 4, dtype=torch.float64)
    assert AdaptiveBand().radii(empty, empty).shape == (0, 4)


def test_signals_by_name_path_and_object() -> None:
    batch = {"entropies": torch.rand(2, 3), "old_per_token_logps": -torch.rand(2, 3)}
    assert get_signal("entropy")(batch) is batch["entropies"]
    assert torch.equal(get_signal("surprisal")(batch), -batch["old_per_token_logps"])
    assert get_signal("bandpo.adaptive:surprisal") is SIGNALS["surprisal"]
    assert get_signal(len) is len


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: get_signal("entropi"), ValueError, "unknown signal 'entropi'; known are entropy"),
        (lambda: get_signal(f"{__name__}:none"), ValueError, "none' cannot be imported: module"),
        (lambda: get_signal("no.such:name"), ValueError, "cannot be imported: No module named"),
        (lambda: get_signal(":name"), ValueError, "cannot be imported"),
        (lambda: get_signal(f"{__name__}:NOT_A_FUNCTION"), TypeError, "name a function, got 3"),
        (lambda: get_signal(3), TypeError, "signal must be a name or a function, got 3"),
        (lambda: AdaptiveBand(signal="x"), ValueError, "unknown signal 'x'"),
        (lambda: AdaptiveBand(adaptivity=1.0), ValueError, "between -1 and 1; got 1.0"),
        (lambda: AdaptiveBand(adaptivity=-1), ValueError, "adaptivity must be a number between"),
        (lambda: AdaptiveBand(adaptivity=math.nan), ValueError, "between -1 and 1; got nan"),
        (lambda: AdaptiveBand(adaptivity="0.5"), ValueError, "between -1 and 1; got '0.5'"),
        (lambda: AdaptiveBand(radius=0.0), ValueError, "radius must be a positive finite number"),
        (lambda: AdaptiveBand(radius=torch.ones(2)), TypeError, "mean of the radii; got a tensor"),
        (lambda: AdaptiveBand("klx"), ValueError, "klx"),
        (lambda: AdaptiveBand(max_ratio=1.0), ValueError, "max_ratio must be a finite number"),
        (
            lambda: make_rule("adaptive_band"),
            ValueError,
            "clip_rule 'adaptive_band' needs a signal",
        ),
        (
            lambda: make_rule("fixed", clip_rule_below="adaptive_band"),
            ValueError,
            "clip_rule_below 'adaptive_band' needs a signal",
        ),
        (
            lambda: AdaptiveBand().log_bounds(torch.zeros(2)),
            TypeError,
            "no bounds before each token has its radius",
        ),
    ],
)
def test_what_is_refused(make: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()  # type: ignore[operator]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"band_signal": "entropi"}, "unknown signal 'entropi'"),
        ({"band_signal": "no.such.module:name"}, "no.such.module"),
        ({"band_adaptivity": 1.0}, "band_adaptivity must be a number between -1 and 1; got 1.0"),
        ({"band_radius": -0.05}, "band_radius must be a positive finite number; got -0.05"),
        ({"band_max_ratio": 0.5}, "band_max_ratio must be a finite number above 1"),
        ({"delta": 4.0}, "delta must be at least the largest upper bound, 10 here"),
    ],
)
def test_the_configuration_names_its_own_fields(changes: dict[str, object], message: str) -> None:
    fields = {"clip_rule": "adaptive_band", "use_cpu": True, "bf16": False}
    with pytest.raises(ValueError, match=message):
        BandPOConfig("unused", **fields | changes)
    assert BandPOConfig("unused", **fields).rule() == AdaptiveBand("kl", 0.05, 10.0, "entropy", 0.5)


@pytest.mark.parametrize("radius", [np.float32(0.05), np.float64(0.05), np.int64(1), 1, 0.05])
def test_radii_of_every_numeric_type(radius: float) -> None:
    logp = torch.tensor([-0.5, -3.0], dtype=torch.float64)
    expected = log_band(logp, "kl", float(radius))
    for bound, other in zip(log_band(logp, "kl", radius), expected, strict=True):
        assert torch.equal(bound, other)
    assert torch.equal(Band("kl", radius).log_bounds(logp)[0], expected[0])
    np.testing.assert_array_equal(band(0.3, "kl", radius), band(0.3, "kl", float(radius)))
    assert check_divergence("kl", radius).radius == float(radius)
    config = BandPOConfig("unused", use_cpu=True, bf16=False, band_radius=radius)
    assert torch.equal(config.rule().log_bounds(logp)[0], expected[0])
