"""Run folders made up for tests, in the form that notebook 07 leaves behind."""

import json

import numpy as np

from bandpo.metrics import LOG_RATIO_EDGES, PROBABILITY_EDGES
from bandpo.runs import write_json

MADE_BY = {
    "commit": "abc",
    "dirty": False,
    "package": "p",
    "lock": "l",
    "versions": {"python": "3"},
    "machine": {"cores": 2},
    "date": "2026-01-01T00:00:00+00:00",
}
RATES = ("clip_rate", "clip_high", "clip_low", "tail_clip_high", "tail_clip_low", "kl_old_new")


def write_run(root, name, seed, *, batches=8, updates=2, shift=0.0, **config):
    """Write a finished run of ``batches * updates`` steps; everything is drawn from ``seed``."""
    rng = np.random.default_rng(seed)
    path = root / f"{name}-{seed}"
    settings = {
        "task": "scratchpad",
        "inner_epochs": updates,
        "mini_batches": 1,
        "seed": seed,
        "run_dir": f"build/runs/x/{path.name}",
    }
    write_json(path / "config.json", settings | config)
    write_json(path / "provenance.json", MADE_BY)
    rows = []
    shape = (len(PROBABILITY_EDGES) + 1, len(LOG_RATIO_EDGES) + 1)
    for step in range(1, batches * updates + 1):
        first = (step - 1) % updates == 0
        row = {"step": step, "entropy": rng.uniform(0.1, 0.2) + shift}
        row |= {f"band/{rate}": 0.0 if first else rng.uniform(0, 0.2) + shift for rate in RATES}
        row["tokens"] = {f"band/{rate}": int(rng.integers(1, 50)) for rate in RATES}
        row["ratio_histogram"] = rng.integers(0, 9, shape).tolist()
        row["rare_strategy"] = step / (batches * updates + 1)
        if first:
            row["reward"] = rng.uniform(0, 0.5) + shift
        rows.append(row)
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    right = rng.integers(0, 5, (2, 20)).tolist()
    write_json(
        path / "evaluation.json",
        {"samples": 4, "right_before": right[0], "right_after": right[1], "seconds": 1.5},
    )
    return path
