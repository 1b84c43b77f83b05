"""The command line of ``python -m bandpo.train``: a recipe and flags, each checked by its name."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers.hf_argparser import string_to_bool
from trl import ModelConfig, TrlParser

from bandpo.config import BandPOConfig
from bandpo.settings import RunArguments

PROGRAM = "python -m bandpo.train"


def make_parser() -> Any:
    """Return the parser (a `trl.TrlParser`) of a recipe and its flags."""
    fields: list[Any] = [RunArguments, BandPOConfig, ModelConfig]
    parser = TrlParser(fields, prog=PROGRAM)
    parser.set_defaults(logging_steps=1)  # a line of metrics for each step: see settings.check
    return parser


def parse(arguments: Sequence[str]) -> tuple[RunArguments, BandPOConfig, ModelConfig]:
    """Read a recipe and the flags that override it.

    Parameters
    ----------
    arguments : sequence of str
        Command line without the program's name.

    Returns
    -------
    run, config, model : RunArguments, BandPOConfig, ModelConfig

    Raises
    ------
    FileNotFoundError
        If there is no such recipe.
    ValueError
        If the recipe is no YAML mapping, a name in it or a flag is unknown, or a value is refused.
    SystemExit
        Where argparse refuses: a value of another type, a missing one.
    """
    first = argparse.ArgumentParser(PROGRAM, add_help=False, allow_abbrev=False)
    first.add_argument("--config")
    first.add_argument("--dry_run", "--dry-run", type=string_to_bool, nargs="?", const=True)
    seen, flags = first.parse_known_args(arguments)
    recipe = read_recipe(seen.config) if seen.config is not None else {}
    parser = make_parser()
    options = parser._option_string_actions  # argparse has no public list of its options
    for name in recipe:
        if name != "env":  # the parser's own: environment variables of a recipe
            _check_name(f"--{name}", options, f"{seen.config}: {name}")
    for flag in flags:
        if flag.startswith("--"):
            _check_name(flag.partition("=")[0], options, flag)
    dry_run = recipe.get("dry_run", False) if seen.dry_run is None else seen.dry_run
    if dry_run and not torch.cuda.is_available():
        # The plan is for another machine: do not refuse what only that one can do.
        arguments = [*arguments, "--use_cpu", "true"]
    run, config, model = parser.parse_args_and_config(list(arguments))
    return run, config, model


def read_recipe(path: str | Path) -> Mapping[str, Any]:
    """Read a recipe's fields.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    ValueError
        If it is no YAML mapping of names to values.
    """
    try:
        found = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"--config: there is no file {path}; bandpo/recipes has recipes to start from"
        ) from error
    except yaml.YAMLError as error:
        raise ValueError(f"--config: {path} is no YAML: {' '.join(str(error).split())}") from error
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise ValueError(f"--config: {path} must hold lines of the form `name: value`")
    return found


def _check_name(option: str, options: Mapping[str, Any], written: str) -> None:
    if any(known.startswith(option) for known in options):  # argparse takes abbreviations
        return
    close = difflib.get_close_matches(option, options, n=1)
    meant = f"; did you mean {close[0].removeprefix('--')}?" if close else ""
    raise ValueError(f"{written} is no field of a run, BandPOConfig or ModelConfig{meant}")
