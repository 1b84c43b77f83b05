"""The weight of an objective, the neighbors' objectives, TRL's loss of given log-probabilities."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import digit_reward, micro_batch, prompts, save_model, settings
from trl import GRPOConfig, GRPOTrainer

from bandpo.neighbors import dppo_surrogate, gradient_weight, smoothed_surrogate
from bandpo.trl_objective import TRLObjective

LOSSES = [
    {"loss_type": "grpo"},
    {"loss_type": "bnpo", "delta": 2.0},
    {"loss_type": "dr_grpo", "max_completion_length": 12},
    {"loss_type": "dapo", "epsilon_high": 0.28},
    {"loss_type": "cispo", "epsilon_high": 5.0},
    {"loss_type": "sapo"},
    {"loss_type": "grpo", "importance_sampling_level": "sequence"},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.mark.parametrize("fields", LOSSES, ids=lambda fields: "-".join(map(str, fields.values())))
def test_the_told_loss_is_that_of_trls_trainer(
    model: str, tmp_path: Path, fields: dict[str, Any]
) -> None:
    """Value, and gradient down to the model's weights, with the model's own log-probabilities."""
    args = GRPOConfig(**settings(tmp_path, **fields))
    trainer = GRPOTrainer(model, digit_reward, args, train_dataset=prompts())
    inputs = micro_batch(trainer)
    whole = torch.ones_like(inputs["completion_mask"])
    ids = inputs["completion_ids"].masked_fill(inputs["completion_mask"] == 0, 3)
    inputs |= {
        "completion_ids": ids,
        "completion_mask": whole,
        "num_items_in_batch": whole.sum(),
        "old_per_token_logps": inputs["old_per_token_logps"].clamp(max=-0.1),
    }
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    theirs = {name: weight.grad.clone() for name, weight in trainer.model.named_parameters()}

    trainer.model.zero_grad()
    logps = trainer._get_per_token_logps_and_entropies(
        trainer.model,
        torch.cat([inputs["prompt_ids"], ids], 1),
        torch.cat([inputs["prompt_mask"], whole], 1),
        ids.size(1),
    )[0]
    objective = TRLObjective(model, **fields)
    told = -objective(logps, inputs["old_per_token_logps"], inputs["advantages"].unsqueeze(1))
    told = told / logps.numel()
    torch.testing.assert_close(told, loss, rtol=1e-6, atol=1e-8)
    told.backward()
    for name, weight in trainer.model.named_parameters():
        scale = theirs[name].abs().max().item()
        torch.testing.assert_close(weight.grad, theirs[name], rtol=1e-5, atol=1e-6 * scale)


def test_trls_objective_wants_sequences(model: str) -> None:
    logp = torch.zeros(4)
    with pytest.raises(ValueError, match=r"logp must have shape \(sequences, tokens\), got \(4,\)"):
        TRLObjective(model)(logp, logp, torch.ones(1))


def test_the_weight_of_the_unclipped_objective_is_one() -> None:
    old, new = torch.tensor([0.1, 0.5]).log(), torch.tensor([0.9, 0.05]).log()
    for advantages in (torch.tensor(-0.3), torch.tensor([2.0, -1.0])):
        weight = gradient_weight(
            lambda logp, old, advantages: (logp - old).exp() * advantages, new, old, advantages
        )
        torch.testing.assert_close(weight, torch.ones(2))
    assert not new.requires_grad


def test_a_zero_advantage_has_no_weight() -> None:
    old = torch.tensor([0.1, 0.5]).log()
    with pytest.raises(ValueError, match="advantages must not be 0"):
        gradient_weight(smoothed_surrogate, old, old, torch.tensor([1.0, 0.0]))


@pytest.mark.parametrize("alpha", [-0.1, 1.0, float("nan")])
def test_a_share_is_a_share(alpha: float) -> None:
    old = torch.tensor([0.1]).log()
    with pytest.raises(ValueError, match=r"alpha must be in \[0, 1\)"):
        smoothed_surrogate(old, old, torch.ones(1), alpha)


def test_dppo_keeps_the_ratio_of_what_it_does_not_mask() -> None:
    old = torch.tensor([0.5, 0.5, 0.5, 0.5], dtype=torch.float64).log()
    new = torch.tensor([0.9, 0.1, 0.9, 0.51], dtype=torch.float64).log()
    advantages = torch.tensor([1.0, -2.0, -2.0, 1.0], dtype=torch.float64)
    value = dppo_surrogate(new, old, advantages, "tv", 0.15)
    torch.testing.assert_close(value, torch.tensor([0.0, 0.0, -3.6, 1.02], dtype=torch.float64))
