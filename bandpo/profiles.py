"""Profiles: which notebooks run, with which parameters, and where their executed copies lie.

A profile is a file ``notebooks/params/NAME.yaml`` with one section per notebook::

    07_train:
      parameters: {task: scratchpad, max_steps: 40}
      grid:                       # one run per combination, named by its labels: kl-band-1
        rule:
          grpo: {clip_rule: fixed}
          kl-band: {clip_rule: band, band_divergence: kl}
        seed: [1, 2, 3]
      show: kl-band-1             # the run that the book shows
    08_training_dynamics:
      needs: [07_train]           # runs after them, and again whenever they ran again

A list of grids stands for all their runs, in the order of the list.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from bandpo.params import Value, did_you_mean, read_defaults, resolve
from bandpo.provenance import (
    ROOT,
    content_digest,
    digest,
    lock_digest,
    notebook_digest,
    package_digest,
    tree_digest,
)

_KEYS: dict[str, tuple[type, ...]] = {
    "parameters": (dict,),
    "grid": (dict, list),
    "show": (str,),
    "needs": (list,),
}


@dataclass(frozen=True)
class Job:
    """One execution of one notebook.

    Parameters
    ----------
    notebook : str
        Stem of the source, such as ``07_train``.
    name : str
        Unique among a plan's jobs: the stem, or the stem, a slash and the labels of a grid entry.
    parameters : Mapping
        What is injected, already checked against the notebook's parameters cell.
    source, copy : Path
        The notebook and where its executed copy belongs.
    needs : tuple of str
        Notebooks, or other paths below the root, that it reads.
    """

    notebook: str
    name: str
    parameters: Mapping[str, Value]
    source: Path
    copy: Path
    needs: tuple[str, ...] = ()


class Project:
    """The notebooks of one repository under one profile.

    Parameters
    ----------
    profile : str
        Name of a file in ``notebooks/params/``, without its suffix.
    root : Path
        The repository.

    Raises
    ------
    ValueError
        If the profile does not exist or is malformed, or names a notebook that does not exist.
    """

    def __init__(self, profile: str = "cpu", root: Path = ROOT) -> None:
        self.profile = profile
        self.root = root
        self.sections = _read_profile(root / "notebooks" / "params", profile)
        for stem in self.sections:
            self._check_stem(stem)

    def _check_stem(self, stem: str) -> None:
        known = {path.stem: None for path in sorted((self.root / "notebooks").glob("*.ipynb"))}
        if stem not in known:
            raise ValueError(
                f"there is no notebooks/{stem}.ipynb{did_you_mean(stem, known)}; "
                f"there are {', '.join(known)}"
            )

    @cached_property
    def _common(self) -> str:
        """Digest of what every notebook depends on."""
        return digest([package_digest(self.root), lock_digest(self.root)])

    def jobs(self, stem: str, overrides: Mapping[str, Any] | None = None) -> list[Job]:
        """Return the executions of one notebook: one, or one for each entry of its grid.

        Parameters
        ----------
        stem : str
            The notebook. One that the profile does not name runs with its defaults.
        overrides : Mapping, optional
            Parameters that come before the profile's. With them the notebook runs once, without
            its grid, and its copy goes to ``build/executed/custom/``.

        Raises
        ------
        ValueError, TypeError
            If the notebook's parameters cell or one of the parameters is not in order.
        """
        self._check_stem(stem)
        section = self.sections.get(stem, {})
        source = self.root / "notebooks" / f"{stem}.ipynb"
        needs = tuple(section.get("needs", ()))
        try:
            defaults = read_defaults(json.loads(source.read_text(encoding="utf-8")))
            common = section.get("parameters", {})
            if overrides or "grid" not in section:
                folder = "custom" if overrides else self.profile
                copy = self.root / "build" / "executed" / folder / f"{stem}.ipynb"
                given = resolve({**common, **(overrides or {})}, defaults)
                return [Job(stem, stem, given, source, copy, needs)]
            jobs = []
            for name, entry in _grid(section["grid"]).items():
                run_folder = self.run_folder(name)
                run_dir = run_folder.relative_to(self.root).as_posix()
                given = resolve({**common, **entry, "run_dir": run_dir}, defaults)
                copy = run_folder / "notebook.ipynb"
                jobs.append(Job(stem, f"{stem}/{name}", given, source, copy, needs))
        except (ValueError, TypeError) as error:
            raise type(error)(f"{stem}, profile {self.profile}: {error}") from None
        return jobs

    def plan(
        self, stems: Iterable[str] = (), overrides: Mapping[str, Any] | None = None
    ) -> list[Job]:
        """Return the jobs of the given notebooks, or of all that the profile names.

        The notebooks that they need come with them, before them.
        """
        ordered: dict[str, list[Job]] = {}

        def add(stem: str, path: tuple[str, ...]) -> None:
            if stem in path:
                raise ValueError(f"notebooks need each other: {' -> '.join([*path, stem])}")
            if stem not in ordered:
                for need in self.sections.get(stem, {}).get("needs", ()):
                    if "/" not in need:
                        add(need, (*path, stem))
                ordered[stem] = self.jobs(stem, None if path else overrides)

        for stem in stems or self.sections:
            add(stem, ())
        return [job for jobs in ordered.values() for job in jobs]

    def run_folder(self, name: str) -> Path:
        """Return the folder of one grid entry."""
        return self.root / "build" / "runs" / self.profile / name

    def orphans(self) -> list[Path]:
        """Return the run folders of this profile that are no entry of any of its grids."""
        names = {
            name
            for section in self.sections.values()
            if "grid" in section
            for name in _grid(section["grid"])
        }
        folders = sorted(self.run_folder("").glob("*/"))
        return [folder for folder in folders if folder.name not in names]

    def shown(self, stem: str) -> Job:
        """Return the job whose executed copy the book shows."""
        jobs = self.jobs(stem)
        name = self.sections.get(stem, {}).get("show")
        return jobs[0] if name is None else next(j for j in jobs if j.name == f"{stem}/{name}")

    def job_digest(self, job: Job) -> str:
        """Return the digest of everything that goes into a job: what its copy is stamped with.

        It covers the notebook, the parameters, the package, the lock, and what the notebooks that
        it needs left behind.
        """
        notebook = json.loads(job.source.read_text(encoding="utf-8"))
        left = {
            need: tree_digest(self.root, [need]) if "/" in need else self._left_by(need)
            for need in job.needs
        }
        return digest([notebook_digest(notebook), self._common, dict(job.parameters), left])

    def _left_by(self, stem: str) -> str:
        copies = [job.copy for job in self.jobs(stem)]
        files = [
            path.relative_to(self.root).as_posix()
            for copy in copies
            for path in [copy, *copy.parent.glob("*.json*")]
            if path == copy or copy.name == "notebook.ipynb"
        ]
        return tree_digest(self.root, files)

    def fault(self, job: Job) -> str | None:
        """Return why the executed copy cannot be shown, or None if it can.

        Returns
        -------
        str or None
            ``missing``, ``failed`` (a cell raised or did not run), ``stale`` (something that went
            in has changed) or ``altered`` (the copy was edited after its run).
        """
        try:
            notebook = json.loads(job.copy.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return "missing"
        except ValueError:
            return "failed"
        stamp = notebook["metadata"].get("bandpo", {})
        if failure(notebook) or not stamp:
            return "failed"
        if stamp["digest"] != self.job_digest(job):
            return "stale"
        return None if stamp["content"] == content_digest(notebook) else "altered"


def failure(notebook: Mapping[str, Any]) -> str | None:
    """Return which cell of an executed notebook failed and how, or None if all ran."""
    for cell in notebook["cells"]:
        if cell["cell_type"] != "code":
            continue
        where = f"cell {cell.get('id')!r}"
        for output in cell.get("outputs", []):
            if output["output_type"] == "error":
                return f"{where}: {output['ename']}: {output['evalue']}"
        # After the death of a kernel, papermill calls cells that never ran "completed".
        if cell["metadata"].get("papermill", {}).get("exception") is not False:
            return f"{where} did not run"
    return None


def _read_profile(folder: Path, profile: str) -> dict[str, dict[str, Any]]:
    path = folder / f"{profile}.yaml"
    known = {found.stem: None for found in sorted(folder.glob("*.yaml"))}
    if profile not in known:
        raise ValueError(
            f"there is no profile {profile!r}{did_you_mean(profile, known)}; "
            f"there are {', '.join(known)}"
        )
    try:
        sections = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except yaml.YAMLError as error:
        raise ValueError(f"profile {profile}: {error}") from None
    if not isinstance(sections, dict):
        raise ValueError(f"profile {profile}: a mapping from notebooks is needed, not {sections!r}")
    for stem, section in sections.items():
        where = f"profile {profile}, {stem}"
        if not isinstance(section, dict):
            raise ValueError(f"{where}: {section!r} is not a mapping; write {{}} for defaults")
        for key, value in section.items():
            if key not in _KEYS:
                raise ValueError(f"{where}: unknown key {key!r}{did_you_mean(key, _KEYS)}")
            if not isinstance(value, _KEYS[key]):
                kinds = " or a ".join(kind.__name__ for kind in _KEYS[key])
                raise ValueError(f"{where}: {key} must be a {kinds}, not {value!r}")
        names = _grid(section["grid"]) if "grid" in section else {}
        if "grid" in section and section.get("show") not in names:
            raise ValueError(
                f"{where}: show = {section.get('show')!r} is no entry of its grid; "
                f"it has {', '.join(names)}"
            )
    return sections


def _grid(grid: Mapping[str, Any] | list[Any]) -> dict[str, dict[str, Any]]:
    """Return run name -> parameters for every combination of the axes, of each grid in turn."""
    runs: dict[str, dict[str, Any]] = {}
    for axes in grid if isinstance(grid, list) else [grid]:
        if not isinstance(axes, dict):
            raise ValueError(f"a grid must be a mapping from axes, not {axes!r}")
        for combination in itertools.product(*(_choices(*axis) for axis in axes.items())):
            name = "-".join(label for label, _ in combination)
            if name in runs:
                raise ValueError(f"two entries of the grid are called {name!r}")
            runs[name] = {key: value for _, part in combination for key, value in part.items()}
    return runs


def _choices(axis: str, values: Any) -> list[tuple[str, dict[str, Any]]]:
    """Return label and parameters of each place on one axis of a grid."""
    if isinstance(values, dict) and all(isinstance(one, dict) for one in values.values()):
        return [(str(label), one) for label, one in values.items()]
    if isinstance(values, list):
        return [(str(value), {axis: value}) for value in values]
    raise ValueError(
        f"grid axis {axis!r} must be a list of values or a mapping from labels to "
        f"parameters, not {values!r}"
    )
