"""Train from a recipe: ``python -m bandpo.train --config recipe.yaml [--field value ...]``.

A recipe is a flat YAML file of the fields of `RunArguments`, `BandPOConfig` and TRL's
`ModelConfig`; flags override it. Run it under ``accelerate launch -m bandpo.train`` for several
processes. Everything that can be wrong with configuration and data is found before the model
loads; ``--dry_run`` stops there and prints the resolved run.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from trl import ModelConfig, TrlParser, get_peft_config, get_quantization_config

from bandpo.base_models import base_model, smollm2
from bandpo.data import TaskData, load_task
from bandpo.metrics import MetricsFile
from bandpo.plan import plan
from bandpo.provenance import provenance
from bandpo.runs import is_whole_checkpoint, last_checkpoint, write_json
from bandpo.tasks import EMBEDDED_TASKS
from bandpo.trainer import BandPOConfig, BandPOTrainer


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


def make_parser() -> Any:
    """Return the parser (a `trl.TrlParser`) of a recipe and its flags."""
    fields: list[Any] = [RunArguments, BandPOConfig, ModelConfig]
    return TrlParser(fields, prog="python -m bandpo.train")


def main(argv: list[str] | None = None) -> None:
    """Parse, check, and train or print the plan.

    Parameters
    ----------
    argv : list of str or None
        Command line without the program's name; None for the process's own.
    """
    arguments = sys.argv[1:] if argv is None else argv
    if "--dry_run" in arguments and not torch.cuda.is_available():
        # The plan is for another machine: do not refuse what only that one can do.
        arguments = [*arguments, "--use_cpu", "true"]
    try:
        run, config, model = make_parser().parse_args_and_config(arguments)
        check(run, config)
        if run.dry_run:
            print(plan(run, config, model))
            return
        checkpoint = checkpoint_to_resume(config)
        data = load_data(run, config)
        model_path = find_model(run, model)
    except (ValueError, TypeError, OSError) as error:
        raise SystemExit(f"bandpo.train: {error}") from error
    train(run, config, model, data, model_path, checkpoint)


def check(run: RunArguments, config: BandPOConfig) -> None:
    """Refuse a launch that is not the run that was written down.

    Raises
    ------
    ValueError
        If the number of processes or a run argument is wrong.
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


def load_data(run: RunArguments, config: BandPOConfig) -> TaskData:
    """Load the task's prompts and rewards, and refuse a set that cannot be trained on.

    Raises
    ------
    ValueError
        If there are too few prompts for one generation, or none to evaluate on.
    """
    data = run.load(config.seed)
    assert config.generation_batch_size is not None  # GRPOConfig fills it in
    assert config.num_generations is not None
    needed = config.generation_batch_size // config.num_generations
    if len(data.train) < needed:
        raise ValueError(
            f"task {run.task!r} has {len(data.train)} training prompts, and one generation takes "
            f"{needed}: lower per_device_train_batch_size or steps_per_generation"
        )
    if config.eval_strategy != "no" and len(data.eval) == 0:
        raise ValueError(
            f"task {run.task!r} has no evaluation prompts: set eval_strategy to 'no', or eval_size"
        )
    return data


def find_model(run: RunArguments, model: ModelConfig) -> str:
    """Return the folder or hub id of the model; an embedded task brings its own.

    Raises
    ------
    ValueError
        If no model is named and the task has none.
    OSError
        If the model is not found or its hub repository is not accessible.
    """
    if model.model_name_or_path is None:
        if run.task in EMBEDDED_TASKS:
            return str(base_model(run.task))
        if run.task == "few_shot_sums":
            return str(smollm2())
        raise ValueError(
            f"model_name_or_path must be set: task {run.task!r} has no model of its own"
        )
    from transformers import AutoConfig

    try:
        AutoConfig.from_pretrained(model.model_name_or_path, revision=model.model_revision)
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise OSError(f"model_name_or_path {model.model_name_or_path!r}: {first}") from error
    return model.model_name_or_path


def checkpoint_to_resume(config: BandPOConfig) -> str | None:
    """Resolve ``resume_from_checkpoint``: a folder, or the last whole checkpoint for ``auto``.

    Parameters
    ----------
    config : BandPOConfig
        ``resume_from_checkpoint`` may be None (start anew), ``"auto"`` or ``"true"`` (go on if
        there is a checkpoint) or a folder.

    Returns
    -------
    str or None
        The checkpoint's folder; None to start at step 0.

    Raises
    ------
    ValueError
        If the folder is no checkpoint, or a fresh start would mix with the checkpoints of
        another run.
    """
    asked = config.resume_from_checkpoint
    last = last_checkpoint(config.output_dir or ".")
    if asked is None or str(asked).lower() in ("", "false", "none"):
        if last is not None:
            raise ValueError(
                f"output_dir {config.output_dir!r} holds checkpoints of an earlier run: set "
                "resume_from_checkpoint to auto to go on with it, or choose another output_dir"
            )
        return None
    if str(asked).lower() in ("auto", "true"):
        return None if last is None else str(last)
    if not is_whole_checkpoint(asked):
        raise ValueError(
            "resume_from_checkpoint must be auto or the folder of a whole checkpoint; "
            f"got {asked!r}"
        )
    return str(asked)


def train(
    run: RunArguments,
    config: BandPOConfig,
    model: ModelConfig,
    data: TaskData,
    model_path: str,
    checkpoint: str | None,
) -> BandPOTrainer:
    """Train, and leave a run folder: configuration, provenance, metrics, checkpoints, model."""
    loading = config.model_init_kwargs
    assert not isinstance(loading, str)  # parsed by TrainingArguments
    config.model_init_kwargs = {
        "revision": model.model_revision,
        "attn_implementation": model.attn_implementation,
        "dtype": model.dtype,
        **(loading or {}),
    }
    folder = Path(config.output_dir or ".")
    trainer = BandPOTrainer(
        model_path,
        data.reward_funcs,
        config,
        train_dataset=data.train,
        eval_dataset=data.eval if config.eval_strategy != "no" else None,
        quantization_config=get_quantization_config(model),
        peft_config=get_peft_config(model),
    )
    trainer.add_callback(MetricsFile(folder, trainer.histograms))
    if trainer.is_world_process_zero():
        fields = json.loads(config.to_json_string())
        write_json(folder / "config.json", fields | asdict(run) | {"model": model_path})
        write_json(folder / "provenance.json", provenance())
    trainer.train(resume_from_checkpoint=checkpoint)
    # not beside the run's own config.json
    trainer.save_model(str(folder / "model"))
    if hasattr(trainer, "end"):  # transformers >= 5.18 closes trackers and process group here
        trainer.end()
    return trainer


if __name__ == "__main__":
    main()
