"""Execute the notebooks: ``python -m bandpo.run [NOTEBOOK ...] [--profile cpu] [-p NAME VALUE]``.

A front end to papermill that refuses what papermill lets through. It checks every parameter
before anything starts, runs several notebooks side by side, skips what is up to date, and puts an
executed copy in its place only when every cell ran. What failed lies under ``build/failed/``.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from bandpo.executor import RunError, execute
from bandpo.profiles import Project
from bandpo.provenance import ROOT


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bandpo.run",
        description="Execute notebooks with checked parameters; skip those that are up to date.",
    )
    parser.add_argument(
        "notebooks",
        nargs="*",
        metavar="NOTEBOOK",
        help="stem or path; default: all that the profile names",
    )
    parser.add_argument(
        "--profile", default="cpu", help="a file of notebooks/params/ (default: cpu)"
    )
    parser.add_argument(
        "-p",
        dest="parameters",
        nargs=2,
        action="append",
        default=[],
        metavar=("NAME", "VALUE"),
        help="set a parameter of the named notebooks; their copies go to build/executed/custom/",
    )
    parser.add_argument(
        "--jobs",
        type=_workers,
        default=os.cpu_count() or 1,
        help="notebooks side by side (default: one for each core)",
    )
    parser.add_argument("--dry-run", action="store_true", help="say what would run, and why")
    return parser


def _workers(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of notebooks, 1 or more")
    return int(text)


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Run the command line.

    Parameters
    ----------
    arguments : sequence of str, optional
        Default: those of the process.
    root : Path
        The repository.

    Returns
    -------
    int
        The exit status: 0 done, 1 a notebook failed, 2 refused before anything ran, 130
        interrupted.
    """
    options = _parser().parse_args(arguments)
    try:
        if options.parameters and not options.notebooks:
            raise ValueError("-p needs the notebook that it is for")
        project = Project(options.profile, root)
        stems = [Path(name).stem for name in options.notebooks]
        jobs = project.plan(stems, dict(options.parameters))
    except (ValueError, TypeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.dry_run:
        for job in jobs:
            print(f"{job.name}  {project.fault(job) or 'up to date'}  {dict(job.parameters)}")
        return 0
    try:
        execute(project, jobs, options.jobs)
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from what is finished", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
