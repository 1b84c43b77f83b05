"""Generated tables: the state of the notebooks, and what the package registers by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from bandpo.profiles import Project
from bandpo.provenance import machine, versions
from companion.executed import machine_text


class GeneratedTable(SphinxDirective):
    """A Markdown table that a build fills in."""

    header: tuple[str, ...]

    def rows(self) -> list[tuple[str, ...]]:
        raise NotImplementedError

    def run(self) -> list[nodes.Node]:
        lines = [self.header, ("---",) * len(self.header), *self.rows()]
        text = "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
        return self.parse_text_to_nodes(text)


class StatusTable(GeneratedTable):
    """Every notebook of the profile: runs, seconds, when, from which commit."""

    header = ("notebook", "runs", "seconds", "date (UTC)", "commit")

    def rows(self) -> list[tuple[str, ...]]:
        project = Project(self.config.companion_profile, Path(self.env.srcdir))
        return [self._row(project, stem) for stem in project.sections]

    def _row(self, project: Project, stem: str) -> tuple[str, ...]:
        copies = [job.copy for job in project.jobs(stem)]
        stamps = [stamp for copy in copies if (stamp := _stamp(copy)) is not None]
        link = "{doc}`/notebooks/" + stem + "`"
        if len(stamps) < len(copies):
            return (link, f"{len(stamps)} of {len(copies)}", "", "", "")
        last = max(stamps, key=lambda stamp: str(stamp["date"]))
        seconds = sum(stamp["seconds"] for stamp in stamps)
        commit = (last["commit"] or "none")[:12] + ("+" if last["dirty"] else "")
        date = last["date"][:16].replace("T", " ")
        return (link, str(len(copies)), f"{seconds:.0f}", date, f"`{commit}`")


class VersionsTable(GeneratedTable):
    """The machine and the packages that built this book."""

    header = ("part", "version")

    def rows(self) -> list[tuple[str, ...]]:
        return [("machine", machine_text(machine())), *versions().items()]


class MetricsTable(GeneratedTable):
    """Every metric that the trainer logs, defined once in ``bandpo.metrics``."""

    header = ("metric", "formula", "meaning", "good")

    def rows(self) -> list[tuple[str, ...]]:
        from bandpo.metrics import METRICS

        return [
            (f"`{name}`", f"${formula}$", meaning, good)
            for name, (formula, meaning, good) in METRICS.items()
        ]


class DivergencesTable(GeneratedTable):
    """Every registered divergence with its two limits."""

    header = ("name", "$f(0^+)$", "slope at infinity", "bounds")

    def rows(self) -> list[tuple[str, ...]]:
        from bandpo.divergences import get_divergence, list_divergences

        found = [get_divergence(name) for name in list_divergences()]
        return [
            (
                f"`{one.name}`",
                f"{one.f_at_zero:.4g}",
                f"{one.slope_at_infinity:.4g}",
                "closed form" if one.closed_form else "root",
            )
            for one in found
        ]


def _stamp(copy: Path) -> dict[str, Any] | None:
    try:
        return json.loads(copy.read_text(encoding="utf-8"))["metadata"].get("bandpo")
    except (FileNotFoundError, ValueError):
        return None


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("status-table", StatusTable)
    app.add_directive("versions-table", VersionsTable)
    app.add_directive("metrics-table", MetricsTable)
    app.add_directive("divergences-table", DivergencesTable)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
