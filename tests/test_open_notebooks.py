"""Opening a notebook elsewhere: Binder's files, the cell for Colab, the repository's address."""

import ast
import json
import os
import re
import subprocess
import tomllib
from importlib.metadata import packages_distributions

import yaml
from packaging.requirements import Requirement

from bandpo.provenance import ROOT

BINDER = ROOT / "binder"


def test_binder_installs_the_pins_with_pytorch_for_cpus_first(tmp_path):
    fake = tmp_path / "pip"
    fake.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n')
    fake.chmod(0o755)
    assert os.access(BINDER / "postBuild", os.X_OK)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    subprocess.run([BINDER / "postBuild"], cwd=ROOT, env=environment, check=True)
    calls = (tmp_path / "calls").read_text().splitlines()
    lock = (ROOT / "requirements.lock").read_text()
    torch = re.search(r"^torch==\S+$", lock, re.MULTILINE)[0]
    assert calls[0].endswith(f"/whl/cpu {torch}")
    assert [" -r requirements.lock" in call for call in calls].index(True) == 1
    assert calls[-1].endswith("--no-deps --editable .")
    assert "nvidia" not in lock


def test_binder_has_a_python_that_the_package_supports():
    environment = yaml.safe_load((BINDER / "environment.yml").read_text())
    python = next(one for one in environment["dependencies"] if str(one).startswith("python="))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = Requirement(f"python{project['requires-python']}").specifier
    assert wanted.contains(python.removeprefix("python=") + ".0")


def test_the_cell_for_colab_brings_what_the_notebooks_import():
    page = (ROOT / "book" / "run.md").read_text()
    extra, others = re.search(r'--editable "\.\[(\w+)\]" (.+)', page).groups()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = [*project["dependencies"], *project["optional-dependencies"][extra], *others.split()]
    brought = {Requirement(one).name.lower() for one in listed} | {"bandpo", "ipython"}
    known = packages_distributions()
    missing = {}
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        cells = json.loads(path.read_text())["cells"]
        code = "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "code")
        for node in ast.walk(ast.parse(code)):
            names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            for top in {name.partition(".")[0] for name in names}:
                owners = {owner.lower() for owner in known.get(top, [])}
                if owners and not owners & brought:
                    missing[path.stem] = top
    assert missing == {}


def test_links_lead_to_the_repository_that_builds_the_book(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "book" / "_ext")
    from companion.site import repository

    monkeypatch.delenv("GITHUB_REPOSITORY", raising=False)
    assert repository("https://example.org/a/b/") == "https://example.org/a/b"
    monkeypatch.setenv("GITHUB_REPOSITORY", "someone/fork")
    monkeypatch.setenv("GITHUB_SERVER_URL", "https://github.com")
    assert repository("https://example.org/a/b") == "https://github.com/someone/fork"
