"""The beginning of a run: a fresh folder, one to go on with, or one that must not be replaced.

What a run folder holds in the end is described in :mod:`bandpo.runs`.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bandpo.provenance import package_digest, provenance
from bandpo.runs import FINISHED, write_json

CHECKPOINTS = "checkpoints"
"""Where notebook 07 keeps checkpoints while it trains; ``bandpo.train`` has them in the folder."""
TRAINED = "training.json"
"""Written when a training that is evaluated by another command has come to its end."""


def start_run(run_dir: str | Path, config: Mapping[str, Any]) -> str | None:
    """Make a run folder ready: written settings, no result of an earlier run.

    Parameters
    ----------
    run_dir : str or Path
        Folder of the run; made if missing.
    config : Mapping
        Every parameter of the run, ``seed`` among them.

    Returns
    -------
    str or None
        The last checkpoint of an interrupted run with the same settings and the same package,
        from which training can go on; None if the run begins at the beginning.

    Raises
    ------
    FileExistsError
        If the folder holds a finished run with other settings.
    """
    folder = Path(run_dir)
    check_run(folder, config)
    (folder / FINISHED).unlink(missing_ok=True)
    checkpoints = folder / CHECKPOINTS
    if _same_run(folder, config) and (found := last_checkpoint(checkpoints)):
        return str(found)
    shutil.rmtree(checkpoints, ignore_errors=True)
    (folder / "metrics.jsonl").unlink(missing_ok=True)
    open_run(folder, config)
    return None


def check_run(run_dir: str | Path, config: Mapping[str, Any]) -> None:
    """Refuse to replace a finished run by one with other settings.

    Parameters
    ----------
    run_dir, config
        As for :func:`start_run`.

    Raises
    ------
    FileExistsError
        If the folder holds a finished run with other settings.
    """
    folder = Path(run_dir)
    if (folder / FINISHED).exists() and not _same_settings(folder, config):
        raise FileExistsError(
            f"{folder} holds a finished run with other settings: choose another run_dir "
            "(output_dir of bandpo.train), or remove the folder"
        )


def open_run(run_dir: str | Path, config: Mapping[str, Any]) -> None:
    """Write the settings of a run that begins or goes on, and drop what said that it had ended.

    Parameters
    ----------
    run_dir, config
        As for :func:`start_run`.
    """
    folder = Path(run_dir)
    for name in (FINISHED, TRAINED):
        (folder / name).unlink(missing_ok=True)
    write_json(folder / "config.json", dict(config))
    write_json(folder / "provenance.json", provenance())


def is_trained(run_dir: str | Path, config: Mapping[str, Any]) -> bool:
    """Tell whether a training with these settings came to its end in this folder.

    Parameters
    ----------
    run_dir, config
        As for :func:`start_run`.
    """
    folder = Path(run_dir)
    return (folder / TRAINED).is_file() and _same_settings(folder, config)


def _same_run(folder: Path, config: Mapping[str, Any]) -> bool:
    """Tell whether a run in this folder has the same settings and was made by the same package."""
    if not _same_settings(folder, config):
        return False
    made_by = _read_json(folder / "provenance.json")
    return made_by is not None and made_by["package"] == package_digest()


def _same_settings(folder: Path, config: Mapping[str, Any]) -> bool:
    """Compare all but the place of the run, which may be written in several ways."""
    before = _read_json(folder / "config.json")
    return before is not None and before | {"run_dir": None} == {**config, "run_dir": None}


def _read_json(path: Path) -> Any:
    """Read a JSON file; None where there is none."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


def last_checkpoint(folder: str | Path) -> Path | None:
    """Return the checkpoint with the highest step that was written whole, or None.

    Parameters
    ----------
    folder : str or Path
        Parent of the folders ``checkpoint-<step>``.
    """
    steps = {
        int(match[1]): path
        for path in Path(folder).glob("checkpoint-*")
        if (match := re.fullmatch(r"checkpoint-(\d+)", path.name)) and is_whole_checkpoint(path)
    }
    return steps[max(steps)] if steps else None


def is_whole_checkpoint(path: str | Path) -> bool:
    """Tell whether a checkpoint was written to its end.

    The trainer's state is the last file that goes into one, so a folder in which it is missing or
    cut off was left by a run that was killed while it saved.
    """
    try:
        json.loads((Path(path) / "trainer_state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return True
