"""Find the radii that clip as much as KL-Band: ``python tools/match_radius.py [OUT]``.

Trains with KL-Band (radius 0.05) on two embedded tasks, with seeds that no comparison of the book
uses, and asks at which radius TV-Band and χ²-Band would have clipped as many of the same tokens.
Each batch's first update, in which nothing can be clipped, is left out. Two minutes on one core.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from bandpo import BandPOConfig, BandPOTrainer
from bandpo.base_models import base_model
from bandpo.data import load_task
from bandpo.provenance import ROOT, provenance
from bandpo.rules import Band
from bandpo.runs import write_json
from bandpo.strictness import Tokens, clip_rate, matched_radius

OUT = ROOT / "book" / "results" / "measured" / "matched-radius.json"
TASKS = ("scratchpad", "precedence")
SEEDS = (101, 102, 103)
MATCHED = ("tv", "chi2")
REFERENCE = Band("kl", 0.05)
# The settings of notebooks/07_train.ipynb.
GENERATIONS, INNER_EPOCHS, PROMPTS, COMPLETIONS, LEARNING_RATE = 40, 4, 16, 8, 3e-4


class _Recorder(BandPOTrainer):
    """Keeps the tokens of every update but the first on each batch."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kept: list[torch.Tensor] = []

    def _record(
        self, logps: Any, old_logps: Any, advantages: Any, mask: Any, *more: Any, **kwargs: Any
    ) -> None:
        super()._record(logps, old_logps, advantages, mask, *more, **kwargs)
        if self.state.global_step % INNER_EPOCHS:
            columns = (old_logps, logps, advantages.expand_as(old_logps))
            self.kept.append(torch.stack([column[mask] for column in columns]).detach())


def record(task: str, seed: int, generations: int = GENERATIONS) -> Tokens:
    """Train once with the reference rule and return the tokens."""
    data = load_task(task, eval_size=1, seed=seed)
    path = str(base_model(task))
    with tempfile.TemporaryDirectory() as folder:
        trainer = _Recorder(
            model=path,
            reward_funcs=data.reward_funcs,
            args=BandPOConfig(
                output_dir=folder,
                clip_rule="band",
                band_divergence=str(REFERENCE.divergence),
                band_radius=REFERENCE.radius,
                band_max_ratio=REFERENCE.max_ratio,
                learning_rate=LEARNING_RATE,
                lr_scheduler_type="constant",
                beta=0.0,
                loss_type="grpo",
                max_steps=generations * INNER_EPOCHS,
                per_device_train_batch_size=PROMPTS * COMPLETIONS,
                steps_per_generation=1,
                num_generations=COMPLETIONS,
                num_iterations=INNER_EPOCHS,
                max_completion_length=data.max_completion_length,
                bf16=False,
                use_cpu=True,
                save_strategy="no",
                disable_tqdm=True,
                report_to="none",
                seed=seed,
            ),
            train_dataset=data.train,
            processing_class=AutoTokenizer.from_pretrained(path, padding_side="left"),
        )
        trainer.train()
    return Tokens(*torch.cat(trainer.kept, dim=1))


def summary(samples: dict[str, Tokens]) -> dict[str, Any]:
    """Return the rates at equal radius and the matching radii, of all tasks and of each."""

    def rates(rule: Band) -> dict[str, float]:
        return {task: clip_rate(tokens, rule) for task, tokens in samples.items()}

    def radius(divergence: str, tasks: Any) -> float:
        chosen = [samples[task] for task in tasks]
        return matched_radius(chosen, REFERENCE, lambda r: Band(divergence, r))

    return {
        "reference": {
            "divergence": "kl",
            "radius": REFERENCE.radius,
            "clip_rate": rates(REFERENCE),
        },
        "tokens": {task: len(tokens.logps) for task, tokens in samples.items()},
        "matched": {
            name: {
                "radius": radius(name, samples),
                "radius_of_task": {task: radius(name, [task]) for task in samples},
                "clip_rate": rates(Band(name, radius(name, samples))),
                "clip_rate_at_equal_radius": rates(Band(name, REFERENCE.radius)),
            }
            for name in MATCHED
        },
    }


def main(out: Path = OUT) -> None:
    """Measure and write ``out``."""
    torch.set_num_threads(1)
    samples = {}
    for task in TASKS:
        runs = [record(task, seed) for seed in SEEDS]
        samples[task] = Tokens(
            *(torch.cat(parts) for parts in zip(*(vars(run).values() for run in runs), strict=True))
        )
    write_json(
        out,
        {
            "what": "Radii at which TV-Band and chi2-Band clip as many tokens as KL-Band",
            "command": "python tools/match_radius.py",
            "seeds": list(SEEDS),
            **summary(samples),
            "provenance": provenance(),
        },
    )


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]))
