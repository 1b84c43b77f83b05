"""Neighbors of the clip rules, and the number by which any two rules compare: the gradient weight.

Every rule for one token is an objective of its new and old log-probability and its advantage.
Training feels it through one derivative. In units of the unclipped policy gradient r A that
derivative is the rule's *weight*: 1 where the rule does nothing, 0 where it has switched the token
off.

>>> import torch
>>> from functools import partial
>>> from bandpo.clipping import Fixed, clipped_surrogate
>>> old = torch.log(torch.tensor([0.1, 0.1]))
>>> new = torch.log(torch.tensor([0.11, 0.15]))
>>> grpo = partial(clipped_surrogate, rule=Fixed(0.2, 0.2))
>>> gradient_weight(grpo, new, old, torch.tensor(1.0))
tensor([1., 0.])
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bandpo.divergences import Divergence
from bandpo.operator import inside_band

__all__ = ["Objective", "dppo_surrogate", "gradient_weight", "smoothed_surrogate"]

Objective = Callable[[Tensor, Tensor, Tensor], Tensor]
"""New log-probabilities, old ones, advantages -> objective, to be maximized and summed."""


def gradient_weight(
    objective: Objective, logp: Tensor, old_logp: Tensor, advantages: Tensor
) -> Tensor:
    """Gradient of an objective by log q, in units of the unclipped policy gradient ``r A``.

    Parameters
    ----------
    objective : callable
        ``(logp, old_logp, advantages) -> Tensor``; its sum is differentiated.
    logp, old_logp : Tensor, any shape
        Log-probabilities (nats) of the sampled tokens under the new and the old policy.
    advantages : Tensor, broadcastable to `logp`
        Nonzero; with ``A = 0`` there is no gradient to compare with.

    Returns
    -------
    Tensor, shape of `logp`
        Without unit.

    Raises
    ------
    ValueError
        If an advantage is 0.
    """
    if (advantages == 0).any():
        raise ValueError("advantages must not be 0: the weight is relative to r A; leave those out")
    logp = logp.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(objective(logp, old_logp, advantages).sum(), logp)
    return gradient / (torch.exp(logp.detach() - old_logp) * advantages) + 0.0  # no minus zero


def dppo_surrogate(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    divergence: str | Divergence = "kl",
    threshold: float = 0.05,
) -> Tensor:
    """Objective of DPPO with a binary divergence: ``r A`` times a mask without gradient.

    Parameters
    ----------
    logp, old_logp, advantages
        As for `gradient_weight`; any advantage.
    divergence : str or Divergence
        ``"kl"`` and ``"tv"`` are DPPO's.
    threshold : float, positive and finite
        A token is dropped where its binary divergence exceeds this and its ratio has moved the way
        that its advantage pushes.

    Returns
    -------
    Tensor, shape of `logp`

    Notes
    -----
    P. Qi et al., "Rethinking the Trust Region in LLM Reinforcement Learning", 2026, arXiv
    2602.04879.
    """
    new = logp.detach()
    outward = torch.where(advantages > 0, new > old_logp, new < old_logp)
    dropped = outward & ~inside_band(old_logp, new, divergence, threshold)
    return (torch.exp(logp - old_logp) * advantages).masked_fill(dropped, 0)


def smoothed_surrogate(
    logp: Tensor, old_logp: Tensor, advantages: Tensor, alpha: float = 0.1
) -> Tensor:
    """Objective of probability smoothing (PSPO): the ratio of the mixture, and no clip.

    Parameters
    ----------
    logp, old_logp, advantages
        As for `gradient_weight`; any advantage.
    alpha : float, in [0, 1)
        Share of the old policy in the mixture ``(1 - alpha) q + alpha p``.

    Returns
    -------
    Tensor, shape of `logp`
        ``((1 - alpha) r + alpha) A``.

    Raises
    ------
    ValueError
        If `alpha` is out of its range.

    Notes
    -----
    M. Dwyer, A. Sobey and A. Chapman, "It's Not You, It's Clipping: A Soft Trust-Region via
    Probability Smoothing for LLM RL", 2025, arXiv 2509.21282.
    """
    if not 0 <= alpha < 1:
        raise ValueError(f"alpha must be in [0, 1), the old policy's share; got {alpha!r}")
    return ((1 - alpha) * torch.exp(logp - old_logp) + alpha) * advantages
