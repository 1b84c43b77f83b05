"""What the trainer logs about clipping: each metric defined once, and the file that keeps them.

A metric is a mean of one quantity over one set of tokens. Sums and counts are kept apart until
a step is logged, so every value is weighted by tokens over micro-batches and processes alike.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class Metric(NamedTuple):
    """Definition of a logged quantity.

    Parameters
    ----------
    formula : str
        LaTeX. ``p`` and ``q`` are the probabilities of the sampled token under the old and the
        new policy, ``r = q/p``, ``A`` its advantage, ``l`` and ``u`` its bounds, ``tau`` the tail
        threshold. ``E[x | c]`` is the mean of x over the completion tokens with c.
    meaning : str
    better : str
        Which way is good.
    """

    formula: str
    meaning: str
    better: str


_CLIPPED = r"(A>0, r>u) \text{ or } (A<0, r<l)"

#: Metrics of BandPOTrainer, in the order of `token_metrics`.
BAND_METRICS: dict[str, Metric] = {
    "band/clip_rate": Metric(
        rf"E[\mathbf 1\{{{_CLIPPED}\}}]",
        "Share of all tokens whose gradient the clip removes. Equals TRL's clip_ratio/region_mean "
        "up to averaging and `delta`.",
        "neither: 0 means that the rule never acts, a high value that samples are thrown away",
    ),
    "band/clip_high": Metric(
        r"E[\mathbf 1\{r>u\} \mid A>0]",
        "Share clipped above, among tokens with a positive advantage.",
        "lower: these are good tokens that may not grow further",
    ),
    "band/clip_low": Metric(
        r"E[\mathbf 1\{r<l\} \mid A<0]",
        "Share clipped below, among tokens with a negative advantage.",
        "neither: low lets bad tokens be driven out far in one batch",
    ),
    "band/tail_clip_high": Metric(
        r"E[\mathbf 1\{r>u\} \mid A>0, p<\tau]",
        "Share clipped above, among rare tokens with a positive advantage.",
        "lower: this is the bottleneck on discoveries",
    ),
    "band/tail_clip_high_share": Metric(
        rf"E[\mathbf 1\{{A>0\}} \mid p<\tau,\ {_CLIPPED}]",
        "Among clipped rare tokens, the share clipped above: what the published code logs as its "
        "tail clip-high rate.",
        "neither by itself: it says nothing about how many tokens are clipped",
    ),
    "band/tail_clip_low": Metric(
        r"E[\mathbf 1\{r<l\} \mid A<0, p<\tau]",
        "Share clipped below, among rare tokens with a negative advantage.",
        "neither: low lets rare tokens be driven out",
    ),
    "band/tail_share": Metric(
        r"E[\mathbf 1\{p<\tau\}]",
        "Share of rare tokens among all tokens.",
        "neither: it falls as the policy sharpens",
    ),
    "band/upper_mean": Metric(
        r"E[u \mid A>0]",
        "Mean upper bound on the ratio, where it acts.",
        "neither: a larger bound allows larger moves",
    ),
    "band/lower_mean": Metric(
        r"E[l \mid A<0]",
        "Mean lower bound on the ratio, where it acts.",
        "neither: a smaller bound allows larger moves",
    ),
    "band/at_cap": Metric(
        r"E[\mathbf 1\{u = \text{band\_max\_ratio}\} \mid A>0]",
        "Share of upper bounds that the ratio cap sets instead of the rule; 0 without a cap.",
        "lower: at the cap, growth is linear in p again",
    ),
    "band/radius_mean": Metric(
        r"E[\delta]",
        "Mean radius δ of the tokens, where `adaptive_band` gives each its own. Over the steps of "
        "one generation it is `band_radius`.",
        "neither: it checks that the budget is kept",
    ),
    "band/tail_radius": Metric(
        r"E[\delta \mid p<\tau]",
        "Mean radius of the rare tokens, where `adaptive_band` gives each its own.",
        "neither: above `band_radius`, rare tokens have more room than in a band",
    ),
    "band/mass_moved": Metric(
        r"E[|q-p|]",
        "Probability mass moved on the sampled tokens since the samples were drawn.",
        "neither: the size of the update, in probability",
    ),
    "band/kl_old_new": Metric(
        r"E[r - 1 - \log r]",
        "Estimate of KL(old, new) in nats a token from tokens of the old policy; unbiased and "
        "never negative (the k3 estimator).",
        "lower means a smaller update; the trust region bounds no mean of this",
    ),
}

#: Metrics of TRL that the book reads, defined here so that each has one definition.
TRL_METRICS: dict[str, Metric] = {
    "reward": Metric(
        r"\frac1N\sum_i R_i",
        "Mean reward of the completions; logged only on steps that generate.",
        "higher",
    ),
    "entropy": Metric(
        r"E[-\sum_v \pi(v)\log\pi(v)]",
        "Mean entropy of the new policy in nats a token, at the sampling temperature.",
        "neither: falling to 0 ends exploration, rising means noise",
    ),
    "kl": Metric(
        r"E[\pi_{\text{ref}}/q - 1 - \log(\pi_{\text{ref}}/q)]",
        "Estimate of KL(new, reference) in nats a token; logged if `beta` is not 0.",
        "lower means closer to the reference",
    ),
    "clip_ratio/region_mean": Metric(
        rf"E[\mathbf 1\{{{_CLIPPED}\}}]",
        "TRL's own clip rate, a plain mean over micro-batches.",
        "as band/clip_rate",
    ),
    "completions/clipped_ratio": Metric(
        r"\frac1N\sum_i \mathbf 1\{\text{completion } i \text{ has no end token}\}",
        "Share of completions cut off at `max_completion_length`. Nothing to do with ratio "
        "clipping, in spite of the name.",
        "lower",
    ),
}

METRICS: dict[str, Metric] = BAND_METRICS | TRL_METRICS


def token_metrics(
    logps: Tensor,
    old_logps: Tensor,
    advantages: Tensor,
    mask: Tensor,
    bound: Tensor,
    *,
    tail_threshold: float,
    max_ratio: float | None,
    radius: Tensor | None = None,
) -> Tensor:
    """Sums and counts behind every metric in `BAND_METRICS`.

    Parameters
    ----------
    logps, old_logps : Tensor, shape (B, T)
        Log-probabilities (nats) of the sampled tokens, new and old.
    advantages : Tensor, broadcastable to (B, T)
    mask : bool Tensor, shape (B, T)
        True for the tokens that count: no padding, no masked completion.
    bound : Tensor, shape (B, T)
        Bound on the ratio that can act: the upper one where the advantage is positive, else the
        lower one.
    tail_threshold : float
        A token is rare if its old probability is below this.
    max_ratio : float or None
        The cap on the upper bound.
    radius : Tensor, shape (B, T), or None
        Radius of each token, where a rule gives each its own.

    Returns
    -------
    Tensor, shape (len(BAND_METRICS), 2), float64 where the device has it
        Sum of the quantity and number of tokens; add over micro-batches and processes.
    """
    log_ratio = logps - old_logps
    ratio = torch.exp(log_ratio)
    advantages = advantages.expand_as(ratio)
    up, down = mask & (advantages > 0), mask & (advantages < 0)
    tail = mask & (old_logps < math.log(tail_threshold))
    high, low = up & (ratio > bound), down & (ratio < bound)
    clipped = high | low
    cap = math.inf if max_ratio is None else max_ratio
    old, new = torch.exp(old_logps), torch.exp(logps)
    of_radius = mask if radius is not None else torch.zeros_like(mask)
    radius = bound if radius is None else radius

    quantities: dict[str, tuple[Tensor, Tensor]] = {
        "band/clip_rate": (clipped, mask),
        "band/clip_high": (high, up),
        "band/clip_low": (low, down),
        "band/tail_clip_high": (high, up & tail),
        "band/tail_clip_high_share": (high, clipped & tail),
        "band/tail_clip_low": (low, down & tail),
        "band/tail_share": (tail, mask),
        "band/upper_mean": (bound, up),
        "band/lower_mean": (bound, down),
        "band/at_cap": (bound >= cap, up),
        "band/radius_mean": (radius, of_radius),
        "band/tail_radius": (radius, of_radius & tail),
        "band/mass_moved": ((new - old).abs(), mask),
        "band/kl_old_new": (torch.expm1(log_ratio) - log_ratio, mask),
    }
    wide = widest(logps.device)
    return torch.stack(
        [
            torch.stack([value.to(wide).where(among, 0).sum(), among.sum().to(wide)])
            for value, among in (quantities[name] for name in BAND_METRICS)
        ]
    )


def averages(totals: Tensor) -> dict[str, float]:
    """Metrics from the summed result of `token_metrics`; those without a token are left out."""
    rows = totals.tolist()
    return {
        name: total / count
        for name, (total, count) in zip(BAND_METRICS, rows, strict=True)
        if count > 0
    }


def token_counts(totals: Tensor) -> dict[str, int]:
    """Number of tokens behind each metric, from the summed result of `token_metrics`."""
    return {
        name: int(count) for name, count in zip(BAND_METRICS, totals[:, 1].tolist(), strict=True)
    }


#: Edges of the old probability in `ratio_histogram`.
PROBABILITY_EDGES = (1e-4, 1e-3, 1e-2, 0.1, 0.2, 0.5, 0.9)
#: Edges of the log-ratio (nats) in `ratio_histogram`.
LOG_RATIO_EDGES = (-2.0, -1.0, -0.5, -0.2, -0.1, -0.05, 0.0, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)


def ratio_histogram(logps: Tensor, old_logps: Tensor, mask: Tensor) -> Tensor:
    """Count tokens by old probability and log-ratio.

    Parameters
    ----------
    logps, old_logps, mask : Tensor, shape (B, T)
        As for `token_metrics`.

    Returns
    -------
    int64 Tensor, shape (len(PROBABILITY_EDGES) + 1, len(LOG_RATIO_EDGES) + 1)
        A bin holds values above its left edge and up to its right edge; the outer bins are open.
    """
    columns = len(LOG_RATIO_EDGES) + 1
    rows = len(PROBABILITY_EDGES) + 1
    new, old = logps[mask], old_logps[mask]
    row = torch.bucketize(old, old.new_tensor(PROBABILITY_EDGES).log())
    column = torch.bucketize(new - old, old.new_tensor(LOG_RATIO_EDGES))
    return torch.bincount(row * columns + column, minlength=rows * columns).view(rows, columns)


def widest(device: torch.device) -> torch.dtype:
    """Return float64, or float32 on the one backend that has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


class MetricsFile(TrainerCallback):
    """Keep one JSON line per logged step in ``<run_dir>/metrics.jsonl``.

    With ``logging_steps=1`` that is one line per optimizer step. An evaluation is merged into the
    line of its step; the summary at the end of training is left out. When training resumes, lines
    after the checkpoint, and a line that a kill has torn, are dropped before the first step.

    Parameters
    ----------
    run_dir : str or Path
        Folder of the run; made if missing.
    extra : callable or None
        Called for every training step; returns more fields for its line (for example
        ``trainer.histograms``).
    """

    def __init__(
        self, run_dir: str | Path, extra: Callable[[], Mapping[str, Any]] | None = None
    ) -> None:
        self.path = Path(run_dir) / "metrics.jsonl"
        self._extra = extra
        self._last_step: int | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Drop what lies beyond the step at which training starts."""
        if state.is_world_process_zero:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            kept = [row for row in self._rows() if row["step"] <= state.global_step]
            self._replace(kept)
            self._last_step = kept[-1]["step"] if kept else None

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Write the line of this step."""
        if not state.is_world_process_zero or not logs or "train_runtime" in logs:
            return
        row = {"step": state.global_step} | {name: _plain(value) for name, value in logs.items()}
        if self._last_step == state.global_step:
            *before, last = self._rows()
            self._replace([*before, last | row])
            return
        self._last_step = state.global_step
        if self._extra is not None:
            row |= self._extra()
        # One write of a whole line to a file opened for appending: a kill leaves it or not.
        with open(self.path, "ab", buffering=0) as file:
            file.write(_line(row))

    def _rows(self) -> list[dict[str, Any]]:
        if not self.path.exists():
            return []
        whole, _, _torn = self.path.read_bytes().rpartition(b"\n")
        return [json.loads(line) for line in whole.splitlines()]

    def _replace(self, rows: list[dict[str, Any]]) -> None:
        temporary = self.path.with_suffix(".tmp")
        temporary.write_bytes(b"".join(_line(row) for row in rows))
        os.replace(temporary, self.path)


def _line(row: Mapping[str, Any]) -> bytes:
    return json.dumps(row, allow_nan=False).encode() + b"\n"


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
