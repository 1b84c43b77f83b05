"""Small print: a minus for a hyphen, no lines that begin with a sign, intervals that stand back."""

from __future__ import annotations

import re

from docutils import nodes
from sphinx.application import Sphinx

_CODE = (nodes.literal, nodes.literal_block, nodes.math, nodes.math_block, nodes.raw)
_PARENTHESES = re.compile(r"(\((?:[^()]|\([^()]*\))*\))")  # with one more pair inside
_INTERVAL = re.compile(r"\d to [+−]?\d")
_CLOSING = re.compile(r"[.,;:?!)\]]+")
_SHORT = 24  # characters of code that have room in any line


def refine(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Set the text of a page (``doctree-resolved``, before terms become links)."""
    for text in list(doctree.findall(nodes.Text)):
        if not isinstance(text.parent, _CODE):
            _set_text(text)
    for code in doctree.findall(nodes.literal):
        if len(code.astext()) <= _SHORT:
            code["classes"].append("unbroken")
    for formula in list(doctree.findall(nodes.math)):
        _keep_punctuation(formula)


def _set_text(text: nodes.Text) -> None:
    """Write a minus as one, keep "%" at its number, and set intervals apart."""
    old = text.astext()
    new = re.sub(r"(?:(?<=\d)|^) %", "\u00a0%", old)
    new = re.sub(r"(?<=\w) - (?=\w)", " − ", new)
    if "pasted-text" in text.parent.get("classes", ()):
        new = re.sub(r"^-(?=\d)", "−", new)
    pieces: list[nodes.Node] = [
        nodes.inline("", part, classes=["aside"])
        if part.startswith("(") and _INTERVAL.search(part)
        else nodes.Text(part)
        for part in _PARENTHESES.split(new)
        if part
    ]
    if (new != old or len(pieces) > 1) and "aside" not in text.parent.get("classes", ()):
        text.parent.replace(text, pieces)


def _keep_punctuation(formula: nodes.math) -> None:
    """Keep the punctuation after a formula in its line: browsers break there."""
    after = formula.next_node(descend=False, siblings=True)
    if not isinstance(after, nodes.Text) or not (mark := _CLOSING.match(after.astext())):
        return
    parent = formula.parent
    parent.replace(after, nodes.Text(after.astext()[mark.end() :]))
    together = nodes.inline("", "", classes=["unbroken"])
    parent.replace(formula, together)
    together += [formula, nodes.Text(mark[0])]


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("doctree-resolved", refine, priority=400)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
