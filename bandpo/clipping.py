"""Clip rules: bounds on the probability ratio, and the clipped policy-gradient objective.

A rule maps the log-probability that the old policy gave to a sampled token to a lower and an upper
bound on the ratio ``r = q / p``. Rules are frozen dataclasses and work without any trainer:

>>> import torch
>>> from bandpo.clipping import Fixed, clipped_surrogate
>>> old = torch.log(torch.tensor([0.5, 0.01]))
>>> new = (old + torch.log(torch.tensor([1.5, 1.1]))).requires_grad_()
>>> clipped_surrogate(new, old, torch.tensor([1.0, 1.0]), Fixed(0.2, 0.2)).detach()
tensor([1.2000, 1.1000])
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bandpo.adaptive import AdaptiveBand, Signal
from bandpo.divergences import Divergence
from bandpo.rules import DCPO, MIN_LOGP, Band, ClipRule, Fixed, PerSide, RelaxedBand

__all__ = [
    "DCPO",
    "MIN_LOGP",
    "RULE_NAMES",
    "AdaptiveBand",
    "Band",
    "ClipRule",
    "Fixed",
    "PerSide",
    "RelaxedBand",
    "clipped_surrogate",
    "make_rule",
]

RULE_NAMES = ("fixed", "dcpo", "band", "relaxed_band", "adaptive_band")


def make_rule(
    clip_rule: str,
    *,
    clip_rule_below: str | None = None,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    divergence: str | Divergence = "kl",
    radius: float = 0.05,
    max_ratio: float | None = 10.0,
    signal: str | Signal | None = None,
    adaptivity: float = 0.5,
) -> ClipRule:
    """Rule from the flat fields of a configuration.

    Parameters
    ----------
    clip_rule : {"fixed", "dcpo", "band", "relaxed_band", "adaptive_band"}
        Rule for both sides, or for the upper side when `clip_rule_below` is given.
    clip_rule_below : str or None
        Rule for the lower side.
    epsilon, epsilon_high : float
        The epsilons of ``fixed`` and ``dcpo`` and of the interval in ``relaxed_band``;
        `epsilon_high` None means the same as `epsilon`, as in TRL.
    divergence, radius : str or Divergence, float
        The trust region of ``band`` and ``relaxed_band``; the mean radius of ``adaptive_band``.
    max_ratio : float or None
        Cap on the upper bound of ``dcpo``, of the bands and of the one inside ``relaxed_band``.
    signal : str, callable or None
        What decides the radius of a token in ``adaptive_band``, which needs one: see
        `bandpo.adaptive.get_signal`.
    adaptivity : float, in (-1, 1)
        How far the radii of ``adaptive_band`` lie apart.

    Raises
    ------
    ValueError
        For an unknown rule name or a parameter outside its range.
    """
    high = epsilon if epsilon_high is None else epsilon_high

    def one(name: str, argument: str) -> ClipRule:
        match name:
            case "fixed":
                return Fixed(epsilon, high)
            case "dcpo":
                return DCPO(epsilon, high, max_ratio)
            case "band":
                return Band(divergence, radius, max_ratio)
            case "relaxed_band":
                return RelaxedBand(Band(divergence, radius, max_ratio), Fixed(epsilon, high))
            case "adaptive_band":
                if signal is None:
                    raise ValueError(
                        f"{argument} 'adaptive_band' needs a signal that decides each token's "
                        "radius, and a caller that computes it, as BandPOTrainer does; got none"
                    )
                return AdaptiveBand(divergence, radius, max_ratio, signal, adaptivity)
        raise ValueError(f"{argument} must be one of {', '.join(RULE_NAMES)}; got {name!r}")

    above = one(clip_rule, "clip_rule")
    if clip_rule_below is None:
        return above
    return PerSide(above, one(clip_rule_below, "clip_rule_below"))


def clipped_surrogate(logp: Tensor, old_logp: Tensor, advantages: Tensor, rule: ClipRule) -> Tensor:
    r"""Per-token clipped objective ``min(r A, clip(r, lower, upper) A)``, to be maximized.

    Parameters
    ----------
    logp : Tensor, any shape
        Log-probabilities (nats) of the sampled tokens under the policy being trained.
    old_logp : Tensor, shape of `logp`
        The same tokens under the policy that sampled them, held fixed.
    advantages : Tensor, broadcastable to `logp`
    rule : ClipRule

    Returns
    -------
    Tensor, shape of `logp`
        The objective; its gradient flows through `logp` alone. Average it over the tokens that
        count and negate it for a loss.

    Notes
    -----
    The minimum is taken in log space, on the side that the advantage pushes to: above for
    ``A > 0``, below for ``A < 0``. No ratio is formed that is not used, so an overflow in the
    branch not taken cannot turn the gradient into NaN. For ``A < 0`` the objective has no bound
    above the old policy (``r > 1``); a cap on it is dual clipping, which is not part of a rule.
    """
    advantages = advantages.detach()
    old_logp = old_logp.detach().clamp(min=MIN_LOGP)
    upward = (advantages > 0).expand_as(logp)
    log_bound = rule.log_bound(old_logp.clamp(max=0), upward).to(logp.dtype)
    log_ratio = logp - old_logp
    # clamp rather than minimum/maximum, which halve the gradient where the ratio meets its bound
    log_ratio = log_ratio.clamp(
        min=log_bound.masked_fill(upward, -math.inf),
        max=log_bound.masked_fill(~upward, math.inf),
    )
    return torch.exp(log_ratio) * advantages
