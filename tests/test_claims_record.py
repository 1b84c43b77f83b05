"""``build/claims.json``: the results of marked tests, and of no other package or tests."""

import json
import shutil
import subprocess
import sys

import pytest
from repository import make_repository

from bandpo.provenance import ROOT, claims_digest

TESTS = """\
import pytest

@pytest.mark.claim("C1", "thm-one")
@pytest.mark.parametrize("x", [1, 2])
def test_one(x):
    pass

@pytest.mark.claim("lem-two")
def test_two():
    assert False

def test_unmarked():
    pass
"""


@pytest.fixture
def root(tmp_path):
    make_repository(tmp_path, "")
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\nmarkers = ['claim']\n")
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path / "tests")
    (tmp_path / "tests" / "test_x.py").write_text(TESTS)
    return tmp_path


def run(root, *options):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
    # Safe path: the folder bandpo/ of the small repository is no package to import.
    subprocess.run(["env", "PYTHONSAFEPATH=1", *command], cwd=root, capture_output=True)
    return json.loads((root / "build" / "claims.json").read_text())


@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["alone", "side by side"])
def test_every_marked_test_is_recorded_with_its_outcome(root, workers):
    claims = run(root, *workers)
    assert claims["digest"] == claims_digest(root)
    found = {node: (one["claims"], one["outcome"]) for node, one in claims["tests"].items()}
    assert found == {
        "tests/test_x.py::test_one[1]": (["C1", "thm-one"], "passed"),
        "tests/test_x.py::test_one[2]": (["C1", "thm-one"], "passed"),
        "tests/test_x.py::test_two": (["lem-two"], "failed"),
    }


def test_a_part_is_added_and_results_of_other_code_are_dropped(root):
    run(root)
    (root / "tests" / "test_x.py").write_text(TESTS.replace("assert False", "assert True"))
    claims = run(root, "-k", "test_two")
    assert {node: one["outcome"] for node, one in claims["tests"].items()} == {
        "tests/test_x.py::test_two": "passed"
    }
    assert len(run(root, "-k", "test_one")["tests"]) == 3
    (root / "bandpo" / "core.py").write_text("x = 2\n")
    assert len(run(root, "-k", "test_two")["tests"]) == 1
