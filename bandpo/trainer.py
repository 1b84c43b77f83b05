"""GRPO with any clip rule, as a subclass of TRL's trainer that copies none of its loss.

TRL reads the clip range in one place, ``clamp(ratio, 1 - epsilon_low, 1 + epsilon_high)``, and
again in its clip metrics. Both broadcast, so two properties that give one epsilon a token put a
rule's bounds into the loss and leave everything else (aggregation, reference KL, sampler
correction, entropy bonus) to TRL. Each micro-batch checks that TRL has read both.
"""

from __future__ import annotations

import copy
import math
import textwrap
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import trl
from torch import Tensor
from trl import GRPOTrainer

from bandpo.adaptive import AdaptiveBand
from bandpo.clipping import MIN_LOGP
from bandpo.config import BandPOConfig
from bandpo.metrics import averages, ratio_histogram, token_counts, token_metrics, widest

__all__ = ["BandPOConfig", "BandPOTrainer"]


@dataclass
class _Bounds:
    """Ratio bounds of one micro-batch, and what TRL's loss has seen of them."""

    lower: Tensor
    upper: Tensor
    read: set[str] = field(default_factory=set)
    logps: Tensor | None = None


def _token_mask(inputs: dict[str, Any]) -> Tensor:
    """True for the tokens that the policy chose: no padding, nothing that a tool wrote."""
    mask = inputs["completion_mask"].bool()
    return mask & inputs["tool_mask"].bool() if "tool_mask" in inputs else mask


class BandPOTrainer(GRPOTrainer):
    """`GRPOTrainer` whose clip range comes from a rule, token by token.

    Parameters
    ----------
    model, reward_funcs
        As in TRL.
    args : BandPOConfig
        Configuration; None for the defaults.
    *more, **kwargs
        Everything else that TRL's trainer takes.

    Notes
    -----
    With the constant bounds of ``clip_rule="fixed"``, loss, gradients and TRL's clip metrics are
    bit-identical to those of `GRPOTrainer`. `bandpo.metrics.BAND_METRICS` are logged besides.
    """

    _tag_names = ["trl", "grpo", "bandpo"]  # noqa: RUF012  (TRL's own form)
    _name = "BandPO"
    _paper = {  # noqa: RUF012
        "title": "BandPO: Bridging Trust Regions and Ratio Clipping via Probability-Aware Bounds "
        "for LLM Reinforcement Learning",
        "id": "2603.04918",
        "citation": textwrap.dedent("""\
            @article{li2026bandpo,
                title        = {{BandPO: Bridging Trust Regions and Ratio Clipping via Probability-Aware Bounds for LLM Reinforcement Learning}},
                author       = {Yuan Li and Bo Wang and Yufei Gao and Yuqian Yao and Xinyuan Wang and Zhangyue Yin and Xipeng Qiu},
                year         = 2026,
                eprint       = {arXiv:2603.04918},
            }"""),  # noqa: E501
    }

    args: BandPOConfig
    model: Any
    _bounds: _Bounds | None = None
    _old_scores: list[Any] | None = None

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: BandPOConfig | None = None,
        *more: Any,
        **kwargs: Any,
    ) -> None:
        if args is None:
            name = model if isinstance(model, str) else model.config._name_or_path
            args = BandPOConfig(f"{name.split('/')[-1]}-BandPO")
        if not isinstance(args, BandPOConfig):
            raise TypeError(
                f"args must be a BandPOConfig, got {type(args).__name__}; BandPOConfig takes every "
                "field of GRPOConfig, and clip_rule besides"
            )
        if args.process_index == 0:
            for caution in args.cautions():
                warnings.warn(caution, stacklevel=2)
        self.rule = args.rule()
        self._adaptive = args.adaptive_band()
        if not isinstance(args.band_divergence, str):
            # The rule holds the object; TRL saves args as JSON and pickle, which take a name.
            args = copy.copy(args)
            args.band_divergence = str(args.band_divergence)
        self._totals: dict[str, Tensor] = {}
        self._counts: Tensor | None = None
        self._histograms: dict[str, Any] = {}
        super().__init__(model, reward_funcs, args, *more, **kwargs)

    # TRL assigns both in its constructor and computes 1 - epsilon_low and 1 + epsilon_high.

    @property
    def epsilon_low(self) -> Any:
        """TRL's lower epsilon; inside the loss, one value a token."""
        if self._bounds is None:
            return self._epsilon_low
        self._bounds.read.add("epsilon_low")
        return 1.0 - self._bounds.lower

    @epsilon_low.setter
    def epsilon_low(self, value: float) -> None:
        self._epsilon_low = value

    @property
    def epsilon_high(self) -> Any:
        """TRL's upper epsilon; inside the loss, one value a token."""
        if self._bounds is None:
            return self._epsilon_high
        self._bounds.read.add("epsilon_high")
        return self._bounds.upper - 1.0

    @epsilon_high.setter
    def epsilon_high(self, value: float) -> None:
        self._epsilon_high = value

    @contextmanager
    def _clipping(self, bounds: _Bounds) -> Iterator[None]:
        self._bounds = bounds
        try:
            yield
        finally:
            self._bounds = None
        if bounds.read != {"epsilon_low", "epsilon_high"} or bounds.logps is None:
            raise RuntimeError(
                f"TRL {trl.__version__} computed its loss without reading the bounds per token, so "
                "training would be plain GRPO. Install the TRL version of requirements.lock"
            )

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        # The first scores after generation are those of the old policy; a reference's may follow.
        of_old_policy = self._old_scores is not None and not self._old_scores
        if of_old_policy:
            kwargs["compute_entropy"] = True
        out = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        if of_old_policy:
            self._old_scores = [out[0], out[1]]
        if self._bounds is not None:
            self._bounds.logps = out[0].detach()
        return out

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        if self._adaptive is None:
            return super()._generate_and_score_completions(inputs)
        self._old_scores = []
        try:
            output = super()._generate_and_score_completions(inputs)
            scores = self._old_scores
        finally:
            self._old_scores = None
        if output.get("old_per_token_logps") is not None:
            # One tensor of shape (B, T) beside TRL's own, to be shuffled and split with them.
            output["band_radius"] = self._radii(self._adaptive, output, scores)
        return output

    def _radii(self, rule: AdaptiveBand, output: dict[str, Any], old_scores: list[Any]) -> Tensor:
        """Radius of each token, from the signals of all processes' tokens of this generation."""
        old_logps, mask = output["old_per_token_logps"], _token_mask(output)
        if not old_scores or old_scores[0] is not old_logps:
            raise RuntimeError(
                f"TRL {trl.__version__} scored its completions in another order than expected, so "
                "the old policy's entropies are not at hand. Install the TRL version of "
                "requirements.lock"
            )
        signal = rule.measure(output | {"entropies": old_scores[1]}, mask)
        signal = signal.to(widest(signal.device))
        # Processes differ in their number of tokens: NaN, which no token has, fills them up.
        batch = self.accelerator.pad_across_processes(signal[mask], pad_index=math.nan)
        batch = self.accelerator.gather(batch)
        return rule.radii(signal, batch[~batch.isnan()]).where(mask, rule.radius)

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        if inputs.get("old_per_token_logps") is None:
            # Purely on-policy: TRL sets every ratio to 1, so no rule can act.
            return super()._compute_loss(model, inputs)
        # A ratio that overflows makes the gradient NaN even in the branch that min does not take.
        old_logps = inputs["old_per_token_logps"].clamp(min=MIN_LOGP)
        mask = _token_mask(inputs)
        radius = inputs.get("band_radius")
        rule = self.rule if radius is None else self.rule.with_radius(radius)
        advantages = inputs["advantages"]
        if advantages.dim() == 1:
            advantages = advantages.unsqueeze(1)

        # Only one bound of a token can act, the one its advantage points to. The other is set to
        # 1, which min(r A, clip(r) A) ignores (an infinite one would undo TRL's `delta`).
        upward = (advantages > 0).expand_as(old_logps)
        logp = old_logps.masked_fill(~mask, 0).clamp(max=0).to(widest(old_logps.device))
        bound = rule.log_bound(logp, upward).exp().float()
        bounds = _Bounds(
            lower=bound.masked_fill(upward, 1.0), upper=bound.masked_fill(~upward, 1.0)
        )
        with self._clipping(bounds):
            loss = super()._compute_loss(model, {**inputs, "old_per_token_logps": old_logps})
        self._record(bounds.logps, old_logps, advantages, mask, bound, radius)
        return loss

    @torch.no_grad()
    def _record(
        self,
        logps: Any,
        old_logps: Tensor,
        advantages: Tensor,
        mask: Tensor,
        bound: Tensor,
        radius: Tensor | None,
    ) -> None:
        mode = "train" if self.model.training else "eval"
        totals = token_metrics(
            logps,
            old_logps,
            advantages,
            mask,
            bound,
            tail_threshold=self.args.tail_threshold,
            max_ratio=self.args.band_max_ratio,
            radius=radius,
        )
        self._totals[mode] = self._totals[mode] + totals if mode in self._totals else totals
        if mode == "train":
            counts = ratio_histogram(logps, old_logps, mask)
            self._counts = counts if self._counts is None else self._counts + counts

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the metrics of `bandpo.metrics.BAND_METRICS` to what TRL logs."""
        mode = "train" if self.model.training else "eval"
        totals = self._totals.pop(mode, None)
        if totals is not None:
            totals = self.accelerator.reduce(totals, reduction="sum")
            for name, value in averages(totals).items():
                self._metrics[mode][name].append(value)
            if mode == "train":
                self._histograms["tokens"] = token_counts(totals)
        if self._counts is not None and mode == "train":
            counts = self.accelerator.reduce(self._counts, reduction="sum")
            self._histograms["ratio_histogram"] = counts.tolist()
            self._counts = None
        super().log(logs, start_time)

    def histograms(self) -> dict[str, Any]:
        """Return token counts of the last logged step.

        Returns
        -------
        dict
            ``ratio_histogram``, counts by old probability and log-ratio (see
            `bandpo.metrics.ratio_histogram`), and ``tokens``, metric name -> number of tokens that
            its mean is over, with which means of several steps are weighted. Empty before the
            first logged step and in purely on-policy training.
        """
        return self._histograms
