"""Checks of the bounds that training would use, over a grid of p and radii.

They are the closed form's where the divergence has one.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bandpo.clipping import Band, clipped_surrogate
from bandpo.divergences import Divergence
from bandpo.operator import binary_divergence, inside_band, log_band, saturation
from bandpo.testing.checks import Check, finding, worst

#: Below log r = -300 a lower bound is 0 for every purpose, and r itself is about to underflow.
_BOTTOM = -300.0


def _grid(radius: float) -> tuple[Tensor, Tensor]:
    """Log p of shape (121,), symmetric under p -> 1 - p, and three radii of shape (3, 1)."""
    logp = torch.nn.functional.logsigmoid(torch.linspace(-30, 30, 121, dtype=torch.float64))
    return logp, radius * torch.tensor([[0.1], [1.0], [10.0]], dtype=torch.float64)


def bound_checks(divergence: Divergence, radius: float) -> list[Check]:
    """Check the bounds that training would use."""
    logp, radii = _grid(radius)
    p = logp.exp()
    if divergence.closed_form is not None:
        try:
            log_band(logp, divergence, radii)
        except Exception as error:  # as for f
            where = f"closed_form raised {type(error).__name__}: {error}"
            return [finding("closed form", math.inf, 0.0, where)]
    lower, upper = log_band(logp, divergence, radii)

    beyond = torch.stack([lower, -upper, upper + logp]).amax(0)
    q = p * upper.exp() + (1 - p) * lower.flip(-1).exp()
    checks = [
        worst("simplex", beyond, 0.0, p=p, radius=radii),
        _roots(divergence, logp, radii, lower, upper),
        _interval(divergence, logp, radii, lower, upper),
        _saturation(divergence, radii),
        worst("mirror", (q - 1).abs(), 1e-9, p=p, radius=radii),
        _monotone(lower, upper, p, radii),
        _gradient(divergence, logp, radius),
        _float32(divergence, logp, radii),
    ]
    if divergence.closed_form is not None:
        generic = torch.stack(log_band(logp, divergence, radii, method="generic")).exp()
        found = torch.stack((lower, upper)).exp()
        gap = ((found - generic).abs() / generic.clamp(min=1)).amax(0)
        checks.append(worst("closed form", gap, 1e-8, p=p, radius=radii))
    return checks


def _roots(
    divergence: Divergence, logp: Tensor, radii: Tensor, lower: Tensor, upper: Tensor
) -> Check:
    """Error of g_f at the bounds; where lower is 0, only an excess over the radius counts.

    Where upper is 1/p nothing is counted: by the mirror that is the lower side of 1 - p.
    """
    zero, edge = lower < _BOTTOM, upper >= -logp * (1 - 1e-9)
    down = binary_divergence(logp, logp + lower.clamp(min=_BOTTOM), divergence) / radii - 1
    below = 0.0 if math.isinf(divergence.f_at_zero) else down.clamp(min=0.0)
    up = binary_divergence(logp, torch.clamp(logp + upper, max=0.0), divergence) / radii - 1
    errors = torch.where(zero, below, down.abs()), torch.where(edge, 0.0, up.abs())
    size, side = torch.stack(errors).max(0)
    r = torch.where(side == 0, lower, upper).exp()
    return worst("roots", size, 1e-5, p=logp.exp(), radius=radii, r=r)


def _interval(
    divergence: Divergence, logp: Tensor, radii: Tensor, lower: Tensor, upper: Tensor
) -> Check:
    """Excess of g_f inside the bounds, lack of it outside, both over the radius."""
    share = torch.tensor([0.01, 0.1, 0.5, 0.9, 0.99, 1.01, 1.1, 2.0, 10.0], dtype=torch.float64)
    share = share[:, None, None, None]
    bounds = torch.stack([lower, upper])  # sides, radii, p
    log_r = share * bounds.clamp(min=_BOTTOM)
    possible = (log_r > 2 * _BOTTOM) & (log_r <= -logp) & ((share < 1) | (bounds > _BOTTOM))
    g = binary_divergence(logp, torch.clamp(logp + log_r, max=0.0), divergence) / radii
    excess = torch.where(share < 1, g - 1, 1 - g)
    size = torch.where(possible, excess, 0.0)
    return worst("interval", size, 1e-6, p=logp.exp(), radius=radii, r=log_r.exp())


def _saturation(divergence: Divergence, radii: Tensor) -> Check:
    """Lower bounds a tenth below and above the probability from which on they have a root."""
    # f(0) is felt only if f gets there before r underflows
    bottom = divergence.f(torch.tensor([_BOTTOM], dtype=torch.float64).exp()).item()
    reached = abs(bottom - divergence.f_at_zero) <= 1e-2 * (abs(bottom) + radii.min().item())
    cases = []
    for radius in radii.flatten().tolist():
        until, _ = saturation(divergence, radius)
        cases += [(0.9 * until, radius, True)] if until > 0 else []
        cases += [(1.1 * until, radius, False)] if 0 < until < 0.9 and reached else []
    if not cases:
        return finding("saturation", 0.0, 0.0, "no such p")
    p, delta, saturated = (torch.tensor(column) for column in zip(*cases, strict=True))
    lower, _ = log_band(p.double().log(), divergence, delta.double())
    wrong = (lower < _BOTTOM) != saturated
    return worst("saturation", torch.where(wrong, math.inf, 0.0), 0.0, p=p, radius=delta)


def _monotone(lower: Tensor, upper: Tensor, p: Tensor, radii: Tensor) -> Check:
    """How far a bound moves the wrong way, from one p or radius to the next."""

    def fall(bound: Tensor, dim: int) -> Tensor:
        drop = -bound.diff(dim=dim)
        return drop / (1 + bound.narrow(dim, 1, drop.shape[dim]).abs())

    lower, upper = lower.clamp(min=_BOTTOM), upper.clamp(max=-_BOTTOM)
    by_p = torch.maximum(fall(lower, 1), fall(-upper, 1))
    by_radius = torch.maximum(fall(upper, 0), fall(-lower, 0))
    found = [
        worst("monotone", by_p, 1e-9, p=p[1:], radius=radii),
        worst("monotone", by_radius, 1e-9, p=p, radius=radii[1:]),
    ]
    return max(found, key=lambda check: check.size)


def _gradient(divergence: Divergence, logp: Tensor, radius: float) -> Check:
    """Gradient of the clipped objective just inside and just outside each bound."""
    rule = Band(divergence, radius, max_ratio=None)
    bounds = torch.stack(rule.log_bounds(logp))
    share = torch.tensor([0.999, 1.001], dtype=torch.float64)[:, None, None]
    log_r = share * bounds
    # next to an edge the clip is out of reach, or g_f does not resolve it
    c = -torch.expm1(torch.clamp(logp + log_r, max=0.0)) / -torch.expm1(logp)
    tested = (log_r > -13) & (c > 1e-6)
    new = torch.where(tested, logp + log_r, logp).requires_grad_()
    advantages = torch.tensor([-1.0, 1.0], dtype=torch.float64)[:, None]
    objective = clipped_surrogate(new, logp.expand_as(new), advantages, rule)
    (gradient,) = torch.autograd.grad(objective.sum(), new)
    wrong = ((gradient != 0) != inside_band(logp, new.detach(), divergence, radius)) & tested
    size, delta = torch.where(wrong, math.inf, 0.0), torch.tensor(radius, dtype=torch.float64)
    return worst("gradient", size, 0.0, p=logp.exp(), radius=delta, r=log_r.exp())


def _float32(divergence: Divergence, logp: Tensor, radii: Tensor) -> Check:
    """Error of log r, or of r itself next to the p where log r runs to minus infinity."""
    narrow = logp.float()
    found = torch.stack(log_band(narrow, divergence, radii.float())).double()
    exact = torch.stack(log_band(narrow.double(), divergence, radii.float().double()))
    relative = (found - exact).abs() / exact.abs()
    absolute = (found.exp() - exact.exp()).abs() / exact.exp().clamp(min=1)
    error = torch.where(found == exact, 0.0, torch.minimum(relative, absolute)).amax(0)
    return worst("float32", error, 1e-5, p=narrow.double().exp(), radius=radii)


def solver_checks(divergence: Divergence, radius: float) -> list[Check]:
    """Compare with SciPy's root finder, which takes its time and a convex f for granted."""
    logp = torch.nn.functional.logsigmoid(torch.linspace(-9, 9, 9, dtype=torch.float64))
    found = torch.stack(log_band(logp, divergence, radius)).clamp(min=_BOTTOM)
    exact = torch.stack(log_band(logp, divergence, radius, method="brent")).clamp(min=_BOTTOM)
    error = torch.where(found == exact, 0.0, (found - exact).abs() / exact.abs()).amax(0)
    delta = torch.tensor(radius, dtype=torch.float64)
    return [worst("Brent", error, 1e-7, p=logp.exp(), radius=delta)]
