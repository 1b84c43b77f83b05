"""Generated tables: the state of the notebooks, and what the package registers by name."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import yaml
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from bandpo.profiles import Project
from bandpo.provenance import machine, versions
from companion.executed import machine_text

_MANY_VALUES = 4


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
    """Every notebook of the profile: parameters, runs, seconds, when, from which commit."""

    header = ("notebook", "parameters given", "runs", "seconds", "date (UTC)", "commit")

    def rows(self) -> list[tuple[str, ...]]:
        project = Project(self.config.companion_profile, Path(self.env.srcdir))
        return [self._row(project, stem) for stem in project.sections]

    def run(self) -> list[nodes.Node]:
        return [nodes.container("", *super().run(), classes=["cards", "runs"])]

    def _row(self, project: Project, stem: str) -> tuple[str, ...]:
        made, all_runs = stamps(project, stem), len(project.jobs(stem))
        link = "{doc}`/notebooks/" + stem + "`"
        if len(made) < all_runs:
            return (link, "", f"{len(made)} of {all_runs}", "", "", "")
        last = max(made, key=lambda stamp: str(stamp["date"]))
        seconds = sum(stamp["seconds"] for stamp in made)
        commit = (last["commit"] or "none")[:12] + ("+" if last["dirty"] else "")
        date = last["date"][:16].replace("T", " ")
        return (link, _given(made), str(all_runs), f"{seconds:.0f}", date, f"`{commit}`")


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


class RecipesTable(GeneratedTable):
    """Every folder of ``bandpo/recipes/`` with its files, linked at this commit."""

    header = ("folder of `bandpo/recipes`", "model", "files")

    def rows(self) -> list[tuple[str, ...]]:
        root = Path(self.env.srcdir)
        top = root / "bandpo" / "recipes"
        folders = sorted({path.parent for path in top.rglob("*.yaml")})
        return [self._row(root, top, folder) for folder in folders]

    def _row(self, root: Path, top: Path, folder: Path) -> tuple[str, ...]:
        files = sorted(folder.glob("*.yaml"))
        contents = [yaml.safe_load(path.read_text(encoding="utf-8")) for path in files]
        models = {
            one["model_name_or_path"]: None for one in contents if "model_name_or_path" in one
        }
        links = [
            f"[{path.stem}]({self.config.companion_source_url}/{path.relative_to(root).as_posix()})"
            for path in files
        ]
        name = folder.relative_to(top).as_posix()
        return (f"`{name}`", "<br>".join(f"`{one}`" for one in models), ", ".join(links))


class Citation(SphinxDirective):
    """``CITATION.cff`` as BibTeX: this work, and the works that it asks to cite with it."""

    def run(self) -> list[nodes.Node]:
        path = Path(self.env.srcdir) / "CITATION.cff"
        self.env.note_dependency(str(path))
        cff = yaml.safe_load(path.read_text(encoding="utf-8"))
        own = {**cff, "url": self.config.companion_repository, "key": "bandpo-companion"}
        entries = [_bibtex(own), *map(_bibtex, cff["references"])]
        text = "\n\n".join(entries)
        return [nodes.literal_block(text, text, language="bibtex")]


def _bibtex(work: dict[str, Any]) -> str:
    """Return one work of a citation file as a BibTeX entry."""
    names = [
        f"{one['family-names']}, {one['given-names']}" if "family-names" in one
        else "{" + one["name"] + "}"
        for one in work["authors"]
    ]  # fmt: skip
    fields = {
        "title": "{" + work["title"] + "}",
        "author": " and ".join(names),
        "year": work.get("year"),
        "version": work.get("version"),
        "url": work["url"],
    }
    first = str(work["authors"][0].get("family-names", "")).lower()
    key = work.get("key") or f"{first}{work['year']}"
    lines = [f"  {name} = {{{value}}}," for name, value in fields.items() if value]
    return "\n".join(["@misc{" + key + ",", *lines, "}"])


def _number(value: float) -> str:
    return r"$\infty$" if math.isinf(value) else f"{value + 0.0:.4g}"  # no -0


def _in_cell(formula: str) -> str:
    """LaTeX whose bars do not end a cell of a Markdown table."""
    return formula.replace("|", r"\vert ")


def stamps(project: Project, stem: str) -> list[dict[str, Any]]:
    """Return the stamps of a notebook's executed copies, of those that there are."""
    found = (_stamp(job.copy) for job in project.jobs(stem))
    return [stamp for stamp in found if stamp is not None]


def _given(made: list[dict[str, Any]]) -> str:
    """Return the parameters that were given, each with its values over all runs."""
    values: dict[str, list[str]] = {}
    for stamp in made:
        for name in stamp["given"]:
            seen = values.setdefault(name, [])
            if (text := repr(stamp["parameters"][name])) not in seen:
                seen.append(text)
    lines = [
        f"`{name}`: {len(seen)} values"
        if len(seen) > _MANY_VALUES
        else f"`{name}` = " + ", ".join(map(_plain, seen))
        for name, seen in values.items()
    ]
    return "<br>".join(lines) or "defaults"


def _plain(text: str) -> str:
    """Return Markdown code that shows a text as it is, inside a table."""
    marks = "``" if "`" in text else "`"
    return f"{marks}{text}{marks}".replace("|", r"\|")


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
    app.add_directive("recipes-table", RecipesTable)
    app.add_directive("citation", Citation)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
