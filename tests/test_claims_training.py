"""What the register says about training claims is what the committed runs lead to."""

import numpy as np
import pytest
import yaml
from scipy import stats

import bandpo.verdicts
from bandpo.cells import read_summary
from bandpo.intervals import Interval
from bandpo.provenance import ROOT
from bandpo.verdicts import CONTRADICTED, OPEN, REPRODUCED, RULES, judge, overall

SUMMARY = ROOT / "book" / "results" / "measured" / "cpu-full.json"
REGISTER = {REPRODUCED: REPRODUCED, CONTRADICTED: CONTRADICTED, OPEN: "not run here"}
CONTROL = "no_tail"  # nothing rare is there to be found


@pytest.fixture(scope="module")
def summary():
    return read_summary(SUMMARY)


@pytest.mark.parametrize(
    "claim", [pytest.param(claim, marks=pytest.mark.claim(claim)) for claim in RULES]
)
def test_the_status_follows_from_the_runs(claim, summary):
    verdicts = {
        task: verdict.status
        for task in summary.tasks
        if task != CONTROL
        and (verdict := judge(claim, summary.of_task(task, RULES[claim].variants)))
    }
    assert len(verdicts) >= 2
    register = yaml.safe_load((ROOT / "book" / "claims.yaml").read_text())
    said = next(one["status"] for one in register if one["id"] == claim)
    assert said == REGISTER[overall(verdicts.values())], verdicts


@pytest.mark.claim("C19")
def test_the_mechanism_shows_on_the_task_that_was_made_for_it(summary):
    cells = summary.of_task("scratchpad", RULES["C19"].variants)
    band = cells["kl-band"].outcomes["tail_clip_high"].mean()
    for fixed in ("grpo", "clip-higher"):
        assert band < cells[fixed].outcomes["tail_clip_high"].mean() / 2


def test_no_verdict_depends_on_the_kind_of_interval(summary, monkeypatch):
    """The bootstrap came first, and was given up for being too narrow with few seeds."""

    def verdicts():
        return {
            (claim, task): found.status
            for claim in RULES
            for task in summary.tasks
            if (found := judge(claim, summary.of_task(task, RULES[claim].variants)))
        }

    def resampled(x, *, confidence):
        found = stats.bootstrap((x,), np.mean, confidence_level=confidence, rng=0)
        low, high = found.confidence_interval
        return Interval(float(x.mean()), float(low), float(high))

    by_student = verdicts()
    monkeypatch.setattr(bandpo.verdicts, "mean_interval", resampled)
    assert verdicts() == by_student
