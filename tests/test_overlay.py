"""The book's extensions on a small book: real notebooks, the real papermill, the real build."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from bs4 import BeautifulSoup
from repository import make_repository, write_notebook

from bandpo.provenance import ROOT, claims_digest
from bandpo.run import main

INDEX = """\
# A small book

```{prf:theorem} One
:label: thm-one

$1 = 1$
```

```{prf:lemma} Two
:label: lem-two

$2 = 2$
```

```{prf:definition} Three
:label: def-three

3
```
"""
CLAIMS_PAGE = "# Claims\n\n```{claims-table}\n```\n"
STATUS_PAGE = (
    "# Status\n\n```{status-table}\n```\n\n```{versions-table}\n```\n\n```{tests-table}\n```\n"
)
CLAIMS = """\
- {id: C1, statement: "It holds that $1=1$.", source: Theorem 1, status: proved and checked,
   where: [thm-one, book/index], notebook: 01_good, command: "python -m bandpo.run 01_good"}
- {id: C2, statement: Later., status: not run here}
- {id: C3, statement: Said alone., status: checked numerically}
- {id: C4, statement: Not so., status: contradicted, where: [lem-two]}
"""
STEMS = ("01_good", "02_missing", "03_stale", "04_altered", "05_failed")


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    """A repository whose notebooks all ran."""
    root = tmp_path_factory.mktemp("book") / "small"
    make_repository(root, "\n".join(f"{stem}: {{parameters: {{b: '`|x'}}}}" for stem in STEMS))
    for stem in STEMS:
        write_notebook(root, stem, "a = 1\nb = 'y'", "print('sum', a + 1)")
    assert main([], root) == 0
    for name, text in (("index", INDEX), ("claims", CLAIMS_PAGE), ("status", STATUS_PAGE)):
        (root / "book" / f"{name}.md").write_text(text)
    (root / "book" / "claims.yaml").write_text(CLAIMS)
    config = yaml.safe_load((ROOT / "_config.yml").read_text())
    config["sphinx"]["local_extensions"]["companion"] = str(ROOT / "book" / "_ext")
    (root / "book" / "references.bib").touch()
    shutil.copytree(ROOT / "book" / "_static", root / "book" / "_static")
    (root / "_config.yml").write_text(yaml.safe_dump(config))
    chapters = [f"notebooks/{stem}" for stem in STEMS] + ["book/claims", "book/status"]
    toc = {"format": "jb-book", "root": "book/index", "chapters": [{"file": c} for c in chapters]}
    (root / "_toc.yml").write_text(yaml.safe_dump(toc))
    (root / "tests" / "test_x.py").write_text("\n\ndef test_one():\n    pass\n")
    return root


@pytest.fixture
def root(executed, tmp_path):
    copied = tmp_path / "small"
    shutil.copytree(executed, copied)
    return copied


def test_a_figure_is_its_picture_alone(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "book" / "_ext")
    from companion.executed import keep_pictures

    text = {"data": {"text/plain": "<Axes: >"}}
    picture = {"data": {"text/plain": "", "image/png": ""}}
    stream = {"output_type": "stream", "text": "said"}
    figure = {"metadata": {"mystnb": {"figure": {}}}, "outputs": [text, picture, stream]}
    plain = {"metadata": {}, "outputs": [text]}
    keep_pictures({"cells": [figure, plain]})
    assert figure["outputs"] == [picture, stream]
    assert plain["outputs"] == [text]


def write_claims(root, **tests):
    results = {
        node: {"claims": claims, "outcome": outcome, "seconds": 0.1}
        for node, (claims, outcome) in tests.items()
    }
    path = root / "build" / "claims.json"
    path.write_text(json.dumps({"digest": claims_digest(root), "tests": results}))


def good_claims(root):
    write_claims(
        root,
        **{
            "tests/test_x.py::test_one": (["thm-one", "C3"], "passed"),
            "tests/test_x.py::test_two[1]": (["lem-two"], "passed"),
            "tests/test_x.py::test_two[2]": (["lem-two"], "passed"),
        },
    )


def build(root, *options):
    """Build the book; return the exit status and the warnings."""
    command = [Path(sys.executable).with_name("jupyter-book"), "build", ".", *options]
    done = subprocess.run(
        [*command, "--path-output", "build"], cwd=root, capture_output=True, text=True
    )
    text = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout + done.stderr)
    assert "Traceback" not in text, text
    return done.returncode, [line for line in text.splitlines() if "WARNING" in line]


def page(root, name):
    text = (root / "build" / "_build" / "html" / f"{name}.html").read_text()
    return BeautifulSoup(text, "html.parser")


def test_a_book_of_good_runs(root):
    good_claims(root)
    assert build(root, "-W", "-n", "--keep-going") == (0, [])

    good = page(root, "notebooks/01_good")
    assert "sum 2" in good.select_one("div.cell_output").text
    assert "Show default parameters" in good.text
    box = good.select_one("div.admonition.provenance")
    assert "cpu" in box.text
    assert re.search(r"a = 1\s+# default", box.text)
    assert "b = '`|x'" in box.text
    assert re.search(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC, \d+\.\d s", box.text)
    download = box.select_one("a.download")
    served = root / "build/_build/html/notebooks" / download["href"]
    assert served.read_text() == (root / "build/executed/cpu/01_good.ipynb").read_text()

    badges = [badge.text for badge in page(root, "book/index").select("p.claim-badge")]
    assert badges == ["✓ checked by 1 test", "✓ checked by 1 test, 2 cases"]
    link = page(root, "book/index").select_one("p.claim-badge a")["href"]
    assert link == "status.html#tests-thm-one"
    status = page(root, "book/status")
    tests = status.select_one("#tests-thm-one")
    assert "thm-one: 1 test" in tests.text
    source = status.select_one("dl.tests a[href*=github]")["href"]
    assert source.endswith("/tests/test_x.py#L3")
    assert "2 of 2 passed" in status.text
    cells = [cell.text for cell in status.select("table")[0].select("td")]
    assert cells[1:3] == ["b = '`|x'", "1"]

    rows = page(root, "book/claims").select("tbody tr")
    assert [row.select_one("td").text for row in rows] == ["C1", "C2", "C3", "C4"]
    first = rows[0]
    assert "Theorem 1" in first.text
    assert {link.text for link in first.select("a")} >= {"Theorem 1", "01_good", "A small book"}
    assert first.select_one("a[href='status.html#tests-thm-one']").text == "thm-one: 1 test"
    assert "python -m bandpo.run 01_good" in first.text

    scripts = [s.get("src") or s.text for s in page(root, "book/index").select("script")]
    assert len(scripts) == len(set(scripts))
    assert any("mathjax/tex-svg-full.js" in script for script in scripts)
    assert (root / "build/_build/html/_static/mathjax/tex-svg-full.js").stat().st_size > 1e6


def test_every_fault_is_a_warning_and_an_error_under_W(root):
    copies = root / "build" / "executed" / "cpu"
    (copies / "02_missing.ipynb").unlink()
    write_notebook(root, "03_stale", "a = 1\nb = 'y'", "print('difference', a - 1)")
    altered = (copies / "04_altered.ipynb").read_text()
    (copies / "04_altered.ipynb").write_text(altered.replace("sum 2", "sum 3"))
    failed = json.loads((copies / "05_failed.ipynb").read_text())
    failed["cells"][-1]["metadata"]["papermill"]["exception"] = None
    (copies / "05_failed.ipynb").write_text(json.dumps(failed))
    write_claims(root, **{"tests/test_x.py::test_one": (["thm-one"], "failed")})

    status, warnings = build(root, "-W", "--keep-going")
    assert status != 0
    text = "\n".join(warnings)
    for stem, words in {
        "02_missing": "has not been executed",
        "03_stale": "was executed with another source",
        "04_altered": "was executed, but the copy was edited",
        "05_failed": "was executed, but a cell failed",
    }.items():
        assert f"{stem}.ipynb: WARNING: notebooks/{stem} {words}" in text
        assert f"python -m bandpo.run --profile cpu {stem}" in text
    assert "01_good" not in text
    assert "no passing test has the mark claim('thm-one')" in text
    assert "no passing test has the mark claim('lem-two')" in text
    assert "def-three" not in text
    assert "claim C1 is said to be proved and checked, but tests of ['thm-one'] fail" in text
    assert "claim C3 is said to be checked numerically, but no test has a mark" in text
    assert "claim C2" not in text

    # A second build warns again, although no source has changed since the first.
    assert build(root, "-W", "--keep-going")[0] != 0


def test_results_of_other_tests_are_refused(root):
    good_claims(root)
    (root / "tests" / "test_x.py").write_text("def test_one():\n    assert True\n")
    status, warnings = build(root, "-W", "--keep-going")
    assert status != 0
    assert "the test results of the statements are stale" in "\n".join(warnings)
    assert page(root, "book/index").select("p.claim-badge") == []


def test_what_a_cell_writes_to_stderr_is_a_warning(root):
    good_claims(root)
    noisy = "import sys\nprint('progress', file=sys.stderr)"
    write_notebook(root, "01_good", "a = 1\nb = 'y'", noisy)
    assert main(["01_good"], root) == 0
    status, warnings = build(root, "-W", "--keep-going")
    assert status != 0
    assert "stderr" in "\n".join(warnings)
