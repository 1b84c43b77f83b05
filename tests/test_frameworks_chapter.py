"""The chapter "Band in other frameworks": its Python runs, its table is the committed record."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import torch

from bandpo.operator import inside_band

ROOT = Path(__file__).resolve().parents[1]
MEASURED = ROOT / "book" / "results" / "measured"

sys.path.insert(0, str(ROOT / "tools"))
import verl_env  # noqa: E402


def chapter_code() -> str:
    text = (ROOT / "book" / "frameworks.md").read_text(encoding="utf-8")
    return "\n".join(re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE))


def test_the_chapters_python_runs_and_clips() -> None:
    names: dict[str, Any] = {}
    exec(chapter_code(), names)
    gradient = names["gradients"][0]
    logps = names["logits"].log_softmax(-1)[torch.arange(5), names["actions"]]
    old, advantages = names["old_logps"], names["advantages"]
    clipped = ((logps - old) * advantages > 0) & ~inside_band(old, logps, "kl", 0.05)
    # the example shows something: among the tokens that count, some are clipped and some are not
    assert 0 < clipped[:4].sum() < 4
    assert torch.equal((gradient == 0).all(-1), clipped | ~names["mask"])


def test_the_table_is_that_of_the_record() -> None:
    record = json.loads((MEASURED / "verl-equivalence.json").read_text(encoding="utf-8"))
    table = (MEASURED / "verl-equivalence.md").read_text(encoding="utf-8")
    assert verl_env.table(record) == table
    # else: python tools/verl_env.py
    assert record["sources"] == verl_env.sources_digest()
    assert list(record["facts"]) == [
        "constant bounds = `vanilla`",
        "gradient of KL-Band = `dppo_kl`",
        "gradient of TV-Band = `dppo_tv`",
    ]
    for figures in record["facts"].values():
        assert max(figures.get("loss", 0), figures["gradient"]) < 1e-12
        assert figures["metrics"] < 1e-7


def test_figures_of_a_fact_are_summed_or_maximal(tmp_path: Path) -> None:
    case = (
        '<testcase name="{0}"><properties><property name="fact" value="f"/>'
        '<property name="tokens" value="{1}"/><property name="loss" value="{2}"/>'
        "</properties></testcase>"
    )
    cases = case.format("a", 3, 1e-16) + case.format("b", 4, 2e-16) + '<testcase name="c"/>'
    junit = tmp_path / "junit.xml"
    junit.write_text(
        f'<testsuites><testsuite tests="3" skipped="0">{cases}</testsuite></testsuites>'
    )
    assert verl_env.collect(junit) == {
        "tests": 3,
        "facts": {"f": {"cases": 2, "tokens": 7, "loss": 2e-16}},
    }
