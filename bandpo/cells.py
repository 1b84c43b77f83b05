"""Cells of runs as the pages use them: read from a summary, compared seed by seed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bandpo.intervals import Comparison, paired_comparison
from bandpo.tasks import EMBEDDED_TASKS

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Cell:
    """Runs that differ in their seed alone.

    Parameters
    ----------
    label : str
        Their name without the seed.
    config : Mapping
        Parameters of the runs.
    seeds : tuple of int
        Increasing.
    outcomes : Mapping
        Name in ``OUTCOMES`` -> one value a seed, NaN where the run has no such number. An outcome
        that none of the runs has is left out.
    steps : ndarray, shape (points,)
        Middle of each window of training, in optimizer steps.
    curves : Mapping
        Name in ``CURVES`` -> interquartile mean over seeds, lower and upper end of its 95 %
        interval, shape (3, points); NaN where no seed has a value. With one value the three agree.
    ratios : ndarray of int
        Tokens by old probability and log-ratio, see `bandpo.metrics.ratio_histogram`.
    """

    label: str
    config: Mapping[str, Any]
    seeds: tuple[int, ...]
    outcomes: Mapping[str, Floats]
    steps: Floats
    curves: Mapping[str, Floats]
    ratios: NDArray[np.int64]

    @property
    def task(self) -> str:
        return str(self.config["task"])

    @property
    def variant(self) -> str:
        """The label without the task: the rule, or a setting and the rule."""
        return self.label.removeprefix(f"{self.task}-")


@dataclass(frozen=True)
class Summary:
    """Cells and what made them.

    Parameters
    ----------
    cells : Mapping
        Label -> Cell.
    provenance : Mapping
        ``runs`` and ``unfinished`` (names), commits, digests, versions, machines, first and last
        date.
    """

    cells: Mapping[str, Cell]
    provenance: Mapping[str, Any]

    def __getitem__(self, label: str) -> Cell:
        if label not in self.cells:
            raise KeyError(f"no cell {label!r}; there are {', '.join(self.cells)}")
        return self.cells[label]

    @property
    def tasks(self) -> list[str]:
        """The tasks: embedded ones in the order of `bandpo.tasks`, then others by name."""
        found = {cell.task for cell in self.cells.values()}
        return [task for task in EMBEDDED_TASKS if task in found] + sorted(
            found - {*EMBEDDED_TASKS}
        )

    def of_task(self, task: str, variants: Iterable[str]) -> dict[str, Cell]:
        """Return variant -> cell for those of the given variants that the task has."""
        found = {cell.variant: cell for cell in self.cells.values() if cell.task == task}
        return {variant: found[variant] for variant in variants if variant in found}


def paired(cells: Sequence[Cell], outcome: str) -> Floats:
    """Return one outcome of several cells on the seeds that all of them have.

    Parameters
    ----------
    cells : sequence of Cell
    outcome : str
        A name in ``OUTCOMES``.

    Returns
    -------
    ndarray, shape (len(cells), n_seeds)
        Columns are seeds, in increasing order; a seed on which one cell has no value is left out.
    """
    for cell in cells:
        if outcome not in cell.outcomes:
            raise KeyError(f"{cell.label} has no {outcome!r}; it has {', '.join(cell.outcomes)}")
    of_cell = [dict(zip(c.seeds, c.outcomes[outcome], strict=True)) for c in cells]
    seeds = sorted(set.intersection(*(set(one) for one in of_cell)))
    table = np.array([[one[seed] for seed in seeds] for one in of_cell])
    return table[:, np.isfinite(table).all(axis=0)]


def compare(a: Cell, b: Cell, outcome: str) -> Comparison:
    """Compare an outcome of two cells seed by seed; positive where ``a`` has more."""
    return paired_comparison(*paired([a, b], outcome))


def parse(value: Mapping[str, Any]) -> Summary:
    """Return the summary that :func:`bandpo.summary.summarize` made, ready for use."""
    cells = {
        label: Cell(
            label=label,
            config={**value["config"], **cell["config"]},
            seeds=tuple(cell["seeds"]),
            outcomes={name: np.array(v, dtype=float) for name, v in cell["outcomes"].items()},
            steps=np.array(cell["steps"], dtype=float),
            curves={name: np.array(rows, dtype=float) for name, rows in cell["curves"].items()},
            ratios=np.array(cell["ratios"], dtype=np.int64),
        )
        for label, cell in value["cells"].items()
    }
    return Summary(cells, value["provenance"])


def read_summary(path: str | Path) -> Summary:
    """Read a summary file.

    Raises
    ------
    FileNotFoundError
        If it is not there; the message says how to make it.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(
            f"no summary {path}: run `make reproduce PROFILE={path.stem}` and then "
            f"`make record PROFILE={path.stem}`"
        )
    return parse(json.loads(path.read_text(encoding="utf-8")))
