"""Tables of chapters: what each shows, the command that repeats it and its time, where it opens."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from urllib.parse import urlsplit

import yaml
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from bandpo.profiles import Project
from companion.claims import read_results
from companion.tables import stamps


class ChaptersTable(SphinxDirective):
    """The chapters of one part of the contents.

    The argument is the part's caption in ``_toc.yml``. A line of the content is a page's file name,
    a colon and what the page shows; for a page without a line that is the first sentence of its
    point.
    """

    required_arguments = 1
    final_argument_whitespace = True
    has_content = True

    def run(self) -> list[nodes.Node]:
        root = Path(self.env.srcdir)
        self.env.note_dependency(str(root / "_toc.yml"))
        pages = contents(root).get(self.arguments[0])
        if pages is None:
            raise self.error(f"_toc.yml has no part {self.arguments[0]!r}")
        shows = dict(line.split(": ", 1) for line in self.content if line)
        stems = [Path(page).name for page in pages]
        if unknown := set(shows).difference(stems):
            raise self.error(f"{sorted(unknown)} are no pages of {self.arguments[0]!r} in _toc.yml")
        lines = ["| chapter | shows | command | minutes |", "|---|---|---|---:|"]
        for page, stem in zip(pages, stems, strict=True):
            try:
                command, seconds = self._repeat(root, page, stem)
            except ValueError as error:
                raise self.error(f"{page}: {error}") from None
            what = shows[stem] if stem in shows else point(root, page)
            cells = ("{doc}`/" + page + "`", what, command, minutes(seconds))
            lines.append("| " + " | ".join(cells) + " |")
        table = self.parse_text_to_nodes("\n".join(lines))
        return [nodes.container("", *table, classes=["chapters"])]

    def _repeat(self, root: Path, page: str, stem: str) -> tuple[str, float | None]:
        """Return the command that repeats what a page says, and the seconds that it took."""
        if page.startswith("notebooks/"):
            made = stamps(Project(self.config.companion_profile, root), stem)
            return f"`python -m bandpo.run {stem}`", sum(one["seconds"] for one in made)
        labels = re.findall(r"^:label: (\S+)", (root / f"{page}.md").read_text(), re.MULTILINE)
        counts: Counter[str] = Counter()
        seconds = 0.0
        for test, result in read_results(root)[0].items():
            if not set(labels).isdisjoint(result["claims"]):
                counts[test.partition("::")[0]] += 1
                seconds += result["seconds"]
        if not counts:
            return "", None
        return f"`pytest {counts.most_common(1)[0][0]}`", seconds


class OpenTable(SphinxDirective):
    """Every notebook: where it opens in a browser at this commit, and its executed copy."""

    def run(self) -> list[nodes.Node]:
        root = Path(self.env.srcdir)
        project = Project(self.config.companion_profile, root)
        name = urlsplit(self.config.companion_repository).path.strip("/")
        place = f"{name}/{{}}{self.config.companion_revision}"
        binder = f"https://mybinder.org/v2/gh/{place.format('')}?urlpath=lab/tree/notebooks"
        colab = f"https://colab.research.google.com/github/{place.format('blob/')}/notebooks"
        lines = ["| notebook | in the browser | executed copy |", "|---|---|---|"]
        for stem in project.sections:
            copy = project.shown(stem).copy
            download = ""
            if copy.is_file():
                inside = copy.relative_to(root).as_posix()
                download = "{download}`" + f"{stem}.ipynb </{inside}>`"
            links = f"[Binder]({binder}/{stem}.ipynb), [Colab]({colab}/{stem}.ipynb)"
            lines.append("| {doc}`/notebooks/" + f"{stem}` | {links} | {download} |")
        table = self.parse_text_to_nodes("\n".join(lines))
        return [nodes.container("", *table, classes=["cards"])]


def contents(root: Path) -> dict[str, list[str]]:
    """Return caption of a part -> its pages, from ``_toc.yml``."""
    toc = yaml.safe_load((root / "_toc.yml").read_text(encoding="utf-8"))
    return {
        part["caption"]: [chapter["file"] for chapter in part["chapters"]]
        for part in toc.get("parts", [])
    }


def point(root: Path, page: str) -> str:
    """Return the first sentence of a page's point, or nothing where it states none."""
    if page.startswith("notebooks/"):
        notebook = json.loads((root / f"{page}.ipynb").read_text(encoding="utf-8"))
        text = "\n".join("".join(cell["source"]) for cell in notebook["cells"])
    else:
        text = (root / f"{page}.md").read_text(encoding="utf-8")
    found = re.search(r"\*\*The point\.\*\*\s+(.+?[.!?])(?=\s)", text, re.DOTALL)
    return " ".join(found[1].split()).replace("|", r"\|") if found else ""


def minutes(seconds: float | None) -> str:
    """Return a time in minutes for a table."""
    if seconds is None:
        return ""
    return "< 0.1" if seconds < 3 else f"{seconds / 60:.1f}"


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("chapters-table", ChaptersTable)
    app.add_directive("open-table", OpenTable)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
