"""What a recipe comes to: sizes, steps, memory and time of a run, before it is started."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from bandpo.config import BandPOConfig

if TYPE_CHECKING:
    from trl import ModelConfig

    from bandpo.settings import RunArguments

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def plan(run: RunArguments, config: BandPOConfig, model: ModelConfig) -> str:
    """Describe the resolved run.

    Parameters
    ----------
    run, config, model : RunArguments, BandPOConfig, ModelConfig
        The parsed recipe. Counts are for ``run.processes`` processes, else for those running.

    Returns
    -------
    str
        One aligned ``name  value`` line a fact, then the cautions of `BandPOConfig.cautions`.
        Where model or data cannot be reached from here, the line says so.

    Raises
    ------
    ValueError
        If the task does not exist or its data cannot be used.
    """
    assert config.steps_per_generation is not None  # GRPOConfig fills these in
    assert config.num_generations is not None
    assert config.max_completion_length is not None
    processes = run.processes or config.world_size
    micro_batch = config.per_device_train_batch_size * processes
    completions = micro_batch * config.steps_per_generation
    prompts = completions // config.num_generations
    tokens = completions * config.max_completion_length

    data, rows = _data(run, config)
    steps = _optimizer_steps(config, rows, prompts)
    generations = None if steps is None else float(steps / config.updates_per_generation)

    facts = {
        "model": model.model_name_or_path or f"the one that comes with task {run.task}",
        "clip rule": f"{config.rule()}",
        "data": data,
        "processes": f"{processes}",
        "generation": f"{prompts:,} prompts x {config.num_generations} completions = "
        f"{completions:,} completions, at most {tokens:,} tokens",
        "updates": f"{config.updates_per_generation} optimizer steps a generation, "
        f"{micro_batch * config.gradient_accumulation_steps:,} completions each",
        "rule can act": "yes" if config.rule_can_act else "no",
        "loss": f"{config.loss_type}, beta {config.beta:g}, learning rate {config.learning_rate:g}",
        "length": "unknown without the data (set max_steps)"
        if steps is None or generations is None
        else f"{steps:,} optimizer steps, {math.ceil(generations):,} generations",
        "memory": _memory(config, model, processes),
        "time": _time(run, generations, tokens),
    }
    width = max(map(len, facts))
    lines = [f"{name:<{width}}  {value}" for name, value in facts.items()]
    return "\n".join([*lines, *(f"caution: {text}" for text in config.cautions())])


def _data(run: RunArguments, config: BandPOConfig) -> tuple[str, int | None]:
    try:
        task = run.load(config.seed)
    except (ConnectionError, PermissionError) as error:
        return f"{run.task}, which cannot be loaded from here ({error})", None
    text = f"{run.task}, {len(task.train):,} prompts to train on, {len(task.eval):,} to evaluate on"
    return text, len(task.train)


def _optimizer_steps(config: BandPOConfig, rows: int | None, prompts: int) -> int | None:
    if config.max_steps > 0:
        return config.max_steps
    if rows is None:
        return None
    return math.ceil(config.num_train_epochs * (rows // prompts) * config.updates_per_generation)


def _memory(config: BandPOConfig, model: ModelConfig, processes: int) -> str:
    parameters, source = _parameters(model)
    if parameters is None:
        return source
    size = parameters * _BYTES.get(model.dtype or "", 4)
    if model.use_peft:
        return (
            f"{_gigabytes(size)} for the weights ({source}); adapters, activations and generation "
            "come on top"
        )
    # weights, gradients and the two moments of AdamW; the reference is a second copy
    states = 4 * size + (size if config.beta else 0)
    each = f", {_gigabytes(states / processes)} each if sharded (FSDP2, ZeRO-3)"
    return (
        f"{_gigabytes(states)} a process for weights, gradients, AdamW"
        f"{' and the reference' if config.beta else ''} ({source})"
        f"{each if processes > 1 else ''}; activations and generation come on top"
    )


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:.1f} GB"


def _parameters(model: ModelConfig) -> tuple[int | None, str]:
    """Number of weights from the architecture, or by the name where the hub is out of reach."""
    name = model.model_name_or_path
    if name is None:
        return None, "small: the task's own model"
    try:
        architecture = AutoConfig.from_pretrained(name, revision=model.model_revision)
    except (OSError, ValueError):
        found = re.search(r"(\d+(?:\.\d+)?)B\b", name)
        if found is None:
            return None, "unknown: the model's configuration cannot be loaded from here"
        return int(float(found[1]) * 1e9), f"{found[1]}e9 parameters by its name"
    with torch.device("meta"):
        count = AutoModelForCausalLM.from_config(architecture).num_parameters()
    return count, f"{count:,} parameters"


def _time(run: RunArguments, generations: float | None, tokens: int) -> str:
    if run.tokens_per_second is None or generations is None:
        return "unknown (set tokens_per_second to the rate that you measure)"
    hours = generations * tokens / run.tokens_per_second / 3600
    return (
        f"at most {hours:,.1f} h at {run.tokens_per_second:g} tokens a second, if every "
        "completion has full length"
    )
