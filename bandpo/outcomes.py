"""What a run is judged by: each outcome defined once, and curves over windows of training.

The pages that compare runs, and the committed summaries, take their numbers from here.

In the first update on fresh completions every ratio is 1 and no clip can act, so clip rates are
over the later updates; they are pooled over tokens, every token with the same weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bandpo.evaluation import mean_at_k, pass_at_k
from bandpo.metrics import LOG_RATIO_EDGES, PROBABILITY_EDGES
from bandpo.runs import Run

Floats = NDArray[np.float64]

EARLY = 0.25
"""Share of training that counts as early, and as the end."""
FOUND = 0.5
"""A strategy is found once the model starts it with more than this probability."""
WINDOWS = 20
"""Points of a curve."""
SHARE = (0.0, 1.0)
"""What a share can be."""


class Outcome(NamedTuple):
    """One number for each run.

    Parameters
    ----------
    title : str
        For tables and axes.
    meaning : str
    measure : callable
        ``Run -> float``; NaN where the run has no such number.
    within : (float, float)
        What it can be.
    """

    title: str
    meaning: str
    measure: Callable[[Run], float]
    within: tuple[float, float] = (0.0, math.inf)


def last_step(run: Run) -> int:
    """Return the number of optimizer steps of the run."""
    return int(run.metrics[-1]["step"])


def updates_per_batch(run: Run) -> int:
    """Return how many optimizer steps use one batch of completions."""
    return int(run.config["inner_epochs"]) * int(run.config["mini_batches"])


def later_steps(run: Run) -> list[int]:
    """Return the steps at which ratios differ from 1: all but the first on each batch."""
    updates = updates_per_batch(run)
    return [step for step in range(1, last_step(run) + 1) if (step - 1) % updates]


def _early(run: Run) -> list[int]:
    return [step for step in later_steps(run) if step <= EARLY * last_step(run)]


def _series(run: Run, metric: str) -> tuple[NDArray[np.int64], Floats]:
    """As :meth:`Run.series`, and empty where the metric was never logged."""
    if all(row.get(metric) is None for row in run.metrics):
        return np.array([], dtype=int), np.array([])
    return run.series(metric)


def _mean(values: Floats) -> float:
    return float(values.mean()) if len(values) else float("nan")


def _pooled(metric: str) -> Callable[[Run], float]:
    return lambda run: run.pooled(metric, later_steps(run))


def _end(metric: str) -> Callable[[Run], float]:
    def measure(run: Run) -> float:
        steps, values = _series(run, metric)
        return _mean(values[steps > (1 - EARLY) * last_step(run)])

    return measure


def _final(metric: str) -> Callable[[Run], float]:
    return lambda run: float(values[-1]) if len(values := _series(run, metric)[1]) else float("nan")


def _score(when: str, k: int | None = None) -> Callable[[Run], float]:
    def measure(run: Run) -> float:
        n = int(run.evaluation["samples"])
        right = run.evaluation[f"right_{when}"]
        return _mean(mean_at_k(right, n) if k == 1 else pass_at_k(right, n, n))

    return measure


def _steps_to_rare(run: Run) -> float:
    steps, rare = _series(run, "rare_strategy")
    if not len(steps):
        return float("nan")
    found = steps[rare > FOUND]
    return float(found[0] if len(found) else last_step(run))


def _lowest_rare(run: Run) -> float:
    rare = _series(run, "rare_strategy")[1]
    return float(rare.min() / rare[0]) if len(rare) else float("nan")


def _kl_of_batch(run: Run) -> float:
    steps, values = _series(run, "band/kl_old_new")
    return _mean(values[steps % updates_per_batch(run) == 0])


def _fall(run: Run) -> float:
    rewards = curve(run, "reward")
    rewards = rewards[np.isfinite(rewards)]
    return float(rewards.max() - rewards[-1])


#: Every outcome of a run, by the name under which a summary keeps it.
OUTCOMES: dict[str, Outcome] = {
    "reward": Outcome(
        "mean reward over training",
        "Mean of the reward over all batches: high for what learns early and stays.",
        lambda run: _mean(_series(run, "reward")[1]),
        (-math.inf, math.inf),
    ),
    "accuracy_before": Outcome(
        "held-out accuracy before", "mean@k of the base model.", _score("before", 1), SHARE
    ),
    "accuracy": Outcome(
        "held-out accuracy at the end", "mean@k of the trained model.", _score("after", 1), SHARE
    ),
    "pass_before": Outcome(
        "held-out pass@k before", "pass@k, k all samples.", _score("before"), SHARE
    ),
    "pass": Outcome("held-out pass@k at the end", "pass@k, k all samples.", _score("after"), SHARE),
    "fall": Outcome(
        "fall from the peak",
        f"Highest reward of {WINDOWS} windows of training less that of the last.",
        _fall,
    ),
    "steps_to_rare": Outcome(
        "steps until P(rare) > 0.5",
        "First step after which the rare strategy is more likely than not; where that never "
        "happens, the last step of training (censored).",
        _steps_to_rare,
    ),
    "rare_lowest": Outcome(
        "lowest P(rare) / P(rare) at first",
        "How far training drives the rare strategy out before it finds it; 1 for not at all.",
        _lowest_rare,
        SHARE,
    ),
    "rare_final": Outcome(
        "P(rare) at the end",
        "Probability of the rare strategy, last step.",
        _final("rare_strategy"),
        SHARE,
    ),
    "entropy_final": Outcome("entropy at the end", "Nats a token, last step.", _final("entropy")),
    "entropy_end": Outcome(
        "entropy, last quarter", "Nats a token, mean of the last quarter.", _end("entropy")
    ),
    "clip_rate": Outcome(
        "clipped, all tokens", "band/clip_rate.", _pooled("band/clip_rate"), SHARE
    ),
    "clip_high": Outcome("clip-high", "band/clip_high.", _pooled("band/clip_high"), SHARE),
    "clip_low": Outcome("clip-low", "band/clip_low.", _pooled("band/clip_low"), SHARE),
    "tail_clip_high": Outcome(
        "tail clip-high", "band/tail_clip_high.", _pooled("band/tail_clip_high"), SHARE
    ),
    "tail_clip_high_early": Outcome(
        "tail clip-high, early",
        "band/tail_clip_high in the first quarter of training.",
        lambda run: run.pooled("band/tail_clip_high", _early(run)),
        SHARE,
    ),
    "tail_clip_high_share": Outcome(
        "tail clip-high, as published",
        "band/tail_clip_high_share: among clipped rare tokens, those clipped above.",
        _pooled("band/tail_clip_high_share"),
        SHARE,
    ),
    "tail_clip_low": Outcome(
        "tail clip-low", "band/tail_clip_low.", _pooled("band/tail_clip_low"), SHARE
    ),
    "tail_share": Outcome("rare tokens", "band/tail_share.", _pooled("band/tail_share"), SHARE),
    "at_cap": Outcome("upper bounds at the cap", "band/at_cap.", _pooled("band/at_cap"), SHARE),
    "kl_old_new": Outcome(
        "KL(old, new), nats a token", "band/kl_old_new.", _pooled("band/kl_old_new")
    ),
    "kl_of_batch": Outcome(
        "KL(old, new) of a batch",
        "band/kl_old_new at the last update on each batch, mean over batches.",
        _kl_of_batch,
    ),
    "mass_moved": Outcome("mass moved", "band/mass_moved.", _pooled("band/mass_moved")),
    "seconds": Outcome("seconds", "Training alone.", lambda run: float(run.evaluation["seconds"])),
}

#: Metrics whose curves a summary keeps.
CURVES = (
    "reward",
    "rare_strategy",
    "entropy",
    "band/clip_rate",
    "band/tail_clip_high",
    "band/tail_clip_low",
    "band/kl_old_new",
)


def windows(run: Run) -> list[range]:
    """Cut training into :data:`WINDOWS` windows of whole batches, or one a batch if that is fewer.

    Returns
    -------
    list of range
        Optimizer steps of each window.
    """
    updates = updates_per_batch(run)
    batches = -(-last_step(run) // updates)
    edges = np.linspace(0, batches, min(WINDOWS, batches) + 1).round().astype(int)
    return [range(a * updates + 1, b * updates + 1) for a, b in pairwise(edges.tolist())]


def curve(run: Run, metric: str) -> Floats:
    """Return the course of a metric over training, one value a window.

    Parameters
    ----------
    run : Run
    metric : str
        A ``band/`` metric is pooled over the tokens of the window's later updates; any other is
        the mean of what was logged in the window.

    Returns
    -------
    ndarray, shape (len(windows(run)),)
        NaN where a window has no such value.
    """
    if metric.startswith("band/"):
        later = set(later_steps(run))
        return np.array([run.pooled(metric, later.intersection(w)) for w in windows(run)])
    steps, values = _series(run, metric)
    return np.array([_mean(values[np.isin(steps, w)]) for w in windows(run)])


def ratio_counts(runs: Sequence[Run]) -> NDArray[np.int64]:
    """Add up the ratio histograms of runs, without the first update on each batch.

    Returns
    -------
    ndarray of int, shape (len(PROBABILITY_EDGES) + 1, len(LOG_RATIO_EDGES) + 1)
        Tokens by old probability and log-ratio.
    """
    total = np.zeros((len(PROBABILITY_EDGES) + 1, len(LOG_RATIO_EDGES) + 1), dtype=np.int64)
    for run in runs:
        later = set(later_steps(run))
        for row in run.metrics:
            if row["step"] in later and "ratio_histogram" in row:
                total += np.array(row["ratio_histogram"])
    return total
