"""A tiny Llama with random weights, and micro-batches for it: what the trainer tests share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

torch.set_num_threads(1)

SYMBOLS = "0123456789+="


def save_model(folder: Path, **changes: Any) -> str:
    """Write a two-layer Llama and its tokenizer; return the folder."""
    vocab = {token: i for i, token in enumerate(["<pad>", "<eos>", "<unk>", *SYMBOLS])}
    core = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
    )
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    config = LlamaConfig(
        **sizes | changes,
        vocab_size=len(vocab),
        max_position_embeddings=64,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        tie_word_embeddings=False,
        initializer_range=0.3,  # peaked enough for rare and common tokens
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def prompts(n: int = 64) -> Dataset:
    return Dataset.from_dict({"prompt": [f"{i % 10}+{i // 10 % 10}=" for i in range(n)]})


def digit_reward(completions: list[str], **_: Any) -> list[float]:
    """1 for a completion whose first sign is below 5, plus a little for its length."""
    return [float(text[:1] in "01234") + 0.01 * len(text) for text in completions]


def settings(output_dir: Path, **changes: Any) -> dict[str, Any]:
    """Fields for a short run on the CPU in which the ratio leaves 1."""
    return {
        "output_dir": str(output_dir),
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "per_device_train_batch_size": 16,
        "num_generations": 4,
        "num_iterations": 2,
        "max_completion_length": 6,
        "learning_rate": 3e-2,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "max_steps": 4,
        "seed": 0,
    } | changes


def micro_batch(trainer: Any, *, rows: int = 8, length: int = 12, seed: int = 0) -> dict[str, Any]:
    """Inputs of TRL's loss with ratios far from 1, ragged completions and every advantage sign."""
    generator = torch.Generator().manual_seed(seed)
    prompt_ids = torch.randint(3, 15, (rows, 4), generator=generator)
    prompt_mask = torch.ones_like(prompt_ids)
    prompt_ids[::2, 0], prompt_mask[::2, 0] = 0, 0
    completion_ids = torch.randint(1, 15, (rows, length), generator=generator)
    lengths = torch.randint(3, length + 1, (rows, 1), generator=generator)
    completion_mask = (torch.arange(length) < lengths).long()
    completion_ids = completion_ids * completion_mask
    with torch.no_grad():
        logps = trainer._get_per_token_logps_and_entropies(
            trainer.model,
            torch.cat([prompt_ids, completion_ids], 1),
            torch.cat([prompt_mask, completion_mask], 1),
            length,
        )[0]
    noise = torch.randn(logps.shape, generator=generator)
    advantages = torch.randn(rows, generator=generator)
    advantages[rows // 2] = 0
    return {
        "prompt_ids": prompt_ids,
        "prompt_mask": prompt_mask,
        "completion_ids": completion_ids,
        "completion_mask": completion_mask,
        "advantages": advantages,
        "old_per_token_logps": ((logps + 0.7 * noise).clamp(max=-1e-4) * completion_mask).float(),
        "num_items_in_batch": completion_mask.sum(),
    }


def loss_and_gradients(
    trainer: Any, inputs: dict[str, Any]
) -> tuple[torch.Tensor, dict[str, torch.Tensor], dict[str, list[float]]]:
    """One call of the trainer's loss: value, gradient of every weight, metrics that it added."""
    model = trainer.model
    model.train()
    model.zero_grad()
    trainer._metrics["train"].clear()
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    loss = trainer.compute_loss(model, inputs)
    loss.backward()
    gradients = {
        name: weight.grad.clone()
        for name, weight in model.named_parameters()
        if weight.grad is not None
    }
    return loss.detach(), gradients, {k: list(v) for k, v in trainer._metrics["train"].items()}
