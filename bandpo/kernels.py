"""One notebook in a process of its own, with a kernel that need not import everything again.

A training run of the embedded tasks takes about ten seconds, and importing PyTorch, transformers
and TRL takes nearly as long. Where processes can be forked, the executor's children come from one
server that has imported them once, and each child forks its kernel. Elsewhere a child is a fresh
process and its kernel another one; the notebook sees no difference.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

#: What every notebook needs, and what the training runs need besides. Not matplotlib's inline
#: backend: it looks for its kernel when it is imported, and shows no figure without one.
_LIGHT = ["papermill", "ipykernel.kernelapp"]
_HEAVY = [
    *("matplotlib.pyplot", "myst_nb", "scipy.stats", "torch", "transformers", "datasets", "trl"),
    *("bandpo.trainer", "bandpo.base_models", "bandpo.data", "bandpo.evaluation"),
]


def can_fork() -> bool:
    """Tell whether a forked process works here like a fresh one.

    Only Linux forks safely after the imports, and a driver of an accelerator that was asked a
    question before a fork refuses to work after it.
    """
    return sys.platform == "linux" and not any(
        os.path.exists(device) for device in ("/dev/nvidiactl", "/dev/kfd")
    )


def kernel_context(environment: Mapping[str, str], *, training: bool) -> BaseContext:
    """Return the context that starts notebook processes.

    Parameters
    ----------
    environment : Mapping
        Environment variables that must be set before anything is imported.
    training : bool
        Whether several training runs follow, so that importing what they need pays off.
    """
    if not can_fork():
        return multiprocessing.get_context("spawn")
    from multiprocessing import forkserver

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_LIGHT + _HEAVY if training else _LIGHT)
    with _environment(environment):
        forkserver.ensure_running()  # the server keeps the environment it was started in
    return context


def start_notebook(
    context: BaseContext,
    source: Path,
    output: Path,
    parameters: Mapping[str, Any],
    *,
    cwd: Path,
    log: Path,
    environment: Mapping[str, str],
) -> BaseProcess:
    """Execute one notebook by papermill in a process of its own.

    Parameters
    ----------
    context : BaseContext
        What :func:`kernel_context` returned.
    source, output : Path
        The notebook and its executed copy.
    parameters : Mapping
        What papermill injects.
    cwd : Path
        Where the notebook runs.
    log : Path
        File that takes what the process and its kernel print.
    environment : Mapping
        Environment variables of the process and its kernel.

    Returns
    -------
    BaseProcess
        Leads a session of its own, so Ctrl-C does not reach it. Its exit code is 0 if every cell
        ran.
    """
    process = context.Process(  # type: ignore[attr-defined]
        target=_execute,
        args=(source, output, dict(parameters), cwd, log, dict(environment), can_fork()),
    )
    with _environment(environment):  # a spawned process reads it before it is told
        process.start()
    return process


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _execute(
    source: Path,
    output: Path,
    parameters: dict[str, Any],
    cwd: Path,
    log: Path,
    environment: dict[str, str],
    fork: bool,
) -> None:
    os.setsid()
    os.environ.update(environment)
    stream = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for standard in (1, 2):
        os.dup2(stream, standard)
    os.chdir(cwd)

    import papermill

    logging.getLogger("papermill").setLevel(logging.ERROR)
    kernel = _fork_kernel() if fork else None
    try:
        papermill.execute_notebook(
            source,
            output,
            parameters,
            kernel_name="python3",
            progress_bar=False,
            cwd=cwd,
            km=kernel,
        )
    finally:
        if kernel is not None:
            kernel.end()


def _fork_kernel() -> Any:
    """Fork a kernel of this process and return the manager of it.

    Nothing here has opened a socket or an event loop yet, so the fork inherits none.
    """
    from jupyter_client.manager import AsyncKernelManager

    class ForkedKernelManager(AsyncKernelManager):
        """A kernel that runs already, as a child of this process."""

        process: BaseProcess

        @property
        def has_kernel(self) -> bool:
            return True

        async def _async_is_alive(self) -> bool:
            return self.process.is_alive()

        def end(self) -> None:
            """End the kernel: politely, then not."""
            self.process.terminate()
            self.process.join(5)
            self.process.kill()
            self.cleanup_connection_file()

    manager = ForkedKernelManager()
    manager.write_connection_file()
    manager.process = multiprocessing.get_context("fork").Process(
        target=_kernel, args=(manager.connection_file,)
    )
    manager.process.start()
    return manager


def _kernel(connection_file: str) -> None:
    os.environ["JPY_PARENT_PID"] = str(os.getppid())  # a kernel without its parent ends itself

    from ipykernel.kernelapp import IPKernelApp

    IPKernelApp.launch_instance(argv=["-f", connection_file])
