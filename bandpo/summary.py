"""Many runs in one file: ``python -m bandpo.summary RUNS_DIR OUT.json``.

A summary keeps, for every cell (runs that differ in their seed alone), the settings, every outcome
of :mod:`bandpo.outcomes` for every seed, the course of a few metrics and the ratio histogram, and
above them what made the runs. It is what a large grid leaves in the repository; pages compute the
same from run folders with :func:`summarize`. Nothing in it depends on when or where it is written.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bandpo.intervals import interquartile_mean_interval
from bandpo.outcomes import CURVES, OUTCOMES, curve, ratio_counts, windows
from bandpo.runs import FINISHED, Run, by_label, read_runs, write_text

Floats = NDArray[np.float64]

# What may differ between the runs of one cell.
_OF_A_RUN = ("seed", "run_dir")
_DIGITS = 5
_DIGITS_OF_CURVES = 4


def summarize(runs: Sequence[Run], unfinished: Sequence[str] = ()) -> dict[str, Any]:
    """Return the summary of runs as JSON values, numbers to five significant digits.

    Parameters
    ----------
    runs : sequence of Run
        At least one.
    unfinished : sequence of str
        Names of runs that began and did not end, to be named in the summary.

    Raises
    ------
    ValueError
        If runs of one label differ in more than their seed.
    """
    cells = by_label(runs)
    configs = {label: _config(label, found) for label, found in cells.items()}
    first = next(iter(configs.values()))
    common = {
        key: value
        for key, value in first.items()
        if all(key in one and one[key] == value for one in configs.values())
    }
    return {
        "provenance": _provenance(runs, unfinished),
        "config": common,
        "cells": {
            label: {
                "config": {k: v for k, v in configs[label].items() if k not in common},
                "seeds": [run.seed for run in found],
                "outcomes": _outcomes(found),
                **_curves(found),
                "ratios": ratio_counts(found).tolist(),
            }
            for label, found in cells.items()
        },
    }


def unfinished_runs(root: str | Path) -> list[str]:
    """Return the names of the folders below ``root`` in which a run began and did not end."""
    folders = (path.parent for path in Path(root).glob("*/config.json"))
    return sorted(folder.name for folder in folders if not (folder / FINISHED).is_file())


def _config(label: str, runs: Sequence[Run]) -> dict[str, Any]:
    first, *others = ({k: v for k, v in r.config.items() if k not in _OF_A_RUN} for r in runs)
    for run, other in zip(runs[1:], others, strict=True):
        if other != first:
            keys = {k for k in first | other if first.get(k) != other.get(k)}
            raise ValueError(
                f"runs {runs[0].name} and {run.name} of cell {label} differ in "
                f"{', '.join(sorted(keys))}: give settings that differ names that differ"
            )
    if len({run.seed for run in runs}) < len(runs):
        raise ValueError(f"cell {label} has two runs of one seed: {[run.name for run in runs]}")
    return first


def _provenance(runs: Sequence[Run], unfinished: Sequence[str]) -> dict[str, Any]:
    made = [run.provenance for run in runs]

    def distinct(key: str) -> list[Any]:
        found: list[Any] = []
        for one in made:
            if one.get(key) not in found:
                found.append(one.get(key))
        return sorted(found, key=lambda v: json.dumps(v, sort_keys=True))

    dates = sorted(one["date"] for one in made)
    return {
        "runs": len(runs),
        "unfinished": list(unfinished),
        "commits": distinct("commit"),
        "dirty": any(one["dirty"] for one in made),
        "packages": distinct("package"),
        "locks": distinct("lock"),
        "versions": distinct("versions"),
        "machines": distinct("machine"),
        "first": dates[0],
        "last": dates[-1],
    }


def _outcomes(runs: Sequence[Run]) -> dict[str, list[float | None]]:
    measured = {name: [one.measure(run) for run in runs] for name, one in OUTCOMES.items()}
    return {
        name: [_plain(value) for value in values]
        for name, values in measured.items()
        if np.isfinite(values).any()
    }


def _curves(runs: Sequence[Run]) -> dict[str, Any]:
    middles = [(window.start + window.stop - 1) / 2 for window in windows(runs[0])]
    curves = {}
    for metric in CURVES:
        values = np.array([curve(run, metric) for run in runs])
        if np.isfinite(values).any():
            rows = np.transpose([_estimate(column) for column in values.T])
            curves[metric] = [[_plain(x, _DIGITS_OF_CURVES) for x in row] for row in rows]
    return {"steps": middles, "curves": curves}


def _estimate(values: Floats) -> tuple[float, float, float]:
    """Interquartile mean of the finite values and the ends of its interval."""
    known = values[np.isfinite(values)]
    if not len(known):
        return (math.nan,) * 3
    if np.ptp(known) == 0:  # also one value alone: there is nothing to resample
        return (float(known[0]),) * 3
    value, low, high = (float(x) for x in interquartile_mean_interval([known]))
    return value, low, high


def _plain(value: float, digits: int = _DIGITS) -> float | None:
    return float(f"{value:.{digits}g}") if math.isfinite(value) else None


def _layout(value: Any, indent: str = "") -> str:
    """Lay out JSON with one line for each list of plain values."""
    inner = indent + " "
    if isinstance(value, Mapping) and value:
        lines = [f"{inner}{json.dumps(k)}: {_layout(v, inner)}" for k, v in value.items()]
        return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
    if isinstance(value, list) and any(isinstance(one, list | Mapping) for one in value):
        lines = [f"{inner}{_layout(one, inner)}" for one in value]
        return "[\n" + ",\n".join(lines) + f"\n{indent}]"
    return json.dumps(value, allow_nan=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Parameters
    ----------
    arguments : sequence of str, optional
        Default: those of the process.

    Returns
    -------
    int
        The exit status: 0 written, 2 refused.
    """
    parser = argparse.ArgumentParser(
        prog="python -m bandpo.summary", description="Put the runs of one folder into one file."
    )
    parser.add_argument("runs_dir", type=Path, help="folder of run folders, build/runs/PROFILE")
    parser.add_argument("out", type=Path, help="the summary, such as NAME.json")
    options = parser.parse_args(arguments)
    try:
        runs, unfinished = read_runs(options.runs_dir), unfinished_runs(options.runs_dir)
        value = summarize(runs, unfinished)
    except (FileNotFoundError, ValueError, KeyError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    write_text(options.out, _layout(value) + "\n")
    print(f"{options.out}: {len(runs)} runs in {len(value['cells'])} cells")
    for name in unfinished:
        print(f"unfinished, left out: {name}")
    if len(value["provenance"]["packages"]) > 1:
        print("caution: the runs were made by more than one version of the package")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
