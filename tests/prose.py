"""The numbers that are typed into the prose of a page, as they stand there."""

from __future__ import annotations

import re

# What is no prose: code, names of references, and the arguments of short fractions.
_NO_PROSE = (
    r"(?s)^```(?:python|bash|yaml|text)\n.*?^```$",
    r"^:label:.*$",
    r"^```.*$",
    r"`[^`\n]+`",
    r"\]\([^)]*\)",
    r"\(eq-[a-z0-9-]+\)",
    r"\\[td]?frac\d\d",
    r"https?://\S+",
    r"(?<![\\A-Za-z])[A-Za-z]+\d+",  # float64, SmolLM2
)
_POWER = r"(?:\d(?:\.\d+)?\s*\\cdot\s*)?10\^\{?-?\d+\}?"
_PLAIN = r"(?:\d{1,3}(?:,\d{3})+|\d+(?:\.\d+)?)"
_NUMBER = re.compile(rf"(?<![\w.{{^_]){_POWER}|(?<![\w.{{^_]){_PLAIN}(?:\\ldots|\s?\\?%)?")


def typed_numbers(markdown: str) -> list[str]:
    """Return the numbers of a page that may be results, each as typed.

    Left out are whole numbers below 10, unless one is all that a cell of a table holds: they count
    or name things. ``0.087\\ldots``, ``60%`` and ``10^{-24}`` stay together.
    """
    for pattern in _NO_PROSE:
        markdown = re.sub(pattern, " ", markdown, flags=re.MULTILINE)
    found = []
    for line in markdown.splitlines():
        cells = {c.strip(" $*") for c in line.split("|")} if line.startswith("|") else set()
        for match in _NUMBER.finditer(line):
            text = re.sub(r"\s*\\cdot\s*", r" \\cdot ", match[0])
            if len(text) > 1 or text in cells:
                found.append(text)
    return list(dict.fromkeys(found))
