"""The package as a user meets it: its public names, and the README's code."""

import re
import subprocess
import sys

import pytest

import bandpo
from bandpo.provenance import ROOT

BLOCKS = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
WHOLE = [block for block in BLOCKS if "..." not in block]


def run(code):
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_no_public_name_is_hidden_by_a_module_of_the_same_name():
    """A module that is imported sets its name on the package, over a function of that name."""
    names = [name for name in bandpo.__all__ if not name.startswith("BandPO")]
    code = f"import bandpo; print([callable(getattr(bandpo, n)) for n in {names * 2}])"
    assert "False" not in run(code)
    modules = {path.stem for path in (ROOT / "bandpo").glob("*.py")}
    assert modules.isdisjoint(bandpo.__all__)


@pytest.mark.parametrize("block", WHOLE, ids=range(len(WHOLE)))
def test_the_code_of_the_readme_runs(block):
    run(block)


def test_the_readme_has_code_to_run():
    assert len(WHOLE) >= 2


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'bund'"):
        bandpo.bund  # noqa: B018
