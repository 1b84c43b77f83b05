"""The Band operator: ratio bounds from the trust region of an f-divergence.

For a token of old probability p, the band is the set of ratios r = q/p in [0, 1/p] with
g_f(p, r) = p f(r) + (1 - p) f((1 - p r)/(1 - p)) <= radius. Bounds are constants: no gradient
flows through them. Values are checked where reading them is free (eager CPU tensors); elsewhere
an element outside the domain gives NaN.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bandpo.closed_forms import log1mexp, mirror
from bandpo.divergences import Divergence, get_divergence
from bandpo.solvers import NEWTON, generic_lower

__all__ = [
    "band",
    "binary_divergence",
    "inside_band",
    "limits",
    "log_band",
    "log_band_side",
    "saturation",
]


def log_band(
    logp: Tensor, divergence: str | Divergence = "kl", radius: float | Tensor = 0.05
) -> tuple[Tensor, Tensor]:
    """Bounds on the log ratio of each token.

    Parameters
    ----------
    logp : Tensor, any shape
        Log probability of the token under the old policy, in nats, at most 0.
    divergence : str or Divergence
        What measures the trust region; see `get_divergence`.
    radius : float or Tensor broadcastable to logp
        Size of the trust region, in the divergence's unit, > 0.

    Returns
    -------
    log_lower, log_upper : Tensor
        Shape of logp and radius broadcast together; float64 for float64 input, else float32.
        -inf where the lower bound is 0; log_upper is at most -logp.

    Raises
    ------
    TypeError
        If logp is no floating-point tensor, or radius neither number nor tensor.
    ValueError
        If an element of logp is above 0 or one of radius is not finite and positive.
    """
    divergence = get_divergence(divergence)
    x, radius, dtype = _prepare(logp, radius)
    if divergence.closed_form is not None:
        lower, upper = divergence.closed_form(x, radius)
    else:
        lower = _lower(divergence, x, radius)
        upper = mirror(_lower(divergence, log1mexp(x), radius), x)
    return lower.to(dtype), upper.to(dtype)


def log_band_side(
    logp: Tensor,
    upward: Tensor,
    divergence: str | Divergence = "kl",
    radius: float | Tensor = 0.05,
) -> Tensor:
    """The one bound that matters to each token: the upper one where upward, else the lower.

    Parameters
    ----------
    logp, divergence, radius
        As in `log_band`.
    upward : Tensor of bool, broadcastable to logp
        True where the objective pushes the ratio up (a positive advantage).

    Returns
    -------
    log_bound : Tensor
        Shape and dtype as in `log_band`.
    """
    divergence = get_divergence(divergence)
    if not isinstance(upward, Tensor) or upward.dtype != torch.bool:
        raise TypeError(f"upward must be a tensor of bool, got {_describe(upward)}")
    x, radius, dtype = _prepare(logp, radius)
    x, upward = torch.broadcast_tensors(x, upward)
    if divergence.closed_form is not None:
        lower, upper = divergence.closed_form(x, radius)
        return torch.where(upward, upper, lower).to(dtype)
    root = _lower(divergence, torch.where(upward, log1mexp(x), x), radius)
    return torch.where(upward, mirror(root, x), root).to(dtype)


def band(p: Any, divergence: str | Divergence = "kl", radius: Any = 0.05) -> tuple[Any, Any]:
    """Bounds on the ratio itself, for probabilities.

    Parameters
    ----------
    p : Tensor, or anything numpy makes an array of
        Old probabilities in [0, 1].
    divergence, radius
        As in `log_band`; radius may be an array too.

    Returns
    -------
    lower, upper : Tensor or ndarray, as given
    """
    if isinstance(p, Tensor):
        lower, upper = log_band(_log_probability(p), divergence, radius)
        return lower.exp(), upper.exp()
    array = np.asarray(p)
    if array.dtype.kind not in "iuf":
        raise TypeError(f"p must hold numbers, got {p!r}")
    if array.dtype.kind != "f":
        array = array.astype(np.float64)
    if not isinstance(radius, Tensor | float | int):
        radius = torch.as_tensor(np.asarray(radius, dtype=np.float64))
    lower, upper = band(torch.as_tensor(array), divergence, radius)
    return lower.numpy(), upper.numpy()


def inside_band(
    logp: Tensor,
    logq: Tensor,
    divergence: str | Divergence = "kl",
    radius: float | Tensor = 0.05,
) -> Tensor:
    """Whether each token's ratio q/p lies inside its band: one evaluation of g_f, no root.

    Parameters
    ----------
    logp, logq : Tensor
        Log probabilities of the token under the old and the new policy, broadcastable.
    divergence, radius
        As in `log_band`.

    Returns
    -------
    Tensor of bool
        False where an input is NaN.
    """
    _check_radius(radius)
    return binary_divergence(logp, logq, divergence) <= radius


def binary_divergence(logp: Tensor, logq: Tensor, divergence: str | Divergence = "kl") -> Tensor:
    """g_f: the divergence between Bernoulli(q) and Bernoulli(p).

    Parameters
    ----------
    logp, logq : Tensor
        Log probabilities under the old and the new policy, broadcastable.

    Returns
    -------
    Tensor
        In the divergence's unit, >= 0 up to rounding; dtype as in `log_band`.
    """
    divergence = get_divergence(divergence)
    x, _, dtype = _prepare(logp, 1.0)
    y, _, _ = _prepare(logq, 1.0, name="logq")
    not_x, not_y = log1mexp(x), log1mexp(y)
    p, not_p = x.exp(), not_x.exp()
    # p f(r) with r = q/p; where p = 0 the term is its limit q f'(inf)
    own = _weighted(divergence, p, x, y)
    rest = _weighted(divergence, not_p, not_x, not_y)
    return (own + rest).to(dtype)


def _weighted(divergence: Divergence, weight: Tensor, log_old: Tensor, log_new: Tensor) -> Tensor:
    ratio = torch.exp(torch.where(log_old == -math.inf, 0.0, log_new - log_old))
    at_zero = torch.where(
        log_new == -math.inf,
        0.0,
        log_new.exp() * divergence.slope_at_infinity,
    )
    return torch.where(log_old == -math.inf, at_zero, weight * divergence(ratio))


def saturation(divergence: str | Divergence = "kl", radius: float = 0.05) -> tuple[float, float]:
    """Probabilities from which a side has no root.

    Returns
    -------
    lower_until, upper_from : float
        The lower bound is 0 for p <= lower_until, the upper one is 1/p for p >= upper_from;
        0 and 1 where that never happens.
    """
    divergence = get_divergence(divergence)
    _check_radius(radius)
    if math.isinf(divergence.f_at_zero):
        return 0.0, 1.0
    zero = torch.full((), -math.inf, dtype=torch.float64)
    low, high = -745.0, 0.0
    for _ in range(64):
        middle = 0.5 * (low + high)
        logp = torch.tensor(middle, dtype=torch.float64)
        if binary_divergence(logp, zero, divergence).item() <= radius:
            low = middle
        else:
            high = middle
    lower_until = math.exp(low) if low > -745.0 else 0.0
    return lower_until, 1.0 - lower_until


def limits(divergence: str | Divergence = "kl", radius: float = 0.05) -> dict[str, float]:
    """What the bounds tend to at the ends of the simplex.

    Returns
    -------
    dict of float
        ``lower_at_one``: limit of the lower bound for p -> 1.
        ``room_at_zero``: limit of p (upper - 1) for p -> 0, the mass a rare token may gain.
    """
    divergence = get_divergence(divergence)
    _check_radius(radius)
    lower_at_one = float(band(1.0, divergence, radius)[0])
    return {"lower_at_one": lower_at_one, "room_at_zero": 1.0 - lower_at_one}


def _lower(divergence: Divergence, logp: Tensor, radius: Tensor | float) -> Tensor:
    if divergence in NEWTON:
        return NEWTON[divergence](logp, radius)
    return generic_lower(divergence, logp, radius)


def _prepare(
    logp: Tensor, radius: float | Tensor, name: str = "logp"
) -> tuple[Tensor, float | Tensor, torch.dtype]:
    """Check, detach and widen; a few ulp above 0 count as 0."""
    if not isinstance(logp, Tensor) or not logp.is_floating_point():
        raise TypeError(f"{name} must be a floating-point tensor, got {_describe(logp)}")
    _check_radius(radius)
    slack = 4 * torch.finfo(logp.dtype).eps
    if _readable(logp):
        _check_values(logp, logp > slack, f"{name} must be a log probability, at most 0")
    dtype = torch.float64 if logp.dtype == torch.float64 else torch.float32
    x = logp.detach().double()
    x = torch.where(x > slack, math.nan, x.clamp(max=0.0))
    if isinstance(radius, Tensor):
        radius = radius.detach().to(x)
        x, radius = torch.broadcast_tensors(x, radius)
    return x, radius, dtype


def _check_radius(radius: float | Tensor) -> None:
    if isinstance(radius, bool) or not isinstance(radius, int | float | Tensor):
        raise TypeError(f"radius must be a number or a tensor, got {radius!r}")
    if isinstance(radius, Tensor):
        if not radius.is_floating_point():
            raise TypeError(f"radius must be a floating-point tensor, got {_describe(radius)}")
        if _readable(radius):
            bad = ~((radius > 0) & (radius < math.inf))
            _check_values(radius, bad, "radius must be finite and > 0")
    elif not (0 < radius < math.inf):
        raise ValueError(f"radius must be finite and > 0, got {radius!r}")


def _log_probability(p: Tensor) -> Tensor:
    if not p.is_floating_point():
        raise TypeError(f"p must be a floating-point tensor, got {_describe(p)}")
    if _readable(p):
        _check_values(p, (p < 0) | (p > 1), "p must be a probability in [0, 1]")
    return p.detach().double().log().to(torch.float64 if p.dtype == torch.float64 else p.dtype)


def _readable(x: Tensor) -> bool:
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def _check_values(x: Tensor, bad: Tensor, message: str) -> None:
    try:
        if not bool(bad.any()):
            return
    except RuntimeError:  # inside vmap, where values cannot be read
        return
    raise ValueError(f"{message}; got {x[bad].flatten()[0].item()!r}")


def _describe(x: object) -> str:
    return f"a tensor of {x.dtype}" if isinstance(x, Tensor) else repr(x)
