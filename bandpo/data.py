"""Prompts and rewards for training and evaluation, ready for TRL's GRPOTrainer.

:func:`load_task` knows four kinds of name:

- an embedded task: ``scratchpad``, ``precedence``, ``two_branches``, ``no_tail``
  (see :mod:`bandpo.tasks`);
- ``few_shot_sums``: two-digit sums as raw few-shot text, for a small pretrained language model
  (:func:`bandpo.base_models.smollm2`);
- math sets on the Hugging Face Hub by their ids (:data:`bandpo.math_sets.MATH_SETS`), joined by
  ``+``, or a name for such a list (:data:`bandpo.math_sets.MIXTURES`);
- ``file:PATH``: a JSON, JSON Lines, Parquet or CSV file with columns ``prompt`` and ``answer``.

Math prompts are conversations of one message; their reward compares the completion's last line
``Answer: ...`` with the gold answer by math-verify. What is wrong with the data is found here,
before a model is loaded.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from datasets import Dataset

from bandpo.math_sets import MATH_SETS, MIXTURES, file_set, load_file, load_math_sets, math_rows
from bandpo.rewards import Reward, answer_agrees, first_line_is, make_reward
from bandpo.tasks import EMBEDDED_TASKS, split_prompts

MATH_COMPLETION_LENGTH = 4096
"""Longest response of the published runs, in tokens."""

SHOTS = "31 + 24 = 55\n12 + 46 = 58\n"


@dataclass(frozen=True)
class TaskData:
    """What a trainer needs of a task.

    Parameters
    ----------
    name : str
        The name that was asked for.
    train, eval : datasets.Dataset
        Columns ``prompt`` (text, or a list of messages) and ``answer``; math sets also ``source``,
        the id of the set that a row came from. Either may have no rows.
    reward_funcs : list of callable
        In TRL's signature, ``(prompts, completions, **columns) -> list of float``.
    max_completion_length : int
        Tokens that a completion may need, its end token included.
    """

    name: str
    train: Dataset
    eval: Dataset
    reward_funcs: list[Reward]
    max_completion_length: int


def load_task(
    name: str,
    *,
    train_size: int | None = None,
    eval_size: int | None = None,
    seed: int = 0,
    wrong_reward: float = 0.0,
) -> TaskData:
    """Load prompts and rewards by name.

    Parameters
    ----------
    name : str
        See the module's description.
    train_size, eval_size : int, optional
        How many prompts, drawn without repetition; None for all there are. A
        training set without a benchmark beside it gives up ``eval_size`` rows (default 0).
    seed : int
        Decides which prompts are drawn for ``train`` and their order. ``eval`` does not depend on
        it, so runs with different seeds are measured on the same prompts.
    wrong_reward : float
        Reward of a wrong answer; a right one gets 1. The published runs use -1.

    Returns
    -------
    TaskData

    Raises
    ------
    ValueError
        Unknown name; more prompts asked for than there are; a missing column, an empty set or a
        gold answer that cannot be read.
    ConnectionError
        The hub cannot be reached.
    PermissionError
        The set is gated.
    FileNotFoundError
        ``file:PATH`` names no file.
    """
    train, benchmark, is_right, length = _source(name)
    if benchmark is None or len(benchmark) == 0:
        if eval_size is not None and eval_size >= len(train):
            raise ValueError(
                f"eval_size must leave rows to train on: there are {len(train)}, got {eval_size}"
            )
        benchmark = _draw(train, eval_size or 0, 0, "eval_size")
        train = train.shuffle(seed=0).select(range(len(benchmark), len(train)))
    return TaskData(
        name=name,
        train=_draw(train, train_size, seed, "train_size"),
        eval=_draw(benchmark, eval_size, 0, "eval_size"),
        reward_funcs=[make_reward(is_right, wrong_reward)],
        max_completion_length=length,
    )


def _source(name: str) -> tuple[Dataset, Dataset | None, Callable[[str, str], bool], int]:
    """Return training rows, evaluation rows if set apart, the check and the completion length."""
    if name in EMBEDDED_TASKS:
        task = EMBEDDED_TASKS[name]
        train, held_out = (_table(p, map(task.answer, p)) for p in task.split())
        return train, held_out, task.is_correct, task.max_completion_length
    if name == "few_shot_sums":
        return *few_shot_sums(), first_line_is, 6
    if name.startswith("file:"):
        path = name.removeprefix("file:")
        rows = math_rows(file_set(path), load_file(path))
        return rows, None, answer_agrees, MATH_COMPLETION_LENGTH
    ids = MIXTURES.get(name, name).split("+")
    if all(i in MATH_SETS for i in ids):
        sets = load_math_sets([MATH_SETS[i] for i in ids])
        return *sets, answer_agrees, MATH_COMPLETION_LENGTH
    known = ", ".join([*EMBEDDED_TASKS, "few_shot_sums", *MIXTURES, *MATH_SETS])
    raise ValueError(
        f"name must be one of {known}, hub ids joined by '+', or file:PATH; got {name!r}"
    )


def few_shot_sums() -> tuple[Dataset, Dataset]:
    """Make sums of two two-digit numbers after two solved ones, as raw text.

    Returns
    -------
    train, eval : datasets.Dataset
        All 8,100 sums, a fifth of them held out. A completion is right if its first line is the
        sum; six tokens of SmolLM2 are enough.
    """
    pairs = itertools.product(range(10, 100), repeat=2)
    sums = {f"{SHOTS}{a} + {b} =": str(a + b) for a, b in pairs}
    train, held_out = (
        _table(prompts, map(sums.__getitem__, prompts))
        for prompts in split_prompts(list(sums), "few_shot_sums")
    )
    return train, held_out


def _table(prompts: Sequence[str], answers: Iterable[str]) -> Dataset:
    return Dataset.from_dict({"prompt": list(prompts), "answer": list(answers)})


def _draw(rows: Dataset, size: int | None, seed: int, argument: str) -> Dataset:
    """Shuffle by seed and keep ``size`` rows; None keeps all."""
    if size is not None and not 0 <= size <= len(rows):
        raise ValueError(f"{argument} must be between 0 and {len(rows)}, all there are; got {size}")
    return rows.shuffle(seed=seed).select(range(len(rows) if size is None else size))
