"""Sampling completions and scoring them: mean@n, pass@k and their intervals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@torch.no_grad()
def sample_completions(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    n: int,
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    batch_size: int = 512,
    seed: int = 0,
) -> list[list[str]]:
    """Sample ``n`` completions of each prompt."""
    training = model.training
    model.eval()
    repeated = [p for p in prompts for _ in range(n)]
    texts: list[str] = []
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for start in range(0, len(repeated), batch_size):
            batch = tokenizer(
                repeated[start : start + batch_size],
                return_tensors="pt",
                padding=True,
                padding_side="left",
                add_special_tokens=False,
            ).to(model.device)
            batch.pop("token_type_ids", None)
            out = model.generate(
                **batch,
                do_sample=True,
                temperature=temperature,
                top_p=top_p,
                top_k=0,
                max_new_tokens=max_new_tokens,
                eos_token_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.pad_token_id,
            )
            new = out[:, batch.input_ids.shape[1] :]
            texts += tokenizer.batch_decode(new, skip_special_tokens=True)
    model.train(training)
    return [texts[i : i + n] for i in range(0, len(texts), n)]
