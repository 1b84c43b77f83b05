"""Bands that have a closed form, in log space and free of cancellation.

Each function maps (log p, radius) to (log lower, log upper). Notation: o = p / (1 - p) are the
odds, w = 1 / o; the upper bound is the mirror of the lower one,
upper(p) = 1 + w (1 - lower(1 - p)), because swapping the token and its complement leaves a
binary divergence as it is.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["chi2", "hellinger", "le_cam", "log1mexp", "mirror", "neyman", "tv"]

LOG_2 = math.log(2)


def log1mexp(x: Tensor) -> Tensor:
    """log(1 - e^x) for x <= 0, to full relative accuracy [1]_.

    References
    ----------
    .. [1] M. Maechler, "Accurately computing log(1 - exp(-|a|))", 2012.
    """
    return torch.where(x > -LOG_2, torch.log(-torch.expm1(x)), torch.log1p(-torch.exp(x)))


def mirror(log_c: Tensor, logp: Tensor) -> Tensor:
    """log r from log c <= 0: r = 1 + (1 - c)(1 - p)/p, never above 1/p."""
    log_excess = log1mexp(log_c) + log1mexp(logp) - logp
    log_r = torch.logaddexp(torch.zeros_like(log_excess), log_excess)
    # at p = 0 the excess is infinite (or 0 times infinity)
    return torch.minimum(torch.where(logp == -math.inf, math.inf, log_r), -logp)


def _log1m(v: Tensor) -> Tensor:
    """log(1 - v) for v >= 0; minus infinity from v = 1 on, where the bound has reached 0."""
    return torch.log1p(-v.clamp(max=1))


def _log(radius: Tensor | float) -> Tensor | float:
    return radius.log() if isinstance(radius, Tensor) else math.log(radius)


def _sqrt(x: Tensor | float) -> Tensor | float:
    return x.sqrt() if isinstance(x, Tensor) else math.sqrt(x)


def tv(logp: Tensor, radius: Tensor | float) -> tuple[Tensor, Tensor]:
    """r = 1 -+ radius / p."""
    log_step = _log(radius) - logp
    upper = torch.logaddexp(torch.zeros_like(log_step), log_step)
    return _log1m(log_step.exp()), torch.minimum(upper, -logp)


def chi2(logp: Tensor, radius: Tensor | float) -> tuple[Tensor, Tensor]:
    """r = 1 -+ sqrt(radius (1 - p) / p): the Wald interval."""
    log_step = 0.5 * (_log(radius) + log1mexp(logp) - logp)
    upper = torch.logaddexp(torch.zeros_like(log_step), log_step)
    return _log1m(log_step.exp()), torch.minimum(upper, -logp)


def neyman(logp: Tensor, radius: Tensor | float) -> tuple[Tensor, Tensor]:
    """Roots of (q - p)^2 = radius q (1 - q): the Wilson score interval."""

    def lower(logp: Tensor, log1mp: Tensor) -> Tensor:
        s = torch.sqrt(radius * (radius + 4 * torch.exp(logp + log1mp)))
        log_x = torch.log(0.5 * (radius + s)) - logp
        return -torch.logaddexp(torch.zeros_like(log_x), log_x)

    log1mp = log1mexp(logp)
    return lower(logp, log1mp), mirror(lower(log1mp, logp), logp)


def hellinger(logp: Tensor, radius: Tensor | float) -> tuple[Tensor, Tensor]:
    """q = sin^2(asin sqrt p -+ acos(1 - radius / 2)): the arcsine interval.

    Divided by p this is r = (cos - sqrt(w) sin)^2 of the angle acos(1 - radius / 2); from
    radius 2 on, the largest value of the divergence, both sides saturate.
    """
    sine = (
        torch.sqrt(radius * (1 - radius / 4).clamp(min=0))
        if isinstance(radius, Tensor)
        else math.sqrt(radius * max(1 - radius / 4, 0.0))
    )

    def lower(logp: Tensor, log1mp: Tensor) -> Tensor:
        root_w = torch.exp(0.5 * (log1mp - logp))
        bound = 2 * _log1m(0.5 * radius + root_w * sine)
        return torch.where(radius + torch.zeros_like(bound) >= 2, -math.inf, bound)

    log1mp = log1mexp(logp)
    return lower(logp, log1mp), mirror(lower(log1mp, logp), logp)


def le_cam(logp: Tensor, radius: Tensor | float) -> tuple[Tensor, Tensor]:
    """Roots of 2 (q - p)^2 = radius (p + q)(2 - p - q)."""

    def lower(logp: Tensor, log1mp: Tensor) -> Tensor:
        p, not_p = logp.exp(), log1mp.exp()
        d = torch.sqrt(radius * (radius + 8 * p * not_p))
        lean = radius * (p - not_p)
        # (d + lean) / ((2 + radius) p) in both cases; the first form is free of cancellation
        # for p < 1/2
        shift = torch.where(
            p < 0.5, 4 * not_p * radius / (d - lean), (d + lean) / ((2 + radius) * p)
        )
        return _log1m(shift)

    log1mp = log1mexp(logp)
    return lower(logp, log1mp), mirror(lower(log1mp, logp), logp)
