"""What test_distributed runs, alone and under torchrun: the same training, split over processes.

Completions are a fixed function of prompt and place in the group, so that they do not depend on
the number of processes; everything after them is TRL's and ours.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
from tiny import prompts, settings

from bandpo.metrics import MetricsFile
from bandpo.trainer import BandPOConfig, BandPOTrainer

GROUP, BATCH = 4, 16
RUNS: dict[str, dict[str, Any]] = {
    "dapo": {"loss_type": "dapo"},
    "grpo": {"loss_type": "grpo"},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "adaptive": {"clip_rule": "adaptive_band", "band_adaptivity": 0.8},
}


def rollout(texts: list[str], trainer: Any) -> dict[str, Any]:
    tokenizer = trainer.processing_class
    completions = []
    for place, text in enumerate(texts):
        draw = random.Random(f"{text} {place % GROUP} {trainer.state.global_step}")
        ids = [draw.randrange(3, 15) for _ in range(draw.randint(1, 6))]
        completions.append([*ids, tokenizer.eos_token_id])
    return {
        "prompt_ids": tokenizer(texts)["input_ids"],
        "completion_ids": completions,
        "logprobs": None,
    }


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [float(sum(ids) % 7) for ids in completion_ids]


def main(model: str, folder: Path, processes: int, changes: dict[str, Any]) -> None:
    fields = settings(
        folder,
        per_device_train_batch_size=BATCH // processes,
        num_iterations=3,
        max_steps=6,
        learning_rate=1e-2,
        max_completion_length=8,
        shuffle_dataset=False,
        **changes,
    )
    trainer = BandPOTrainer(
        model, reward, BandPOConfig(**fields), train_dataset=prompts(), rollout_func=rollout
    )
    assert trainer.accelerator.num_processes == processes
    trainer.add_callback(MetricsFile(folder, trainer.histograms))
    trainer.train()
    if trainer.accelerator.is_main_process:
        weights = trainer.accelerator.unwrap_model(trainer.model).state_dict()
        torch.save(weights, folder / "weights.pt")
        (folder / "history.json").write_text(json.dumps(trainer.state.log_history))
    trainer.accelerator.wait_for_everyone()


if __name__ == "__main__":
    for name, changes in RUNS.items():
        main(sys.argv[1], Path(sys.argv[2]) / name, int(sys.argv[3]), changes)
