"""The clip rules and the clipped objective, against definitions written with NumPy and SciPy."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from scipy.optimize import brentq

from bandpo.clipping import (
    DCPO,
    MIN_LOGP,
    RULE_NAMES,
    Band,
    ClipRule,
    Fixed,
    PerSide,
    RelaxedBand,
    clipped_surrogate,
    make_rule,
)

torch.set_num_threads(1)

RULES: dict[str, ClipRule] = {
    "fixed": Fixed(0.2, 0.28),
    "dcpo": DCPO(),
    "kl": Band("kl", 0.05),
    "tv": Band("tv", 0.05),
    "chi2": Band("chi2", 0.05),
    "kl-uncapped": Band("kl", 0.05, None),
    "relaxed": RelaxedBand(Band("kl", 0.05), Fixed(0.2, 0.28)),
    "band-above": PerSide(Band("kl", 0.05), Fixed(0.2, 0.2)),
}
every_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)


def old_probabilities() -> np.ndarray:
    return np.concatenate([np.logspace(-6, -0.01, 40), 1 - np.logspace(-6, -2, 10)])


def log_p(dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.tensor(np.log(old_probabilities()), dtype=dtype)


def kl_bounds(p: float, radius: float, cap: float) -> tuple[float, float]:
    """Roots of KL(Bernoulli(p), Bernoulli(q)) = radius, bracketed in the logit of q."""

    def excess(logit: float) -> float:
        log_q, log_not_q = -np.logaddexp(0, -logit), -np.logaddexp(0, logit)
        return p * (math.log(p) - log_q) + (1 - p) * (math.log1p(-p) - log_not_q) - radius

    at = math.log(p) - math.log1p(-p)
    low = brentq(excess, at - 2 * radius / p - 50, at, xtol=1e-13, rtol=1e-14)
    high = brentq(excess, at, at + 2 * radius / (1 - p) + 50, xtol=1e-13, rtol=1e-14)
    return (
        math.exp(-np.logaddexp(0, -low) - math.log(p)),
        min(math.exp(-np.logaddexp(0, -high) - math.log(p)), cap),
    )


def test_kl_band_bounds_match_brent() -> None:
    lower, upper = (bound.exp() for bound in Band("kl", 0.05).log_bounds(log_p()))
    expected = np.array([kl_bounds(p, 0.05, 10.0) for p in old_probabilities()])
    np.testing.assert_allclose(lower, expected[:, 0], rtol=1e-8, atol=1e-15)
    np.testing.assert_allclose(upper, expected[:, 1], rtol=1e-8)


def test_dcpo_bounds_solve_their_defining_inequality() -> None:
    p = old_probabilities()
    lower, upper = (bound.exp().numpy() for bound in DCPO(0.16, 0.2, None).log_bounds(log_p()))
    np.testing.assert_allclose((upper - 1) * upper * p, 0.2, rtol=1e-12)
    solvable = p > 4 * 0.16
    np.testing.assert_allclose((1 - lower) * lower * p, np.where(solvable, 0.16, p / 4), rtol=1e-9)
    np.testing.assert_array_equal(lower[~solvable], 0.5)


@pytest.mark.claim("C10")
def test_dcpo_leaves_the_simplex_above_five_sixths() -> None:
    p = old_probabilities()
    upper = DCPO(0.16, 0.2, None).log_bounds(log_p())[1].exp().numpy()
    np.testing.assert_array_equal(p * upper > 1, p > 5 / 6)
    assert (p > 5 / 6).any()
    assert (p <= 5 / 6).any()


@every_rule
def test_bounds_contain_one_and_one_side_equals_both(rule: ClipRule) -> None:
    logp = log_p()
    log_lower, log_upper = rule.log_bounds(logp)
    assert (log_lower <= 0).all()
    assert (log_upper >= 0).all()
    upward = torch.arange(len(logp)) % 2 == 0
    torch.testing.assert_close(
        rule.log_bound(logp, upward), torch.where(upward, log_upper, log_lower), rtol=1e-12, atol=0
    )


@every_rule
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_dtype_and_shape_contract(rule: ClipRule, dtype: torch.dtype) -> None:
    logp = log_p(dtype).clamp(max=0).reshape(5, 10)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for bound in (*rule.log_bounds(logp), rule.log_bound(logp, logp < -1)):
        assert bound.shape == logp.shape
        assert bound.dtype == wide
    for bound in rule.log_bounds(logp[:0]):
        assert bound.shape == (0, 10)


@every_rule
def test_certain_and_impossible_tokens_have_usable_bounds(rule: ClipRule) -> None:
    """Padding has log p = 0; a NaN or an infinite upper bound would poison the loss."""
    log_lower, log_upper = rule.log_bounds(torch.tensor([0.0, MIN_LOGP]))
    assert torch.isfinite(log_upper).all()
    assert not torch.isnan(log_lower).any()
    assert torch.isfinite(log_lower[0])


def test_cap_binds_where_the_band_is_wider() -> None:
    p = old_probabilities()
    capped = Band("kl", 0.05, 10.0).log_bounds(log_p())[1].exp().numpy()
    free = Band("kl", 0.05, None).log_bounds(log_p())[1].exp().numpy()
    np.testing.assert_allclose(capped, np.minimum(free, 10), rtol=1e-14)
    # with radius 0.05 the cap binds below p = 0.00714
    assert p[np.isclose(capped, 10)].max() < 0.00714 < p[~np.isclose(capped, 10)].min()


def test_relaxed_band_is_the_union() -> None:
    band, fixed = Band("kl", 0.05), Fixed(0.2, 0.28)
    lower, upper = (bound.exp() for bound in RelaxedBand(band, fixed).log_bounds(log_p()))
    band_lower, band_upper = (bound.exp() for bound in band.log_bounds(log_p()))
    torch.testing.assert_close(lower, band_lower.clamp(max=0.8))
    torch.testing.assert_close(upper, band_upper.clamp(min=1.28))
    assert (band_lower > 0.8).any()
    assert (band_upper < 1.28).any()


def test_per_side_takes_upper_above_and_lower_below() -> None:
    lower, upper = PerSide(Band("tv", 0.05), Fixed(0.3, 0.9)).log_bounds(log_p())
    torch.testing.assert_close(lower.exp(), torch.full_like(lower, 0.7))
    torch.testing.assert_close(upper, Band("tv", 0.05).log_bounds(log_p())[1])


def test_constant_bounds_survive_the_log_round_trip_exactly() -> None:
    """Ratio bounds formed in float64 and rounded to float32 equal the constants rounded once."""
    for low, high in [(0.2, 0.2), (0.2, 0.28), (0.16, 0.2), (0.1, 0.3), (0.003, 0.004)]:
        lower, upper = Fixed(low, high).log_bounds(torch.zeros(1, dtype=torch.float64))
        assert lower.exp().float().item() == np.float32(1 - low)
        assert upper.exp().float().item() == np.float32(1 + high)


# --- the objective -------------------------------------------------------------------------------


def random_tokens(n: int = 4000) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    old = -torch.empty(n, dtype=torch.float64).exponential_(0.5, generator=generator)
    logp = (old + 0.8 * torch.randn(n, dtype=torch.float64, generator=generator)).clamp(max=0)
    advantages = torch.randn(n, dtype=torch.float64, generator=generator)
    advantages[::17] = 0
    return logp, old, advantages


@every_rule
def test_objective_and_gradient_match_the_definition(rule: ClipRule) -> None:
    """min(r A, clip(r) A) in ratio space with NumPy; gradient r A where not clipped, else 0."""
    logp, old, advantages = random_tokens()
    logp.requires_grad_()
    objective = clipped_surrogate(logp, old, advantages, rule)
    objective.sum().backward()

    lower, upper = (bound.exp().numpy() for bound in rule.log_bounds(old))
    r, a = np.exp((logp.detach() - old).numpy()), advantages.numpy()
    expected = np.minimum(r * a, np.clip(r, lower, upper) * a)
    clipped = ((a > 0) & (r > upper)) | ((a < 0) & (r < lower))
    assert clipped.any()
    assert not clipped.all()
    np.testing.assert_allclose(objective.detach(), expected, rtol=1e-12, atol=1e-300)
    np.testing.assert_allclose(logp.grad, np.where(clipped, 0, r * a), rtol=1e-12, atol=1e-300)


def test_gradient_is_whole_where_the_ratio_meets_its_bound() -> None:
    """A token with p = 1 has upper = 1 = ratio at first; half a gradient would be wrong."""
    logp = torch.zeros(2, requires_grad=True)
    clipped_surrogate(
        logp, torch.zeros(2), torch.tensor([2.0, -3.0]), Band("kl", 0.05)
    ).sum().backward()
    torch.testing.assert_close(logp.grad, torch.tensor([2.0, -3.0]))


def test_no_gradient_reaches_the_old_policy_or_the_advantages() -> None:
    old = torch.tensor([-1.0, -2.0], requires_grad=True)
    advantages = torch.tensor([1.0, -1.0], requires_grad=True)
    logp = torch.tensor([-1.1, -1.9], requires_grad=True)
    clipped_surrogate(logp, old, advantages, Band()).sum().backward()
    assert old.grad is None
    assert advantages.grad is None
    assert logp.grad is not None


@every_rule
def test_no_nan_from_an_overflowing_branch(rule: ClipRule) -> None:
    """MakazhanAlpamys/Soup#342: exp overflows in the branch that min does not take."""
    logp = torch.tensor([-1.0, -1.0, -1.0, -300.0], requires_grad=True)
    old = torch.tensor([-200.0, -200.0, -math.inf, -1.0])
    advantages = torch.tensor([1.0, 0.0, 1.0, -1.0])
    objective = clipped_surrogate(logp, old, advantages, rule)
    objective.sum().backward()
    assert torch.isfinite(objective).all()
    assert logp.grad is not None
    assert torch.isfinite(logp.grad).all()


def test_advantages_broadcast_over_tokens() -> None:
    logp, old = torch.full((2, 3), -1.0), torch.full((2, 3), -1.2)
    objective = clipped_surrogate(logp, old, torch.tensor([[1.0], [-1.0]]), Fixed())
    torch.testing.assert_close(objective, torch.tensor([[1.2], [-math.exp(0.2)]]).expand(2, 3))


# --- configuration -------------------------------------------------------------------------------


def test_make_rule() -> None:
    assert make_rule("fixed") == Fixed(0.2, 0.2)
    assert make_rule("fixed", epsilon=0.2, epsilon_high=0.28) == Fixed(0.2, 0.28)
    assert make_rule("dcpo", epsilon=0.16, epsilon_high=0.2) == DCPO(0.16, 0.2, 10.0)
    assert make_rule("band", divergence="tv", radius=0.1, max_ratio=None) == Band("tv", 0.1, None)
    assert make_rule("relaxed_band", epsilon_high=0.28) == RelaxedBand(Band(), Fixed(0.2, 0.28))
    assert make_rule("band", clip_rule_below="fixed") == PerSide(Band(), Fixed(0.2, 0.2))


@pytest.mark.parametrize("rule", RULE_NAMES)
def test_every_named_rule_can_be_made(rule: str) -> None:
    assert isinstance(make_rule(rule, signal="entropy"), ClipRule)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: make_rule("clip"), "clip_rule must be one of fixed, dcpo, band, relaxed_band"),
        (lambda: make_rule("band", clip_rule_below="x"), "clip_rule_below must be one of"),
        (lambda: Fixed(0.0, 0.2), "epsilon_low must be a positive finite number; got 0.0"),
        (lambda: Fixed(1.5, 0.2), "epsilon_low must be at most 1"),
        (lambda: Fixed(0.2, math.inf), "epsilon_high must be a positive finite number"),
        (lambda: Fixed(0.2, math.nan), "epsilon_high must be a positive finite number"),
        (lambda: Fixed("0.2", 0.2), "epsilon_low must be a positive finite number; got '0.2'"),
        (lambda: DCPO(-0.1), "epsilon_low"),
        (lambda: DCPO(max_ratio=1.0), "max_ratio must be a finite number above 1"),
        (lambda: Band("kl", 0.0), "radius must be a positive finite number; got 0.0"),
        (lambda: Band("kl", math.nan), "radius"),
        (lambda: Band("kl", math.inf), "radius"),
        (lambda: Band("kl", 0.05, 0.5), "max_ratio"),
        (lambda: Band("klx"), "klx"),
    ],
)
def test_bad_parameters_are_named(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]


def test_importing_the_numerical_half_never_imports_trl_or_transformers() -> None:
    script = (
        "import sys, bandpo, bandpo.clipping\n"
        "bandpo.clipping.Band().log_bounds(__import__('torch').zeros(1))\n"
        "print([m for m in ('trl', 'transformers', 'accelerate') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
