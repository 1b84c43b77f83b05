import json

import numpy as np
import pytest
from run_folders import write_run

from bandpo.outcomes import (
    OUTCOMES,
    curve,
    last_step,
    later_steps,
    ratio_counts,
    updates_per_batch,
    windows,
)
from bandpo.runs import read_run


def changed(path, change):
    """The run after ``change`` was applied to each of its rows."""
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        change(row)
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_run(path)


def measured(run):
    return {name: outcome.measure(run) for name, outcome in OUTCOMES.items()}


def test_the_first_update_on_each_batch_is_left_out(tmp_path):
    run = read_run(write_run(tmp_path, "a", 1, batches=3, updates=4))
    assert (last_step(run), updates_per_batch(run)) == (12, 4)
    assert later_steps(run) == [2, 3, 4, 6, 7, 8, 10, 11, 12]


def test_outcomes_of_a_run_by_hand(tmp_path):
    def fill(row):
        step = row["step"]
        row["band/tail_clip_high"] = step / 100
        row["tokens"]["band/tail_clip_high"] = 1 if step < 8 else 3
        row["entropy"] = step / 10
        row["rare_strategy"] = [0.01, 0.005, 0.1, 0.2, 0.49, 0.5, 0.51, 0.9][step - 1]
        row["band/kl_old_new"] = step / 1000
        if "reward" in row:
            row["reward"] = {1: 0.1, 3: 0.5, 5: 0.9, 7: 0.6}[step]

    found = measured(changed(write_run(tmp_path, "a", 1, batches=4, updates=2), fill))
    assert found["reward"] == pytest.approx(0.525)
    assert found["fall"] == pytest.approx(0.3)
    assert found["steps_to_rare"] == 7
    assert found["rare_lowest"] == pytest.approx(0.5)
    assert found["rare_final"] == 0.9
    assert found["entropy_final"] == 0.8
    assert found["entropy_end"] == pytest.approx(0.75)  # steps 7 and 8 of 8
    # steps 2, 4, 6 with one token and step 8 with three
    assert found["tail_clip_high"] == pytest.approx((0.02 + 0.04 + 0.06 + 3 * 0.08) / 6)
    assert found["tail_clip_high_early"] == pytest.approx(0.02)  # the first quarter: step 2
    assert found["kl_of_batch"] == pytest.approx((2 + 4 + 6 + 8) / 4 / 1000)
    assert found["seconds"] == 1.5


def test_scores_are_means_over_problems(tmp_path):
    path = write_run(tmp_path, "a", 1)
    evaluation = json.loads((path / "evaluation.json").read_text())
    evaluation |= {"samples": 4, "right_before": [0, 0], "right_after": [4, 1]}
    (path / "evaluation.json").write_text(json.dumps(evaluation))
    found = measured(read_run(path))
    assert (found["accuracy_before"], found["pass_before"]) == (0, 0)
    assert (found["accuracy"], found["pass"]) == (0.625, 1)


def test_a_strategy_that_is_never_found_is_censored_at_the_end(tmp_path):
    run = changed(write_run(tmp_path, "a", 1), lambda row: row.update(rare_strategy=0.5))
    assert OUTCOMES["steps_to_rare"].measure(run) == last_step(run)


def test_what_a_run_does_not_have_is_nan(tmp_path):
    def drop(row):
        for name in ("rare_strategy", "band/tail_clip_high"):
            row.pop(name)

    run = changed(write_run(tmp_path, "a", 1), drop)
    found = measured(run)
    missing = {"steps_to_rare", "rare_lowest", "rare_final", "tail_clip_high"}
    assert missing <= {name for name, value in found.items() if np.isnan(value)}
    assert np.isnan(curve(run, "rare_strategy")).all()
    assert np.isnan(curve(run, "band/tail_clip_high")).all()


def test_windows_are_whole_batches_and_cover_training(tmp_path):
    for batches, points in ((8, 8), (40, 20), (50, 20)):
        run = read_run(write_run(tmp_path, f"b{batches}", 1, batches=batches, updates=3))
        found = windows(run)
        assert len(found) == points
        assert [step for w in found for step in w] == list(range(1, 3 * batches + 1))
        assert {(w.start - 1) % 3 for w in found} == {0}


def test_curves_are_pooled_or_averaged_within_a_window(tmp_path):
    run = read_run(write_run(tmp_path, "a", 1, batches=40, updates=2))
    window = windows(run)[3]
    rows = [row for row in run.metrics if row["step"] in window]
    rewards = [row["reward"] for row in rows if "reward" in row]
    assert len(rewards) == 2
    assert curve(run, "reward")[3] == pytest.approx(np.mean(rewards))
    name = "band/clip_rate"
    later = [row for row in rows if row["step"] % 2 == 0]
    total = sum(row[name] * row["tokens"][name] for row in later)
    count = sum(row["tokens"][name] for row in later)
    assert curve(run, name)[3] == pytest.approx(total / count)


def test_ratio_counts_add_up_runs_without_first_updates(tmp_path):
    runs = [read_run(write_run(tmp_path, "a", seed, updates=4)) for seed in (1, 2)]
    rows = [row for run in runs for row in run.metrics if (row["step"] - 1) % 4]
    expected = np.sum([row["ratio_histogram"] for row in rows], axis=0)
    np.testing.assert_array_equal(ratio_counts(runs), expected)
