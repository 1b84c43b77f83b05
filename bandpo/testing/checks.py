"""One check of a divergence: what must hold, by how much it fails, where, and what that breaks.

A size is the largest error found, 0 if there is none; where no number can tell, it is infinite.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

_REQUIRES = {
    "elementwise": "f maps float64 ratios to float64 values, each on its own",
    "finite": "f is a finite number for every ratio",
    "zero at one": "f(1) is 0",
    "convex": "f lies below its chords",
    "precision": "f has float64's digits",
    "charges": "f is no multiple of u - 1",
    "limit at 0": "f(u) tends to f_at_zero for u to 0",
    "slope": "f(u)/u tends to slope_at_infinity",
    "simplex": "0 <= lower <= 1 <= upper <= 1/p",
    "roots": "g_f is the radius at each bound that is no edge",
    "interval": "g_f <= radius between the bounds and nowhere else",
    "saturation": "lower is 0 below the p where g_f(p, 0) is the radius, and not above it",
    "mirror": "p upper(p) + (1-p) lower(1-p) is 1",
    "monotone": "the band narrows as p grows and widens with the radius",
    "gradient": "the clip stops the gradient where g_f > radius, and only there",
    "float32": "bounds of float32 input agree with those of float64",
    "closed form": "the closed form's bounds are those of f",
    "Brent": "SciPy's root finder gives the same bounds",
}
_BREAKS = {
    "elementwise": "a token's bound would depend on the other tokens of its batch, or fail",
    "finite": "the solver takes NaN for outside, so bounds stop short of where they belong",
    "zero at one": "the radius is off by f(1) everywhere: an unchanged token may already be "
    "outside its band, and its gradient is stopped before the first update",
    "convex": "beyond its bound a token can be inside the trust region again: the clip stops "
    "tokens that may move or lets through tokens that may not",
    "precision": "bounds carry the noise of f and jump between tokens of nearly equal p",
    "charges": "the divergence of any two policies is 0: nothing is ever clipped",
    "limit at 0": "saturation is wrong: a token may be driven to probability 0, or may not, "
    "against what the trust region says",
    "slope": "the bounds at p = 0 and p = 1 are wrong: room that rare tokens do not have, or "
    "none where they have it",
    "simplex": "a clip at a ratio that no policy can have, or one that excludes the old policy",
    "roots": "tokens are clipped at another radius than the one that was set",
    "interval": "tokens outside the trust region go on moving, or tokens inside are stopped",
    "saturation": "a token may be driven to probability 0, or may not, against what the trust "
    "region says",
    "mirror": "a token and its complement are held by two different trust regions",
    "monotone": "a likelier token would get more room than a rarer one",
    "gradient": "the update of a token outside the trust region is not stopped, or one inside is",
    "float32": "training in float32 or less clips elsewhere than the tables and figures say",
    "closed form": "training, which uses the closed form, clips elsewhere than f says",
    "Brent": "the bounds depend on the solver",
}


@dataclass(frozen=True)
class Check:
    """One check and its outcome.

    Parameters
    ----------
    name : str
        Short name.
    requires : str
        What must hold.
    size : float
        Largest error found; infinite where no number can tell.
    tolerance : float
        Largest error allowed.
    where : str
        The ratio u, or the p, radius and ratio r, of the largest error; or what f did instead.
    breaks : str
        What a violation would do to training.
    """

    name: str
    requires: str
    size: float
    tolerance: float
    where: str
    breaks: str

    @property
    def passed(self) -> bool:
        """Whether the error is at most the tolerance."""
        return self.size <= self.tolerance

    def __str__(self) -> str:
        by = f"off by {self.size:.3g}, allowed {self.tolerance:.1g}; "
        return (
            f"{self.name}: {self.requires}; {by if math.isfinite(self.size) else ''}"
            f"{self.where}. In training: {self.breaks}"
        )


def finding(name: str, size: float, tolerance: float, where: str) -> Check:
    """The outcome of the check of that name."""
    return Check(name, _REQUIRES[name], size, tolerance, where, _BREAKS[name])


def worst(name: str, size: Tensor, tolerance: float, **places: Tensor) -> Check:
    """The check whose error is the largest of ``size``, and the place of it."""
    size, *coordinates = torch.broadcast_tensors(size, *places.values())
    if not size.numel():
        return finding(name, 0.0, tolerance, "nothing to compare")
    flat = size.nan_to_num(nan=math.inf, posinf=math.inf).flatten()
    at = int(flat.argmax())
    if flat[at] <= 0:
        return finding(name, 0.0, tolerance, "no error anywhere")
    where = [
        f"{key} = {_shown(one.flatten()[at].item())}"
        for key, one in zip(places, coordinates, strict=True)
    ]
    return finding(name, flat[at].item(), tolerance, ", ".join(where))


def _shown(x: float) -> str:
    return f"1 - {1 - x:.2g}" if 0.999 < x < 1 else f"{x:.4g}"
