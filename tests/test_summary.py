"""Summaries of runs: derived from the folders alone, and the committed ones in order."""

import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from run_folders import MADE_BY, write_run
from scipy import stats

from bandpo.cells import compare, paired, parse, read_summary
from bandpo.metrics import LOG_RATIO_EDGES, PROBABILITY_EDGES
from bandpo.outcomes import CURVES, OUTCOMES, WINDOWS, curve, ratio_counts
from bandpo.provenance import ROOT
from bandpo.runs import by_label, read_runs, write_json
from bandpo.summary import main, summarize

RECIPES = ROOT / "bandpo" / "recipes"
COMMITTED = [
    path
    for path in sorted((ROOT / "book" / "results" / "measured").glob("*.json"))
    if "cells" in json.loads(path.read_text())
]


@pytest.fixture
def root(tmp_path):
    for seed in (10, 9, 3):
        write_run(tmp_path / "runs", "scratchpad-grpo", seed, clip_rule="fixed")
        write_run(tmp_path / "runs", "scratchpad-kl-band", seed, shift=0.1, clip_rule="band")
    return tmp_path


def test_every_number_is_derived_from_the_run_folders(root):
    out = root / "out.json"
    assert main([str(root / "runs"), str(out)]) == 0
    summary = read_summary(out)
    assert list(summary.cells) == ["scratchpad-grpo", "scratchpad-kl-band"]
    for label, runs in by_label(read_runs(root / "runs")).items():
        cell = summary[label]
        assert cell.seeds == (3, 9, 10)
        for name, outcome in OUTCOMES.items():
            values = np.array([outcome.measure(run) for run in runs])
            if np.isnan(values).all():
                assert name not in cell.outcomes
            else:
                np.testing.assert_allclose(cell.outcomes[name], values, rtol=1e-4)
        for metric in CURVES:
            values = np.array([curve(run, metric) for run in runs])
            # three seeds: the interquartile mean cuts none off
            np.testing.assert_allclose(cell.curves[metric][0], values.mean(axis=0), rtol=1e-3)
            assert (cell.curves[metric][1] <= cell.curves[metric][0]).all()
            assert (cell.curves[metric][0] <= cell.curves[metric][2]).all()
        np.testing.assert_array_equal(cell.ratios, ratio_counts(runs))
        expected = {k: v for k, v in runs[0].config.items() if k not in ("seed", "run_dir")}
        assert cell.config == expected
    assert (summary.provenance["runs"], summary.provenance["unfinished"]) == (6, [])


def test_the_file_depends_on_the_runs_alone(root):
    texts = []
    for name in ("a.json", "b.json"):
        assert main([str(root / "runs"), str(root / name)]) == 0
        texts.append((root / name).read_bytes())
    assert texts[0] == texts[1]
    assert str(root).encode() not in texts[0]


def test_unfinished_runs_are_named(root, capsys):
    unfinished = write_run(root / "runs", "scratchpad-grpo", 4)
    (unfinished / "evaluation.json").unlink()
    assert main([str(root / "runs"), str(root / "out.json")]) == 0
    summary = read_summary(root / "out.json")
    assert summary.provenance["unfinished"] == ["scratchpad-grpo-4"]
    assert 4 not in summary["scratchpad-grpo"].seeds
    assert "scratchpad-grpo-4" in capsys.readouterr().out


def test_runs_of_several_versions_of_the_package_are_told(root, capsys):
    path = root / "runs" / "scratchpad-grpo-3" / "provenance.json"
    write_json(path, MADE_BY | {"package": "other", "date": "2025-01-01T00:00:00+00:00"})
    assert main([str(root / "runs"), str(root / "out.json")]) == 0
    made_by = read_summary(root / "out.json").provenance
    assert made_by["packages"] == ["other", "p"]
    assert (made_by["first"], made_by["last"]) == ("2025-01-01T00:00:00+00:00", MADE_BY["date"])
    assert "more than one version of the package" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("empty", "no finished run"),
        ("settings", "differ in learning_rate"),
        ("twice", "two runs of one seed"),
    ],
)
def test_what_is_no_grid_is_refused_and_nothing_is_written(root, capsys, case, message):
    runs = root / "runs"
    if case == "empty":
        runs = root / "empty"
    elif case == "settings":
        write_run(runs, "scratchpad-grpo", 4, clip_rule="fixed", learning_rate=1.0)
    else:
        write_run(runs, "scratchpad-grpo", 4, clip_rule="fixed").rename(runs / "scratchpad-grpo")
        write_run(runs, "scratchpad-grpo", 4, clip_rule="fixed")
    assert main([str(runs), str(root / "out.json")]) == 2
    assert message in capsys.readouterr().err
    assert not (root / "out.json").exists()


def test_a_missing_summary_and_a_missing_cell_say_what_to_do(root):
    with pytest.raises(FileNotFoundError, match="make reproduce PROFILE=cpu-full"):
        read_summary(root / "cpu-full.json")
    summary = parse(summarize(read_runs(root / "runs")))
    with pytest.raises(KeyError, match="no cell 'grpo'; there are scratchpad-grpo"):
        summary["grpo"]
    cell = summary["scratchpad-grpo"]
    with pytest.raises(KeyError, match="has no 'speed'; it has reward"):
        paired([cell, cell], "speed")


def test_cells_know_their_task_and_what_varies(root):
    summary = parse(summarize(read_runs(root / "runs")))
    assert summary.tasks == ["scratchpad"]
    found = summary.of_task("scratchpad", ["kl-band", "dcpo", "grpo"])
    assert list(found) == ["kl-band", "grpo"]
    assert found["grpo"].label == "scratchpad-grpo"


def test_comparisons_pair_the_seeds_that_both_cells_have(root):
    write_run(root / "runs", "scratchpad-grpo", 4, clip_rule="fixed")
    summary = parse(summarize(read_runs(root / "runs")))
    a, b = summary["scratchpad-kl-band"], summary["scratchpad-grpo"]
    table = paired([a, b], "reward")
    assert table.shape == (2, 3)
    np.testing.assert_allclose(table[0], a.outcomes["reward"])
    np.testing.assert_allclose(table[1], b.outcomes["reward"][[0, 2, 3]])
    found = compare(a, b, "reward")
    assert found.pairs == 3
    assert found.difference.value == pytest.approx(0.1, abs=1e-4)
    assert (
        found.p_value
        == stats.permutation_test(
            (table[0] - table[1],), np.mean, permutation_type="samples"
        ).pvalue
    )


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
class TestCommitted:
    def test_it_is_whole(self, path):
        summary = read_summary(path)
        made_by = summary.provenance
        assert sum(len(cell.seeds) for cell in summary.cells.values()) == made_by["runs"]
        for name in made_by["unfinished"]:  # counted nowhere
            label, _, seed = name.rpartition("-")
            assert label not in summary.cells or int(seed) not in summary[label].seeds
        assert not made_by["dirty"]
        assert len(made_by["packages"]) == len(made_by["commits"]) == 1
        assert made_by["first"] <= made_by["last"]
        assert path.stat().st_size < 600_000

    def test_its_cells_have_every_seed_and_number(self, path):
        shape = (len(PROBABILITY_EDGES) + 1, len(LOG_RATIO_EDGES) + 1)
        for cell in read_summary(path).cells.values():
            assert cell.seeds == tuple(sorted(set(cell.seeds)))
            assert {"reward", "accuracy", "clip_rate", "entropy_end"} <= set(cell.outcomes)
            assert set(cell.outcomes) <= set(OUTCOMES)
            assert {len(values) for values in cell.outcomes.values()} == {len(cell.seeds)}
            for name in ("reward", "accuracy", "accuracy_before", "clip_rate"):
                values = cell.outcomes[name]
                assert ((values >= 0) & (values <= 1)).all(), (cell.label, name)
            assert 1 < len(cell.steps) <= WINDOWS
            for name, rows in cell.curves.items():
                assert name in CURVES
                assert rows.shape == (3, len(cell.steps))
                low_to_high = rows[[1, 0, 2]]
                assert (np.diff(low_to_high, axis=0)[~np.isnan(low_to_high[1:])] >= 0).all()
            assert cell.ratios.shape == shape
            assert cell.ratios.sum() > 0

    def test_its_runs_are_those_of_a_profile_or_of_recipes(self, path):
        profile = ROOT / "notebooks" / "params" / f"{path.stem}.yaml"
        recipes = map(yaml.safe_load, (p.read_text() for p in RECIPES.rglob("*.yaml")))
        written = {Path(one["output_dir"]).parent.name for one in recipes if "output_dir" in one}
        if path.stem not in written:
            assert "07_train" in yaml.safe_load(profile.read_text())
