"""The rules by which claims about training are judged, and the register's agreement with them."""

import numpy as np
import pytest

from bandpo.cells import Cell
from bandpo.intervals import Interval
from bandpo.verdicts import CONTRADICTED, OPEN, REPRODUCED, RULES, judge, overall, status_of

NOISE = np.array([-1.2, -0.6, -0.3, -0.1, 0.0, 0.1, 0.2, 0.4, 0.6, 0.9]) * 0.01


def cells(claim, values, seeds=10):
    """Cells in which the claim's outcome is one value a variant, up to a little noise."""
    rng = np.random.default_rng(0)
    return {
        variant: Cell(
            label=f"scratchpad-{variant}",
            config={"task": "scratchpad"},
            seeds=tuple(range(1, seeds + 1)),
            outcomes={RULES[claim].outcome: value * (1 + rng.permutation(NOISE)[:seeds])},
            steps=np.array([]),
            curves={},
            ratios=np.zeros((0, 0), dtype=int),
        )
        for variant, value in values.items()
    }


CASES = [
    ("C16", {"kl-band": 0.9, "relaxed-band": 0.8}, REPRODUCED),
    ("C16", {"kl-band": 0.8, "relaxed-band": 0.9}, CONTRADICTED),
    ("C16", {"kl-band": 0.8, "relaxed-band": 0.8}, OPEN),
    ("C18", {"grpo": 0.02, "clip-higher": 0.015, "kl-band": 0.021}, REPRODUCED),
    ("C18", {"grpo": 0.02, "clip-higher": 0.022, "kl-band": 0.02}, CONTRADICTED),
    ("C18", {"grpo": 0.02, "clip-higher": 0.015, "kl-band": 0.002}, CONTRADICTED),
    ("C18", {"grpo": 0.02, "clip-higher": 0.015, "kl-band": 0.04}, CONTRADICTED),
    ("C18", {"grpo": 0.02, "clip-higher": 0.02, "kl-band": 0.02}, OPEN),
    ("C19", {"grpo": 0.2, "clip-higher": 0.18, "kl-band": 0.03}, REPRODUCED),
    ("C19", {"grpo": 0.2, "clip-higher": 0.05, "kl-band": 0.03}, CONTRADICTED),
    ("C20", {"grpo": 0.02, "kl-band": 0.2}, REPRODUCED),
    ("C20", {"grpo": 0.02, "kl-band": 0.05}, CONTRADICTED),
]


@pytest.mark.parametrize(("claim", "values", "status"), CASES)
def test_a_claim_is_judged_by_its_parts(claim, values, status):
    found = judge(claim, cells(claim, values))
    assert found.status == status
    assert found.seeds == 10
    assert all(part.low <= part.value <= part.high for part in found.parts.values())


@pytest.mark.parametrize(
    ("best", "status"), [("kl-band", REPRODUCED), ("kl-0.3", CONTRADICTED), (None, OPEN)]
)
def test_the_radius_is_best_only_if_it_beats_every_other(best, status):
    values = dict.fromkeys(RULES["C17"].variants, 0.8)
    if best:
        values[best] = 0.9
    assert judge("C17", cells("C17", values)).status == status


def test_few_seeds_settle_nothing_and_missing_cells_are_not_judged():
    values = {"grpo": 0.02, "kl-band": 0.2}
    assert judge("C20", cells("C20", values, seeds=7)).status == OPEN
    assert judge("C20", cells("C20", values, seeds=8)).status == REPRODUCED
    assert judge("C20", cells("C20", {"grpo": 0.02})) is None
    other = {v: cells("C19", {v: 1.0})[v] for v in values}
    assert judge("C20", other) is None  # no such outcome


def test_more_parts_make_wider_intervals():
    d = cells("C16", {"kl-band": 0.9, "relaxed-band": 0.88})
    alone = judge("C16", d).parts["KL-Band - Relaxed Band"]
    with_more = judge("C17", cells("C17", dict.fromkeys(RULES["C17"].variants, 0.9)))
    assert len(with_more.parts) == 4
    assert alone.high - alone.low > 0


def test_a_status_follows_from_intervals():
    above, below, across = Interval(2, 1, 3), Interval(-2, -3, -1), Interval(0, -1, 1)
    assert status_of([above, above]) == REPRODUCED
    assert status_of([above, across]) == OPEN
    assert status_of([above, across, below]) == CONTRADICTED
    assert overall([REPRODUCED, REPRODUCED]) == REPRODUCED
    assert overall([REPRODUCED, CONTRADICTED]) == OPEN
