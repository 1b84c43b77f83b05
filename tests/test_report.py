"""How the pages write numbers: words that the interval allows, and nothing more."""

import math

import numpy as np
import pytest

from bandpo.cells import Cell
from bandpo.intervals import Interval, paired_comparison
from bandpo.report import adjust, comparison_rows, evidence, level, span, verb, verdict_lines
from bandpo.verdicts import CONTRADICTED, OPEN, Verdict

ABOVE, BELOW = Interval(0.02, 0.01, 0.03), Interval(-0.02, -0.03, -0.01)
ACROSS, TOUCHING = Interval(0.02, -0.01, 0.05), Interval(0.02, 0.0, 0.05)


@pytest.mark.parametrize(
    ("one", "word"),
    [
        (ABOVE, "higher"),
        (BELOW, "lower"),
        (ACROSS, "not distinguishable"),
        (TOUCHING, "not distinguishable"),
    ],
)
def test_the_verb_is_what_the_interval_allows(one, word):
    assert verb(one) == word


def test_other_words_for_other_outcomes():
    words = ("later", "earlier", "neither")
    assert [verb(one, *words) for one in (ABOVE, BELOW, ACROSS)] == list(words)


@pytest.mark.parametrize(
    ("one", "how", "text"),
    [
        (BELOW, {"spec": "+.3f"}, "−0.020 (−0.030 to −0.010)"),
        (ABOVE, {"spec": ".1f", "scale": 100}, "2.0 (1.0 to 3.0)"),
        (Interval(-0.0001, -0.0002, 0.04), {"spec": "+.2f"}, "0.00 (0.00 to +0.04)"),
    ],
)
def test_an_interval_in_words(one, how, text):
    assert span(one, **how) == text


def cell(**outcomes):
    return Cell(
        label="scratchpad-grpo",
        config={"task": "scratchpad"},
        seeds=(1, 2, 3),
        outcomes={name: np.array(values) for name, values in outcomes.items()},
        steps=np.array([]),
        curves={},
        ratios=np.zeros((0, 0), dtype=int),
    )


def test_a_level_leaves_out_what_a_run_does_not_have():
    found = cell(
        clip_rate=[0.0, 0.01, 0.05],
        reward=[-1.0, 0.5, 0.5],
        accuracy=[0.5, math.nan, math.nan],
        entropy_end=[0.25, math.nan, 0.75],
        rare_final=[math.nan] * 3,
    )
    assert level(found, "accuracy") == Interval(0.5, 0.5, 0.5)
    assert level(found, "entropy_end").value == 0.5
    assert level(found, "rare_final") is level(found, "tail_share") is None
    assert level(found, "clip_rate").low == 0  # a share is not negative
    assert level(found, "reward").low < -1.0  # a reward can be


def test_the_evidence_of_a_comparison():
    found = paired_comparison([2.0, 3.0, 4.0, 1.0], [1.0, 1.0, 1.0, 1.0])
    differences = np.array([1.0, 2.0, 3.0, 0.0])
    text = evidence(found, "later", "+.1f", " steps")
    assert text.startswith("+1.5 (")
    assert " steps, later on 3.5 of 4 seeds" in text  # a tie counts one half
    assert text.endswith(f"effect size +{differences.mean() / differences.std(ddof=1):.1f}")


def test_p_values_are_adjusted_for_the_number_of_rows():
    # Benjamini and Hochberg by hand: p_(i) m / i, made monotone from the largest down
    assert adjust([0.01, 0.04, 0.03, 0.5]) == pytest.approx([0.04, 0.16 / 3, 0.16 / 3, 0.5])


def test_rows_of_comparisons():
    pairs = {
        ("scratchpad", "reward"): paired_comparison([1.0, 2.0, 4.0], [0.0, 1.0, 2.0]),
        ("precedence", "reward"): paired_comparison([0.0, 1.0, 2.0], [0.0, 1.0, 2.0]),
    }
    first, second = comparison_rows(pairs, ("task", "outcome"))
    assert (first["task"], first["outcome"], first["higher on"]) == (
        "scratchpad", "reward", "3 of 3",
    )  # fmt: skip
    assert (first["p"], first["p adjusted"]) == ("0.250", "0.500")
    assert (second["difference"], second["higher on"]) == ("0.000 (0.000 to 0.000)", "1.5 of 3")


def test_how_a_claim_fares():
    of_task = {
        "scratchpad": Verdict(CONTRADICTED, {"A - B": BELOW, "A - C": ABOVE}, 10),
        "precedence": Verdict(OPEN, {}, 5),
    }
    assert verdict_lines("C1", OPEN, of_task, spec="+.1f", scale=100, unit=" points") == [
        f"* **C1: {OPEN}.**",
        "  On `scratchpad`, 10 seeds: A - B = −2.0 (−3.0 to −1.0) points; "
        f"A - C = +2.0 (+1.0 to +3.0) points. That is {CONTRADICTED}.",
        f"  On `precedence`, 5 seeds: too few seeds. That is {OPEN}.",
    ]
    (_, line, _) = verdict_lines("C1", OPEN, of_task, of_what="accuracy")
    assert line.startswith("  On `scratchpad`, 10 seeds, accuracy: A - B = −0.020")
