"""Configuration of BandPOTrainer: TRL's GRPOConfig and the clip rule."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from fractions import Fraction

import numpy as np
import trl
from trl import GRPOConfig, GRPOTrainer

from bandpo.adaptive import SIGNALS, AdaptiveBand, check_adaptivity
from bandpo.clipping import RULE_NAMES, ClipRule, PerSide, make_rule
from bandpo.operator import band
from bandpo.rules import check_max_ratio, check_positive
from bandpo.testing import check_divergence

_BAND = ("band_divergence", "band_radius")
_ADAPTIVE = (*_BAND, "band_signal", "band_adaptivity")
_EPSILON = ("epsilon", "epsilon_high")
# Fields that each rule reads; above, all but fixed read band_max_ratio too.
_READS = {
    "fixed": _EPSILON,
    "dcpo": _EPSILON,
    "band": _BAND,
    "relaxed_band": (*_BAND, *_EPSILON),
    "adaptive_band": _ADAPTIVE,
}
LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo")


@dataclass
class BandPOConfig(GRPOConfig):
    """Configuration of `BandPOTrainer`: TRL's `GRPOConfig` and the clip rule.

    Parameters
    ----------
    clip_rule : {"fixed", "dcpo", "band", "relaxed_band", "adaptive_band"}
        Bounds on the probability ratio. ``fixed`` is GRPO and Clip-Higher. ``epsilon`` and
        ``epsilon_high`` belong to ``fixed``, to ``dcpo`` (published: 0.16 and 0.20) and to the
        interval inside ``relaxed_band`` (published: 0.2 and 0.28).
    clip_rule_below : str or None
        Another rule for the lower bound; None for the same rule on both sides.
    band_divergence : str or Divergence
        What measures the trust region: a registered name, ``"alpha:0.5"``,
        ``"package.module:Name"``, or an object.
    band_radius : float
        Radius of the trust region, in the divergence's unit (nats for KL). For ``adaptive_band``
        the mean over all tokens of a generation.
    band_max_ratio : float or None
        Cap on the upper bound of every rule but ``fixed``; None for no cap.
    band_signal : str
        What orders the tokens in ``adaptive_band``: ``"entropy"`` of the old policy at the token's
        position, ``"surprisal"`` of the token, or ``"package.module:name"`` of a function (see
        `bandpo.adaptive.AdaptiveBand.measure`).
    band_adaptivity : float, in (-1, 1)
        Radii of ``adaptive_band`` lie within this share of ``band_radius`` around it; more room
        where the signal is large if positive, where it is small if negative.
    tail_threshold : float
        Tokens whose old probability is below this are rare, in the metrics.

    Notes
    -----
    ``disable_dropout`` is True by default: with dropout, old and new log-probabilities of the
    same policy differ, and the rule would clip noise. TRL's ``delta`` caps the ratio in the loss;
    at or above the largest upper bound it is exactly dual clipping with ``c = delta``.

    Raises
    ------
    ValueError
        If a field is out of its range, the divergence breaks its contract, or TRL's loss would not
        be clipped token by token.
    """

    clip_rule: str = field(
        default="band",
        metadata={"help": f"Bounds on the probability ratio: one of {', '.join(RULE_NAMES)}."},
    )
    clip_rule_below: str | None = field(
        default=None,
        metadata={"help": "Another rule for the lower bound; None for the same on both sides."},
    )
    band_divergence: str = field(
        default="kl",
        metadata={
            "help": "Divergence of the trust region: a registered name, 'alpha:0.5' or "
            "'package.module:Name'."
        },
    )
    band_radius: float = field(
        default=0.05,
        metadata={"help": "Radius of the trust region, in the divergence's unit (nats for KL)."},
    )
    band_max_ratio: float | None = field(
        default=10.0,
        metadata={"help": "Cap on the upper bound of every rule but fixed; None for none."},
    )
    band_signal: str = field(
        default="entropy",
        metadata={
            "help": f"What orders the tokens in adaptive_band: {', '.join(SIGNALS)} or "
            "'package.module:name' of a function."
        },
    )
    band_adaptivity: float = field(
        default=0.5,
        metadata={
            "help": "How far the radii of adaptive_band lie apart, in (-1, 1): more room where "
            "the signal is large if positive, where it is small if negative."
        },
    )
    tail_threshold: float = field(
        default=0.2,
        metadata={"help": "Metrics call a token rare if its old probability is below this."},
    )
    disable_dropout: bool = field(
        default=True,
        metadata={"help": "Turn dropout off, so that an unchanged policy has ratio 1."},
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_max_ratio("band_max_ratio", self.band_max_ratio)
        if self.uses_divergence:
            check_positive("band_radius", self.band_radius)
        if self.uses("adaptive_band"):
            check_adaptivity("band_adaptivity", self.band_adaptivity)
        self.rule()
        if self.uses_divergence:
            # a wrong f would train without a word
            check_divergence(self.band_divergence, self.band_radius)
        if not 0 < self.tail_threshold < 1:
            raise ValueError(f"tail_threshold must lie in (0, 1); got {self.tail_threshold!r}")
        if self.loss_type not in LOSS_TYPES:
            raise ValueError(
                f"loss_type must be one of {', '.join(LOSS_TYPES)}, whose loss clips the ratio of "
                f"each token to an interval; {self.loss_type!r} does not"
            )
        if self.importance_sampling_level != "token":
            raise ValueError(
                "importance_sampling_level must be 'token': a rule bounds the ratio of one token, "
                f"and {self.importance_sampling_level!r} has one ratio a sequence"
            )
        if self.use_liger_kernel and hasattr(GRPOTrainer, "compute_liger_loss"):
            raise ValueError(
                f"use_liger_kernel must be False: TRL {trl.__version__} then computes the loss in "
                "a fused kernel, which knows no bounds per token"
            )
        self._check_delta()

    def _check_delta(self) -> None:
        if self.delta is None:
            return
        high = self.epsilon if self.epsilon_high is None else self.epsilon_high
        fixed = 1 + high if self.clip_rule in ("fixed", "relaxed_band") else 1.0
        capped = 1.0 if self.clip_rule == "fixed" else self.band_max_ratio or math.inf
        largest = max(fixed, capped)
        if self.delta < largest:
            raise ValueError(
                f"delta must be at least the largest upper bound, {largest:g} here; got "
                f"{self.delta:g}. It caps the ratio of every token in TRL's loss, so a smaller one "
                "would replace the rule's upper bound. Raise delta, set band_max_ratio to at most "
                "delta, or set delta to None"
            )

    def uses(self, *names: str) -> bool:
        """Whether the rule of either side has one of these names."""
        return not {self.clip_rule, self.clip_rule_below}.isdisjoint(names)

    @property
    def uses_divergence(self) -> bool:
        """Whether a rule of either side is a band."""
        return self.uses("band", "relaxed_band", "adaptive_band")

    def rule(self) -> ClipRule:
        """Return the clip rule that the fields describe."""
        return make_rule(
            self.clip_rule,
            clip_rule_below=self.clip_rule_below,
            epsilon=self.epsilon,
            epsilon_high=self.epsilon_high,
            divergence=self.band_divergence,
            radius=self.band_radius,
            max_ratio=self.band_max_ratio,
            signal=self.band_signal,
            adaptivity=self.band_adaptivity,
        )

    def adaptive_band(self) -> AdaptiveBand | None:
        """Return the side of the rule that gives each token its radius, if there is one."""
        rule = self.rule()
        sides = (rule.above, rule.below) if isinstance(rule, PerSide) else (rule,)
        return next((side for side in sides if isinstance(side, AdaptiveBand)), None)

    @property
    def updates_per_generation(self) -> Fraction:
        """Optimizer steps that use one generation's completions."""
        assert self.steps_per_generation is not None  # GRPOConfig fills it in
        micro_steps = self.steps_per_generation * self.num_iterations
        return Fraction(micro_steps, self.gradient_accumulation_steps)

    @property
    def rule_can_act(self) -> bool:
        """False if every update is purely on-policy: the ratio is then 1 and nothing is clipped."""
        return self.updates_per_generation.numerator != 1

    @property
    def steps_per_cycle(self) -> int:
        """Optimizer steps between two moments at which generation and update both begin anew."""
        return self.updates_per_generation.numerator

    def _ignored(self) -> list[str]:
        """Fields that were set to something of their own and that no side's rule reads."""
        read = _reads(self.clip_rule, self.clip_rule_below)
        defaults = {one.name: one.default for one in fields(self)}
        # epsilon_high equal to epsilon says what leaving it out says
        defaults["epsilon_high"] = self.epsilon if self.epsilon_high is not None else None
        names = (*_EPSILON, *_ADAPTIVE, "band_max_ratio")
        return [n for n in names if n not in read and getattr(self, n) != defaults[n]]

    def cautions(self) -> list[str]:
        """Return what is legal but probably not meant, one sentence each."""
        found = []
        if ignored := self._ignored():
            below = f" and clip_rule_below={self.clip_rule_below!r}" if self.clip_rule_below else ""
            found.append(
                f"{', '.join(f'{name}={getattr(self, name)!r}' for name in ignored)} has no "
                f"effect: clip_rule={self.clip_rule!r}{below} does not read it. Leave it out, or "
                "choose a rule that reads it: "
                f"{', '.join(rule for rule in RULE_NAMES if ignored[0] in _reads(rule, None))}."
            )
        if self.uses_divergence and _is_free(self.band_divergence, self.band_radius):
            found.append(
                f"band_radius={self.band_radius:g} leaves nearly every ratio free: a token of any "
                "probability may go nearly to 0 or nearly to 1, and only band_max_ratio "
                f"({self.band_max_ratio}) is left of the clip. The published runs use 0.05."
            )
        if not self.rule_can_act:
            found.append(
                "The clip rule can never act: every update uses fresh completions "
                f"(num_iterations={self.num_iterations}, steps_per_generation="
                f"{self.steps_per_generation}, gradient_accumulation_steps="
                f"{self.gradient_accumulation_steps}), so every ratio is 1. Set num_iterations "
                "above 1, or steps_per_generation to a multiple of gradient_accumulation_steps."
            )
        if (
            self.save_strategy == "steps"
            and self.save_steps >= 1
            and self.save_steps % self.steps_per_cycle
        ):
            found.append(
                f"save_steps={self.save_steps:g} is not a multiple of the {self.steps_per_cycle} "
                "optimizer steps between generations: a run resumed from such a checkpoint "
                "generates anew at once and differs from an uninterrupted one. Set save_steps to "
                f"a multiple of {self.steps_per_cycle}."
            )
        return found


def _reads(above: str, below: str | None) -> set[str]:
    """Fields that the rules of the two sides read."""
    cap = () if above == "fixed" else ("band_max_ratio",)
    return {*_READS[above], *_READS[below or above], *cap}


def _is_free(divergence: str, radius: float) -> bool:
    """Tell whether likely, even and rare tokens may all lose, or reach, 99 % of what there is."""
    p = np.array([0.01, 0.5, 0.99])
    lower, upper = band(p, divergence, radius)
    return bool((lower < 0.01).all() and (1 - p * upper < 0.01 * (1 - p)).all())
