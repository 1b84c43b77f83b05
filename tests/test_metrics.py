"""The logged metrics, from their definitions; and the file that must survive a kill."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import TrainerControl, TrainerState, TrainingArguments

from bandpo.clipping import Band
from bandpo.metrics import (
    BAND_METRICS,
    LOG_RATIO_EDGES,
    METRICS,
    PROBABILITY_EDGES,
    MetricsFile,
    averages,
    ratio_histogram,
    token_metrics,
)

torch.set_num_threads(1)
TAU = 0.2


def batch(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (6, 40)
    old = -torch.empty(shape, dtype=torch.float64).exponential_(0.5, generator=generator)
    new = (old + 1.2 * torch.randn(shape, dtype=torch.float64, generator=generator)).clamp(max=0)
    advantages = torch.randn(6, 1, dtype=torch.float64, generator=generator)
    advantages[2] = 0
    mask = torch.rand(shape, generator=generator) < 0.8
    bound = Band("kl", 0.05, 10.0).log_bound(old, (advantages > 0).expand(shape)).exp()
    radius = 0.05 * (1 + 0.5 * torch.rand(shape, dtype=torch.float64, generator=generator))
    return {
        "logps": new,
        "old_logps": old,
        "advantages": advantages,
        "mask": mask,
        "bound": bound,
        "radius": radius,
    }


def by_definition(tokens: dict[str, torch.Tensor]) -> dict[str, float]:
    """Each metric written out as in its formula, over a list of the tokens that count."""
    rows = []
    advantages = tokens["advantages"].expand_as(tokens["mask"])
    for index in zip(*np.nonzero(tokens["mask"].numpy()), strict=True):
        p, q = math.exp(tokens["old_logps"][index]), math.exp(tokens["logps"][index])
        bound, radius = float(tokens["bound"][index]), float(tokens["radius"][index])
        rows.append((p, q, q / p, float(advantages[index]), bound, radius))
    p, q, r, a, b, delta = np.array(rows).T
    high, low = (a > 0) & (r > b), (a < 0) & (r < b)
    tail = p < TAU
    return {
        "band/clip_rate": np.mean(high | low),
        "band/clip_high": np.mean(high[a > 0]),
        "band/clip_low": np.mean(low[a < 0]),
        "band/tail_clip_high": np.mean(high[(a > 0) & tail]),
        "band/tail_clip_high_share": high[tail].sum() / (high | low)[tail].sum(),
        "band/tail_clip_low": np.mean(low[(a < 0) & tail]),
        "band/tail_share": np.mean(tail),
        "band/upper_mean": np.mean(b[a > 0]),
        "band/lower_mean": np.mean(b[a < 0]),
        "band/at_cap": np.mean(b[a > 0] >= 10 - 1e-9),
        "band/radius_mean": np.mean(delta),
        "band/tail_radius": np.mean(delta[tail]),
        "band/mass_moved": np.mean(np.abs(q - p)),
        "band/kl_old_new": np.mean(r - 1 - np.log(r)),
    }


def measure(tokens: dict[str, torch.Tensor], max_ratio: float | None = 10.0) -> torch.Tensor:
    return token_metrics(**tokens, tail_threshold=TAU, max_ratio=max_ratio)


@pytest.mark.claim("C19")
def test_every_metric_follows_its_definition() -> None:
    tokens = batch()
    expected = by_definition(tokens)
    measured = averages(measure(tokens))
    assert measured.keys() == expected.keys() == BAND_METRICS.keys()
    for name, value in expected.items():
        assert measured[name] == pytest.approx(value, rel=1e-9), name
        assert value > 0, f"{name} is not exercised"
    # the published code's tail share is another number than the rate
    assert measured["band/tail_clip_high_share"] > 2 * measured["band/tail_clip_high"]


def test_micro_batches_add_up_to_the_whole() -> None:
    tokens = batch()
    parts = [{k: v[rows] for k, v in tokens.items()} for rows in (slice(0, 1), slice(1, 6))]
    summed = averages(sum((measure(part) for part in parts), torch.zeros(())))
    for name, value in averages(measure(tokens)).items():
        assert summed[name] == pytest.approx(value, rel=1e-12), name


def test_masked_tokens_count_nowhere_whatever_they_hold() -> None:
    tokens = batch()
    expected = averages(measure(tokens))
    outside = ~tokens["mask"]
    for name in ("logps", "old_logps", "bound"):
        tokens[name] = tokens[name].masked_fill(outside, math.nan)
    assert averages(measure(tokens)) == expected


def test_a_metric_without_tokens_is_left_out() -> None:
    tokens = batch()
    tokens["advantages"] = tokens["advantages"].abs() + 1
    measured = averages(measure(tokens))
    assert "band/clip_low" not in measured
    assert "band/lower_mean" not in measured
    assert measured["band/tail_clip_high_share"] == 1


def test_no_cap_means_no_token_at_the_cap() -> None:
    assert averages(measure(batch(), max_ratio=None))["band/at_cap"] == 0


def test_every_metric_has_a_definition() -> None:
    for name, metric in METRICS.items():
        assert all(metric), name
        assert metric.formula.count("{") == metric.formula.count("}"), name


def test_histogram_counts_every_token_once_in_its_bin() -> None:
    tokens = batch()
    mask = tokens["mask"]
    counts = ratio_histogram(tokens["logps"], tokens["old_logps"], mask)
    p = tokens["old_logps"][mask].exp().numpy()
    log_ratio = (tokens["logps"] - tokens["old_logps"])[mask].numpy()
    inf = np.inf
    expected, _, _ = np.histogram2d(
        p, log_ratio, bins=[[-inf, *PROBABILITY_EDGES, inf], [-inf, *LOG_RATIO_EDGES, inf]]
    )
    np.testing.assert_array_equal(counts, expected)
    assert counts.sum() == mask.sum()


# --- metrics.jsonl -------------------------------------------------------------------------------


class Loop:
    """The calls that a trainer makes, in its order."""

    def __init__(self, folder: Path, start: int = 0, **kwargs: Any) -> None:
        self.callback = MetricsFile(folder, **kwargs)
        self.state = TrainerState(global_step=start, is_world_process_zero=True)
        self.args = TrainingArguments(str(folder), use_cpu=True, report_to="none")
        self.callback.on_train_begin(self.args, self.state, TrainerControl())

    def log(self, step: int, **logs: Any) -> None:
        self.state.global_step = step
        self.callback.on_log(self.args, self.state, TrainerControl(), logs=logs)


def read(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_one_line_a_step(tmp_path: Path) -> None:
    loop = Loop(tmp_path / "run")
    loop.log(1, loss=0.5, reward=1.0)
    loop.log(2, loss=math.nan)
    loop.log(2, train_runtime=3.0)
    assert read(tmp_path / "run") == [
        {"step": 1, "loss": 0.5, "reward": 1.0},
        {"step": 2, "loss": None},
    ]


def test_an_evaluation_joins_the_line_of_its_step(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    loop.log(1, loss=0.5)
    loop.log(2, loss=0.4)
    loop.log(2, eval_reward=0.7)
    loop.log(3, loss=0.3)
    assert [row["step"] for row in read(tmp_path)] == [1, 2, 3]
    assert read(tmp_path)[1] == {"step": 2, "loss": 0.4, "eval_reward": 0.7}


def test_resuming_drops_later_and_torn_lines(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    for step in range(1, 6):
        loop.log(step, loss=float(step))
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 6, "lo')
    loop = Loop(tmp_path, start=4)
    assert [row["step"] for row in read(tmp_path)] == [1, 2, 3, 4]
    loop.log(5, loss=50.0)
    assert [row["loss"] for row in read(tmp_path)] == [1.0, 2.0, 3.0, 4.0, 50.0]


def test_a_fresh_start_begins_a_fresh_file(tmp_path: Path) -> None:
    Loop(tmp_path).log(1, loss=1.0)
    Loop(tmp_path).log(1, loss=2.0)
    assert read(tmp_path) == [{"step": 1, "loss": 2.0}]


def test_extra_fields_and_other_processes(tmp_path: Path) -> None:
    loop = Loop(tmp_path, extra=lambda: {"ratio_histogram": [[1, 2]]})
    loop.log(1, loss=1.0)
    assert read(tmp_path) == [{"step": 1, "loss": 1.0, "ratio_histogram": [[1, 2]]}]
    loop.state.is_world_process_zero = False
    loop.log(2, loss=2.0)
    assert len(read(tmp_path)) == 1
