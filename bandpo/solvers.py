"""Solvers for the two roots of g_f(p, r) = p f(r) + (1 - p) f(c) = radius.

They work on the lower root alone, as the drop T = -log r >= 0; swapping a token and its complement
turns the upper root into a lower one. Bracketing r itself fails near p = 1, where the upper root
lies closer to 1/p than float64 resolves; T has no such place.

Every solver but `bisection` and `brent` takes a fixed number of elementwise steps: no branch and
no loop depends on the data, so they run unchanged under torch.compile and on any device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from scipy.optimize import brentq
from torch import Tensor

from bandpo.divergences import KL, Divergence
from bandpo.elementary import FLOOR, expm1, inverse_odds

# Stands in for w = 0, that is for p = 1, where the odds are infinite: changes no digit of a bound.
_SMALLEST = {torch.float32: 1e-26, torch.float64: 1e-147}

__all__ = [
    "SOLVERS",
    "Solver",
    "binary_divergence",
    "bisection_steps",
    "get_solver",
    "textbook_bisection",
]

TwoSided = Callable[[Divergence, Tensor, "Tensor | float"], tuple[Tensor, Tensor]]
OneSided = Callable[[Divergence, Tensor, Tensor, "Tensor | float"], Tensor]


@dataclass(frozen=True)
class Solver:
    """A way to compute bounds.

    Parameters
    ----------
    two_sided : callable
        (divergence, logp, radius) -> (log_lower, log_upper).
    one_sided : callable
        (divergence, logp, upward, radius) -> log_bound.
    native : bool
        Whether it takes float32 as it comes; otherwise it is given everything in float64.
    """

    two_sided: TwoSided
    one_sided: OneSided
    native: bool


def has_fast_membership(divergence: Divergence) -> bool:
    """Whether `binary_divergence` may run in float32: only KL's terms are known not to cancel."""
    return divergence == KL


def binary_divergence(divergence: Divergence, logp: Tensor, logq: Tensor) -> Tensor:
    """g_f between Bernoulli(q) and Bernoulli(p), both given by their logarithm <= 0."""
    if divergence == KL:
        return _kl_binary_divergence(logp, logq)
    own = _term(divergence, logp.exp(), logq.exp(), torch.exp(logq - logp))
    not_p, not_q = -expm1(logp), -expm1(logq)
    return own + _term(divergence, not_p, not_q, not_q / not_p)


def _kl_binary_divergence(logp: Tensor, logq: Tensor) -> Tensor:
    # p (log(p/q) - w log c)
    w, _ = _positive_odds(logp)
    log_r = logq - logp.clamp(min=FLOOR[logp.dtype])
    # rounding may carry q past 1, where c ends
    not_c = (expm1(log_r) / w).clamp(max=1 - torch.finfo(w.dtype).eps)
    value = -(log_r + w * torch.log1p(-not_c)) / (1 + w)
    return torch.where(logp == logq, 0.0, value)


def _term(divergence: Divergence, old: Tensor, new: Tensor, ratio: Tensor) -> Tensor:
    """old f(new/old), continued to old = 0 by new f'(inf)."""
    at_zero = torch.where(new == 0, 0.0, new * divergence.slope_at_infinity)
    return torch.where(old == 0, at_zero, old * divergence.at(ratio))


def _positive_odds(logp: Tensor) -> tuple[Tensor, Tensor]:
    w, below = inverse_odds(logp)
    return w.clamp(min=_SMALLEST[w.dtype]), below


# --- forward KL -----------------------------------------------------------------------------

# The start has the exact expansion for a small radius and the exact limits for p -> 0 and p -> 1;
# the two numbers were fitted so that one step from it errs by 1.1e-7 at most, for every p and
# every radius up to 20, and two steps by less than a float64 rounding.
_BEND, _RADIUS_BEND = 3 / 14, 0.3


def kl_drop(w: Tensor, radius: Tensor | float, steps: int) -> Tensor:
    """T = -log lower of forward KL, by Halley's third-order form of Newton's method.

    Solves p T - (1 - p) log c - radius = 0, where c = 1 + (1 - e^-T) / w.
    """
    p = 1 / (1 + w)
    not_p = w * p
    k = torch.sqrt(2 * radius * w)
    start = (1 + _BEND * k) / (
        1 + _RADIUS_BEND * radius + radius / (3 * k) + k * (1 / 3 + _BEND + _BEND * k)
    )
    t = radius * (1 + w) + k * start
    for _ in range(steps):
        e = expm1(-t)
        excess = p * t - not_p * torch.log1p(-e / w) - radius
        # the derivatives are e / (e - w) and, over the first, -w (1 + e) / (e (w - e))
        t = t + 2 * excess * e * (w - e) / (2 * e * e - excess * w * (1 + e))
    return t


def _kl_steps(dtype: torch.dtype) -> int:
    return 2 if dtype == torch.float64 else 1


def _newton(divergence: Divergence, logp: Tensor, radius: Tensor | float) -> tuple[Tensor, Tensor]:
    _only_kl(divergence)
    w, below = _positive_odds(logp)
    steps = _kl_steps(logp.dtype)
    lower = -kl_drop(w, radius, steps) * below.exp()
    rise = -w * expm1(-kl_drop(1 / w, radius, steps))
    return lower, torch.minimum(torch.log1p(rise) + below, -logp)


def _newton_side(
    divergence: Divergence, logp: Tensor, upward: Tensor, radius: Tensor | float
) -> Tensor:
    _only_kl(divergence)
    w, below = _positive_odds(logp)
    drop = kl_drop(torch.where(upward, 1 / w, w), radius, _kl_steps(logp.dtype))
    upper = torch.log1p(-w * expm1(-drop)) + below
    return torch.minimum(torch.where(upward, upper, -drop * below.exp()), -logp)


def _only_kl(divergence: Divergence) -> None:
    if divergence != KL:
        raise ValueError(
            f"method 'newton' knows forward KL only, not {divergence.name!r}; use method='auto'"
        )


# --- closed forms ---------------------------------------------------------------------------


def _closed_form(
    divergence: Divergence, logp: Tensor, radius: Tensor | float
) -> tuple[Tensor, Tensor]:
    if divergence.closed_form is None:
        raise ValueError(
            f"divergence {divergence.name!r} has no closed form; use method='auto' or 'generic'"
        )
    return divergence.closed_form(logp, radius)


def _closed_form_side(
    divergence: Divergence, logp: Tensor, upward: Tensor, radius: Tensor | float
) -> Tensor:
    lower, upper = _closed_form(divergence, logp, radius)
    return torch.where(upward, upper, lower)


# --- any convex f ---------------------------------------------------------------------------

# The drop is sought as log(e^T - 1), the log odds of 1 - r: one exponential gives both r and c.
# At the upper end r = e^-700, and a smaller one is no float64 any more.
_LOG_ODDS = (-350.0, 700.0)
# By the dtype of the answer; the work is done in float64 all the same.
_HALVINGS = {torch.float64: 50, torch.float32: 30}


def generic_drop(
    divergence: Divergence, w: Tensor, radius: Tensor | float, out: torch.dtype
) -> Tensor:
    """T = -log lower for any convex f, by halving the range of log(e^T - 1).

    The relative error in T is at most the last width, 1e-12 after the 50 halvings for float64 and
    1e-6 after the 30 for float32, whatever f does: no derivative, no smoothness, no good start is
    needed, so a kink as that of TV costs nothing. One evaluation of f on both tokens a halving.
    """
    p = 1 / (1 + w)
    not_p = w * p

    def inside(log_odds: Tensor) -> Tensor:
        odds = torch.exp(log_odds)
        r = 1 / (1 + odds)
        c = 1 + odds * r / w
        return p * divergence.f(r) + not_p * divergence.f(c) <= radius

    low, width = torch.full_like(w, _LOG_ODDS[0]), _LOG_ODDS[1] - _LOG_ODDS[0]
    for _ in range(_HALVINGS[out]):
        width /= 2
        # where() written as a sum, several times faster in eager code
        low = low + width * inside(low + width)
    drop = torch.log1p(torch.exp(low + width))
    bottom = torch.full_like(w, _LOG_ODDS[1])
    return _with_nan_of(torch.where(inside(bottom), math.inf, drop), w, radius)


def _with_nan_of(x: Tensor, *inputs: Tensor | float) -> Tensor:
    """NaN where an input is NaN; a comparison takes it for false."""
    for one in inputs:
        x = x + 0 * one
    return x


DropSolver = Callable[[Divergence, Tensor, "Tensor | float", torch.dtype], Tensor]


def _mirrored(solve: DropSolver) -> TwoSided:
    def two_sided(
        divergence: Divergence, logp: Tensor, radius: Tensor | float
    ) -> tuple[Tensor, Tensor]:
        logp, radius, out = _widened(logp, radius)
        w, below = _positive_odds(logp)
        lower = -_at_the_ends(divergence, logp, solve(divergence, w, radius, out))
        rise = -w * expm1(-solve(divergence, 1 / w, radius, out))
        return lower, _log_upper(divergence, logp, rise, below)

    return two_sided


def _mirrored_side(solve: DropSolver) -> OneSided:
    def one_sided(
        divergence: Divergence, logp: Tensor, upward: Tensor, radius: Tensor | float
    ) -> Tensor:
        logp, radius, out = _widened(logp, radius)
        w, below = _positive_odds(logp)
        drop = solve(divergence, torch.where(upward, 1 / w, w), radius, out)
        upper = _log_upper(divergence, logp, -w * expm1(-drop), below)
        return torch.where(upward, upper, -_at_the_ends(divergence, logp, drop))

    return one_sided


def _widened(logp: Tensor, radius: Tensor | float) -> tuple[Tensor, Tensor | float, torch.dtype]:
    """Both in float64, since f may cancel, and the dtype whose accuracy is called for."""
    if isinstance(radius, Tensor):
        radius = radius.double()
    return logp.double(), radius, logp.dtype


def _at_the_ends(divergence: Divergence, logp: Tensor, drop: Tensor) -> Tensor:
    """The lower bound is 0 at p = 0, and 1 at p = 1 if the complement's price is unbounded."""
    drop = torch.where(logp == -math.inf, math.inf, drop)
    if math.isinf(divergence.slope_at_infinity):
        drop = torch.where(logp == 0, 0.0, drop)
    return drop


def _log_upper(divergence: Divergence, logp: Tensor, rise: Tensor, below: Tensor) -> Tensor:
    # far below every p in use the bound goes on as 1/p, unless the slope of f has no end;
    # there it grows more slowly, and only the limit infinity at p = 0 is sure
    if math.isinf(divergence.slope_at_infinity):
        below = torch.where(below == math.inf, below, 0.0)
    return torch.minimum(torch.log1p(rise) + below, -logp)


# --- the textbook ---------------------------------------------------------------------------


def bisection_steps(width: float, tolerance: float) -> int:
    """How many halvings bring a bracket of this width down to the tolerance."""
    return math.ceil(math.log2(width / tolerance)) if width > tolerance else 0


def textbook_bisection(
    divergence: Divergence,
    logp: Tensor,
    radius: Tensor | float,
    tolerance: float = 1e-12,
) -> tuple[Tensor, Tensor]:
    """Bisection of r in [0, 1] and [1, 1/p], as in a textbook; the error in r is absolute.

    After n halvings it is at most the bracket's width / 2^n, so n is known beforehand from the
    smallest p, which is read on the host. Nothing is known of log r where r or 1/p - r is smaller
    than the tolerance; p = 0 and p = 1 give NaN.
    """
    p = logp.exp()
    p = torch.where((p > 0) & (p < 1), p, math.nan)

    def inside(r: Tensor) -> Tensor:
        c = ((1 - p * r) / (1 - p)).clamp(min=0)
        return p * divergence.at(r) + (1 - p) * divergence.at(c) <= radius

    def edge(inner: Tensor, outer: Tensor) -> Tensor:
        saturated = inside(outer)
        width = float((outer - inner).abs().nan_to_num().max()) if p.numel() else 0.0
        for _ in range(bisection_steps(width, tolerance)):
            middle = 0.5 * (inner + outer)
            hit = inside(middle)
            inner, outer = torch.where(hit, middle, inner), torch.where(hit, outer, middle)
        return torch.where(saturated, outer, inner) + 0 * p

    one = torch.ones_like(p)
    return edge(one, 0 * p).log(), torch.minimum(edge(one, 1 / p).log(), -logp)


# The drop is sought between e^-350 and e^6.55 = 700.
_LOG_DROP = (-350.0, 6.55)


def _excess(
    divergence: Divergence, w: Tensor, radius: Tensor | float
) -> Callable[[Tensor], Tensor]:
    """T -> g_f - radius, increasing in T from -radius at T = 0."""
    p = 1 / (1 + w)
    not_p = w * p

    def excess(drop: Tensor) -> Tensor:
        c = 1 - expm1(-drop) / w
        return p * divergence.f(torch.exp(-drop)) + not_p * divergence.f(c) - radius

    return excess


def _brent_drop(
    divergence: Divergence, w: Tensor, radius: Tensor | float, out: torch.dtype
) -> Tensor:
    """The same root by SciPy's Brent, element by element: the reference, slow."""

    def solve(w: Tensor, radius: Tensor) -> float:
        excess = _excess(divergence, w, radius)

        def at(log_drop: float) -> float:
            value = excess(w.new_tensor(math.exp(log_drop))).item()
            return max(min(value, 1e300), -1e300)

        if math.isnan(w.item()):
            return math.nan
        if at(_LOG_DROP[1]) <= 0:
            return math.inf
        return math.exp(brentq(at, *_LOG_DROP, xtol=1e-15, rtol=1e-15, maxiter=500))

    radii = torch.as_tensor(radius, dtype=w.dtype).expand(w.shape)
    drops = [solve(*pair) for pair in zip(w.flatten(), radii.flatten(), strict=True)]
    return w.new_tensor(drops).reshape(w.shape)


def _bisection_side(
    divergence: Divergence, logp: Tensor, upward: Tensor, radius: Tensor | float
) -> Tensor:
    lower, upper = textbook_bisection(divergence, logp, radius)
    return torch.where(upward, upper, lower)


SOLVERS = {
    "closed_form": Solver(_closed_form, _closed_form_side, native=True),
    "newton": Solver(_newton, _newton_side, native=True),
    "generic": Solver(_mirrored(generic_drop), _mirrored_side(generic_drop), native=True),
    "bisection": Solver(textbook_bisection, _bisection_side, native=False),
    "brent": Solver(_mirrored(_brent_drop), _mirrored_side(_brent_drop), native=False),
}
"""By name; ``auto`` picks among the first three."""


def get_solver(method: str, divergence: Divergence) -> Solver:
    """The solver of that name, or for ``auto`` the best one that the divergence has."""
    if method == "auto":
        if divergence.closed_form is not None:
            return SOLVERS["closed_form"]
        return SOLVERS["newton" if divergence == KL else "generic"]
    if method not in SOLVERS:
        raise ValueError(f"unknown method {method!r}; known are auto, {', '.join(SOLVERS)}")
    return SOLVERS[method]
