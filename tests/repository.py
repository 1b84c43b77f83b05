"""A small repository with real notebooks, to run and render in a test."""

from __future__ import annotations

from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

KERNEL = {"name": "python3", "display_name": "Python 3", "language": "python"}


def write_notebook(root: Path, stem: str, parameters: str, *cells: str) -> Path:
    """Write a notebook with a title, a parameters cell and the given code cells."""
    tagged = {"tags": ["parameters"]}
    every = [
        new_markdown_cell(f"# {stem}", id="title"),
        new_code_cell(parameters, id="parameters", metadata=tagged),
        *(new_code_cell(source, id=f"cell-{i}") for i, source in enumerate(cells)),
    ]
    path = root / "notebooks" / f"{stem}.ipynb"
    nbformat.write(new_notebook(cells=every, metadata={"kernelspec": KERNEL}), path)
    return path


def make_repository(root: Path, profile: str) -> Path:
    """Make the folders and files that a digest covers, and the profile ``cpu``."""
    for folder in ("bandpo", "tests", "notebooks/params", "book"):
        (root / folder).mkdir(parents=True)
    (root / "bandpo" / "core.py").write_text("x = 1\n")
    (root / "requirements.lock").write_text("numpy==2.0\n")
    (root / "notebooks" / "params" / "cpu.yaml").write_text(profile)
    return root
