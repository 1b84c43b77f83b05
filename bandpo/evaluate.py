"""Finish a trained run: ``python -m bandpo.evaluate RUN_DIR [--samples 32] [--vllm]``.

``python -m bandpo.train`` leaves a run folder with a model, and no number about it: under FSDP or
ZeRO no process has the whole model. This command, one process, samples the model that training
started from and the trained one on the task's held-out prompts, as notebook 07 does within one
process, and writes ``completions.jsonl`` and at last ``evaluation.json``. From then on the pages
and ``python -m bandpo.summary`` read the run.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from bandpo.base_models import check_model, model_path
from bandpo.data import TaskData, load_task
from bandpo.evaluation import Texts, finish_run, sample_completions, sample_completions_vllm
from bandpo.launch import TRAINED
from bandpo.provenance import provenance
from bandpo.runs import FINISHED


@dataclass(frozen=True)
class Trained:
    """A run that is trained and not evaluated.

    Parameters
    ----------
    folder : Path
    config : Mapping
        Its settings, as `bandpo.train.settings` made them.
    training : Mapping
        ``seconds`` and ``resumed``.
    data : TaskData
        Its task, with the held-out prompts that training left out.
    """

    folder: Path
    config: Mapping[str, Any]
    training: Mapping[str, Any]
    data: TaskData

    @property
    def model(self) -> Path:
        """Folder of the trained weights, or of an adapter."""
        return self.folder / "model"

    @property
    def has_adapter(self) -> bool:
        return (self.model / "adapter_config.json").is_file()

    @property
    def base(self) -> str:
        """Folder or hub id of the model that training started from."""
        return model_path(self.config["model"], self.config["task"])


def read_trained(run_dir: str | Path) -> Trained:
    """Read a run that ``python -m bandpo.train`` has trained.

    Raises
    ------
    FileNotFoundError
        If it is no run folder, or training has not come to its end.
    OSError
        If the model that training started from is not found.
    ValueError
        If its models cannot be loaded again, or the task has no held-out prompts.
    """
    folder = Path(run_dir)
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{folder} is no run folder: it has no config.json")
    if not (folder / TRAINED).is_file():
        raise FileNotFoundError(
            f"{folder} holds no trained model: {TRAINED} is missing, so training has not come to "
            "its end. Launch it again with --resume_from_checkpoint auto"
        )
    config, training = (
        json.loads((folder / name).read_text(encoding="utf-8")) for name in ("config.json", TRAINED)
    )
    for field in ("load_in_4bit", "load_in_8bit"):
        if config[field]:
            raise ValueError(
                f"{folder} was trained with {field}: models are evaluated as they were saved, "
                "without quantization, which would be other models"
            )
    data = load_task(
        config["task"],
        eval_size=config["eval_size"],
        seed=config["seed"],
        wrong_reward=config["wrong_reward"],
    )
    if len(data.eval) == 0:
        raise ValueError(
            f"task {config['task']!r} of {folder} has no held-out prompts: train it with an "
            "eval_size above 0"
        )
    run = Trained(folder, config, training, data)
    check_model(run.base, config["model_revision"])
    return run


def is_evaluated(run_dir: str | Path, samples: int, sampler: str) -> bool:
    """Tell whether a run has been evaluated in this way.

    Parameters
    ----------
    run_dir : str or Path
        Folder of the run.
    samples : int
        Completions of each prompt.
    sampler : {"transformers", "vllm"}

    Raises
    ------
    FileExistsError
        If it has been evaluated in another way.
    """
    path = Path(run_dir) / FINISHED
    if not path.is_file():
        return False
    found = json.loads(path.read_text(encoding="utf-8"))
    done = found["samples"], found.get("sampler", "transformers")
    if done != (samples, sampler):
        raise FileExistsError(
            f"{run_dir} is evaluated already, with {done[0]} samples of each prompt by {done[1]}: "
            f"remove its {FINISHED} to evaluate it with {samples} by {sampler}"
        )
    return True


def load_base(run: Trained) -> PreTrainedModel:
    """Load the model that training started from, on the CPU and in training's precision."""
    revision = run.config["model_revision"]
    dtype = run.config["dtype"] or "auto"
    return AutoModelForCausalLM.from_pretrained(run.base, revision=revision, dtype=dtype)


def load_trained(run: Trained) -> PreTrainedModel:
    """Load the trained model, on the CPU and in training's precision; an adapter is merged in."""
    if run.has_adapter:
        from peft import PeftModel

        return PeftModel.from_pretrained(load_base(run), str(run.model)).merge_and_unload()
    dtype = run.config["dtype"] or "auto"
    return AutoModelForCausalLM.from_pretrained(run.model, dtype=dtype)


def sample_by_transformers(run: Trained, samples: int, batch_size: int) -> tuple[Texts, Texts]:
    """Sample the base and the trained model, on a GPU if there is one.

    Parameters
    ----------
    run : Trained
    samples : int
        Completions of each prompt.
    batch_size : int
        Sequences at once.

    Returns
    -------
    before, after : list of list of str
        ``samples`` completions of each held-out prompt.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(run.model)  # the one that training used

    def sample(model: Any) -> Texts:
        return sample_completions(
            model.to(device),
            tokenizer,
            run.data.eval["prompt"],
            samples,
            max_new_tokens=run.config["max_completion_length"],
            batch_size=batch_size,
            seed=run.config["seed"],
        )

    return sample(load_base(run)), sample(load_trained(run))


def sample_by_vllm(run: Trained, samples: int) -> tuple[Texts, Texts]:
    """Sample the base and the trained model with vLLM, under the run's own vLLM settings.

    Parameters
    ----------
    run : Trained
    samples : int
        Completions of each prompt.

    Returns
    -------
    before, after : list of list of str
        ``samples`` completions of each held-out prompt.

    Raises
    ------
    ModuleNotFoundError
        If vLLM is not installed.
    """
    config = run.config

    def sample(model: str, **engine: Any) -> Texts:
        # In a process of its own, whose end gives the GPU back before the next model needs it.
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            texts = pool.submit(
                sample_completions_vllm,
                model,
                list(run.data.eval["prompt"]),
                samples,
                max_new_tokens=config["max_completion_length"],
                seed=config["seed"],
                dtype="bfloat16" if config["bf16"] else config["dtype"] or "auto",
                max_model_len=config["vllm_max_model_length"],
                tensor_parallel_size=config["vllm_tensor_parallel_size"],
                **engine,
            )
            return texts.result()

    before = sample(run.base, revision=config["model_revision"])
    if not run.has_adapter:
        return before, sample(str(run.model))
    with tempfile.TemporaryDirectory() as merged:
        load_trained(run).save_pretrained(merged)
        AutoTokenizer.from_pretrained(run.model).save_pretrained(merged)
        return before, sample(merged)


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, 1 or more")
    return int(text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Parameters
    ----------
    arguments : sequence of str, optional
        Default: those of the process.

    Returns
    -------
    int
        The exit status: 0 evaluated, 2 refused.
    """
    parser = argparse.ArgumentParser(
        prog="python -m bandpo.evaluate",
        description="Sample a run's base model and its trained model on the held-out prompts.",
    )
    parser.add_argument("run_dir", type=Path, help="what bandpo.train left: its output_dir")
    parser.add_argument(
        "--samples", type=_positive, default=32, help="completions of each prompt (default: 32)"
    )
    parser.add_argument("--vllm", action="store_true", help="sample with vLLM, on a GPU")
    parser.add_argument(
        "--batch_size",
        type=_positive,
        default=512,
        help="sequences at once, without vLLM (default: 512)",
    )
    options = parser.parse_args(arguments)
    sampler = "vllm" if options.vllm else "transformers"
    try:
        if is_evaluated(options.run_dir, options.samples, sampler):
            print(f"{options.run_dir}: evaluated already; nothing is left to do")
            return 0
        run = read_trained(options.run_dir)
        before, after = (
            sample_by_vllm(run, options.samples)
            if options.vllm
            else sample_by_transformers(run, options.samples, options.batch_size)
        )
    except (OSError, ValueError, ModuleNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    finish_run(
        run.folder,
        run.data,
        before,
        after,
        **run.training,
        sampler=sampler,
        provenance=provenance(),
    )
    print(f"{run.folder}: {len(before)} prompts, {options.samples} completions of each")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
