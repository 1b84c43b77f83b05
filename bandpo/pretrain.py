"""Supervised training of the embedded tasks' base models, and measurement of what came out."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from bandpo.evaluation import sample_completions
from bandpo.tasks import EMBEDDED_TASKS, EmbeddedTask, branch_weights, strategy_probabilities

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


def train(task: EmbeddedTask, recipe: Recipe) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
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
    with one_thread(), torch.random.fork_rng(devices=[]):
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

    with one_thread():
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


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on one thread: on models this small more threads cost time and determinism."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
