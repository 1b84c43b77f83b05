"""Solvers for the lower bound of a band; the upper one is its mirror image.

Each solver takes log p (float64) and the radius and returns log lower, the smaller root of
g_f(p, r) = p f(r) + (1 - p) f(c) = radius in r = Q(a)/P(a), where c = (1 - p r)/(1 - p) is the
ratio of the complement; minus infinity where the bound is 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from bandpo.closed_forms import log1mexp
from bandpo.divergences import KL, Divergence

__all__ = ["NEWTON", "generic_lower", "newton_kl_lower"]

MAX_LOG_ODDS = 690.0  # e^690 is a finite float64 with room for a square root either way


def newton_kl_lower(logp: Tensor, radius: Tensor | float, steps: int = 5) -> Tensor:
    """Lower bound of forward KL by Newton's method in t = log r.

    F(t) = -p t - (1 - p) log c - radius is convex and decreasing, and the start lies on the
    side from which Newton converges monotonically.
    """
    # below p = e^-600 the bound is -radius/p to all digits: scale instead of overflowing
    log_p = logp.clamp(min=-600.0)
    p = log_p.exp()
    not_p = -torch.expm1(log_p)
    w = not_p / p
    t = -(radius / p + torch.sqrt(2 * radius * w))
    for _ in range(steps):
        e = torch.expm1(t)
        log_c = torch.log1p(-e / w)
        c_minus_r = -e * (1 + 1 / w)
        t = t + (-p * t - not_p * log_c - radius) * (1 - e / w) / (p * c_minus_r)
    t = torch.where(logp == 0, -radius + torch.zeros_like(t), t)
    return t * torch.exp(log_p - logp)


NEWTON: dict[Divergence, Callable[[Tensor, Tensor | float], Tensor]] = {KL: newton_kl_lower}


def generic_lower(
    divergence: Divergence, logp: Tensor, radius: Tensor | float, steps: int = 52
) -> Tensor:
    """Lower bound for any convex f by bisection of log(-log r), a fixed number of steps."""
    log_odds = (logp - log1mexp(logp)).clamp(-MAX_LOG_ODDS, MAX_LOG_ODDS)
    odds = log_odds.exp()
    p, not_p = torch.sigmoid(log_odds), torch.sigmoid(-log_odds)

    def inside(t: Tensor) -> Tensor:
        r = t.exp()
        c = 1 - torch.expm1(t) * odds
        return p * divergence(r) + not_p * divergence(c) <= radius

    low = torch.full_like(logp, -MAX_LOG_ODDS)
    high = torch.full_like(logp, math.log(MAX_LOG_ODDS))
    for _ in range(steps):
        middle = 0.5 * (low + high)
        closer = inside(-middle.exp())
        low = torch.where(closer, middle, low)
        high = torch.where(closer, high, middle)
    t = -low.exp()
    t = torch.where(inside(torch.full_like(t, -MAX_LOG_ODDS)), -math.inf, t)
    if math.isinf(divergence.slope_at_infinity):
        t = torch.where(logp == 0, 0.0, t)
    return torch.where(logp.isnan(), logp, t)
