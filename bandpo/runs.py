"""Run folders: what one training run leaves behind, and how the later notebooks read it.

A folder holds ``config.json`` and ``provenance.json`` (written before training), ``metrics.jsonl``
(one line per optimizer step, written while it trains), ``completions.jsonl`` (held-out prompts and
their completions before and after training) and ``evaluation.json``. The last is written when
everything else is there, so its presence means that the run is finished. Where training and
evaluation are two commands, ``training.json`` says that the first of them came to its end.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

FINISHED = "evaluation.json"


def write_text(path: str | Path, text: str) -> None:
    """Write ``text`` so that a reader sees the old file or the new one, never a part.

    Parameters
    ----------
    path : str or Path
        Target; its folder is made if missing.
    text : str
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_json(path: str | Path, value: Any) -> None:
    """Write ``value`` as JSON, whole or not at all, as :func:`write_text` does.

    Parameters
    ----------
    path : str or Path
        Target; its folder is made if missing.
    value : object
        Anything :func:`json.dumps` takes.
    """
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


@dataclass(frozen=True)
class Run:
    """One finished training run.

    Parameters
    ----------
    path : Path
        The run folder; its last part is the run's name.
    config : Mapping
        Parameters of the run, among them ``seed``.
    provenance : Mapping
        Commit, versions, machine and date.
    metrics : tuple of Mapping
        One row per optimizer step, in order.
    evaluation : Mapping
        What was measured on the trained model.
    """

    path: Path
    config: Mapping[str, Any]
    provenance: Mapping[str, Any]
    metrics: tuple[Mapping[str, Any], ...]
    evaluation: Mapping[str, Any]

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def seed(self) -> int:
        return int(self.config["seed"])

    @property
    def label(self) -> str:
        """The name without its seed: what runs of one cell share."""
        return self.name.removesuffix(f"-{self.seed}")

    def series(self, metric: str) -> tuple[np.ndarray, np.ndarray]:
        """Return optimizer steps and values of one metric, where it was logged.

        Parameters
        ----------
        metric : str
            A key of the rows of ``metrics.jsonl``.

        Returns
        -------
        steps, values : ndarray, shape (n,)

        Raises
        ------
        KeyError
            If no row has the metric; the message lists those that are there.
        """
        rows = [(row["step"], row[metric]) for row in self.metrics if row.get(metric) is not None]
        if not rows:
            known = sorted({key for row in self.metrics for key in row})
            raise KeyError(f"run {self.name} has no metric {metric!r}; it has {', '.join(known)}")
        steps, values = zip(*rows, strict=True)
        return np.array(steps), np.array(values, dtype=float)

    def pooled(self, metric: str, steps: Iterable[int] | None = None) -> float:
        """Return the mean of a ``band/`` metric over the tokens of several steps.

        Parameters
        ----------
        metric : str
            A metric whose token counts the trainer keeps under ``tokens``.
        steps : iterable of int, optional
            The optimizer steps to pool; None for all.

        Returns
        -------
        float
            Every token weighs the same, whatever its step; NaN if no step has such a token.
        """
        wanted = None if steps is None else set(steps)
        total, tokens = 0.0, 0
        for row in self.metrics:
            if metric in row and (wanted is None or row["step"] in wanted):
                count = row["tokens"][metric]
                total += row[metric] * count
                tokens += count
        return total / tokens if tokens else float("nan")


def read_run(path: str | Path) -> Run:
    """Read one finished run folder.

    Raises
    ------
    FileNotFoundError
        If the run did not finish or is no run folder.
    """
    path = Path(path)
    if not (path / FINISHED).is_file():
        raise FileNotFoundError(f"{path} holds no finished run: {FINISHED} is missing")
    config, provenance, evaluation = (
        json.loads((path / name).read_text(encoding="utf-8"))
        for name in ("config.json", "provenance.json", FINISHED)
    )
    lines = (path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    metrics = tuple(json.loads(line) for line in lines)
    return Run(path, config, provenance, metrics, evaluation)


def read_runs(root: str | Path) -> list[Run]:
    """Read every finished run below ``root``, sorted by label and seed.

    Raises
    ------
    FileNotFoundError
        If there is none; the message says how to make some.
    """
    root = Path(root)
    runs = [read_run(found.parent) for found in root.glob(f"*/{FINISHED}")]
    if not runs:
        raise FileNotFoundError(
            f"no finished run below {root}: "
            "run `python -m bandpo.run notebooks/07_train.ipynb` first, or "
            "`python -m bandpo.train` and `python -m bandpo.evaluate`"
        )
    return sorted(runs, key=lambda run: (run.label, run.seed))


def by_label(runs: Iterable[Run]) -> dict[str, list[Run]]:
    """Group runs that differ in their seed alone, in the order in which the labels appear."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.label, []).append(run)
    return groups


def stack(runs: Iterable[Run], metric: str) -> tuple[np.ndarray, np.ndarray]:
    """Return one metric of several runs as a matrix over the steps that all of them logged.

    Parameters
    ----------
    runs : iterable of Run
        Runs of one cell, usually one per seed.
    metric : str
        A key of the rows of ``metrics.jsonl``.

    Returns
    -------
    steps : ndarray, shape (n_steps,)
    values : ndarray, shape (n_runs, n_steps)
    """
    series = [dict(zip(*run.series(metric), strict=True)) for run in runs]
    steps = sorted(set.intersection(*(set(one) for one in series)))
    if not steps:
        raise ValueError(f"the runs share no step at which {metric!r} was logged")
    return np.array(steps), np.array([[one[step] for step in steps] for one in series])
