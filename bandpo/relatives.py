"""Which known divergence a new one comes near, and the confidence interval that this is.

Two divergences at the same radius are not equally strict. Here they are compared at radii that
give the same bounds at p = 1/2; for small radii that is the ratio of their curvatures at 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from scipy.stats import norm

from bandpo.divergences import Divergence, get_divergence, list_divergences
from bandpo.operator import binary_divergence, log_band

__all__ = ["Relative", "curvature", "equivalent_radius", "nearest"]

_ALPHAS = ("-2", "-0.5", "1.5", "3")
_LEVEL = 0.05
_Z = float(norm.ppf(1 - _LEVEL / 2))


@dataclass(frozen=True)
class Relative:
    """A known divergence beside a new one.

    Parameters
    ----------
    name : str
        The known divergence.
    radius : float
        Its radius that gives the same bounds at p = 1/2.
    distance : float
        Largest difference of the reachable probability p·upper over all p; by the mirror that of
        p·lower too.
    p : float
        Where that is.
    interval : str
        The confidence interval, or test, for a proportion that its band is.
    draws : float
        Number of draws that its radius stands for, at a level of 95 %.
    """

    name: str
    radius: float
    distance: float
    p: float
    interval: str
    draws: float


def curvature(divergence: str | Divergence) -> float | None:
    """f''(1), by central differences; None if f has a kink at 1.

    Parameters
    ----------
    divergence : str or Divergence
        What `get_divergence` takes.
    """
    f = get_divergence(divergence).f
    h = torch.tensor([1e-3, 1e-4], dtype=torch.float64)
    coarse, fine = ((f(1 + h) + f(1 - h)) / h**2).tolist()  # f(1) is 0
    return fine if abs(fine - coarse) < 0.5 * abs(fine) or fine == coarse else None


def equivalent_radius(
    divergence: str | Divergence, radius: float, other: str | Divergence
) -> float:
    """The radius at which another divergence has the same bounds at p = 1/2.

    Parameters
    ----------
    divergence, other : str or Divergence
        What `get_divergence` takes.
    radius : float
        Of the first.

    Returns
    -------
    float
        In the unit of the other.

    Raises
    ------
    ValueError
        If the radius is so large that at p = 1/2 the bounds are 0 and 2.
    """
    half = torch.tensor([0.5], dtype=torch.float64).log()
    _, upper = log_band(half, divergence, radius)
    if (half + upper).item() >= 0:
        largest = binary_divergence(half, torch.zeros_like(half), divergence).item()
        raise ValueError(
            f"radius must be below {largest:.4g} for {get_divergence(divergence).name!r}, got "
            f"{radius!r}: at p = 1/2 its bounds are 0 and 2, and nothing is held"
        )
    return binary_divergence(half, half + upper, other).item()


def nearest(
    divergence: str | Divergence, radius: float, known: Sequence[str] = ()
) -> list[Relative]:
    """Known divergences by the distance of their bounds, the nearest first.

    Parameters
    ----------
    divergence : str or Divergence
        The new one.
    radius : float
        Its radius.
    known : sequence of str
        What to compare with; empty for every registered divergence and four powers.

    Returns
    -------
    list of Relative

    Raises
    ------
    ValueError
        As in `equivalent_radius`.
    """
    logp = torch.nn.functional.logsigmoid(torch.linspace(-14, 14, 561, dtype=torch.float64))

    def reach(divergence: str | Divergence, radius: float) -> torch.Tensor:
        return torch.exp(logp + log_band(logp, divergence, radius)[1])

    own, relatives = reach(divergence, radius), []
    for name in known or (*list_divergences(), *(f"alpha:{alpha}" for alpha in _ALPHAS)):
        equivalent = equivalent_radius(divergence, radius, name)
        gap = (reach(name, equivalent) - own).abs()
        at = int(gap.argmax())
        interval, draws = _interval(name, equivalent)
        p = logp[at].exp().item()
        relatives.append(Relative(name, equivalent, gap[at].item(), p, interval, draws))
    return sorted(relatives, key=lambda one: one.distance)


def _interval(name: str, radius: float) -> tuple[str, float]:
    """Name and number of draws, by the dictionary of the chapter on closed forms."""
    by_z2 = _Z**2 / radius
    if name.startswith("alpha:"):
        return f"Cressie-Read, λ = {-float(name.removeprefix('alpha:')):g}", by_z2 / 2
    return {
        "kl": ("likelihood ratio", by_z2 / 2),
        "reverse_kl": ("modified likelihood ratio", by_z2 / 2),
        "tv": ("Hoeffding", math.log(2 / _LEVEL) / (2 * radius**2)),
        "chi2": ("Wald", by_z2),
        "neyman": ("Wilson score", by_z2),
        "hellinger": ("arcsine", (_Z / (2 * math.acos(max(1 - radius / 2, -1)))) ** 2),
        "le_cam": ("two samples, pooled z-test", by_z2),
        "jensen_shannon": ("two samples, likelihood ratio", by_z2 / 4),
    }[name]
