"""The clip rules as a policy loss of verl, chosen by verl's own configuration.

Four overrides of an ordinary verl command train with KL-Band::

    actor_rollout_ref.actor.policy_loss._target_=bandpo.integrations.verl.BandPolicyLossConfig
    actor_rollout_ref.actor.policy_loss.loss_mode=bandpo
    +actor_rollout_ref.actor.policy_loss.band_divergence=kl
    +actor_rollout_ref.actor.policy_loss.band_radius=0.05

The first makes verl build its ``policy_loss`` section from `BandPolicyLossConfig`. To do so, the
driver and each actor worker import this module, and importing it registers the loss. So the
driver refuses a wrong value before a model is loaded, and the workers need no other hook.

Aggregation, metric names, dual clip and rollout-correction weights are those of verl's
``vanilla``. Written against verl 0.9.1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from verl.trainer.ppo.core_algos import agg_loss, register_policy_loss
from verl.utils.torch_functional import masked_mean
from verl.workers.config import ActorConfig, PolicyLossConfig

from bandpo.clipping import MIN_LOGP, ClipRule, clipped_surrogate, make_rule

__all__ = ["LOSS_MODE", "BandPolicyLossConfig", "band_policy_loss"]

#: Name in verl's registry, the value of ``policy_loss.loss_mode``.
LOSS_MODE = "bandpo"

#: verl's losses hold the log ratio within this distance of 0 before they exponentiate it.
MAX_LOG_RATIO = 20.0


@dataclass
class BandPolicyLossConfig(PolicyLossConfig):
    """verl's ``policy_loss`` section with the fields of a clip rule.

    Names and meanings are those of `bandpo.trainer.BandPOConfig`; the epsilons of ``fixed``,
    ``dcpo`` and ``relaxed_band`` are verl's own ``actor.clip_ratio_low`` and ``clip_ratio_high``.

    Parameters
    ----------
    clip_rule : {"band", "fixed", "dcpo", "relaxed_band"}
    clip_rule_below : str, optional
        Rule for the lower side, where it is not the same.
    band_divergence : str
        A registered name or ``"package.module:Name"``.
    band_radius : float
        In the divergence's unit, nats for KL.
    band_max_ratio : float, optional
        Cap on the upper bound; None for no cap.
    tail_threshold : float
        Tokens of lower old probability are the tail that the ``actor/tail_*`` metrics count.

    Raises
    ------
    ValueError
        If a value is out of its range, or ``loss_mode`` names another loss, which would ignore
        the rule.
    """

    loss_mode: str = LOSS_MODE
    clip_rule: str = "band"
    clip_rule_below: str | None = None
    band_divergence: str = "kl"
    band_radius: float = 0.05
    band_max_ratio: float | None = 10.0
    tail_threshold: float = 0.2

    def __post_init__(self) -> None:
        if self.loss_mode != LOSS_MODE:
            raise ValueError(
                f"policy_loss.loss_mode is {self.loss_mode!r}, a loss that ignores the clip rule; "
                f"set actor_rollout_ref.actor.policy_loss.loss_mode={LOSS_MODE}"
            )
        if not (isinstance(self.tail_threshold, int | float) and 0 < self.tail_threshold <= 1):
            raise ValueError(f"tail_threshold must be in (0, 1], got {self.tail_threshold!r}")
        self.rule()

    def rule(self, epsilon_low: float = 0.2, epsilon_high: float = 0.2) -> ClipRule:
        """The clip rule, with verl's ``clip_ratio_low`` and ``clip_ratio_high`` as epsilons."""
        return make_rule(
            self.clip_rule,
            clip_rule_below=self.clip_rule_below,
            epsilon=epsilon_low,
            epsilon_high=epsilon_high,
            divergence=self.band_divergence,
            radius=self.band_radius,
            max_ratio=self.band_max_ratio,
        )


@register_policy_loss(LOSS_MODE)
def band_policy_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: ActorConfig | None = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """Clipped policy loss under the configured rule, with verl's dual clip.

    Parameters
    ----------
    old_log_prob, log_prob : Tensor, shape (batch, response)
        Log probabilities (nats) of the sampled tokens under the anchor of the trust region, and
        under the policy being trained.
    advantages : Tensor, shape (batch, response)
    response_mask : Tensor, shape (batch, response)
        True (or 1) at the tokens that count.
    loss_agg_mode : str
        How `verl.trainer.ppo.core_algos.agg_loss` makes one number of them.
    config : ActorConfig
        Its ``policy_loss`` is a `BandPolicyLossConfig`; ``clip_ratio``, ``clip_ratio_low``,
        ``clip_ratio_high``, ``clip_ratio_c`` and ``global_batch_info`` are read as ``vanilla``
        reads them.
    rollout_is_weights : Tensor, shape (batch, response), optional
        Importance weights of verl's rollout correction, multiplied into the loss.

    Returns
    -------
    loss : Tensor, shape ()
    metrics : dict of float
        ``actor/pg_clipfrac``, ``actor/ppo_kl`` and ``actor/pg_clipfrac_lower`` as ``vanilla``
        defines them, and four more shares of the response tokens: ``actor/tail_up_frac`` and
        ``actor/tail_down_frac``, tail tokens of positive and of negative advantage;
        ``actor/tail_clip_high_frac`` and ``actor/tail_clip_low_frac``, those among them that the
        rule clips. Rates are their quotients: verl averages metrics over micro-batches, and a
        micro-batch without a tail token has no rate.

    Raises
    ------
    TypeError
        If ``config.policy_loss`` is of another class.
    ValueError
        If ``clip_ratio_c`` is not above 1.
    """
    settings = getattr(config, "policy_loss", None)
    if config is None or not isinstance(settings, BandPolicyLossConfig):
        raise TypeError(
            f"loss_mode={LOSS_MODE} needs policy_loss to be a BandPolicyLossConfig, got "
            f"{type(settings).__name__}; set actor_rollout_ref.actor.policy_loss._target_="
            f"{__name__}.BandPolicyLossConfig"
        )
    if not config.clip_ratio_c > 1:
        raise ValueError(f"clip_ratio_c, the dual clip, must be above 1, got {config.clip_ratio_c}")
    low, high = (
        config.clip_ratio if side is None else side
        for side in (config.clip_ratio_low, config.clip_ratio_high)
    )

    # Dual clip, -A min(r, c) for A < 0, and verl's guard hold the log ratio in an interval of its
    # own, where gradients stop as they do at the rule's bounds.
    old = old_log_prob.clamp(min=MIN_LOGP)
    dual_clip = math.log(config.clip_ratio_c)
    ceiling = torch.where(advantages < 0, old + min(dual_clip, MAX_LOG_RATIO), old + MAX_LOG_RATIO)
    logp = log_prob.clamp(min=old - MAX_LOG_RATIO, max=ceiling)
    objective = clipped_surrogate(logp, old, advantages, settings.rule(low, high))

    losses = -objective if rollout_is_weights is None else -objective * rollout_is_weights
    loss = agg_loss(
        loss_mat=losses,
        loss_mask=response_mask,
        loss_agg_mode=loss_agg_mode,
        **config.global_batch_info,
    )

    with torch.no_grad():
        log_ratio = (log_prob - old_log_prob).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        clipped = torch.exp(logp - old) * advantages > objective
        tail = old.exp() < settings.tail_threshold
        up, down = advantages > 0, advantages < 0
        per_token = {
            "actor/pg_clipfrac": clipped,
            "actor/ppo_kl": -log_ratio,
            "actor/pg_clipfrac_lower": down & (log_ratio > dual_clip),
            "actor/tail_up_frac": tail & up,
            "actor/tail_down_frac": tail & down,
            "actor/tail_clip_high_frac": tail & up & clipped,
            "actor/tail_clip_low_frac": tail & down & clipped,
        }
        means = [masked_mean(value.to(log_ratio), response_mask) for value in per_token.values()]
        # one copy from the device for all of them
        metrics = dict(zip(per_token, torch.stack(means).tolist(), strict=True))
    return loss, metrics
