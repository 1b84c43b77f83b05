"""Numbers of grids as the pages say them: phrases chosen by intervals, rows of tables, forests.

Every sentence about a difference takes its verb from the interval, so that it stays true when the
runs behind it change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray
from scipy import stats

from bandpo.cells import Cell, Summary
from bandpo.intervals import Comparison, Interval, mean_interval
from bandpo.outcomes import OUTCOMES
from bandpo.plotting import INK
from bandpo.verdicts import Verdict


def level(cell: Cell, outcome: str) -> Interval | None:
    """Return the mean of an outcome over the seeds of a cell, with its interval.

    Parameters
    ----------
    cell : Cell
    outcome : str
        A name in ``OUTCOMES``.

    Returns
    -------
    Interval or None
        Of the seeds that have such a number; one seed stands alone, without a width. None if no
        seed has it.
    """
    x = cell.outcomes.get(outcome, np.array([]))
    known = x[np.isfinite(x)]
    if not len(known):
        return None
    if len(known) == 1:
        alone = float(known[0])
        return Interval(alone, alone, alone)
    return mean_interval(known, within=OUTCOMES[outcome].within)


def span(one: Interval, spec: str = ".3f", scale: float = 1.0) -> str:
    """Write an interval, such as ``+0.031 (+0.012 to +0.051)``.

    Parameters
    ----------
    one : Interval
    spec : str
        Format of each number; ``+`` for differences.
    scale : float
        Factor on each number, 100 for percent.
    """
    value, low, high = (_number(scale * x, spec) for x in (one.value, one.low, one.high))
    return f"{value} ({low} to {high})"


def _number(x: float, spec: str) -> str:
    text = format(x, spec)
    if float(text) == 0:
        text = text.lstrip("+-")  # a rounded zero has no sign
    return text.replace("-", "−")


def verb(
    one: Interval, more: str = "higher", less: str = "lower", same: str = "not distinguishable"
) -> str:
    """Return the word that an interval of a difference allows: above, below or across zero."""
    if one.low > 0:
        return more
    return less if one.high < 0 else same


def evidence(found: Comparison, more: str = "higher", spec: str = "+.3f", unit: str = "") -> str:
    """Write what stands behind a comparison: difference, pairs, effect size.

    Parameters
    ----------
    found : Comparison
    more : str
        Word for a difference above zero.
    spec, unit : str
        Format and unit of the difference.
    """
    wins = found.wins * found.pairs
    return (
        f"{span(found.difference, spec)}{unit}, {more} on {wins:g} of {found.pairs} seeds, "
        f"effect size {_number(found.effect_size, '+.1f')}"
    )


def verdict_lines(
    heading: str,
    status: str,
    of_task: Mapping[str, Verdict],
    *,
    of_what: str = "",
    spec: str = "+.3f",
    scale: float = 1.0,
    unit: str = "",
) -> list[str]:
    """Write how a claim fares: a list item, and under it a sentence for each task.

    Parameters
    ----------
    heading : str
        The claim, and the grid where several are judged.
    status : str
        Over the tasks that count.
    of_task : Mapping
        Task -> Verdict.
    of_what : str
        The outcome, where the parts do not name it.
    spec, scale, unit
        As for :func:`span`, of the parts' differences.
    """
    lines = [f"* **{heading}: {status}.**"]
    for task, verdict in of_task.items():
        told = "; ".join(
            f"{what} = {span(one, spec, scale)}{unit}" for what, one in verdict.parts.items()
        )
        subject = f", {of_what}" if of_what else ""
        lines.append(
            f"  On `{task}`, {verdict.seeds} seeds{subject}: {told or 'too few seeds'}. "
            f"That is {verdict.status}."
        )
    return lines


def adjust(p_values: Sequence[float]) -> NDArray[np.float64]:
    """Adjust the p-values of one table for their number (Benjamini and Hochberg)."""
    return np.asarray(stats.false_discovery_control(p_values))


def comparison_rows(
    pairs: Mapping[tuple[str, ...], Comparison], names: Sequence[str], spec: str = "+.3f"
) -> list[dict[str, Any]]:
    """Return table rows for comparisons: differences and effect sizes first, p-values last.

    Parameters
    ----------
    pairs : Mapping
        What is compared, one entry for each of ``names`` -> its comparison.
    names : sequence of str
        Headers of the first columns.
    spec : str
        Format of the difference.
    """
    adjusted = adjust([found.p_value for found in pairs.values()])
    return [
        {
            **dict(zip(names, what, strict=True)),
            "difference": span(found.difference, spec),
            "effect size": _number(found.effect_size, "+.2f"),
            "higher on": f"{found.wins * found.pairs:g} of {found.pairs}",
            "p": f"{found.p_value:.3f}",
            "p adjusted": f"{p:.3f}",
        }
        for (what, found), p in zip(pairs.items(), adjusted, strict=True)
    ]


def origin(name: str, summary: Summary) -> dict[str, Any]:
    """Return a table row that says what made a grid."""
    made_by = summary.provenance
    seeds = sorted({len(cell.seeds) for cell in summary.cells.values()})
    machines = {
        f"{', '.join(one['gpus']) or one['processor']}, {one['cores']} cores"
        for one in made_by["machines"]
    }
    return {
        "grid": name,
        "runs": made_by["runs"],
        "cells": len(summary.cells),
        "seeds a cell": " to ".join(str(n) for n in dict.fromkeys((seeds[0], seeds[-1]))),
        "unfinished": len(made_by["unfinished"]),
        "commit": ", ".join(str(c)[:7] for c in made_by["commits"]),
        "versions of the package": len(made_by["packages"]),
        "torch": ", ".join(sorted({one["torch"] for one in made_by["versions"]})),
        "machine": "; ".join(sorted(machines)),
        "made": f"{made_by['first'][:10]} to {made_by['last'][:10]}",
    }


def run_rows(cells: Sequence[Cell], outcomes: Sequence[str]) -> list[dict[str, Any]]:
    """Return one table row for every run of the cells; a number that a run lacks is None."""
    return [
        {"cell": cell.label, "seed": seed}
        | {
            OUTCOMES[name].title: float(cell.outcomes[name][i]) if name in cell.outcomes else None
            for name in outcomes
        }
        for cell in cells
        for i, seed in enumerate(cell.seeds)
    ]


def forest(
    ax: Axes, rows: Mapping[str, Interval | None], colors: Sequence[str], scale: float = 1.0
) -> None:
    """Draw intervals below one another, the first on top.

    Parameters
    ----------
    ax : Axes
    rows : Mapping
        Name -> Interval; the row of None stays empty.
    colors : sequence of str
        One for each row.
    scale : float
        Factor on each number, 100 for percent.
    """
    for place, (one, color) in enumerate(zip(rows.values(), colors, strict=True)):
        if one is not None:
            ax.plot([scale * one.low, scale * one.high], [-place, -place], color=color, lw=2)
            ax.plot(scale * one.value, -place, "o", color=color)
    ax.set_yticks(-np.arange(len(rows)), list(rows))
    ax.set_ylim(-len(rows) + 0.5, 0.5)
    ax.grid(axis="y", visible=False)


def zero_line(ax: Axes) -> None:
    """Mark no difference."""
    ax.axvline(0, color=INK, lw=1, zorder=0)
