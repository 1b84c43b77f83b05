"""Bands that have a closed form: (log p, radius) -> (log lower, log upper).

Each is a known binomial confidence interval or a close relative of one. The formulas are arranged
so that nothing cancels for any p, in float32 as in float64; w = (1 - p)/p throughout.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bandpo.elementary import inverse_odds

__all__ = ["chi2", "hellinger", "le_cam", "neyman", "tv"]


def _log_lower(step: Tensor) -> Tensor:
    """log(1 - step); minus infinity from step = 1 on, where the bound has reached 0."""
    return torch.log1p(-step.clamp(max=1))


def _log_upper(step: Tensor, below: Tensor, logp: Tensor) -> Tensor:
    """log(1 + step), never above 1/p; far below every p in use it moves with a power of p."""
    return torch.minimum(torch.log1p(step) + below, -logp)


def tv(logp: Tensor, radius: Tensor | float) -> tuple[Tensor, Tensor]:
    """r = 1 -+ radius / p."""
    w, below = inverse_odds(logp)
    step = radius * (1 + w)
    return _log_lower(step), _log_upper(step, below, logp)


def chi2(logp: Tensor, radius: Tensor | float) -> tuple[Tensor, Tensor]:
    """r = 1 -+ sqrt(radius (1 - p) / p): the Wald interval."""
    w, below = inverse_odds(logp)
    step = torch.sqrt(radius * w)
    return _log_lower(step), _log_upper(step, 0.5 * below, logp)


def neyman(logp: Tensor, radius: Tensor | float) -> tuple[Tensor, Tensor]:
    """Roots of (q - p)^2 = radius q (1 - q): the Wilson score interval."""
    w, below = inverse_odds(logp)
    p = 1 / (1 + w)
    half = 0.5 * (radius + torch.sqrt(radius * (radius + 4 * w * p * p)))
    # lower r = p / (p + half); the complement's c = (1 - p) / (1 - p + half) gives upper r
    not_c = half / (w * p + half)
    lower = -torch.log1p(half * (1 + w)) - below
    return lower, _log_upper(w * not_c, below, logp)


def hellinger(logp: Tensor, radius: Tensor | float) -> tuple[Tensor, Tensor]:
    """q = sin^2(asin sqrt p -+ phi) with cos phi = 1 - radius / 2: the arcsine interval.

    Divided by p this is r = (cos phi -+ sqrt(w) sin phi)^2, as far as the angle stays within
    [0, pi/2]. From radius 2 on, the largest value of the divergence, both sides saturate.
    """
    w, below = inverse_odds(logp)
    half = torch.as_tensor(radius, dtype=w.dtype, device=w.device).clamp(max=2.0) / 2
    sine = torch.sqrt(half * (2 - half))
    root_w = torch.sqrt(w)
    lower = 2 * _log_lower(root_w * sine + half)
    # holding sqrt(w) at the saturating tangent makes the bound at least 1/p there
    wide = torch.maximum(root_w, sine / (1 - half))
    upper = 2 * torch.log1p(wide * sine - half) + below
    return lower, torch.minimum(upper, -logp)


def le_cam(logp: Tensor, radius: Tensor | float) -> tuple[Tensor, Tensor]:
    """Roots of 2 (q - p)^2 = radius (p + q)(2 - p - q)."""
    w, below = inverse_odds(logp)
    p = 1 / (1 + w)
    not_p = w * p
    root = torch.sqrt(radius * (radius + 8 * p * not_p)) + radius * (p - not_p).abs()
    # the two steps |r - 1|; their product is 4 w radius / (2 + radius)
    short, long = 4 * radius * not_p / root, root * (1 + w) / (2 + radius)
    down = torch.where(w > 1, short, long)
    up = torch.where(w > 1, long, short)
    return _log_lower(down), _log_upper(up, below, logp)
