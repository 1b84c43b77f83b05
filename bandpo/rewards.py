"""Verifiable rewards in TRL's signature, ``(prompts, completions, **columns) -> list of float``."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from math_verify import parse, verify

Reward = Callable[..., list[float]]

_ANSWER_LINE = re.compile(r"answer\W*?:(.*)", re.IGNORECASE)


def make_reward(is_right: Callable[[str, str], bool], wrong: float = 0.0) -> Reward:
    """Turn ``is_right(completion, answer)`` into a reward function.

    Parameters
    ----------
    is_right : callable
        Gets the completion's text and the row's ``answer``.
    wrong : float
        Reward of a wrong completion; a right one gets 1. Must be below 1.

    Returns
    -------
    callable
        Named ``correct``, so TRL logs ``rewards/correct/mean``. It takes completions as text or as
        messages and reads the column ``answer``.
    """
    if not wrong < 1.0:
        raise ValueError(f"wrong_reward must be below 1, the reward of a right answer; got {wrong}")

    def correct(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
        return [
            1.0 if is_right(text, gold) else wrong for text, gold in zip(texts, answer, strict=True)
        ]

    return correct


def first_line_is(completion: str, answer: str) -> bool:
    """Tell whether the completion's first line is the answer, blanks aside."""
    return completion.split("\n", 1)[0].strip() == answer


def final_answer(completion: str) -> str | None:
    """Return what follows the last ``Answer:`` up to the end of its line; None without one.

    Bold markers around the word or the answer are dropped.
    """
    found = _ANSWER_LINE.findall(completion)
    return found[-1].strip(" \t\r*") if found else None


def answer_agrees(completion: str, answer: str) -> bool:
    """Tell whether the completion's last ``Answer:`` equals the gold answer, by math-verify.

    A completion without such a line, or with one that cannot be read, is wrong. Comparison is of
    value, not of text: ``\\frac12`` agrees with ``0.5``.
    """
    given = final_answer(completion)
    if not given:
        return False
    seconds = _time_limit()
    return bool(verify(_gold(answer), _parse(given, seconds), timeout_seconds=seconds))


def is_readable(answer: str) -> bool:
    """Tell whether math-verify makes a value, not mere text, of a gold answer."""
    values = _gold(answer)
    return bool(values) and not isinstance(values[0], str)


@lru_cache(maxsize=65536)
def _gold(answer: str) -> list[Any]:
    return _parse(answer, _time_limit())


def _parse(text: str, seconds: int | None) -> list[Any]:
    r"""Parse LaTeX or plain text; math-verify reads LaTeX between delimiters only, so add them."""
    text = text.strip()
    delimited = "$" in text.replace("\\$", "") or any(d in text for d in ("\\boxed", "\\(", "\\["))
    return list(parse(text if delimited else f"${text}$", parsing_timeout=seconds))


def _time_limit() -> int | None:
    """Seconds that math-verify may take; none off the main thread, where its alarm cannot work."""
    if threading.current_thread() is threading.main_thread():
        return 5
    for module in ("parser", "grader"):  # they warn on every call without a limit
        logging.getLogger(f"math_verify.{module}").setLevel(logging.ERROR)
    return None
