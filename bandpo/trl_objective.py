"""TRL's own loss as a function of log-probabilities, to be differentiated and compared.

Nothing of the loss is written here. `TRLObjective` is TRL's trainer with one method replaced: the
one that asks the model for the completion's log-probabilities gives back those that it was told.
"""

from __future__ import annotations

from tempfile import TemporaryDirectory
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer

__all__ = ["TRLObjective"]


class _Told(GRPOTrainer):
    """TRL's trainer, told the log-probabilities instead of asking its model."""

    logps: Tensor

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        return self.logps, torch.zeros_like(self.logps), None


def _no_reward(completions: list[str], **_: Any) -> list[float | None]:
    return [None] * len(completions)


def _trainer(model: str, fields: dict[str, Any]) -> Any:
    with TemporaryDirectory() as folder:  # made by the trainer, never written to
        args = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            report_to="none",
            save_strategy="no",
            per_device_train_batch_size=2,
            num_generations=2,
            **fields,
        )
        prompts = Dataset.from_dict({"prompt": ["1", "2"]})
        trainer: Any = _Told(model, _no_reward, args, train_dataset=prompts)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    return trainer


class TRLObjective:
    """What TRL's loss makes of given log-probabilities; an objective for `gradient_weight`.

    Parameters
    ----------
    model : str
        Folder of a causal language model with its tokenizer. Any will do; it is loaded, because
        TRL's trainer wants one, and never asked.
    **fields
        Fields of `trl.GRPOConfig` that choose the loss, such as ``loss_type``, ``epsilon``,
        ``epsilon_high``, ``delta`` or ``importance_sampling_level``.
    """

    def __init__(self, model: str, **fields: Any) -> None:
        self.fields = fields
        self._trainer = _trainer(model, fields)

    def __call__(self, logp: Tensor, old_logp: Tensor, advantages: Tensor) -> Tensor:
        """Return minus TRL's loss, times the number of tokens.

        Parameters
        ----------
        logp, old_logp : Tensor, shape (sequences, tokens)
            Log-probabilities (nats) of the completions' tokens; every token counts.
        advantages : Tensor, broadcastable to `logp`

        Returns
        -------
        Tensor, shape ()
            A sum over tokens: TRL averages over them, in whatever way ``loss_type`` says, and with
            sequences of one length all these ways agree.

        Raises
        ------
        ValueError
            If `logp` has not two dimensions.
        """
        if logp.dim() != 2:
            raise ValueError(
                f"logp must have shape (sequences, tokens), got {tuple(logp.shape)}; a sequence of "
                "one token each is logp.reshape(-1, 1)"
            )
        self._trainer.logps = logp
        ids = torch.zeros(logp.shape, dtype=torch.long)
        mask = torch.ones_like(ids)
        loss = self._trainer._compute_loss(
            self._trainer.model,
            {
                "prompt_ids": ids[:, :1],
                "prompt_mask": mask[:, :1],
                "completion_ids": ids,
                "completion_mask": mask,
                "advantages": advantages.expand_as(logp),
                "old_per_token_logps": old_logp,
                "num_items_in_batch": mask.sum(),
            },
        )
        return -loss * logp.numel()
