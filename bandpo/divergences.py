"""f-divergences: what a ratio bound needs to know about one.

An f-divergence is :math:`D_f(Q\\|P) = \\sum_V P\\, f(Q/P)` with f convex on (0, inf) and f(1) = 0.
P is the old policy, Q the new one, u = Q/P their ratio. Only f and its two limits are needed for
everything else in this package; a closed form is a shortcut, never a second definition.

References
----------
.. [1] I. Csiszar, "Information-type measures of difference of probability distributions and
       indirect observations", Studia Sci. Math. Hungar. 2 (1967).
.. [2] Noel Cressie and Timothy Read, "Multinomial goodness-of-fit tests", JRSS B 46 (1984).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from bandpo import closed_forms
from bandpo.import_path import load

__all__ = ["Divergence", "alpha_divergence", "get_divergence", "list_divergences"]


@dataclass(frozen=True)
class Divergence:
    """An f-divergence, given by its generator.

    Parameters
    ----------
    name : str
        What tables, figures and configurations call it.
    f : callable
        Elementwise on a tensor of ratios u > 0 (float64), any shape; convex, with f(1) = 0, in
        nats or the divergence's own unit. Adding k (u - 1) changes nothing: it cancels in D_f.
    f_at_zero : float
        f(0+), the limit of f(u) for u -> 0; ``math.inf`` is allowed.
    slope_at_infinity : float
        f'(inf), the limit of f(u)/u for u -> inf; ``math.inf`` is allowed.
    closed_form : callable, optional
        ``closed_form(logp, radius) -> (log_lower, log_upper)``, where the band has one.

    Raises
    ------
    TypeError
        If the name is no string, f is not callable or a limit is no number.
    ValueError
        If the name is empty or a limit is NaN or minus infinity.

    Examples
    --------
    >>> Divergence("jeffreys", lambda u: (u - 1) * u.log(), math.inf, math.inf).name
    'jeffreys'
    """

    name: str
    f: Callable[[Tensor], Tensor]
    f_at_zero: float
    slope_at_infinity: float
    closed_form: Callable[[Tensor, Tensor | float], tuple[Tensor, Tensor]] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise TypeError(f"Divergence name must be a string, got {self.name!r}")
        if not self.name:
            raise ValueError("Divergence name must not be empty")
        if not callable(self.f):
            raise TypeError(f"Divergence f must be a function of a tensor, got {self.f!r}")
        for field in ("f_at_zero", "slope_at_infinity"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(f"Divergence {field} must be a number, got {value!r}")
            if math.isnan(value) or value == -math.inf:
                raise ValueError(
                    f"Divergence {field} must be finite or math.inf, got {value!r}; "
                    "a convex f with f(1) = 0 has no other limits"
                )

    def at(self, u: Tensor) -> Tensor:
        """f(u), continued to u = 0 by its limit."""
        return torch.where(u == 0, self.f_at_zero, self.f(u))

    def __str__(self) -> str:
        return self.name


def _jensen_shannon(u: Tensor) -> Tensor:
    # u log u - (1+u) log((1+u)/2), arranged so that nothing cancels at 1 or at infinity
    log_share = torch.where(u < 0.5, torch.log(2 * u / (1 + u)), torch.log1p((u - 1) / (u + 1)))
    return 0.5 * (u * log_share - torch.log1p(0.5 * (u - 1)))


@lru_cache(maxsize=64)
def alpha_divergence(alpha: float) -> Divergence:
    """The Cressie-Read power divergence, f(u) = (u^a - a u + a - 1) / (a (a - 1)).

    Parameters
    ----------
    alpha : float
        Any finite number. 0 and 1, the limits, are forward and reverse KL and give those objects.
        2, 1/2 and -1 are chi2 / 2, 2 hellinger and neyman / 2.

    Returns
    -------
    Divergence
        Named ``alpha:<alpha>``; ``kl`` or ``reverse_kl`` at 0 and 1.
    """
    alpha = float(alpha)
    if not math.isfinite(alpha):
        raise ValueError(f"alpha must be a finite number, got {alpha!r}")
    if alpha == 0:
        return KL
    if alpha == 1:
        return REVERSE_KL

    def f(u: Tensor) -> Tensor:
        # both expm1 forms are the formula above; each is free of cancellation at its own limit
        if alpha < 0.5:
            return (torch.expm1(alpha * u.log()) - alpha * (u - 1)) / (alpha * (alpha - 1))
        return (u * torch.expm1((alpha - 1) * u.log()) - (alpha - 1) * (u - 1)) / (
            alpha * (alpha - 1)
        )

    return Divergence(
        f"alpha:{alpha:g}",
        f,
        1 / alpha if alpha > 0 else math.inf,
        1 / (1 - alpha) if alpha < 1 else math.inf,
    )


KL = Divergence("kl", lambda u: -u.log(), math.inf, 0.0)
REVERSE_KL = Divergence("reverse_kl", lambda u: torch.xlogy(u, u), 0.0, math.inf)
TV = Divergence("tv", lambda u: 0.5 * (u - 1).abs(), 0.5, 0.5, closed_forms.tv)
CHI2 = Divergence("chi2", lambda u: (u - 1) ** 2, 1.0, math.inf, closed_forms.chi2)
NEYMAN = Divergence("neyman", lambda u: (u - 1) * ((u - 1) / u), math.inf, 1.0, closed_forms.neyman)
HELLINGER = Divergence("hellinger", lambda u: (u.sqrt() - 1) ** 2, 1.0, 1.0, closed_forms.hellinger)
LE_CAM = Divergence(
    "le_cam", lambda u: (u - 1) * ((u - 1) / (u + 1)), 1.0, 1.0, closed_forms.le_cam
)
JENSEN_SHANNON = Divergence("jensen_shannon", _jensen_shannon, 0.5 * math.log(2), 0.5 * math.log(2))

_BY_NAME = {
    d.name: d for d in (KL, REVERSE_KL, TV, CHI2, NEYMAN, HELLINGER, LE_CAM, JENSEN_SHANNON)
}


def list_divergences() -> tuple[str, ...]:
    """Names that `get_divergence` knows; ``alpha:<number>`` comes on top."""
    return tuple(_BY_NAME)


def get_divergence(spec: str | Divergence) -> Divergence:
    """Resolve a divergence.

    Parameters
    ----------
    spec : str or Divergence
        A registered name, ``alpha:<number>``, an import path ``package.module:Name``, or the
        object itself.

    Returns
    -------
    Divergence

    Raises
    ------
    TypeError
        If spec is neither, or the import path names something else.
    ValueError
        If the name is not known, the number after ``alpha:`` is none, or the import fails.
    """
    if isinstance(spec, Divergence):
        return spec
    if not isinstance(spec, str):
        raise TypeError(f"divergence must be a name or a Divergence, got {spec!r}")
    if spec in _BY_NAME:
        return _BY_NAME[spec]
    head, colon, tail = spec.partition(":")
    if head == "alpha" and colon:
        try:
            return alpha_divergence(float(tail))
        except ValueError:
            raise ValueError(
                f"divergence {spec!r}: what follows 'alpha:' must be a finite number, "
                "as in 'alpha:0.5'"
            ) from None
    if colon:
        found = load(spec, "divergence")
        if not isinstance(found, Divergence):
            raise TypeError(f"divergence {spec!r} must name a Divergence, got {found!r}")
        return found
    raise ValueError(
        f"unknown divergence {spec!r}; known are {', '.join(_BY_NAME)}, alpha:<number> "
        "and an import path 'package.module:Name'"
    )
