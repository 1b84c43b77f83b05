"""Embedded tasks: small verifiable problems whose rare strategies are known by construction.

Each task maps a short prompt to one digit. Its answer can be written by several *strategies*, told
apart by their first tokens (the branch). A base model (see :mod:`bandpo.base_models`) uses each
strategy with a chosen probability, so whether reinforcement learning finds a good but rare one, and
how fast, can be measured. All text is one character a token.

============ ================================== ==================================================
task         prompt and answer                  strategies: base rate, share of right answers
============ ================================== ==================================================
scratchpad   ``30142=``, sum mod 5              ``D`` guess .99, .2; ``T`` running sums .01, 1
precedence   ``3+4*2=``, value mod 10           ``L`` left to right .79, .48; ``D`` guess .20, .1;
                                                ``P`` precedence .01, 1
two_branches ``30142=``, sum mod 5              ``D`` guess .905, .2; ``SG`` guess .089, .2;
                                                ``ST`` running sums .006, 1
no_tail      ``30142=``, sum mod 2              ``D`` guess .5, .5; ``T`` running sums .5, 1
============ ================================== ==================================================

In ``two_branches`` the good strategy needs two rare tokens in a row (.095, then .063). ``no_tail``
is the control: the base model gives every strategy and every digit of a guess probability one half,
so there is nothing in the tail to find.

Use with TRL::

    from bandpo.base_models import base_model
    from bandpo.data import load_task

    task = load_task("scratchpad", seed=0)
    config = GRPOConfig(..., temperature=1.0, max_completion_length=task.max_completion_length)
    trainer = GRPOTrainer(model=str(base_model("scratchpad")), args=config,
                          train_dataset=task.train, eval_dataset=task.eval,
                          reward_funcs=task.reward_funcs)

The tokenizer saved with the base model has an end and a padding token, so nothing else is needed.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

HELD_OUT = 0.2
"""Share of a task's prompts that neither supervised nor reinforcement learning ever sees."""


@dataclass(frozen=True)
class Strategy:
    """One way to write the answer.

    Parameters
    ----------
    name : str
        What plots and metrics call it.
    branch : str
        The first characters of a completion that uses it.
    rate : float
        Probability with which the base model is to use it.
    digits : int
        How many digits follow the branch; the last one is the answer.
    work : callable, optional
        ``prompt -> digits``. None means a guess: one digit, uniform over the task's answers.
    """

    name: str
    branch: str
    rate: float
    digits: int
    work: Callable[[str], str] | None = None


@dataclass(frozen=True)
class EmbeddedTask:
    """A task in full: every prompt, the right answer and the strategies.

    Parameters
    ----------
    name : str
        Name under which :func:`bandpo.data.load_task` knows it.
    prompts : tuple of str
        Every prompt there is.
    answer : callable
        ``prompt -> str``, the right digit.
    answers : str
        The digits that an answer can be.
    strategies : tuple of Strategy
        Their rates sum to one; no branch is the start of another.
    rare : str
        Name of the strategy whose discovery is of interest.
    """

    name: str
    prompts: tuple[str, ...]
    answer: Callable[[str], str]
    answers: str
    strategies: tuple[Strategy, ...]
    rare: str

    @property
    def max_completion_length(self) -> int:
        """Tokens of the longest completion, its end token included."""
        return max(len(s.branch) + s.digits for s in self.strategies) + 1

    def split(self) -> tuple[list[str], list[str]]:
        """Return the prompts for training and the held-out ones; the same split in every run."""
        return split_prompts(self.prompts, self.name)

    def strategy_of(self, completion: str) -> str | None:
        """Return the name of the strategy that wrote ``completion``; None where its form is none's.

        The form is the branch and then exactly the strategy's number of digits.
        """
        for s in self.strategies:
            rest = completion.removeprefix(s.branch)
            if completion.startswith(s.branch) and len(rest) == s.digits and rest.isdigit():
                return s.name
        return None

    def is_correct(self, completion: str, answer: str) -> bool:
        """Tell whether the completion has a strategy's form and ends with the answer."""
        return self.strategy_of(completion) is not None and completion[-1] == answer

    def accuracy(self, strategy: Strategy) -> float:
        """Share of right answers when ``strategy`` is carried out without a slip."""
        if strategy.work is None:
            return 1.0 / len(self.answers)
        right = [strategy.work(p)[-1] == self.answer(p) for p in self.prompts]
        return sum(right) / len(right)

    def base_reward(self) -> float:
        """Mean reward of a base model that meets the rates and makes no slip."""
        return sum(s.rate * self.accuracy(s) for s in self.strategies)

    def write(self, strategy: Strategy, prompt: str, rng: random.Random) -> str:
        """Write the completion of ``prompt`` by ``strategy``; ``rng`` draws the guesses."""
        work = rng.choice(self.answers) if strategy.work is None else strategy.work(prompt)
        return strategy.branch + work


def split_prompts(prompts: Sequence[str], key: str) -> tuple[list[str], list[str]]:
    """Split prompts into those for training and :data:`HELD_OUT` of them, the same at each call."""
    shuffled = list(prompts)
    random.Random(key).shuffle(shuffled)
    held_out = int(len(shuffled) * HELD_OUT)
    return shuffled[held_out:], shuffled[:held_out]


def branch_weights(strategies: Sequence[Strategy]) -> dict[str, tuple[float, ...]]:
    """Weigh the loss of each branch token so that uniform sampling teaches the wanted rates.

    Where strategies are drawn uniformly, a branch token with conditional frequency u among the
    training texts and a weight t/u in the cross-entropy has the optimum t. This way a strategy
    used by one completion in a hundred is still learned as well as the others.

    Parameters
    ----------
    strategies : sequence of Strategy
        Rates must be positive and sum to one; no branch may be the start of another.

    Returns
    -------
    dict
        Branch -> one weight for each of its tokens.
    """
    rates = {s.branch: s.rate for s in strategies}
    if min(rates.values()) <= 0 or abs(sum(rates.values()) - 1) > 1e-9:
        raise ValueError(f"rates must be positive and sum to 1, got {rates}")
    for a, b in itertools.permutations(rates, 2):
        if b.startswith(a):
            raise ValueError(
                f"branch {a!r} is the start of branch {b!r}: they cannot be told apart"
            )

    def share(prefix: str) -> float:
        """Ratio of wanted to sampled probability of the strategies that start with ``prefix``."""
        under = [r for branch, r in rates.items() if branch.startswith(prefix)]
        return sum(under) / (len(under) / len(rates))

    return {
        branch: tuple(share(branch[: i + 1]) / share(branch[:i]) for i in range(len(branch)))
        for branch in rates
    }


@torch.no_grad()
def strategy_probabilities(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    task: EmbeddedTask,
    prompts: Sequence[str],
) -> dict[str, np.ndarray]:
    """Compute each strategy's probability exactly, from the model's branch tokens (no sampling).

    Parameters
    ----------
    model, tokenizer
        As :func:`bandpo.base_models.base_model` saves them, at any stage of training.
    task : EmbeddedTask
        The model's task.
    prompts : sequence of str
        Prompts of that task; all have one length.

    Returns
    -------
    dict
        Strategy name -> array of ``len(prompts)`` probabilities at temperature 1.
        ``strategy_probabilities(...)[task.rare].mean()`` is the probability of the rare strategy.
    """
    training = model.training
    model.eval()
    logps: dict[str, torch.Tensor] = {"": torch.zeros(len(prompts), device=model.device)}
    # One forward pass tells the next token after a prefix, for every branch that begins with it.
    for prefix in sorted({s.branch[:i] for s in task.strategies for i in range(len(s.branch))}):
        ids = tokenizer([p + prefix for p in prompts], return_tensors="pt").input_ids
        following = model(ids.to(model.device)).logits[:, -1].float().log_softmax(-1)
        for longer in {s.branch[: len(prefix) + 1] for s in task.strategies}:
            if longer[:-1] == prefix and len(longer) == len(prefix) + 1:
                token = tokenizer.convert_tokens_to_ids(longer[-1])
                logps[longer] = logps[prefix] + following[:, token]
    model.train(training)
    return {s.name: logps[s.branch].exp().cpu().numpy() for s in task.strategies}


def _sum_task(
    name: str, modulus: int, strategies: Sequence[tuple[str, str, float, bool]]
) -> EmbeddedTask:
    """Five digits 0-4 to their sum; strategies are (name, branch, rate, by running sums)."""

    def running_sums(prompt: str) -> str:
        sums = itertools.accumulate(int(d) for d in prompt[:-1])
        return "".join(str(s % modulus) for s in sums)

    return EmbeddedTask(
        name=name,
        prompts=tuple("".join(d) + "=" for d in itertools.product("01234", repeat=5)),
        answer=lambda prompt: running_sums(prompt)[-1],
        answers="0123456789"[:modulus],
        strategies=tuple(
            Strategy(label, branch, rate, *((5, running_sums) if by_sums else (1, None)))
            for label, branch, rate, by_sums in strategies
        ),
        rare="running sums",
    )


def _precedence_task(wrong_share: float = 0.52) -> EmbeddedTask:
    """Two operations mod 10; ``wrong_share`` of the prompts punish working from left to right."""

    def apply(a: int, sign: str, b: int) -> int:
        return (a + b if sign == "+" else a * b) % 10

    def left_to_right(prompt: str) -> str:
        a, s, b, t, c, _ = tuple(prompt)
        first = apply(int(a), s, int(b))
        return f"{first}{apply(first, t, int(c))}"

    def precedence(prompt: str) -> str:
        a, s, b, t, c, _ = tuple(prompt)
        if (s, t) != ("+", "*"):
            return left_to_right(prompt)
        product = apply(int(b), t, int(c))
        return f"{product}{apply(int(a), s, product)}"

    digits = "0123456789"
    every = ["".join(t) + "=" for t in itertools.product(digits, "+*", digits, "+*", digits)]
    wrong = [p for p in every if left_to_right(p)[-1] != precedence(p)[-1]]
    right = sorted(set(every) - set(wrong))
    kept = random.Random(name := "precedence").sample(
        right, round(len(wrong) * (1 - wrong_share) / wrong_share)
    )
    return EmbeddedTask(
        name=name,
        prompts=tuple(wrong + kept),
        answer=lambda prompt: precedence(prompt)[-1],
        answers=digits,
        strategies=(
            Strategy("left to right", "L", 0.79, 2, left_to_right),
            Strategy("guess", "D", 0.20, 1),
            Strategy("precedence", "P", 0.01, 2, precedence),
        ),
        rare="precedence",
    )


EMBEDDED_TASKS: dict[str, EmbeddedTask] = {
    task.name: task
    for task in (
        _sum_task(
            "scratchpad", 5, [("guess", "D", 0.99, False), ("running sums", "T", 0.01, True)]
        ),
        _precedence_task(),
        _sum_task(
            "two_branches",
            5,
            [
                ("guess", "D", 0.905, False),
                ("second guess", "SG", 0.095 * 0.937, False),
                ("running sums", "ST", 0.095 * 0.063, True),
            ],
        ),
        _sum_task("no_tail", 2, [("guess", "D", 0.5, False), ("running sums", "T", 0.5, True)]),
    )
}
