"""What made a result: digests of what went in, versions, machine, commit.

A digest is the SHA-256 of content alone, never of times or places, so that two checkouts of one
commit agree. Only the standard library is used: the book's build and every run import this.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

# The repository: the folder that holds bandpo/, notebooks/ and book/.
ROOT = Path(__file__).resolve().parents[1]

LOCKS = ("requirements.lock", "requirements-nodeps.lock")
PACKAGES = ("torch", "numpy", "scipy", "transformers", "trl", "accelerate", "datasets", "papermill")
# Cell metadata that changes what a cell does or how the book shows it, outputs apart.
_SHOWN = ("tags", "mystnb")


def digest(value: Any) -> str:
    """Return the SHA-256 of a JSON value, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def tree_digest(root: Path, paths: Iterable[str]) -> str:
    """Return the digest of files and folders below ``root``: their names and their bytes.

    Parameters
    ----------
    root : Path
        Folder that the names are relative to.
    paths : iterable of str
        Files or folders. Missing ones count as absent; hidden files and byte code do not count.
    """
    total = hashlib.sha256()
    for name in sorted(paths):
        top = root / name
        for path in sorted(top.rglob("*")) if top.is_dir() else [top]:
            inside = path.relative_to(root)
            hidden = any(p.startswith(".") or p == "__pycache__" for p in inside.parts)
            if path.is_file() and not hidden:
                total.update(f"{inside.as_posix()}\0".encode())
                total.update(hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()


def package_digest(root: Path = ROOT) -> str:
    """Return the digest of ``bandpo/``, recipes included."""
    return tree_digest(root, ["bandpo"])


def lock_digest(root: Path = ROOT) -> str:
    """Return the digest of the files that pin every dependency."""
    return tree_digest(root, LOCKS)


def claims_digest(root: Path = ROOT) -> str:
    """Return the digest of what a test result depends on: package, tests and lock."""
    return tree_digest(root, ["bandpo", "tests", *LOCKS])


def notebook_digest(notebook: Mapping[str, Any]) -> str:
    """Return the digest of a notebook's cells without outputs, the same before and after a run.

    Parameters
    ----------
    notebook : Mapping
        The notebook's JSON. The cell that papermill injects is left out, and so are cell ids.
    """
    return digest(
        [
            [
                cell["cell_type"],
                "".join(cell["source"]),
                {key: cell["metadata"][key] for key in _SHOWN if cell["metadata"].get(key)},
            ]
            for cell in notebook["cells"]
            if "injected-parameters" not in cell["metadata"].get("tags", [])
        ]
    )


def content_digest(notebook: Mapping[str, Any]) -> str:
    """Return the digest of all that a reader sees of an executed notebook, outputs included."""
    return digest(
        [
            [cell["cell_type"], "".join(cell["source"]), cell.get("outputs", [])]
            for cell in notebook["cells"]
        ]
    )


def commit(root: Path = ROOT) -> dict[str, Any]:
    """Return ``{"commit": hash or None, "dirty": whether tracked files differ from it}``."""
    head = _output("git", "-C", str(root), "rev-parse", "HEAD")
    status = _output("git", "-C", str(root), "status", "--porcelain", "--untracked-files=no")
    return {"commit": head or None, "dirty": bool(status)}


def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed packages that a result depends on."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def machine() -> dict[str, Any]:
    """Return processor, cores, memory in GiB, GPUs and system, without the machine's name."""
    gpus = _output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader").splitlines()
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gib": _memory_gib(),
        "gpus": [name.strip() for name in gpus],
        "system": f"{platform.system()} {platform.machine()}",
    }


def provenance(root: Path = ROOT) -> dict[str, Any]:
    """Return commit, digests of package and lock, versions, machine and date (UTC).

    Parameters
    ----------
    root : Path
        The repository.
    """
    return {
        **commit(root),
        "package": package_digest(root),
        "lock": lock_digest(root),
        "versions": versions(),
        "machine": machine(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _output(*command: str) -> str:
    """Return what a command prints, or nothing where it is missing or fails."""
    if shutil.which(command[0]) is None:
        return ""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _memory_gib() -> float | None:
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None
    return round(total / 2**30, 1)
