import json
import os

import numpy as np
import pytest

from bandpo.launch import check_run, is_trained, open_run, start_run
from bandpo.runs import by_label, read_run, read_runs, stack, write_json


def make_run(root, label, seed, rewards, finished=True):
    path = root / f"{label}-{seed}"
    write_json(path / "config.json", {"seed": seed})
    write_json(path / "provenance.json", {"commit": "abc"})
    rows = [{"step": i + 1, "reward": r} for i, r in enumerate(rewards)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if finished:
        write_json(path / "evaluation.json", {"mean_reward": rewards[-1]})
    return path


def test_only_finished_runs_are_read_in_order(tmp_path):
    make_run(tmp_path, "kl-band", 10, [0.1, 0.4])
    make_run(tmp_path, "kl-band", 9, [0.1, 0.2])
    make_run(tmp_path, "grpo", 1, [0.3, 0.3])
    make_run(tmp_path, "grpo", 2, [0.3, 0.3], finished=False)
    runs = read_runs(tmp_path)
    assert [run.name for run in runs] == ["grpo-1", "kl-band-9", "kl-band-10"]
    assert list(by_label(runs)) == ["grpo", "kl-band"]


def test_stack_aligns_runs_on_their_common_steps(tmp_path):
    make_run(tmp_path, "a", 1, [0.1, None, 0.3, 0.4])
    make_run(tmp_path, "a", 2, [0.5, 0.6, 0.7])
    steps, values = stack(read_runs(tmp_path), "reward")
    np.testing.assert_array_equal(steps, [1, 3])
    np.testing.assert_array_equal(values, [[0.1, 0.3], [0.5, 0.7]])


def test_errors_say_what_to_do(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"bandpo\.run notebooks/07_train"):
        read_runs(tmp_path)
    with pytest.raises(FileNotFoundError, match="no finished run"):
        read_run(make_run(tmp_path, "a", 1, [0.1], finished=False))
    run = read_run(make_run(tmp_path, "a", 2, [0.1]))
    with pytest.raises(KeyError, match=r"no metric 'entropy'; it has reward, step"):
        run.series("entropy")


def test_write_json_leaves_the_old_file_when_the_value_cannot_be_written(tmp_path):
    path = tmp_path / "x.json"
    write_json(path, {"a": 1})
    for bad in ({"a": float("nan")}, {"a": object()}):
        with pytest.raises((ValueError, TypeError)):
            write_json(path, bad)
    assert json.loads(path.read_text()) == {"a": 1}
    assert os.listdir(tmp_path) == ["x.json"]


def checkpoint(folder, step, whole=True):
    path = folder / "checkpoints" / f"checkpoint-{step}"
    path.mkdir(parents=True)
    if whole:
        (path / "trainer_state.json").write_text("{}")
    return path


def test_an_interrupted_run_goes_on_from_its_last_whole_checkpoint(tmp_path):
    config = {"seed": 1, "clip_rule": "band"}
    assert start_run(tmp_path, config) is None
    (tmp_path / "metrics.jsonl").write_text('{"step": 9}\n')
    checkpoint(tmp_path, 8)
    tenth = checkpoint(tmp_path, 10)
    checkpoint(tmp_path, 12, whole=False)
    assert start_run(tmp_path, config) == str(tenth)
    assert (tmp_path / "metrics.jsonl").exists()


@pytest.mark.parametrize("change", ["settings", "package"])
def test_a_run_with_other_settings_or_code_begins_at_the_beginning(tmp_path, change):
    config = {"seed": 1, "clip_rule": "band"}
    start_run(tmp_path, config)
    (tmp_path / "metrics.jsonl").write_text('{"step": 9}\n')
    checkpoint(tmp_path, 8)
    if change == "settings":
        config = config | {"seed": 2}
    else:
        made_by = json.loads((tmp_path / "provenance.json").read_text())
        write_json(tmp_path / "provenance.json", made_by | {"package": "other"})
    assert start_run(tmp_path, config) is None
    assert sorted(os.listdir(tmp_path)) == ["config.json", "provenance.json"]
    assert json.loads((tmp_path / "config.json").read_text()) == config


def test_pooled_weighs_every_token_alike(tmp_path):
    path = make_run(tmp_path, "a", 1, [0.0])
    rows = [
        {"step": 1, "band/clip_high": 1.0, "tokens": {"band/clip_high": 1}},
        {"step": 2, "tokens": {"band/clip_high": 0}},
        {"step": 3, "band/clip_high": 0.5, "tokens": {"band/clip_high": 6}},
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = read_run(path)
    assert run.pooled("band/clip_high") == pytest.approx(4 / 7)
    assert run.pooled("band/clip_high", [1, 2]) == 1.0
    assert np.isnan(run.pooled("band/clip_high", [2]))


def test_a_finished_run_is_replaced_only_by_itself(tmp_path):
    config = {"seed": 1, "clip_rule": "band"}
    start_run(tmp_path, config)
    (tmp_path / "metrics.jsonl").write_text('{"step": 9}\n')
    write_json(tmp_path / "evaluation.json", {"right_after": [1]})
    with pytest.raises(FileExistsError, match="other settings: choose another run_dir"):
        start_run(tmp_path, config | {"clip_rule": "fixed"})
    assert read_run(tmp_path).evaluation == {"right_after": [1]}
    assert start_run(tmp_path, config) is None
    assert sorted(os.listdir(tmp_path)) == ["config.json", "provenance.json"]


def test_a_run_that_goes_on_has_not_ended(tmp_path):
    config = {"seed": 1, "clip_rule": "band", "run_dir": "build/runs/x/a-1"}
    open_run(tmp_path, config)
    assert not is_trained(tmp_path, config)
    for name in ("training.json", "evaluation.json"):
        write_json(tmp_path / name, {"seconds": 1.0})
    elsewhere = config | {"run_dir": "./build/runs/x/a-1"}  # the same run, written otherwise
    assert is_trained(tmp_path, elsewhere)
    check_run(tmp_path, elsewhere)
    assert not is_trained(tmp_path, config | {"seed": 2})
    with pytest.raises(FileExistsError, match="other settings: choose another run_dir"):
        check_run(tmp_path, config | {"seed": 2})
    open_run(tmp_path, config)
    assert sorted(os.listdir(tmp_path)) == ["config.json", "provenance.json"]
