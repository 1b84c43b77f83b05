"""Checks of f itself, as a function of the ratio u."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from bandpo.divergences import Divergence
from bandpo.testing.checks import Check, finding, worst

#: From here on an overflowing f is far beyond every radius, so that infinity is as good.
_HUGE = 1e30


def generator_checks(divergence: Divergence, radius: float) -> list[Check]:
    """Check f and its two limits; only the first check where f is no elementwise function."""
    f = divergence.f
    checks = [_elementwise(f, radius)]
    if not checks[0].passed:
        return checks
    at_one = f(torch.ones(1, dtype=torch.float64)).item()
    off = math.inf if math.isnan(at_one) else abs(at_one)
    checks.append(_finite(divergence))
    checks.append(finding("zero at one", off, 1e-9 * radius, f"f(1) = {at_one:.6g}"))
    checks += [_convex(f, radius), _precision(f, radius), _charges(f)]
    small, large = torch.exp(_FAR.neg()), torch.exp(_FAR)
    at_zero, slope = divergence.f_at_zero, divergence.slope_at_infinity
    checks.append(_limit("limit at 0", at_zero, f(small), "f(u)", radius))
    checks.append(_limit("slope", slope, f(large) / large, "f(u)/u", radius))
    return checks


#: Log of the ratios at which limits are looked for; the square of the farthest is no overflow.
_FAR = torch.tensor([75.0, 150.0, 225.0, 300.0], dtype=torch.float64)


def _ratios() -> Tensor:
    """Ratios from 1e-40 to 1e40, what float32 probabilities can give, and more of them near 1."""
    wide = torch.logspace(-40, 40, 4001, dtype=torch.float64)
    middle = torch.logspace(-3, 3, 12001, dtype=torch.float64)
    near = torch.logspace(-5, -3, 101, dtype=torch.float64)
    return torch.cat([wide, middle, 1 - near, 1 + near]).unique()


def _elementwise(f: Callable[[Tensor], Tensor], radius: float) -> Check:
    """Evaluate f on one set of ratios in several shapes and orders."""
    u = torch.logspace(-6, 6, 301, dtype=torch.float64)
    kept = u.clone()
    try:
        value = f(u)
        if not isinstance(value, Tensor) or value.shape != u.shape or value.dtype != u.dtype:
            return finding("elementwise", math.inf, 0.0, f"f gave {_described(value)}")
        if not torch.equal(u, kept):
            return finding("elementwise", math.inf, 0.0, "f writes into its argument")
        others = (
            f(u.flip(0)).flip(0),
            f(u.reshape(7, 43)).reshape(-1),
            torch.cat([f(one) for one in u.split(50)]),
            torch.stack([f(one) for one in u]),
        )
        f(u[:0])
    except Exception as error:  # whatever a stranger's f raises is the finding
        return finding("elementwise", math.inf, 0.0, f"f raised {type(error).__name__}: {error}")
    errors = [
        torch.where((a == value) | (a.isnan() & value.isnan()), 0.0, (a - value).abs())
        for a in others
    ]
    size = torch.stack(errors).amax(0) / (radius + value.abs().nan_to_num(nan=0.0))
    return worst("elementwise", size, 1e-12, u=u)


def _described(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of {value.dtype} and shape {tuple(value.shape)} for one of (301,)"
    return f"no tensor but {type(value).__name__}"


def _finite(divergence: Divergence) -> Check:
    """Find the NaN or infinity nearest to 1, but for an overflow where f tends to infinity."""
    u = _ratios()
    value = divergence.f(u)
    bad = value.isnan() | value.isneginf()
    for side, limit in (
        (torch.where(u < 1)[0].flip(0), divergence.f_at_zero),
        (torch.where(u > 1)[0], divergence.slope_at_infinity),
    ):
        outward = value[side]
        blown = outward.isposinf()
        if blown.any():
            first = int(blown.int().argmax())
            overflow = (
                limit == math.inf and blown[first:].all() and (outward[first - 1] > _HUGE).item()
            )
            bad[side] |= blown & (not overflow)
    if not bad.any():
        return finding("finite", 0.0, 0.0, "u from 1e-40 to 1e40")
    nearest = int(torch.where(bad, u.log().abs(), math.inf).argmin())
    where = f"f({u[nearest].item():.4g}) = {value[nearest].item():g}"
    return finding("finite", math.inf, 0.0, where)


def _convex(f: Callable[[Tensor], Tensor], radius: float) -> Check:
    """How far f rises above the chord of its two neighbors on the grid."""
    u = _ratios()
    value = f(u)
    u, value = u[value.isfinite()], value[value.isfinite()]
    left, middle, right = value[:-2], value[1:-1], value[2:]
    weight = (u[2:] - u[1:-1]) / (u[2:] - u[:-2])
    above = middle - (weight * left + (1 - weight) * right)
    unit = torch.stack([left, middle, right]).abs().amax(0) + radius
    size, u = above / unit, u[1:-1]
    check = worst("convex", size, 1e-9, u=u)
    if check.passed:
        return check
    first = u[size > check.tolerance].log().abs().argmin()
    nearest = u[size > check.tolerance][first].item()
    return replace(check, where=f"{check.where}; nearest to 1 at u = {nearest:.4g}")


def _precision(f: Callable[[Tensor], Tensor], radius: float) -> Check:
    """A dent between ratios so close that only rounding can make one."""
    u = torch.logspace(-6, 6, 1201, dtype=torch.float64)
    left, middle, right = f(u * (1 - 1e-6)), f(u), f(u * (1 + 1e-6))
    # a token of ratio u has p <= 1/u, and p f(u) is what is compared with the radius
    unit = torch.stack([left, middle, right]).abs().amax(0) + radius * u.clamp(min=1)
    dent = (2 * middle - left - right) / unit
    return worst("precision", torch.where(unit.isfinite(), dent, 0.0), 1e-9, u=u)


def _charges(f: Callable[[Tensor], Tensor]) -> Check:
    """Whether any move costs anything."""
    p = torch.tensor([[1e-3], [0.5]], dtype=torch.float64)
    q = torch.linspace(0.001, 0.999, 999, dtype=torch.float64)
    own, other = p * f(q / p), (1 - p) * f((1 - q) / (1 - p))
    cost = (own + other) / (own.abs() + other.abs() + torch.finfo(p.dtype).tiny)
    free = bool((cost.abs() <= 1e-9).all())
    where = "g_f is 0 at every p and r" if free else "p = 0.001 and p = 0.5"
    return finding("charges", math.inf if free else 0.0, 0.0, where)


def _limit(name: str, declared: float, found: Tensor, what: str, radius: float) -> Check:
    """Compare a declared limit with values at four far ratios, evenly spaced in log u.

    Aitken's extrapolation is exact where the limit is approached as a power of u. Where it is not,
    the last values must at least go the right way.
    """
    *_, before, far = values = found.tolist()
    where = f"{what} has come to {far:.6g}, declared limit {declared:g}"
    if not math.isfinite(far) or math.isinf(declared):
        step, last = values[2] - values[1], far - before
        grows = far == math.inf or (last > 0 and last > 0.5 * step)
        return finding(name, 0.0 if grows and declared == math.inf else math.inf, 0.0, where)
    unit = abs(declared) + radius
    early, limit = _aitken(values[:3], unit), _aitken(values[1:], unit)
    size = abs(limit - declared) / unit
    approaches = abs(far - declared) < 0.8 * abs(before - declared)
    if math.isfinite(limit) and abs(early - limit) > 1e-6 * unit and approaches:
        size = 0.0  # no power of u: slower, but on its way
    return finding(name, size if size < 1e6 else math.inf, 1e-6, where)


def _aitken(values: list[float], unit: float) -> float:
    """Limit of a sequence whose steps shrink by one factor; infinite if they do not shrink."""
    first, second, third = values
    step, last = second - first, third - second
    if abs(last) <= 1e-9 * unit:
        return third
    if abs(last) >= (1 - 1e-6) * abs(step):
        return math.copysign(math.inf, last)
    return third + last * last / (step - last)
