"""Elementary functions of a log probability, without cancellation and right under torch.compile.

Notation of the whole numerical half: w = (1 - p)/p and its inverse, the odds o; r = q/p is the
ratio of a token, c = (1 - q)/(1 - p) that of its complement, so that r - 1 = w (1 - c).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["FLOOR", "expm1", "inverse_odds"]

# From here down a bound is a pure power of p to every digit, and squares of 1/p are finite from
# here up.
FLOOR = {torch.float32: -60.0, torch.float64: -340.0}


def expm1(x: Tensor) -> Tensor:
    """e^x - 1 to full relative accuracy.

    Inductor's vectorized CPU code lowers expm1 to exp(x) - 1, which has no correct digit left at
    x = 1e-8 in float32; the truncated series replaces it there.
    """
    if not torch.compiler.is_compiling() or x.device.type != "cpu":
        return torch.expm1(x)
    terms = 14 if x.dtype == torch.float64 else 7
    series = torch.full_like(x, 1 / math.factorial(terms))
    for k in range(terms - 1, 0, -1):
        series = series * x + 1 / math.factorial(k)
    return torch.where(x.abs() < 0.35, series * x, x.exp() - 1)


def inverse_odds(logp: Tensor) -> tuple[Tensor, Tensor]:
    """w = (1 - p)/p with p held where w is finite, and how far log p lies below that.

    Parameters
    ----------
    logp : Tensor
        float32 or float64, at most 0.

    Returns
    -------
    w, below : Tensor
        below >= 0 is what was taken away from -log p; 0 for any p that a model gives.
    """
    held = logp.clamp(min=FLOOR[logp.dtype])
    return expm1(-held), held - logp
