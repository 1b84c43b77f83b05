"""The Band operator: ratio bounds from the trust region of an f-divergence.

For a token of old probability p, the band is the set of ratios r = q/p in [0, 1/p] with
g_f(p, r) = p f(r) + (1 - p) f((1 - p r)/(1 - p)) <= radius.

Contract
--------
- Elementwise, any shape and device, one answer per token and side; bounds are constants, so no
  gradient flows through them.
- lower <= 1 <= upper <= 1/p. p = 0 and p = 1 give the limits. NaN stays NaN, empty stays empty.
- float64 in: log r is right to 1e-12 of itself for KL and the closed forms, to 1e-9 for the
  generic solver, for radius >= 1e-3 and log p >= -300 (farther down the generic bounds stop
  widening). Anything narrower comes back as float32, right to 1e-5.
  Next to the p where a lower bound saturates, log r runs to minus infinity and the answer is
  that of a radius right to the same digits.
- Bad values raise where reading them is free, on eager CPU tensors; elsewhere (CUDA,
  torch.compile, vmap) such elements give NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bandpo import solvers
from bandpo.divergences import Divergence, get_divergence, list_divergences

__all__ = [
    "band",
    "binary_divergence",
    "inside_band",
    "limits",
    "log_band",
    "log_band_side",
    "saturation",
    "summary",
]

# Elements that eager CPU code works on at once, per thread: temporaries stay in the core's cache.
_CHUNK = 1 << 15


def log_band(
    logp: Tensor,
    divergence: str | Divergence = "kl",
    radius: float | Tensor = 0.05,
    method: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Bounds on the log ratio of each token.

    Parameters
    ----------
    logp : Tensor, any shape
        Log probability of the token under the old policy, in nats, at most 0 (a few roundings
        above count as 0).
    divergence : str or Divergence
        What measures the trust region; see `get_divergence`.
    radius : float or Tensor broadcastable to logp
        Size of the trust region, in the divergence's unit, > 0.
    method : str
        ``auto`` (the closed form, Newton for KL, else generic), ``closed_form``, ``newton``,
        ``generic``, or the textbook's ``bisection`` and ``brent``.

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
        If an element of logp is above 0, one of radius is not finite and positive, or the
        divergence or the method is unknown.
    """
    divergence = get_divergence(divergence)
    solver = solvers.get_solver(method, divergence)
    logp, radius, out = _prepare(logp, radius, native=solver.native)

    def solve(logp: Tensor, radius: float | Tensor) -> tuple[Tensor, ...]:
        return solver.two_sided(divergence, logp, radius)

    lower, upper = _in_chunks(solve, logp, radius)
    return lower.to(out), upper.to(out)


def log_band_side(
    logp: Tensor,
    upward: Tensor,
    divergence: str | Divergence = "kl",
    radius: float | Tensor = 0.05,
    method: str = "auto",
) -> Tensor:
    """The one bound that matters to each token: the upper one where upward, else the lower.

    Parameters
    ----------
    logp, divergence, radius, method
        As in `log_band`.
    upward : Tensor of bool, broadcastable to logp
        True where the objective pushes the ratio up (a positive advantage).

    Returns
    -------
    log_bound : Tensor
        Shape and dtype as in `log_band`.

    Raises
    ------
    TypeError, ValueError
        As in `log_band`; TypeError if upward is no tensor of bool.
    """
    divergence = get_divergence(divergence)
    solver = solvers.get_solver(method, divergence)
    if not isinstance(upward, Tensor) or upward.dtype != torch.bool:
        raise TypeError(f"upward must be a tensor of bool, got {_describe(upward)}")
    logp, radius, out = _prepare(logp, radius, native=solver.native)
    logp, upward = torch.broadcast_tensors(logp, upward)

    def solve(logp: Tensor, radius: float | Tensor, upward: Tensor) -> tuple[Tensor, ...]:
        return (solver.one_sided(divergence, logp, upward, radius),)

    (bound,) = _in_chunks(solve, logp, radius, upward)
    return bound.to(out)


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
        A ratio above the largest float comes back as infinity.

    Raises
    ------
    TypeError, ValueError
        As in `log_band`; ValueError if an element of p is outside [0, 1].
    """
    if isinstance(p, Tensor):
        if not p.is_floating_point():
            raise TypeError(f"p must be a floating-point tensor, got {_describe(p)}")
        _check_values(p, lambda p: (p < 0) | (p > 1), "p must be a probability in [0, 1]")
        out = _out_dtype(p)
        bounds = log_band(p.detach().double().log(), divergence, radius)
        lower, upper = (bound.exp().to(out) for bound in bounds)
        return lower, upper
    array = np.asarray(p)
    if array.dtype.kind not in "iuf":
        raise TypeError(f"p must hold numbers, got {p!r}")
    if array.dtype not in (np.float16, np.float32):
        array = array.astype(np.float64)
    if not isinstance(radius, Tensor | Real):
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

    Raises
    ------
    TypeError, ValueError
        As in `log_band`.
    """
    _check_radius(radius)
    if isinstance(radius, Tensor):
        radius = radius.detach()
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

    Raises
    ------
    TypeError, ValueError
        As in `log_band`.
    """
    divergence = get_divergence(divergence)
    native = solvers.has_fast_membership(divergence)
    logp, _, out = _prepare(logp, 1.0, native=native)
    logq, _, out_q = _prepare(logq, 1.0, native=native, name="logq")
    out = torch.promote_types(out, out_q)
    logp, logq = torch.broadcast_tensors(logp, logq)
    if native and logp.dtype != logq.dtype:
        logp, logq = logp.to(out), logq.to(out)

    def evaluate(logp: Tensor, _: float | Tensor, logq: Tensor) -> tuple[Tensor, ...]:
        return (solvers.binary_divergence(divergence, logp, logq),)

    (value,) = _in_chunks(evaluate, logp, 1.0, logq)
    return value.to(out)


def saturation(divergence: str | Divergence = "kl", radius: float = 0.05) -> tuple[float, float]:
    """Probabilities beyond which a side has no root.

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
    if radius >= divergence.f_at_zero + divergence.slope_at_infinity:  # no Q is farther away
        return 1.0, 0.0
    nothing = torch.full((1,), -math.inf, dtype=torch.float64)
    low, high = -700.0, 0.0
    for _ in range(64):
        logp = nothing.new_tensor([0.5 * (low + high)])
        if solvers.binary_divergence(divergence, logp, nothing).item() <= radius:
            low = logp.item()
        else:
            high = logp.item()
    # g_f(p, 0) grows with p, and the upper side is the mirror image
    return math.exp(low) if low > -700.0 else 0.0, -math.expm1(low)


def limits(divergence: str | Divergence = "kl", radius: float = 0.05) -> dict[str, float]:
    """What the bounds tend to at the ends of the simplex.

    Returns
    -------
    dict of float
        ``lower_at_one``: limit of the lower bound for p -> 1 (the upper one tends to 1).
        ``room_at_zero``: limit of p (upper - 1) for p -> 0, the mass that a rare token may gain.
    """
    lower, _ = log_band(torch.zeros(1, dtype=torch.float64), divergence, radius)
    return {
        "lower_at_one": math.exp(lower.item()),
        "room_at_zero": 0.0 - math.expm1(lower.item()),
    }


def summary(
    radius: float = 0.05, p: tuple[float, ...] = (0.01, 0.1, 0.5, 0.9, 0.99)
) -> list[dict[str, Any]]:
    """One row for each registered divergence, computed from the objects themselves.

    Returns
    -------
    list of dict
        ``name``, ``f_at_zero``, ``slope_at_infinity``, ``closed_form`` (bool), ``lower_until``
        and ``upper_from`` of `saturation`, the entries of `limits`, and ``bounds``, a list of
        (p, lower, upper).
    """
    rows = []
    for name in list_divergences():
        divergence = get_divergence(name)
        lower, upper = band(p, divergence, radius)
        lower_until, upper_from = saturation(divergence, radius)
        rows.append(
            {
                "name": name,
                "f_at_zero": divergence.f_at_zero,
                "slope_at_infinity": divergence.slope_at_infinity,
                "closed_form": divergence.closed_form is not None,
                "lower_until": lower_until,
                "upper_from": upper_from,
                **limits(divergence, radius),
                "bounds": list(zip(p, lower.tolist(), upper.tolist(), strict=True)),
            }
        )
    return rows


def _in_chunks(
    function: Callable[..., tuple[Tensor, ...]],
    x: Tensor,
    radius: float | Tensor,
    *others: Tensor,
) -> tuple[Tensor, ...]:
    """An elementwise function on pieces that fit the cache, where every operation is a pass."""
    if torch.compiler.is_compiling() or x.device.type != "cpu" or x.numel() <= _CHUNK:
        return function(x, radius, *others)
    chunk = _CHUNK * torch.get_num_threads()
    tensors = (x, radius, *others) if isinstance(radius, Tensor) else (x, *others)
    results = []
    for pieces in zip(*(t.reshape(-1).split(chunk) for t in tensors), strict=True):
        if isinstance(radius, Tensor):
            results.append(function(*pieces))
        else:
            results.append(function(pieces[0], radius, *pieces[1:]))
    return tuple(torch.cat(column).view(x.shape) for column in zip(*results, strict=True))


def _prepare(
    logp: Tensor, radius: float | Tensor, native: bool, name: str = "logp"
) -> tuple[Tensor, float | Tensor, torch.dtype]:
    """Checked, detached and at working precision, with the dtype to return."""
    if not isinstance(logp, Tensor) or not logp.is_floating_point():
        raise TypeError(f"{name} must be a floating-point tensor, got {_describe(logp)}")
    radius_checked = _check_radius(radius)
    slack = 4 * torch.finfo(logp.dtype).eps
    checked = _check_values(
        logp, lambda x: x > slack, f"{name} must be a log probability, at most 0"
    )
    out = _out_dtype(logp)
    work = out if native else torch.float64
    x = logp.detach().to(work)
    if not checked:
        x = torch.where(x > slack, math.nan, x)
    x = x.clamp(max=0.0)
    if isinstance(radius, Tensor):
        radius = radius.detach().to(x)
        if not radius_checked:
            radius = torch.where((radius > 0) & (radius < math.inf), radius, math.nan)
        x, radius = torch.broadcast_tensors(x, radius)
        return x, radius, out
    return x, float(radius), out


def _out_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _check_radius(radius: float | Tensor) -> bool:
    """Raise if it is no radius; False where its values cannot be read for free."""
    if isinstance(radius, Tensor):
        if not radius.is_floating_point():
            raise TypeError(f"radius must be a floating-point tensor, got {_describe(radius)}")
        return _check_values(
            radius, lambda x: ~((x > 0) & (x < math.inf)), "radius must be finite and > 0"
        )
    if isinstance(radius, bool) or not isinstance(radius, Real):
        raise TypeError(f"radius must be a number or a tensor, got {radius!r}")
    if not (0 < radius < math.inf):
        raise ValueError(f"radius must be finite and > 0, got {radius!r}")
    return True


def _check_values(x: Tensor, bad: Callable[[Tensor], Tensor], message: str) -> bool:
    """Raise if any element is bad; False where values cannot be read for free."""
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    wrong = bad(x.detach())
    try:
        if not bool(wrong.any()):
            return True
    except RuntimeError:  # inside vmap
        return False
    raise ValueError(f"{message}; got {x[wrong][0].item()!r}")


def _describe(x: object) -> str:
    return f"a tensor of {x.dtype}" if isinstance(x, Tensor) else repr(x)
