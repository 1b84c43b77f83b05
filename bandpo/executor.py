"""Run jobs side by side in processes of their own, and put in place only what ran to the end."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from bandpo.kernels import kernel_context, start_notebook
from bandpo.params import read_defaults
from bandpo.profiles import Job, Project, failure
from bandpo.provenance import content_digest, provenance

# One thread a run: small models gain nothing from more, and runs side by side would fight.
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TQDM_DISABLE": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "PYTHONHASHSEED": "0",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "MPLBACKEND": "module://matplotlib_inline.backend_inline",
    # The kernel of this environment, and nobody's start-up files.
    "JUPYTER_PREFER_ENV_PATH": "1",
    # tqdm, as it is imported without ipywidgets
    "PYTHONWARNINGS": "ignore:IProgress not found",
}
_COLOR = re.compile(r"\x1b\[[0-9;]*m")
_GRACE = 5.0
# From this many training runs on, importing what they need once is worth the wait.
_MANY_RUNS = 3


class RunError(RuntimeError):
    """A notebook failed; the message says which cell, how, and where the copy lies."""


@dataclass
class _Running:
    job: Job
    digest: str
    process: BaseProcess
    folder: Path
    started: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    @property
    def output(self) -> Path:
        return self.folder / self.job.source.name

    @property
    def log(self) -> Path:
        return self.folder / "log"


def execute(project: Project, jobs: Sequence[Job], workers: int) -> None:
    """Execute the jobs that are not up to date, at most ``workers`` at a time.

    Parameters
    ----------
    project : Project
        Where they belong.
    jobs : sequence of Job
        What :meth:`Project.plan` returns: needed ones first.
    workers : int
        Number of notebooks side by side.

    Raises
    ------
    RunError
        At the first failure, once the notebooks that were running have ended. What finished is
        kept and skipped by the next call.
    """
    pending = list(jobs)
    running: list[_Running] = []
    errors: list[str] = []
    total = len(pending)
    training = [job for job in pending if "run_dir" in job.parameters and project.fault(job)]
    context = kernel_context(_ENVIRONMENT, training=len(training) >= _MANY_RUNS)
    with _scratch(project.root) as scratch, _stop_on_terminate():
        for folder in project.orphans():
            where = _retire(project, folder).relative_to(project.root)
            _say(f"~ {folder.name}  is no entry of a grid any more: moved to {where}")
        try:
            while running or (pending and not errors):
                while not errors and len(running) < workers and (job := _next(pending, running)):
                    pending.remove(job)
                    if project.fault(job) is None:
                        _say(f"= {job.name}  up to date")
                    else:
                        running.append(_start(context, project, job, scratch))
                for one in [one for one in running if one.process.exitcode is not None]:
                    running.remove(one)
                    try:
                        _finish(project, one)
                    except RunError as error:
                        errors.append(str(error))
                        _say(f"x {one.job.name}  failed after {one.seconds:.1f} s")
                    else:
                        left = f"{total - len(pending) - len(running)}/{total}"
                        _say(f"+ {one.job.name}  {one.seconds:.1f} s  ({left})")
                if running:
                    time.sleep(0.05)
        finally:
            _stop(running)
    if errors:
        raise RunError("\n\n".join(errors))


def _next(pending: Sequence[Job], running: Sequence[_Running]) -> Job | None:
    """Return the first job that waits for no notebook."""
    unfinished = {job.notebook for job in pending} | {one.job.notebook for one in running}
    return next((job for job in pending if not unfinished.intersection(job.needs)), None)


def _start(context: BaseContext, project: Project, job: Job, scratch: Path) -> _Running:
    folder = Path(tempfile.mkdtemp(dir=scratch))
    stamp = project.job_digest(job)
    if "run_dir" in job.parameters:
        _prepare_run_folder(project, project.root / str(job.parameters["run_dir"]), stamp)
    process = start_notebook(
        context,
        job.source,
        folder / job.source.name,
        job.parameters,
        cwd=project.root,
        log=folder / "log",
        environment=_ENVIRONMENT | {"IPYTHONDIR": str(scratch / "ipython")},
    )
    return _Running(job, stamp, process, folder)


def _prepare_run_folder(project: Project, folder: Path, stamp: str) -> None:
    """Leave in a run folder only what a run with the same stamp began, so that it can resume."""
    mark = folder / ".digest"
    if folder.exists() and not (mark.is_file() and mark.read_text() == stamp):
        _retire(project, folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "notebook.ipynb").unlink(missing_ok=True)
    mark.write_text(stamp)


def _retire(project: Project, folder: Path) -> Path:
    """Move a run folder to where no notebook reads it; only the last of its name is kept."""
    retired = project.root / "build" / "retired" / folder.parent.name / folder.name
    shutil.rmtree(retired, ignore_errors=True)
    retired.parent.mkdir(parents=True, exist_ok=True)
    folder.rename(retired)
    return retired


def _finish(project: Project, one: _Running) -> None:
    """Stamp the copy and put it in its place, or keep it apart and raise."""
    job = one.job
    try:
        notebook = json.loads(one.output.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        end = one.log.read_text(encoding="utf-8", errors="replace")
        raise RunError(f"{job.name} did not start:\n{_last_lines(end)}") from None
    failed = failure(notebook)
    if failed is None and one.process.exitcode != 0:
        failed = f"papermill ended with status {one.process.exitcode}"
    if failed is not None:
        kept = project.root / "build" / "failed" / f"{job.name.replace('/', '-')}.ipynb"
        kept.parent.mkdir(parents=True, exist_ok=True)
        os.replace(one.output, kept)
        end = _traceback(notebook) or one.log.read_text(errors="replace")
        where = kept.relative_to(project.root)
        raise RunError(f"{job.name}: {failed}\n{_last_lines(end)}\nThe failed copy: {where}")
    defaults = read_defaults(json.loads(job.source.read_text(encoding="utf-8")))
    notebook["metadata"]["bandpo"] = {
        "digest": one.digest,
        "content": content_digest(notebook),
        "profile": project.profile,
        "parameters": {**defaults, **job.parameters},
        "given": sorted(job.parameters),
        "seconds": round(one.seconds, 1),
        **provenance(project.root),
    }
    one.output.write_text(json.dumps(notebook, indent=1) + "\n", encoding="utf-8")
    job.copy.parent.mkdir(parents=True, exist_ok=True)
    os.replace(one.output, job.copy)
    failed_before = project.root / "build" / "failed" / f"{job.name.replace('/', '-')}.ipynb"
    failed_before.unlink(missing_ok=True)


def _traceback(notebook: dict[str, Any]) -> str:
    for cell in notebook["cells"]:
        for output in cell.get("outputs", []):
            if output["output_type"] == "error" and cell["cell_type"] == "code":
                return "\n".join(output["traceback"])
    return ""


def _last_lines(text: str, count: int = 12) -> str:
    return "\n".join(_COLOR.sub("", text).rstrip().splitlines()[-count:])


def _stop(running: Sequence[_Running]) -> None:
    """End the processes and their kernels: politely, then not."""
    processes: list[psutil.Process] = []
    for one in running:
        with contextlib.suppress(psutil.NoSuchProcess):
            top = psutil.Process(one.process.pid)
            processes += [*top.children(recursive=True), top]
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    _, alive = psutil.wait_procs(processes, timeout=_GRACE)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    for one in running:
        one.process.join()


@contextlib.contextmanager
def _scratch(root: Path) -> Iterator[Path]:
    """Yield a folder on the same disk as the results, gone when the block ends."""
    (root / "build").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root / "build", prefix=".run-") as folder:
        yield Path(folder)


@contextlib.contextmanager
def _stop_on_terminate() -> Iterator[None]:
    """Treat SIGTERM like Ctrl-C, so that no kernel outlives this process."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _say(line: str) -> None:
    print(line, flush=True)
