"""Generated tables: the state of the notebooks, and what the package registers by name."""

from __future__ import annotations

import json
import math
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

    header = ("metric", "formula, meaning, and which way is good")

    def rows(self) -> list[tuple[str, ...]]:
        from bandpo.metrics import METRICS

        return [
            (f"`{name}`", f"${_in_cell(formula)}$<br>{meaning}<br>*Good:* {good}.")
            for name, (formula, meaning, good) in METRICS.items()
        ]


class DivergencesTable(GeneratedTable):
    """Every registered divergence: its limits, and those of its band at the default radius."""

    header = (
        "name",
        "$f(0^+)$",
        r"$f'(\infty)$",
        r"$\underline r = 0$ up to $p$",
        r"$\overline r = 1/p$ from $p$",
        r"$\underline r$ for $p \to 1$",
        r"room for $p \to 0$",
        "bounds",
    )

    def rows(self) -> list[tuple[str, ...]]:
        from bandpo.operator import summary

        return [
            (
                f"`{row['name']}`",
                _number(row["f_at_zero"]),
                _number(row["slope_at_infinity"]),
                _number(row["lower_until"]) if row["lower_until"] > 0 else "never",
                _number(row["upper_from"]) if row["upper_from"] < 1 else "never",
                _number(row["lower_at_one"]),
                _number(row["room_at_zero"]),
                "closed form" if row["closed_form"] else "root",
            )
            for row in summary()
        ]


class BoundsTable(GeneratedTable):
    """The band of every registered divergence at a few p, for the default radius."""

    places = (0.01, 0.1, 0.5, 0.9, 0.99)
    header = ("name", *(f"$p = {p:g}$" for p in places))

    def rows(self) -> list[tuple[str, ...]]:
        from bandpo.operator import summary

        return [
            (
                f"`{row['name']}`",
                *(f"{lower:.3g}–{upper:.3g}" for _, lower, upper in row["bounds"]),
            )
            for row in summary(p=self.places)
        ]


def _number(value: float) -> str:
    return r"$\infty$" if math.isinf(value) else f"{value + 0.0:.4g}"  # no -0


def _in_cell(formula: str) -> str:
    """LaTeX whose bars do not end a cell of a Markdown table."""
    return formula.replace("|", r"\vert ")


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
    app.add_directive("bounds-table", BoundsTable)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
