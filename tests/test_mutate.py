"""The mutation script: it finds every formula, changes it, and sees a broken one."""

from __future__ import annotations

import ast
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tools import mutate

ALL = list(mutate.mutants(mutate.ROOT, []))


def test_every_formula_is_broken_in_some_way() -> None:
    named = {(file, name) for file, names in mutate.FORMULAS.items() for name in names}
    # u log u is one function call without an operator to turn
    assert named - {(m.file, m.formula) for m in ALL} <= {("bandpo/divergences.py", "REVERSE_KL")}
    assert {m.kind for m in ALL} == {"sign", "factor", "power", "side"}


def test_a_mutant_differs_from_the_package_in_one_expression() -> None:
    for m in ALL:
        package = ast.unparse(ast.parse((mutate.ROOT / m.file).read_text(encoding="utf-8")))
        pairs = zip(package.splitlines(), m.source.splitlines(), strict=True)
        assert sum(one != other for one, other in pairs) == 1, m.summary()


def test_a_formula_that_is_gone_is_named() -> None:
    with pytest.raises(ValueError, match="no formula 'no_such'"):
        mutate.find(ast.parse("x = 1"), "no_such")


@pytest.mark.slow
def test_a_broken_formula_is_noticed_and_a_whole_one_is_not(tmp_path: Path) -> None:
    mutate.prepare(tmp_path)
    broken = next(m for m in ALL if m.before == "-self.epsilon_low")
    whole = replace(broken, source=(mutate.ROOT / broken.file).read_text(encoding="utf-8"))
    assert mutate.caught_by(whole, tmp_path) is None
    noticed = mutate.caught_by(broken, tmp_path)
    assert noticed is not None
    assert "test_claims_bottleneck" in noticed
