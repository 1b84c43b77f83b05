"""What a page loads: only the icons that the book uses, and the weight of each page, written down.

A page's weight is what a browser fetches for it from a server that compresses text, as GitHub Pages
does. A page above the bound is a warning (``companion.heavy``).
"""

from __future__ import annotations

import gzip
import re
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from bs4 import BeautifulSoup
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

logger = logging.getLogger(__name__)

_PLACE = "<p>The table is on the page of the book, not on paper.</p>"
_KINDS = {".html": "text", ".css": "styles", ".js": "scripts"}
_COMPRESSED = (".html", ".css", ".js", ".svg")
# One icon of the theme's bundle: name, width, height, other names, code point, path or paths.
_ICON = re.compile(
    r'"?([a-z0-9-]+)"?:\[\d+,\d+,\[([^\]]*)\],"[0-9a-f]+",(?:"[^"]*"|\["[^"]*","[^"]*"\])\],?'
)
_MANY_ICONS = 1000
_FONT = "_static/vendor/fontawesome/webfonts/fa-solid-900.woff2"
_IMPORT = re.compile(r"""@import\s+(?:url\()?["']?([^"')\s;]+)""")


@cache
def _fetched(path: Path) -> int:
    """Return the bytes of a file on its way to a browser."""
    content = path.read_bytes()
    return len(gzip.compress(content, mtime=0)) if path.suffix in _COMPRESSED else len(content)


def loads(page: Path) -> set[Path]:
    """Return the local files that a built page makes a browser fetch, the page itself included."""
    soup = BeautifulSoup(page.read_text(encoding="utf-8"), "html.parser")
    links = "link:is([rel=stylesheet], [rel=preload], [rel=icon])"
    tags = soup.select(f"script[src], img[src], {links}")
    addresses = [urlsplit(str(tag.get("src") or tag["href"])) for tag in tags]
    paths = [page.parent / unquote(one.path) for one in addresses if not one.scheme]
    imported = [
        style.parent / urlsplit(name).path
        for style in paths
        if style.suffix == ".css"
        for name in _IMPORT.findall(style.read_text(encoding="utf-8"))
    ]
    # The style sheets may ask for the icon font as well, before the icons are drawn.
    fonts = [found for root in page.parents if (found := root / _FONT).is_file()]
    return {page, *(path.resolve() for path in [*paths, *imported, *fonts])}


def weigh(page: Path) -> dict[str, int]:
    """Return kind of file -> bytes that a first visit to a page fetches, and their sum, "total"."""
    weights = dict.fromkeys((*_KINDS.values(), "pictures"), 0)
    for path in loads(page):
        weights[_KINDS.get(path.suffix, "pictures")] += _fetched(path)
    return {**weights, "total": sum(weights.values())}


def keep_used_icons(html: Path) -> None:
    """Leave in the theme's script of two thousand icons only those that a page or a script names.

    Raises
    ------
    RuntimeError
        If the script is not made as expected.
    """
    script = html / "_static" / "scripts" / "fontawesome.js"
    text = script.read_text(encoding="utf-8")
    if len(_ICON.findall(text)) < _MANY_ICONS:
        raise RuntimeError(f"{script}: no list of icons was found; the theme has changed")
    naming = [*html.rglob("*.html"), *(p for p in html.rglob("*.js") if p != script)]
    used = {
        name
        for path in naming
        for name in re.findall(r"\bfa-([a-z0-9-]+)", path.read_text(encoding="utf-8"))
    }

    def keep(icon: re.Match[str]) -> str:
        names = {icon[1], *re.findall(r'"([a-z0-9-]+)"', icon[2])}
        return icon[0] if names & used else ""

    script.write_text(re.sub(r",\}", "}", _ICON.sub(keep, text)), encoding="utf-8")


class PageWeights(SphinxDirective):
    """The place of the table of weights, which is filled in when all pages are written."""

    def run(self) -> list[nodes.Node]:
        return [nodes.raw("", _PLACE, format="html")]


def finish(app: Sphinx, error: Exception | None) -> None:
    """Thin out the icons, weigh the pages, write the table (``build-finished``)."""
    if error is not None or app.builder.name != "html":
        return
    _fetched.cache_clear()
    html = Path(app.outdir)
    # A second build in one folder finds the icons thinned out already.
    if (html / "_static" / "scripts" / "fontawesome.js").stat().st_size > 2**19:
        keep_used_icons(html)
    bound = app.config.companion_bound_kib
    rows = []
    status = html / f"{app.config.companion_tests_page}.html"
    for name in sorted(app.env.found_docs):
        weights = weigh(html / f"{name}.html")
        kib = {kind: -(-size // 1024) for kind, size in weights.items()}
        rows.append((name, kib))
        if kib["total"] > bound:
            logger.warning(
                "%s weighs %d KiB, more than %d", name, kib["total"], bound,
                type="companion", subtype="heavy",
            )  # fmt: skip
    if status.is_file():
        text = status.read_text(encoding="utf-8")
        table = _table(app, rows, app.config.companion_tests_page)
        status.write_text(text.replace(_PLACE, table), encoding="utf-8")


def _table(app: Sphinx, rows: list[tuple[str, dict[str, int]]], page: str) -> str:
    kinds = list(rows[0][1])
    head = "<th>page</th>" + "".join(f'<th class="num">{kind}</th>' for kind in kinds)
    lines = []
    for name, kib in sorted(rows, key=lambda row: -row[1]["total"]):
        title = app.env.titles[name].astext()
        uri = app.builder.get_relative_uri(page, name)
        cells = "".join(f'<td class="num">{kib[kind]}</td>' for kind in kinds)
        lines.append(f'<tr><td><a href="{uri}">{title}</a></td>{cells}</tr>')
    return (
        '<div class="pst-scrollable-table-container"><table class="table weights">'
        f"<caption>KiB; the build refuses a page above {app.config.companion_bound_kib}</caption>"
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
    )


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_config_value("companion_bound_kib", 1440, "")
    app.add_directive("page-weights", PageWeights)
    app.connect("build-finished", finish, priority=900)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
