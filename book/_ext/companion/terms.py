"""Glossary terms explain themselves: the first on a page is a link that shows its definition.

A term that a page uses without a link gets one where it first occurs in the text. The definitions
stand at the end of the page, hidden; ``definitions.js`` shows one beside its link.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from html import escape
from typing import Any

from docutils import nodes
from docutils.utils import new_document
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.builders.html import StandaloneHTMLBuilder

_DEFINITION = "<definition>"
# Text in these is no prose, or is a link already.
_LEFT_ALONE = (
    nodes.reference, nodes.literal, nodes.literal_block, nodes.math, nodes.math_block, nodes.title,
    nodes.raw, nodes.term, nodes.field, nodes.table, nodes.caption,
)  # fmt: skip


@cache
def glossary(app: Sphinx) -> dict[str, tuple[str, nodes.definition]]:
    """Return id -> term and definition; nothing where the book has no glossary."""
    page = app.config.companion_glossary
    if page not in app.env.found_docs:
        return {}
    return {
        term["ids"][0]: (term.astext(), term.next_node(nodes.definition, siblings=True))
        for term in app.env.get_doctree(page).findall(nodes.term)
        if term["ids"]
    }


def link_first_uses(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Turn the first use of each term into a link to the glossary (``doctree-resolved``)."""
    if doctree.get("source") == _DEFINITION or docname == app.config.companion_glossary:
        return
    page = app.builder.get_relative_uri(docname, app.config.companion_glossary)
    open_terms = {one: term for one, (term, _) in glossary(app).items()}
    for one in _linked(doctree):
        open_terms.pop(one, None)
    for text in list(_prose(doctree)):
        found = _first(text, open_terms)
        if found is None:
            continue
        # Several terms in one text: the earliest now, the others in what follows it.
        pieces: list[nodes.Node] = []
        rest = text.astext()
        while found is not None:
            identity, start, end = found
            link = nodes.reference(
                "", rest[start:end], refuri=f"{page}#{identity}", internal=True, classes=["term"]
            )
            pieces += [nodes.Text(rest[:start]), link]
            rest = rest[end:]
            del open_terms[identity]
            found = _first(rest, open_terms)
        text.parent.replace(text, [*pieces, nodes.Text(rest)])


def _prose(doctree: nodes.document) -> Iterator[nodes.Text]:
    for paragraph in doctree.findall(nodes.paragraph):
        for text in paragraph.findall(nodes.Text):
            parent = text.parent
            while parent is not None and not isinstance(parent, _LEFT_ALONE):
                parent = parent.parent
            if parent is None:
                yield text


def _first(text: str, terms: dict[str, str]) -> tuple[str, int, int] | None:
    """Return id, start and end of the first term in a text; of two at one place the longer."""
    found = [
        (match.start(), -match.end(), identity)
        for identity, term in terms.items()
        if (match := re.search(rf"(?<![\w-]){re.escape(term)}s?(?![\w-])", text, re.IGNORECASE))
    ]
    if not found:
        return None
    start, end, identity = min(found)
    return identity, start, -end


def _linked(doctree: nodes.document) -> list[str]:
    """Return the ids of the terms that a page links to."""
    addresses = [link.get("refuri", "") for link in doctree.findall(nodes.reference)]
    return list(dict.fromkeys(a.partition("#")[2] for a in addresses if "#term-" in a))


def add_definitions(
    app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: nodes.document | None
) -> None:
    """Put the definitions of a page's terms at its end (``html-page-context``)."""
    builder = app.builder
    if doctree is None or not isinstance(builder, StandaloneHTMLBuilder) or builder.name != "html":
        return
    known = glossary(app)
    used = [one for one in _linked(doctree) if one in known]
    boxes = [
        f'<div class="definition" id="{escape(one.replace("term-", "definition-", 1))}" '
        f'role="tooltip" hidden>{_render(builder, page, known[one][1])}</div>'
        for one in used
    ]
    context["body"] += "".join(boxes)


def _render(builder: StandaloneHTMLBuilder, page: str, definition: nodes.definition) -> str:
    document = new_document(_DEFINITION)
    document.settings.env = builder.env
    document += [child.deepcopy() for child in definition.children]
    for reference in document.findall(pending_xref):
        reference["refdoc"] = page  # where it stands now: addresses are relative
    builder.env.resolve_references(document, page, builder)
    return builder.render_partial(nodes.container("", *document.children))["fragment"]


def forget(app: Sphinx) -> None:
    """Read the glossary anew in each build (``builder-inited``)."""
    glossary.cache_clear()


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_config_value("companion_glossary", "book/glossary", "env")
    app.add_js_file("definitions.js", loading_method="defer")
    app.connect("builder-inited", forget)
    app.connect("doctree-resolved", link_first_uses)
    app.connect("html-page-context", add_definitions)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
