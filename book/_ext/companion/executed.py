"""Show the executed copy of each notebook in the place of its source.

The table of contents names sources, which have no outputs. When Sphinx reads one, its text is
swapped for the copy that ``python -m bandpo.run`` made of exactly this source, with this package,
these parameters and this lock. Any other state is a warning (``companion.missing``, ``.failed``,
``.stale``, ``.altered``), which the project's own build treats as an error.
"""

from __future__ import annotations

import json
from pathlib import PurePosixPath
from typing import Any

from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import logging

from bandpo.profiles import Project

logger = logging.getLogger(__name__)

_ADVICE = {
    "missing": "has not been executed",
    "failed": "was executed, but a cell failed or did not run",
    "stale": "was executed with another source, package, lock, parameters or inputs",
    "altered": "was executed, but the copy was edited afterwards",
}
_VERSIONS = ("python", "torch", "transformers", "trl")


def _is_notebook(docname: str) -> bool:
    return docname.startswith("notebooks/")


def show_executed(app: Sphinx, docname: str, content: list[str]) -> None:
    """Swap a notebook's source for its executed copy (``source-read``)."""
    if not _is_notebook(docname):
        return
    project = Project(app.config.companion_profile, app.srcdir)
    job = project.shown(PurePosixPath(docname).name)
    fault = project.fault(job)
    if fault is not None:
        logger.warning(
            "%s %s: run `python -m bandpo.run --profile %s %s`",
            docname, _ADVICE[fault], project.profile, job.notebook,
            location=docname, type="companion", subtype=fault,
        )  # fmt: skip
    if fault == "missing":
        return
    notebook = json.loads(job.copy.read_text(encoding="utf-8"))
    stamp = notebook["metadata"].get("bandpo")
    collapse_defaults(notebook)
    keep_pictures(notebook)
    if stamp:
        copy = job.copy.relative_to(project.root).as_posix()
        cell = {"cell_type": "markdown", "id": "provenance", "metadata": {}}
        notebook["cells"].append(cell | {"source": provenance_box(stamp, copy)})
    content[0] = json.dumps(notebook)


def collapse_defaults(notebook: dict[str, Any]) -> None:
    """Fold the cell of default parameters when another one was injected below it."""
    tags = [cell["metadata"].get("tags", []) for cell in notebook["cells"]]
    if not any("injected-parameters" in one for one in tags):
        return
    for cell in notebook["cells"]:
        if "parameters" in cell["metadata"].get("tags", []):
            cell["metadata"]["tags"].append("hide-input")
            cell["metadata"]["mystnb"] = {
                "code_prompt_show": "Show default parameters",
                "code_prompt_hide": "Hide default parameters",
            }


def keep_pictures(notebook: dict[str, Any]) -> None:
    """Leave out what the last line of a figure's cell returned, such as ``<Axes: ...>``."""
    for cell in notebook["cells"]:
        if "figure" in cell["metadata"].get("mystnb", {}):
            outputs = cell["outputs"]
            cell["outputs"] = [one for one in outputs if set(one.get("data", {})) != {"text/plain"}]


def provenance_box(stamp: dict[str, Any], copy: str) -> str:
    """Return the Markdown of the box at a notebook's end: what made this page.

    Parameters
    ----------
    stamp : dict
        ``metadata.bandpo`` of the executed copy.
    copy : str
        Path of the copy below the repository.
    """
    given = set(stamp["given"])
    parameters = "\n".join(
        f"{name} = {value!r}" + ("" if name in given else "  # default")
        for name, value in stamp["parameters"].items()
    )
    machine = stamp["machine"]
    versions = ", ".join(
        f"{name} {stamp['versions'][name]}" for name in _VERSIONS if name in stamp["versions"]
    )
    commit = f"`{stamp['commit'][:12]}`" if stamp["commit"] else "none"
    rows = {
        "Profile": f"`{stamp['profile']}`",
        "Commit": commit + (" with uncommitted changes" if stamp["dirty"] else ""),
        "Package, lock": f"`{stamp['package'][:12]}`, `{stamp['lock'][:12]}` (SHA-256)",
        "Versions": versions,
        "Machine": machine_text(machine),
        "Run": f"{stamp['date'][:16].replace('T', ' ')} UTC, {stamp['seconds']:.1f} s",
        "Executed copy": "{download}`" + f"{PurePosixPath(copy).name} </{copy}>`",
    }
    table = "\n".join(f"| {key} | {value} |" for key, value in rows.items())
    return (
        "````{admonition} How this page was made\n:class: dropdown note provenance\n\n"
        f"| what | value |\n|---|---|\n{table}\n\n"
        f"```python\n{parameters or '# no parameters'}\n```\n````\n"
    )


def machine_text(machine: dict[str, Any]) -> str:
    """Return one line about a machine, safe inside a Markdown table."""
    parts = [machine["processor"], f"{machine['cores']} cores", f"{machine['memory_gib']} GiB"]
    return ", ".join([*parts, *machine["gpus"], machine["system"]]).replace("|", "/")


def always_read(app: Sphinx, env: BuildEnvironment, *_: set[str]) -> list[str]:
    """Read every notebook at every build: its page depends on files that Sphinx does not watch."""
    return [docname for docname in env.found_docs if _is_notebook(docname)]


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_config_value("companion_profile", "cpu", "env")
    app.connect("source-read", show_executed)
    app.connect("env-get-outdated", always_read)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
