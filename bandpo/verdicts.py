"""How claims about training are judged here: rules that do not depend on the numbers.

A claim is put as *parts*: differences between cells, seed by seed, each above zero where the claim
holds. It is reproduced if every part's interval lies above zero, contradicted if one lies below,
and not settled otherwise, or with fewer than eight seeds. Intervals hold at 95 % for all parts of a
claim together (Bonferroni), so that a claim of many parts is not contradicted by chance.

All of this is at small scale: it says how the claim fares on the models at hand, and leaves open
how it fares on the published ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bandpo.cells import Cell, paired
from bandpo.intervals import Interval, mean_interval

Floats = NDArray[np.float64]
Cells = Mapping[str, Cell]

REPRODUCED = "reproduced at small scale"
CONTRADICTED = "contradicted at small scale"
OPEN = "not settled at small scale"

MIN_SEEDS = 8
"""With fewer, no exact test of a claim of four parts could reach 0.05. It was five until the first
five seeds of the large sweep had been seen; the other rules are older than the numbers."""
SIMILAR = 1.5
"""Two clip rates are about the same within this factor (C18)."""
FAR_LESS = 0.5
"""A rate is far lower below this share of another (C19)."""
FAR_MORE = 3.0
"""An entropy is far higher above this multiple of another (C20: ten times are published)."""
RADII = ("kl-0.01", "kl-0.03", "kl-0.1", "kl-0.3")
"""Variants beside KL-Band with 0.05 (C17)."""


@dataclass(frozen=True)
class Verdict:
    """How a claim fares on one task.

    Parameters
    ----------
    status : str
        ``REPRODUCED``, ``CONTRADICTED`` or ``OPEN``.
    parts : Mapping
        What must be above zero -> its mean over seeds with an interval.
    seeds : int
    """

    status: str
    parts: Mapping[str, Interval]
    seeds: int


@dataclass(frozen=True)
class Rule:
    """How one claim is judged.

    Parameters
    ----------
    outcome : str
        The name in ``OUTCOMES`` that it is about.
    variants : tuple of str
        The cells it needs.
    holds : str
        When the claim is taken to hold, in words.
    parts : callable
        Variant -> values, shape (n_seeds,), to part -> values, shape (n_seeds,).
    """

    outcome: str
    variants: tuple[str, ...]
    holds: str
    parts: Callable[[Mapping[str, Floats]], dict[str, Floats]]


RULES: dict[str, Rule] = {
    "C16": Rule(
        "accuracy",
        ("kl-band", "relaxed-band"),
        "held-out accuracy at the end is higher with KL-Band than with Relaxed Band",
        lambda v: {"KL-Band - Relaxed Band": v["kl-band"] - v["relaxed-band"]},
    ),
    "C17": Rule(
        "accuracy",
        ("kl-band", *RADII),
        "held-out accuracy at the end is higher with radius 0.05 than with any other of the sweep",
        lambda v: {
            f"0.05 - {other.removeprefix('kl-')}": v["kl-band"] - v[other] for other in RADII
        },
    ),
    "C18": Rule(
        "clip_rate",
        ("grpo", "clip-higher", "kl-band"),
        f"KL-Band clips at most {SIMILAR:g} times as many tokens as GRPO, at least the "
        f"{SIMILAR:g}th part, and more than Clip-Higher",
        lambda v: {
            f"{SIMILAR:g} GRPO - KL-Band": SIMILAR * v["grpo"] - v["kl-band"],
            f"KL-Band - GRPO / {SIMILAR:g}": v["kl-band"] - v["grpo"] / SIMILAR,
            "KL-Band - Clip-Higher": v["kl-band"] - v["clip-higher"],
        },
    ),
    "C19": Rule(
        "tail_clip_high_early",
        ("grpo", "clip-higher", "kl-band"),
        "in the first quarter of training, KL-Band's tail clip-high rate is below half of GRPO's "
        "and of Clip-Higher's",
        lambda v: {
            "GRPO / 2 - KL-Band": FAR_LESS * v["grpo"] - v["kl-band"],
            "Clip-Higher / 2 - KL-Band": FAR_LESS * v["clip-higher"] - v["kl-band"],
        },
    ),
    "C20": Rule(
        "entropy_end",
        ("grpo", "kl-band"),
        f"entropy over the last quarter of training is above {FAR_MORE:g} times GRPO's",
        lambda v: {f"KL-Band - {FAR_MORE:g} GRPO": v["kl-band"] - FAR_MORE * v["grpo"]},
    ),
}


def judge(claim: str, cells: Cells) -> Verdict | None:
    """Judge a claim on the cells of one task.

    Parameters
    ----------
    claim : str
        A key of ``RULES``.
    cells : Mapping
        Variant -> Cell.

    Returns
    -------
    Verdict or None
        None if a cell that the claim needs is not there, or has no such outcome (a task without
        rare tokens has no tail clip-high rate).
    """
    rule = RULES[claim]
    if not all(v in cells and rule.outcome in cells[v].outcomes for v in rule.variants):
        return None
    table = paired([cells[variant] for variant in rule.variants], rule.outcome)
    seeds = table.shape[1]
    parts = rule.parts(dict(zip(rule.variants, table, strict=True)))
    if seeds < MIN_SEEDS:
        return Verdict(OPEN, {}, seeds)
    confidence = 1 - 0.05 / len(parts)
    found = {name: mean_interval(d, confidence=confidence) for name, d in parts.items()}
    return Verdict(status_of(found.values()), found, seeds)


def status_of(parts: Iterable[Interval]) -> str:
    """Return the status that intervals lead to: all above zero, one below, or neither."""
    intervals = list(parts)
    if any(one.high < 0 for one in intervals):
        return CONTRADICTED
    return REPRODUCED if all(one.low > 0 for one in intervals) else OPEN


def overall(statuses: Iterable[str]) -> str:
    """Return the status over tasks: theirs if they agree, else not settled."""
    found = set(statuses)
    return found.pop() if len(found) == 1 else OPEN
