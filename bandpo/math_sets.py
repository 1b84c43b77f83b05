"""Math problems with gold answers: sets on the Hugging Face Hub and local files.

Every set comes out with the same columns: ``prompt``, a conversation of one message, ``answer``,
text that math-verify can read, and ``source``, the set's id. What is wrong with a set (not
reachable, gated, without a column that is read, empty, an answer that cannot be read) is an error
that says so.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
from datasets import Dataset

from bandpo.rewards import is_readable

PROMPT_FORM = (
    "Work out the following problem step by step. End with a line of its own that reads "
    '"Answer: $Answer", where $Answer stands for your final answer.\n\n{problem}'
)
"""Form of a math prompt, to the same effect as the published one: steps, then ``Answer:``."""

_TEXT = datasets.Value("string")
COLUMNS = datasets.Features(
    {"prompt": [{"role": _TEXT, "content": _TEXT}], "answer": _TEXT, "source": _TEXT}
)
"""Columns of every set once read."""

FILE_TYPES = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}


@dataclass(frozen=True)
class MathSet:
    """Where a math set lies and which of its columns are read.

    Parameters
    ----------
    id : str
        Hub id, or a local folder that ``datasets.load_dataset`` reads.
    split : str
        Split of the set.
    problem, answer : str
        Column of the problem (text, or messages that are used as they are) and of the gold
        answer; a dot leads into a nested column.
    for_training : bool
        Whether rows are for training; else they are for evaluation.
    config : str, optional
        Configuration of the set.
    boxed : bool
        The gold answer is the last ``\\boxed{}`` of the answer column.
    levels : tuple of int, optional
        Levels to keep, from column ``level`` (``"Level 3"`` or ``3``).
    unreadable : float
        Largest share of rows that may be left out, with a warning, because their gold answer
        cannot be read. Zero for benchmarks, whose score counts every problem, and for files,
        which their owner can mend.
    """

    id: str
    split: str
    problem: str
    answer: str
    for_training: bool = False
    config: str | None = None
    boxed: bool = False
    levels: tuple[int, ...] | None = None
    unreadable: float = 0.0


_TRAIN: dict[str, Any] = {"for_training": True, "unreadable": 0.01}
_HARD: dict[str, Any] = {"levels": (3, 4, 5), **_TRAIN}

MATH_SETS: dict[str, MathSet] = {
    s.id: s
    for s in (
        MathSet("HuggingFaceH4/aime_2024", "train", "problem", "answer"),
        MathSet("yentinglin/aime_2025", "train", "problem", "answer"),
        MathSet("MathArena/aime_2025", "train", "problem", "answer"),
        MathSet("math-ai/amc23", "test", "question", "answer"),
        MathSet("HuggingFaceH4/MATH-500", "test", "problem", "answer"),
        MathSet("nlile/hendrycks-MATH-benchmark", "train", "problem", "answer", **_HARD),
        MathSet(
            "DigitalLearningGmbH/MATH-lighteval",
            "train",
            "problem",
            "solution",
            boxed=True,
            **_HARD,
        ),
        MathSet(
            "open-r1/DAPO-Math-17k-Processed",
            "train",
            "prompt",
            "solution",
            config="all",
            **_TRAIN,
        ),
        MathSet(
            "BytedTsinghua-SIA/DAPO-Math-17k",
            "train",
            "prompt",
            "reward_model.ground_truth",
            **_TRAIN,
        ),
    )
}
"""The sets that can be named, by hub id."""

MIXTURES: dict[str, str] = {
    "published_math": "open-r1/DAPO-Math-17k-Processed+nlile/hendrycks-MATH-benchmark"
    "+HuggingFaceH4/aime_2024+yentinglin/aime_2025+math-ai/amc23",
    "math": "nlile/hendrycks-MATH-benchmark+HuggingFaceH4/MATH-500",
}
"""Names for lists of sets: the published runs' data, and MATH levels 3-5 with MATH-500."""


def load_math_sets(sets: Sequence[MathSet]) -> tuple[Dataset, Dataset]:
    """Load sets and join them.

    Returns
    -------
    train, eval : datasets.Dataset
        Rows of the sets for training and of the benchmarks; either may be empty.

    Raises
    ------
    ValueError, ConnectionError, PermissionError
        See :func:`load_hub` and :func:`math_rows`.
    """
    rows = [(s.for_training, math_rows(s, load_hub(s))) for s in sets]
    empty = Dataset.from_dict({c: [] for c in COLUMNS}, COLUMNS)

    def joined(parts: list[Dataset]) -> Dataset:
        return datasets.concatenate_datasets(parts) if parts else empty

    return joined([r for training, r in rows if training]), joined(
        [r for training, r in rows if not training]
    )


def load_hub(spec: MathSet) -> Dataset:
    """Load a set from the hub or its local cache, with one clear error where it cannot be had."""
    what = f"math set {spec.id!r} (split {spec.split!r}, configuration {spec.config or 'default'})"
    try:
        return datasets.load_dataset(spec.id, spec.config, split=spec.split)
    except datasets.exceptions.DatasetNotFoundError as error:
        if "gated" in str(error):
            raise PermissionError(
                f"{what} is gated: accept its terms on its hub page, then log in with "
                "`hf auth login` or set HF_TOKEN"
            ) from error
        raise ValueError(f"{what} is not on the hub: {error}") from error
    except ConnectionError as error:
        raise ConnectionError(
            f"{what} is not in the local cache and the hub cannot be reached: connect (and unset "
            "HF_HUB_OFFLINE) or pass a file as file:PATH"
        ) from error
    except ValueError as error:  # no such configuration or split, or no data files
        raise ValueError(f"{what} cannot be loaded: {error}") from error


def load_file(path: str | Path) -> Dataset:
    """Load a JSON, JSON Lines, Parquet or CSV file, and only that."""
    path = Path(path)
    if path.suffix not in FILE_TYPES:
        raise ValueError(f"file must end in one of {', '.join(FILE_TYPES)}; got {str(path)!r}")
    if not path.is_file():
        raise FileNotFoundError(f"no file {str(path)!r} (folder now: {str(Path.cwd())!r})")
    try:
        return datasets.load_dataset(FILE_TYPES[path.suffix], data_files=str(path), split="train")
    except StopIteration as error:  # what datasets raises where it finds no first row
        raise ValueError(
            f"file {str(path)!r} is empty; it needs rows with a prompt and an answer"
        ) from error
    except (datasets.exceptions.DatasetGenerationError, ValueError) as error:
        cause = error.__cause__ or error
        raise ValueError(f"file {str(path)!r} cannot be read as a table: {cause}") from error


def file_set(path: str | Path) -> MathSet:
    """Describe a local file of prompts and answers."""
    return MathSet(str(path), "train", "prompt", "answer", for_training=True)


def math_rows(spec: MathSet, table: Dataset) -> Dataset:
    """Bring a set's rows into the common form.

    Repeated problems are kept once (one published set repeats each about a hundred times), levels
    are filtered, and gold answers are tidied: ``"27.0"`` becomes ``"27"``.

    Parameters
    ----------
    spec : MathSet
        Which columns to read.
    table : datasets.Dataset
        The set as it was loaded.

    Returns
    -------
    datasets.Dataset
        Columns prompt, answer, source.

    Raises
    ------
    ValueError
        A column is missing, no row is left, or more gold answers than ``spec.unreadable`` allows
        cannot be read.
    """
    _require(spec, table)
    if spec.levels is not None:
        table = table.filter(lambda level: _level(level) in spec.levels, input_columns="level")
    table = table.select(_first_of_each(table[spec.problem]))
    rows = table.map(
        lambda row: {
            "prompt": _prompt(row[spec.problem]),
            "answer": _tidy(_nested(row, spec.answer), spec.boxed),
            "source": spec.id,
        },
        remove_columns=table.column_names,
        features=COLUMNS,
    )
    if len(rows) == 0:
        raise ValueError(f"math set {spec.id!r} has no rows in split {spec.split!r}{_kept(spec)}")
    bad = [i for i, answer in enumerate(rows["answer"]) if not is_readable(answer)]
    if bad:
        shown = "; ".join(f"row {i}: {rows[i]['answer']!r}" for i in bad[:3])
        found = f"{len(bad)} of {len(rows)} answers of {spec.id!r} cannot be read ({shown})"
        if len(bad) > spec.unreadable * len(rows):
            raise ValueError(f"{found}: give each as a number or a LaTeX expression")
        warnings.warn(f"{found}: these rows are left out", stacklevel=2)
        rows = rows.select(sorted(set(range(len(rows))) - set(bad)))
    return rows


def last_boxed(solution: str) -> str:
    r"""Return what the last ``\boxed{...}`` of a solution holds, braces matched; "" without one."""
    start = solution.rfind("\\boxed{")
    depth = 0
    for i, c in enumerate(solution[start:] if start >= 0 else ""):
        depth += (c == "{") - (c == "}")
        if c == "}" and depth == 0:
            return solution[start + len("\\boxed{") : start + i]
    return ""


def _require(spec: MathSet, table: Dataset) -> None:
    needed = [spec.problem, spec.answer, *(["level"] if spec.levels else [])]
    for column in needed:
        top, _, key = column.partition(".")
        inner = table.features.get(top)
        if inner is None or (key and not (isinstance(inner, dict) and key in inner)):
            raise ValueError(
                f"math set {spec.id!r} lacks the column {column!r}; "
                f"it has {', '.join(table.column_names) or 'none'}"
            )


def _kept(spec: MathSet) -> str:
    return f" with a level in {spec.levels}" if spec.levels else ""


def _level(level: str | int) -> int | None:
    found = re.search(r"\d+", str(level))
    return int(found.group()) if found else None


def _first_of_each(problems: Sequence[Any]) -> list[int]:
    """Return the first position of each distinct problem, in order."""
    return list({repr(p): i for i, p in reversed(list(enumerate(problems)))}.values())[::-1]


def _prompt(problem: Any) -> list[dict[str, str]]:
    if isinstance(problem, str):
        return [{"role": "user", "content": PROMPT_FORM.format(problem=problem)}]
    return [{"role": m["role"], "content": m["content"]} for m in problem]


def _nested(row: dict[str, Any], column: str) -> Any:
    for key in column.split("."):
        row = row[key]
    return row


def _tidy(answer: Any, boxed: bool) -> str:
    text = "" if answer is None else str(answer).strip()
    text = last_boxed(text) if boxed else text
    return re.sub(r"^(-?\d+)\.0+$", r"\1", text)
