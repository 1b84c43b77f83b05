"""Embedded tasks: right answers, forms, exact branch probabilities."""

import itertools
import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bandpo.pretrain import character_tokenizer
from bandpo.tasks import (
    EMBEDDED_TASKS,
    Strategy,
    branch_weights,
    split_prompts,
    strategy_probabilities,
)

every_task = pytest.mark.parametrize("task", EMBEDDED_TASKS.values(), ids=EMBEDDED_TASKS)


def value(name: str, prompt: str) -> str:
    """Work out a prompt's answer by other means than the task does."""
    if name == "precedence":
        return str(eval(prompt[:-1]) % 10)
    return str(sum(map(int, prompt[:-1])) % (2 if name == "no_tail" else 5))


@every_task
def test_answers_are_right(task):
    for prompt in task.prompts:
        assert task.answer(prompt) == value(task.name, prompt)
        assert task.answer(prompt) in task.answers


@every_task
def test_prompts_are_distinct_and_of_one_length(task):
    assert len(set(task.prompts)) == len(task.prompts)
    assert len({len(p) for p in task.prompts}) == 1


@every_task
def test_split_is_a_fixed_partition(task):
    train, held_out = task.split()
    assert sorted(train + held_out) == sorted(task.prompts)
    assert len(held_out) == len(task.prompts) // 5
    assert (train, held_out) == task.split()
    assert split_prompts(task.prompts, "other")[1] != held_out


@every_task
def test_each_strategy_is_recognized_and_rewarded_as_said(task):
    rng = random.Random(1)
    for strategy in task.strategies:
        right = 0
        for prompt in task.prompts:
            completion = task.write(strategy, prompt, rng)
            assert task.strategy_of(completion) == strategy.name
            assert len(completion) < task.max_completion_length
            right += task.is_correct(completion, task.answer(prompt))
        n, p = len(task.prompts), task.accuracy(strategy)
        assert right / n == pytest.approx(p, abs=4 * math.sqrt(p * (1 - p) / n) + 1e-12)


def test_running_sums_show_every_partial_sum():
    task = EMBEDDED_TASKS["scratchpad"]
    sums = next(s for s in task.strategies if s.name == task.rare)
    assert task.write(sums, "30142=", random.Random(0)) == "T33430"


def test_precedence_and_left_to_right_differ_where_they_should():
    task = EMBEDDED_TASKS["precedence"]
    work = {s.name: s.work for s in task.strategies}
    assert work["left to right"]("3+4*2=") == "74"
    assert work["precedence"]("3+4*2=") == "81"
    assert work["left to right"]("3*4+2=") == work["precedence"]("3*4+2=") == "24"


@pytest.mark.parametrize(
    "completion", ["", "D", "D12", "T3343", "T334300", "DT33430", "T3343x", "X3", "3", " D3"]
)
def test_other_forms_are_no_strategys_and_wrong(completion):
    task = EMBEDDED_TASKS["scratchpad"]
    assert task.strategy_of(completion) is None
    assert not any(task.is_correct(completion, a) for a in task.answers)


@pytest.mark.parametrize(
    ("name", "base", "accuracies"),
    [
        ("scratchpad", 0.208, [0.2, 1]),
        ("precedence", 0.409, [0.48, 0.1, 1]),
        ("two_branches", 0.205, [0.2, 0.2, 1]),
        ("no_tail", 0.75, [0.5, 1]),
    ],
)
def test_base_reward_and_accuracies(name, base, accuracies):
    task = EMBEDDED_TASKS[name]
    assert [task.accuracy(s) for s in task.strategies] == pytest.approx(accuracies, abs=1e-3)
    assert task.base_reward() == pytest.approx(base, abs=1e-3)
    assert math.fsum(s.rate for s in task.strategies) == pytest.approx(1)


def test_branch_weights_make_the_rates_optimal():
    """Minimize the weighted cross-entropy of a free distribution: it must be the rates."""
    strategies = EMBEDDED_TASKS["two_branches"].strategies
    weights = branch_weights(strategies)
    symbols = {"D": 0, "S": 1, "G": 0, "T": 1}
    logits = torch.zeros(2, 2, dtype=torch.float64, requires_grad=True)  # (position, choice)
    optimizer = torch.optim.LBFGS([logits], max_iter=200, tolerance_grad=1e-12)

    def closure():
        optimizer.zero_grad()
        logp = logits.log_softmax(-1)
        loss = -sum(
            w * logp[i, symbols[c]]
            for branch, ws in weights.items()
            for i, (c, w) in enumerate(zip(branch, ws, strict=True))
        )
        loss.backward()
        return loss

    optimizer.step(closure)
    p = logits.detach().softmax(-1)
    found = {"D": p[0, 0], "SG": p[0, 1] * p[1, 0], "ST": p[0, 1] * p[1, 1]}
    for s in strategies:
        assert float(found[s.branch]) == pytest.approx(s.rate, rel=1e-4)


def test_branch_weights_refuse_what_cannot_work():
    def made(*pairs):
        return [Strategy(b, b, r, 1) for b, r in pairs]

    with pytest.raises(ValueError, match="sum to 1"):
        branch_weights(made(("D", 0.5), ("T", 0.4)))
    with pytest.raises(ValueError, match="positive"):
        branch_weights(made(("D", 1.0), ("T", 0.0)))
    with pytest.raises(ValueError, match="start of"):
        branch_weights(made(("D", 0.5), ("DT", 0.5)))


def test_strategy_probabilities_match_a_dense_computation():
    """One forward pass per prefix, softmax by hand, against the batched computation."""
    task = EMBEDDED_TASKS["two_branches"]
    tokenizer = character_tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        initializer_range=0.5,
    )
    model = LlamaForCausalLM(config).train()
    prompts = list(task.prompts[:7])
    found = strategy_probabilities(model, tokenizer, task, prompts)
    assert model.training
    for s, (i, prompt) in itertools.product(task.strategies, enumerate(prompts)):
        expected = 1.0
        for j, c in enumerate(s.branch):
            ids = torch.tensor([tokenizer.convert_tokens_to_ids(list(prompt + s.branch[:j]))])
            logits = model(ids).logits[0, -1].detach().double()
            expected *= float(logits.softmax(-1)[tokenizer.convert_tokens_to_ids(c)])
        assert found[s.name][i] == pytest.approx(expected, rel=1e-4)
    assert all(v.shape == (7,) and v.dtype == np.float32 for v in found.values())


def test_every_text_is_made_of_known_characters():
    tokenizer = character_tokenizer()
    rng = random.Random(0)
    for task in EMBEDDED_TASKS.values():
        for s in task.strategies:
            text = task.prompts[0] + task.write(s, task.prompts[0], rng)
            ids = tokenizer(text).input_ids
            assert tokenizer.unk_token_id not in ids
            assert len(ids) == len(text)
            assert tokenizer.decode(ids) == text


def test_a_task_of_ones_own_needs_no_code_here():
    task = replace(EMBEDDED_TASKS["scratchpad"], name="mine", prompts=("00000=", "11111="))
    assert task.base_reward() == pytest.approx(0.208)
