"""The contract that a divergence must meet before its bounds can be trusted."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from bandpo.divergences import Divergence, get_divergence
from bandpo.operator import binary_divergence, log_band

__all__ = ["check_divergence"]


def check_divergence(divergence: str | Divergence, radius: float = 0.05) -> None:
    """Check that f is what its limits and its closed form say, and that its bounds hold.

    Parameters
    ----------
    divergence : str or Divergence
        What `get_divergence` takes.
    radius : float
        Size of the trust region at which the bounds are checked.

    Raises
    ------
    ValueError
        Naming the first thing that is wrong: f(1) is not 0, f is not convex, a limit is not that
        of f, a bound does not solve its equation, or the closed form disagrees with f.
    """
    divergence = get_divergence(divergence)
    u = torch.logspace(-6, 6, 2001, dtype=torch.float64)
    f = divergence.f(u)

    def require(holds: bool, what: str) -> None:
        if not holds:
            raise ValueError(f"divergence {divergence.name!r}: {what}")

    require(
        isinstance(f, torch.Tensor) and f.shape == u.shape and f.dtype == u.dtype,
        "f must map a float64 tensor to one of the same shape and dtype",
    )
    require(bool(f.isfinite().all()), "f must be finite for ratios from 1e-6 to 1e6")
    at_one = divergence.f(torch.ones(1, dtype=torch.float64)).item()
    require(abs(at_one) < 1e-12, f"f(1) must be 0, is {at_one!r}")
    chord, middle = 0.5 * (f[1:] + f[:-1]), divergence.f(0.5 * (u[1:] + u[:-1]))
    above = middle > chord + 1e-12 * (1 + chord.abs())
    require(not above.any(), f"f must be convex, is not near u = {u[1:][above][:1].tolist()}")
    _check_limit(divergence, "f_at_zero", require)
    _check_limit(divergence, "slope_at_infinity", require)

    logp = torch.linspace(-12, -1e-3, 200, dtype=torch.float64)
    generic = log_band(logp, divergence, radius, method="generic")
    for bound, name in zip(generic, ("lower", "upper"), strict=True):
        solved = (bound > -30) & (bound < -logp * (1 - 1e-9))
        g = binary_divergence(logp[solved], (logp + bound)[solved], divergence)
        wrong = (g - radius).abs() > 1e-6 * radius
        require(
            not wrong.any(), f"the {name} bound does not solve g_f = {radius}; is f continuous?"
        )
    if divergence.closed_form is not None:
        closed = log_band(logp, divergence, radius, method="closed_form")
        for bound, found, name in zip(generic, closed, ("lower", "upper"), strict=True):
            same = (found.exp() - bound.exp()).abs() <= 1e-8 * bound.exp().clamp(min=1)
            require(
                bool(same.all()),
                f"the closed form's {name} bound is not that of f at "
                f"log p = {logp[~same][:1].tolist()}",
            )


def _check_limit(divergence: Divergence, field: str, require: Callable[[bool, str], None]) -> None:
    """Compare f_at_zero or slope_at_infinity with f at far ratios."""
    declared = getattr(divergence, field)
    if field == "f_at_zero":
        found = divergence.f(torch.tensor([1e-30, 1e-100], dtype=torch.float64))
    else:
        u = torch.tensor([1e30, 1e100], dtype=torch.float64)
        found = divergence.f(u) / u
    nearer, far = found.tolist()
    if math.isinf(declared):
        grows = far > nearer + 0.1 or far == math.inf
        require(grows, f"{field} is declared infinite, but f tends to {far:.6g}")
    else:
        # some slopes, as that of alpha near 1, are reached slowly: the gap must at least shrink
        gap, far_gap = abs(nearer - declared), abs(far - declared)
        close = far_gap <= 1e-6 * (1 + abs(declared)) or far_gap < 0.5 * gap
        require(close, f"{field} is declared {declared!r}, but f tends to {far:.6g}")
