"""What a run is told: the fields that TRL does not have, what is refused, and what is kept of them.

Notebook 07 trains within one process, ``python -m bandpo.train`` under a launcher of many. The
pages read both, so :func:`settings` gives a recipe's fields the names that the notebook uses.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from transformers import IntervalStrategy
from trl import ModelConfig

from bandpo.config import BandPOConfig
from bandpo.data import TaskData, load_task
from bandpo.tasks import EMBEDDED_TASKS

# What a launch decides and the run does not depend on. The folder is kept as run_dir.
_OF_A_LAUNCH = {
    *("output_dir", "run_name", "resume_from_checkpoint", "local_rank"),
    *("dry_run", "tokens_per_second"),
}


@dataclass
class RunArguments:
    """What a run needs beside TRL's own fields.

    Parameters
    ----------
    task : str
        Prompts and rewards, by a name of `bandpo.data.load_task`.
    train_size, eval_size : int or None
        How many prompts; None for all.
    wrong_reward : float
        Reward of a wrong answer; a right one gets 1.
    processes : int or None
        Number of processes that the batch sizes are meant for. A launch with another number is
        refused, since it would be another batch; a dry run counts with it.
    dry_run : bool
        Print the resolved run and stop.
    tokens_per_second : float or None
        Completion tokens trained on per second, all processes together; for the time estimate.
    """

    task: str = field(metadata={"help": "Name of the task: see bandpo.data.load_task."})
    train_size: int | None = field(
        default=None, metadata={"help": "Training prompts; all if unset."}
    )
    eval_size: int | None = field(
        default=None, metadata={"help": "Evaluation prompts; all if unset."}
    )
    wrong_reward: float = field(default=0.0, metadata={"help": "Reward of a wrong answer."})
    processes: int | None = field(
        default=None, metadata={"help": "Processes that the batch sizes are meant for."}
    )
    dry_run: bool = field(default=False, metadata={"help": "Print the resolved run and stop."})
    tokens_per_second: float | None = field(
        default=None, metadata={"help": "Completion tokens a second, for the time estimate."}
    )

    def load(self, seed: int) -> TaskData:
        """Load the task's prompts and rewards; raises what `bandpo.data.load_task` raises."""
        return load_task(
            self.task,
            train_size=self.train_size,
            eval_size=self.eval_size,
            seed=seed,
            wrong_reward=self.wrong_reward,
        )


def check(run: RunArguments, config: BandPOConfig) -> None:
    """Refuse a launch that is not the run that was written down.

    Raises
    ------
    ValueError
        If the number of processes or a run argument is wrong, or the run folder could not tell
        its optimizer steps apart.
    """
    if run.processes is not None and run.processes < 1:
        raise ValueError(f"processes must be at least 1; got {run.processes}")
    if run.tokens_per_second is not None and not run.tokens_per_second > 0:
        raise ValueError(f"tokens_per_second must be positive; got {run.tokens_per_second}")
    if run.processes not in (None, config.world_size) and not run.dry_run:
        raise ValueError(
            f"processes: the batch sizes are meant for {run.processes} processes, and "
            f"{config.world_size} are running. Launch as many (accelerate launch --num_processes "
            f"{run.processes}), or set the batch sizes and --processes {config.world_size}"
        )
    logged = IntervalStrategy(config.logging_strategy).value
    if logged != "steps" or config.logging_steps != 1:
        raise ValueError(
            "logging_strategy must be 'steps' and logging_steps 1: a run folder keeps one line of "
            f"metrics for each optimizer step; got {logged!r} and "
            f"{config.logging_steps:g}"
        )
    assert config.steps_per_generation is not None  # GRPOConfig fills it in
    if config.steps_per_generation % config.gradient_accumulation_steps:
        raise ValueError(
            "steps_per_generation must be a multiple of gradient_accumulation_steps: no optimizer "
            "step would be the first on a batch of completions, which has every ratio at 1 and is "
            f"left out of the clip rates; got {config.steps_per_generation} and "
            f"{config.gradient_accumulation_steps}"
        )


def settings(run: RunArguments, config: BandPOConfig, model: ModelConfig) -> dict[str, Any]:
    """Return what decides a run, for its ``config.json``.

    Parameters
    ----------
    run, config, model : RunArguments, BandPOConfig, ModelConfig
        The parsed recipe.

    Returns
    -------
    dict
        JSON values: the fields of all three under their own names, and under the names of
        notebook 07 what the pages read from the runs of both. ``epsilon_high`` is the one in force.

    Raises
    ------
    ValueError
        If no model is named and the task has none.
    """
    assert config.generation_batch_size is not None  # GRPOConfig fills these in
    assert config.num_generations is not None
    assert config.steps_per_generation is not None
    fields = asdict(run) | asdict(model) | json.loads(config.to_json_string())
    shared = {
        "model": model_name(run, model),
        "epsilon_high": config.epsilon if config.epsilon_high is None else config.epsilon_high,
        "optimizer": fields["optim"],
        "prompts": config.generation_batch_size // config.num_generations,
        "completions": config.num_generations,
        "inner_epochs": config.num_iterations,
        "mini_batches": config.steps_per_generation // config.gradient_accumulation_steps,
        "accumulation": config.gradient_accumulation_steps,
        "processes": config.world_size,
        "run_dir": config.output_dir or ".",
    }
    return {k: v for k, v in (fields | shared).items() if k not in _OF_A_LAUNCH}


def model_name(run: RunArguments, model: ModelConfig) -> str:
    """Return the model's name, one of `bandpo.base_models.model_path`.

    Raises
    ------
    ValueError
        If no model is named and the task has none.
    """
    if model.model_name_or_path is not None:
        return model.model_name_or_path
    if run.task in EMBEDDED_TASKS:
        return "base"
    if run.task == "few_shot_sums":
        return "smollm2"
    raise ValueError(f"model_name_or_path must be set: task {run.task!r} has no model of its own")
