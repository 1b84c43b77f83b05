"""Sphinx extensions of this book: executed notebooks, checked statements, generated tables."""

from __future__ import annotations

from typing import Any

from sphinx.application import Sphinx


def setup(app: Sphinx) -> dict[str, Any]:
    for part in (
        "executed", "claims", "tables", "chapters", "typography", "terms", "site", "weight",
    ):  # fmt: skip
        app.setup_extension(f"companion.{part}")
    return {"parallel_read_safe": True, "parallel_write_safe": True}
