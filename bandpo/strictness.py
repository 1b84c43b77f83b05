"""How strict a clip rule is on the tokens of given runs, and radii of equal strictness.

Equal radii of two divergences are not equal strictness, so rules compared at one radius differ in
two things at once. Here strictness is the clip rate on tokens that training has produced, and two
radii *match* where it is equal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from scipy.optimize import brentq
from torch import Tensor

from bandpo.rules import ClipRule

# A radius is looked for between these; both are far outside what anyone trains with.
_SMALLEST, _LARGEST = 1e-4, 10.0


@dataclass(frozen=True)
class Tokens:
    """Completion tokens as a training step saw them.

    Parameters
    ----------
    old_logps, logps : Tensor, shape (n,)
        Log-probabilities (nats) under the policy that sampled them and the one being trained.
    advantages : Tensor, shape (n,)
    """

    old_logps: Tensor
    logps: Tensor
    advantages: Tensor

    def __post_init__(self) -> None:
        shapes = [tuple(t.shape) for t in (self.old_logps, self.logps, self.advantages)]
        if len(set(shapes)) != 1 or len(shapes[0]) != 1 or not shapes[0][0]:
            raise ValueError(
                "old_logps, logps and advantages must be rows of one length, 1 or more; "
                f"got shapes {shapes}"
            )


def clip_rate(tokens: Tokens, rule: ClipRule) -> float:
    """Share of tokens whose gradient a rule would remove, as ``band/clip_rate`` counts them.

    Parameters
    ----------
    tokens : Tokens
    rule : ClipRule
        Any rule; it need not be the one under which the tokens arose.

    Returns
    -------
    float
        In [0, 1].
    """
    old = tokens.old_logps.double().clamp(max=0)
    log_ratio = tokens.logps.double() - old
    lower, upper = rule.log_bounds(old)
    high = (tokens.advantages > 0) & (log_ratio > upper)
    low = (tokens.advantages < 0) & (log_ratio < lower)
    return float((high | low).double().mean())


def matched_radius(
    samples: Sequence[Tokens], rule: ClipRule, make: Callable[[float], ClipRule]
) -> float:
    """Radius at which a family of rules clips as many tokens as a given rule.

    Parameters
    ----------
    samples : sequence of Tokens
        One for each task; each weighs the same.
    rule : ClipRule
        The rule to match.
    make : callable
        ``radius -> ClipRule``, less strict the larger the radius.

    Returns
    -------
    float
        Between 1e-4 and 10. The clip rate is a step function of the radius, so it meets the wanted
        one up to one token.

    Raises
    ------
    ValueError
        If no radius in that range will do.
    """
    if not samples:
        raise ValueError("samples must hold the tokens of at least one task; got none")

    def excess(log_radius: float) -> float:
        made = make(math.exp(log_radius))
        return sum(clip_rate(one, made) - clip_rate(one, rule) for one in samples)

    ends = math.log(_SMALLEST), math.log(_LARGEST)
    strict, loose = map(excess, ends)
    if strict < 0 or loose > 0:
        raise ValueError(
            f"no radius from {_SMALLEST:g} to {_LARGEST:g} clips as many tokens as {rule}: from "
            f"the one end to the other the mean rates differ from it by {strict / len(samples):+g} "
            f"and {loose / len(samples):+g}"
        )
    return math.exp(brentq(excess, *ends, xtol=1e-4))
