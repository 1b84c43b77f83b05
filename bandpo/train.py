"""Train from a recipe: ``python -m bandpo.train --config recipe.yaml [--field value ...]``.

A recipe is a flat YAML file of the fields of `RunArguments`, `BandPOConfig` and TRL's
`ModelConfig`; flags override it. Run it under ``accelerate launch -m bandpo.train`` for several
processes. Everything that can be wrong with configuration and data is found before the model
loads; ``--dry_run`` stops there and prints the resolved run. What it leaves is a run folder (see
`bandpo.runs`) that ``python -m bandpo.evaluate`` finishes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from trl import ModelConfig, get_peft_config, get_quantization_config

from bandpo.base_models import check_model, model_path
from bandpo.command_line import parse
from bandpo.data import TaskData
from bandpo.launch import (
    TRAINED,
    check_run,
    is_trained,
    is_whole_checkpoint,
    last_checkpoint,
    open_run,
)
from bandpo.metrics import MetricsFile
from bandpo.plan import plan
from bandpo.runs import write_json
from bandpo.settings import RunArguments, check, model_name, settings
from bandpo.tasks import EMBEDDED_TASKS, strategy_probabilities
from bandpo.trainer import BandPOConfig, BandPOTrainer


def main(argv: list[str] | None = None) -> None:
    """Parse, check, and train or print the plan.

    Parameters
    ----------
    argv : list of str or None
        Command line without the program's name; None for the process's own.
    """
    try:
        run, config, model = parse(sys.argv[1:] if argv is None else argv)
        check(run, config)
        if run.dry_run:
            print(plan(run, config, model))
            return
        checkpoint = checkpoint_to_resume(config)
        written = settings(run, config, model)
        folder = Path(written["run_dir"])
        check_run(folder, written)
        if is_trained(folder, written) and checkpoint == str(last_checkpoint(folder)):
            if config.process_index == 0:
                print(f"{folder}: trained already; nothing is left to do")
            return
        data = load_data(run, config)
        path = find_model(run, model)
    except (ValueError, TypeError, OSError) as error:
        raise SystemExit(f"bandpo.train: {error}") from error
    train(written, config, model, data, path, checkpoint)


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
    path = model_path(model_name(run, model), run.task)
    check_model(path, model.model_revision)
    return path


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


def step_metrics(trainer: BandPOTrainer, data: TaskData) -> Callable[[], dict[str, Any]]:
    """Return what gives the fields of a line of ``metrics.jsonl`` beside the trainer's own log.

    Parameters
    ----------
    trainer : BandPOTrainer
    data : TaskData
        Prompts and rewards that it trains on.

    Returns
    -------
    callable
        ``() -> dict``: token counts of the step and, for an embedded task trained by one process,
        ``rare_strategy``, the probability with which the model starts its rare strategy. It is read
        off the model on 64 held-out prompts, so it carries no sampling noise.
    """
    task = EMBEDDED_TASKS.get(data.name)
    prompts = data.eval["prompt"][:64]
    # One process alone sees whole weights, whatever shards them.
    if task is None or not prompts or trainer.args.world_size > 1:
        return trainer.histograms

    def measure() -> dict[str, Any]:
        tokenizer: Any = trainer.processing_class
        found = strategy_probabilities(trainer.model, tokenizer, task, prompts)
        return trainer.histograms() | {"rare_strategy": float(found[task.rare].mean())}

    return measure


class _AtTheEnd(Exception):
    """The checkpoint that was loaded is that of the last step."""


class _StopAtTheEnd(TrainerCallback):
    """Keep the trainer, once it has loaded the checkpoint of the last step, from one step more."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.global_step >= state.max_steps:
            raise _AtTheEnd


def train(
    written: Mapping[str, Any],
    config: BandPOConfig,
    model: ModelConfig,
    data: TaskData,
    model_path: str,
    checkpoint: str | None,
) -> BandPOTrainer:
    """Train, and leave a run folder with the model, which ``bandpo.evaluate`` finishes.

    Parameters
    ----------
    written : Mapping
        What :func:`settings` returns, for ``config.json``.
    config, model : BandPOConfig, ModelConfig
        The parsed recipe.
    data : TaskData
        Prompts and rewards.
    model_path : str
        Folder or hub id of the model.
    checkpoint : str or None
        Folder of the checkpoint to go on from; None to start at step 0.

    Returns
    -------
    BandPOTrainer
        After training.
    """
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
    trainer.add_callback(MetricsFile(folder, step_metrics(trainer, data)))
    trainer.accelerator.wait_for_everyone()  # all have looked at what the folder held
    if trainer.is_world_process_zero():
        open_run(folder, written)
    trainer.add_callback(_StopAtTheEnd())
    start = time.perf_counter()
    with suppress(_AtTheEnd):
        trainer.train(resume_from_checkpoint=checkpoint)
    seconds = time.perf_counter() - start
    # not beside the run's own config.json
    trainer.save_model(str(folder / "model"))
    if trainer.is_world_process_zero():
        write_json(folder / TRAINED, {"seconds": seconds, "resumed": checkpoint is not None})
    if hasattr(trainer, "end"):  # transformers >= 5.18 closes trackers and process group here
        trainer.end()
    return trainer


if __name__ == "__main__":
    main()
