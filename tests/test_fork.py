"""Forking: ``make notebook`` on a copy of the repository, and the shipped sets of parameters."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib import util
from pathlib import Path

import nbformat
import papermill
import pytest
import yaml

from bandpo.params import read_defaults, resolve
from bandpo.profiles import Project
from bandpo.provenance import ROOT
from bandpo.testing import ContractError, check_divergence

SETS = ROOT / "notebooks" / "params" / "divergences"
NOTEBOOK = ROOT / "notebooks" / "11_new_divergence.ipynb"
WRITTEN = ("_toc.yml", "notebooks/params/cpu.yaml")


@pytest.fixture
def tool():
    spec = util.spec_from_file_location("notebook_tool", ROOT / "tools" / "notebook.py")
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def copy(tmp_path):
    """The files that a fork reads or changes, and the tests of notebooks."""
    for name in ("bandpo", "notebooks", "tools", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("_toc.yml", "pyproject.toml", "requirements.lock", "requirements-nodeps.lock"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def make(root, name):
    return subprocess.run(
        [sys.executable, "tools/notebook.py", name], cwd=root, capture_output=True, text=True
    )


def test_a_fork_is_in_the_book_the_profile_and_the_tests(copy):
    before = {name: (copy / name).read_text() for name in WRITTEN}
    done = make(copy, "my_own2")
    assert done.returncode == 0, done.stderr
    assert "To undo: delete notebooks/my_own2.ipynb" in done.stdout

    toc = yaml.safe_load((copy / "_toc.yml").read_text())
    (pages,) = (p["chapters"] for p in toc["parts"] if p["caption"] == "Notebooks")
    assert pages[-1] == {"file": "notebooks/my_own2"}
    assert "my_own2" in Project("cpu", copy).sections
    assert Project("cpu", copy).jobs("my_own2")[0].parameters == {}
    # one line more in each, all others as they were, comments too
    for name, text in before.items():
        lines = (copy / name).read_text().splitlines()
        assert [line for line in lines if "my_own2" not in line] == text.splitlines()

    nbformat.validate(nbformat.read(copy / "notebooks" / "my_own2.ipynb", 4))
    forked = json.loads((copy / "notebooks" / "my_own2.ipynb").read_text())
    original = json.loads(NOTEBOOK.read_text())
    assert forked["cells"][0]["source"][0] == "# A divergence of your own: my_own2\n"
    names = [figures(notebook) for notebook in (forked, original)]
    assert names[0] == [name.replace("fig-new-", "fig-my-own2-") for name in names[1]]
    assert names[1]
    assert set(names[0]).isdisjoint(names[1])
    for ours, theirs in zip(forked["cells"][1:], original["cells"][1:], strict=True):
        assert ours["source"] == theirs["source"]

    environment = {**os.environ, "PYTHONPATH": str(copy)}
    checks = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "my_own2",
         "tests/test_notebooks.py"],
        cwd=copy, capture_output=True, text=True, env=environment,
    )  # fmt: skip
    assert checks.returncode == 0, checks.stdout


def figures(notebook):
    shown = [cell["metadata"].get("mystnb", {}) for cell in notebook["cells"]]
    return [one["figure"]["name"] for one in shown if "figure" in one]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("", "NAME='' must begin with a letter"),
        ("My Divergence", "lower-case letters, digits and _ only"),
        ("../escape", "must begin with a letter"),
        ("12_mine", "must begin with a letter"),
        ("taken", "notebooks/taken.ipynb exists already"),
        ("listed", "_toc.yml names notebooks/listed already"),
        ("planned", "cpu.yaml has planned already"),
    ],
)
def test_a_name_that_will_not_do_changes_nothing(copy, name, words):
    (copy / "notebooks" / "taken.ipynb").write_text("{}")
    for file, line in zip(
        WRITTEN, ("      - file: notebooks/listed\n", "planned: {}\n"), strict=True
    ):
        with (copy / file).open("a") as f:
            f.write(line)
    before = tree(copy)
    done = make(copy, name)
    assert done.returncode == 2
    assert words in done.stderr
    assert done.stderr.count("\n") == 1
    assert tree(copy) == before


def test_a_second_fork_of_one_name_is_refused(copy):
    assert make(copy, "twice").returncode == 0
    before = tree(copy)
    assert make(copy, "twice").returncode == 2
    assert tree(copy) == before


def test_a_write_that_fails_leaves_nothing_half_done(copy, tool, monkeypatch):
    before = tree(copy)
    files = tool.fork(copy, "mine")
    real = Path.write_text

    def full(path, *arguments, **options):
        if path.name == "cpu.yaml":
            raise OSError("disk full")
        return real(path, *arguments, **options)

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="disk full"):
        tool.write(files)
    assert tree(copy) == before


def tree(root):
    paths = [*(root / "notebooks").rglob("*"), root / "_toc.yml"]
    return {p: p.read_bytes() for p in paths if p.is_file() and "__pycache__" not in p.parts}


def parameters(name):
    given = yaml.safe_load((SETS / f"{name}.yaml").read_text())
    return resolve(given, read_defaults(json.loads(NOTEBOOK.read_text())))


def test_the_shipped_sets_are_what_they_say():
    assert sorted(path.stem for path in SETS.iterdir()) == ["broken", "cressie-read", "jeffreys"]
    for name in ("jeffreys", "cressie-read"):
        given = parameters(name)
        assert check_divergence(given["divergence"], given["radius"]).passed
    assert parameters("broken")["expect_refusal"] is True
    with pytest.raises(ContractError, match="- convex: "):
        check_divergence(parameters("broken")["divergence"])


def execute(tmp_path, **given):
    """Run the page as plain papermill does from the root; its outputs by cell."""
    out = tmp_path / "out.ipynb"
    papermill.execute_notebook(NOTEBOOK, out, given, cwd=ROOT, progress_bar=False)
    cells = json.loads(out.read_text())["cells"]
    return {
        cell["id"]: json.dumps(cell["outputs"]) for cell in cells if cell["cell_type"] == "code"
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", ["jeffreys", "cressie-read"])
def test_the_page_runs_with_a_shipped_set(tmp_path, name):
    shown = execute(tmp_path, **parameters(name), generations=2, n_tokens=5000)
    assert "VIOLATED" not in shown["contract"]
    nearest = {"jeffreys": "reverse_kl", "cressie-read": "alpha:-0.5"}
    assert f"{nearest[name]} at " in shown["summary"]
    for figure in ("fig-bounds", "fig-room", "fig-training"):
        assert "image/svg+xml" in shown[figure]


@pytest.mark.slow
def test_the_page_shows_a_refusal_and_stops_there(tmp_path):
    shown = execute(tmp_path, **parameters("broken"))
    assert shown["contract"].count("VIOLATED") == 2
    assert "squared_log is refused" in shown["verdict"]
    assert "14 of 16 checks hold" in shown["summary"]
    later = ("fig-bounds", "fig-room", "facts", "relatives", "cost", "runs", "fig-training")
    assert {cell: shown[cell] for cell in later} == dict.fromkeys(later, "[]")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"divergence": "notebooks.divergences:SQUARED_LOG"}, "breaks its contract"),
        ({"divergence": "kl", "expect_refusal": True}, "kl keeps its contract"),
        ({"divergence": "kll"}, "unknown divergence 'kll'"),
    ],
)
def test_what_is_not_expected_ends_the_run(tmp_path, given, words):
    with pytest.raises(papermill.exceptions.PapermillExecutionError, match=words):
        execute(tmp_path, **given)
