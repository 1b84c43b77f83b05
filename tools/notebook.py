"""Fork notebook 11 for a divergence of your own: ``make notebook NAME=mine``.

Writes notebooks/NAME.ipynb, enters it in ``_toc.yml`` after the last notebook and in the profile
``notebooks/params/cpu.yaml``; so the book shows it, ``make book`` runs it and the tests check it.
Nothing is written unless all three can be.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = "11_new_divergence"
# What a file name, a label of a figure and a key of YAML may be alike.
NAME = re.compile(r"[a-z][a-z0-9_]*")


def fork(root: Path, name: str) -> dict[Path, str]:
    """Return the files to write and their texts.

    Parameters
    ----------
    root : Path
        The repository.
    name : str
        Stem of the new notebook.

    Raises
    ------
    ValueError
        If the name will not do or is taken, or a file does not look as expected.
    """
    if not NAME.fullmatch(name):
        raise ValueError(
            f"NAME={name!r} must begin with a letter and hold lower-case letters, digits and _ "
            "only, as in NAME=my_divergence"
        )
    notebook = root / "notebooks" / f"{name}.ipynb"
    toc, profile = root / "_toc.yml", root / "notebooks" / "params" / "cpu.yaml"
    contents, jobs = (path.read_text(encoding="utf-8") for path in (toc, profile))
    entry, job = f"- file: notebooks/{name}", f"{name}: {{}}"
    if notebook.exists():
        raise ValueError(f"{notebook.relative_to(root)} exists already; choose another NAME")
    if re.search(rf"^\s*{entry}\s*$", contents, re.MULTILINE):
        raise ValueError(f"_toc.yml names notebooks/{name} already; choose another NAME")
    if re.search(rf"^{name}:", jobs, re.MULTILINE):
        raise ValueError(f"notebooks/params/cpu.yaml has {name} already; choose another NAME")
    pages = list(re.finditer(r"^( *)- file: notebooks/.*\n", contents, re.MULTILINE))
    if not pages:
        raise ValueError("_toc.yml names no notebook to put the new one after")
    end, indent = pages[-1].end(), pages[-1][1]
    return {
        notebook: _renamed(root / "notebooks" / f"{SOURCE}.ipynb", name),
        toc: f"{contents[:end]}{indent}{entry}\n{contents[end:]}",
        profile: f"{jobs.rstrip()}\n{job}\n",
    }


def _renamed(source: Path, name: str) -> str:
    """Return the notebook with a title of its own, and labels that are unique in the book."""
    notebook = json.loads(source.read_text(encoding="utf-8"))
    first, *rest = notebook["cells"][0]["source"]
    notebook["cells"][0]["source"] = [f"{first.rstrip()}: {name}\n", *rest]
    for cell in notebook["cells"]:
        if figure := cell["metadata"].get("mystnb", {}).get("figure"):
            figure["name"] = figure["name"].replace("fig-new-", f"fig-{name.replace('_', '-')}-")
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def write(files: dict[Path, str]) -> None:
    """Write all files, or put back what was there."""
    before = {path: path.read_bytes() if path.exists() else None for path in files}
    try:
        for path, text in files.items():
            path.write_text(text, encoding="utf-8")
    except OSError:
        for path, content in before.items():
            if content is not None:
                path.write_bytes(content)
            else:
                path.unlink(missing_ok=True)
        raise


def main() -> int:
    """Run the command line; 0 if the notebook was made, 2 if it was refused."""
    parser = argparse.ArgumentParser(description="Fork notebook 11 for a divergence of your own.")
    parser.add_argument("name", metavar="NAME", help="stem of the new notebook")
    name = parser.parse_args().name
    try:
        write(fork(ROOT, name))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(
        f"notebooks/{name}.ipynb is in the book and in the cpu profile.\n"
        "  1. edit the cell between the lines `your divergence`\n"
        f"  2. .venv/bin/python -m bandpo.run {name}   executes it: "
        f"build/executed/cpu/{name}.ipynb\n"
        "  3. make book\n"
        f"To undo: delete notebooks/{name}.ipynb and the line with {name} in _toc.yml and in "
        "notebooks/params/cpu.yaml."
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
