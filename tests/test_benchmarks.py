"""What a published average can say: against linear programs, simulation and a shell."""

import itertools
import json
import os
import subprocess
from fractions import Fraction

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from scipy import optimize, stats

from bandpo.benchmarks import (
    difference_variance,
    launches,
    least_evaluations,
    score_variance,
    seeds_needed,
)
from bandpo.evaluation import best_at_k_bootstrap, pass_at_k
from bandpo.provenance import ROOT

PUBLISHED = json.loads((ROOT / "book/results/published.json").read_text(encoding="utf-8"))
CLAIMS = yaml.safe_load((ROOT / "book/claims.yaml").read_text(encoding="utf-8"))
shares = st.integers(0, 20).map(lambda i: i / 20)


def extremes(values, means, points):
    """Least and greatest mean of ``values`` over the distributions on ``points`` with ``means``."""
    equalities = np.vstack([np.ones(len(points)), np.transpose(points)])
    found = [
        optimize.linprog(sign * values, A_eq=equalities, b_eq=[1.0, *means], bounds=(0, None))
        for sign in (1, -1)
    ]
    assert all(f.status == 0 for f in found)
    return found[0].fun, -found[1].fun


@pytest.mark.claim("prop-benchmark-error")
@given(shares, st.integers(1, 40))
def test_range_of_one_score_is_that_of_the_linear_program(mean, samples):
    p = np.linspace(0, 1, 21)
    second = p**2 + p * (1 - p) / samples
    low, high = extremes(second, [mean], p[:, None])
    assert score_variance(mean, samples) == pytest.approx((low - mean**2, high - mean**2), abs=1e-9)


@pytest.mark.claim("prop-benchmark-error")
@given(shares, shares, st.integers(1, 40))
def test_range_of_a_difference_is_that_of_the_linear_program(a, b, samples):
    points = np.array(list(itertools.product(np.linspace(0, 1, 21), repeat=2)))
    p, q = points.T
    second = (p - q) ** 2 + (p * (1 - p) + q * (1 - q)) / samples
    low, high = extremes(second, [a, b], points)
    expected = (low - (a - b) ** 2, high - (a - b) ** 2)
    assert difference_variance(a, b, samples) == pytest.approx(expected, abs=1e-9)
    assert difference_variance(b, a, samples) == pytest.approx(expected, abs=1e-9)


@pytest.mark.claim("prop-benchmark-error")
def test_variance_of_simulated_scores_lies_at_the_ends():
    rng = np.random.default_rng(0)
    equal = rng.binomial(32, 0.46, 200_000) / 32
    sure = rng.random(200_000) < 0.46
    low, high = score_variance(0.46, 32)
    assert np.var(equal) == pytest.approx(low, rel=0.02)
    assert np.var(sure) == pytest.approx(high, rel=0.02)


@pytest.mark.claim("C13")
def test_five_evaluations_are_the_fewest_that_average_to_the_published_number():
    def printed(evaluations):
        parts = 1280 * evaluations
        return {round(100 * j / parts, 2) for j in range(parts + 1)}

    assert [55.17 in printed(m) for m in range(1, 6)] == [False, False, False, False, True]
    assert least_evaluations(55.17, 1280) == 5
    assert least_evaluations(45.94, 1280) == 1


@pytest.mark.claim("C13")
def test_nine_points_on_forty_problems_are_not_one_statement():
    """Far outside the luck of sampling, and for other problems anything from nothing to certain."""
    a, b, problems, samples = 0.5517, 0.4594, 40, 32
    sampling = (score_variance(a, samples)[0] + score_variance(b, samples)[0]) / problems
    assert (a - b) / sampling**0.5 > 4.6
    low, high = (v / problems for v in difference_variance(a, b, samples))
    assert (a - b) / low**0.5 > 11
    assert (a - b) / high**0.5 < 0.6


@given(st.integers(1, 60).flatmap(lambda n: st.tuples(*[st.integers(0, n)] * 2, st.just(n))))
@pytest.mark.claim("prop-best-at-k", "C14")
def test_best_at_k_is_below_pass_at_k_by_at_most_a_collision(case):
    c, k, n = case[0], max(1, case[1]), case[2]
    best = 1 - Fraction(n - c, n) ** k
    distinct = Fraction(1)
    for i in range(k):
        distinct *= Fraction(n - i, n)
    wrong = Fraction(1)
    for i in range(k):
        wrong *= Fraction(max(n - c - i, 0), n - i)
    unbiased = 1 - wrong
    assert best_at_k_bootstrap([c], k, n=n)[0] == pytest.approx(float(best), abs=1e-12)
    assert pass_at_k([c], k, n=n)[0] == pytest.approx(float(unbiased), abs=1e-12)
    assert (best == unbiased) == (k == 1 or c in (0, n))
    assert best <= unbiased
    assert unbiased - best <= unbiased * (1 - distinct)
    assert 1 - distinct <= Fraction(k * (k - 1), 2 * n)
    if c < n:
        assert best < 1


@given(st.integers(2, 24), st.floats(0.01, 0.99), st.data())
@pytest.mark.claim("prop-best-at-k", "C14")
def test_best_at_k_is_biased_low_for_every_k_above_1(n, p, data):
    k = data.draw(st.integers(2, n))
    counts = np.arange(n + 1)
    chance = stats.binom.pmf(counts, n, p)
    truth = 1 - (1 - p) ** k
    assert chance @ pass_at_k(counts, k, n=n) == pytest.approx(truth, rel=1e-10)
    short = truth - chance @ best_at_k_bootstrap(counts, k, n=n)
    assert short > -1e-12
    if p * n > 0.5 and k < 12 and p < 0.5:
        assert short > 0


@pytest.mark.claim("C14")
def test_the_published_gain_is_possible_without_one_more_problem_solved():
    before, after = np.full(10, 1), np.full(10, 2)
    assert pass_at_k(before, 32, n=32).mean() == pass_at_k(after, 32, n=32).mean() == 1
    ratio = best_at_k_bootstrap(after, 32, n=32).mean() / best_at_k_bootstrap(before, 32, n=32)
    assert (ratio > 1.289).all()


@pytest.mark.parametrize(("effect", "seeds"), [(0.5, 64), (0.8, 26), (1.0, 17)])
def test_seeds_needed_are_those_of_the_tables(effect, seeds):
    """Two-sided t test, level 0.05, power 0.8: sizes found in any table of power."""
    assert seeds_needed(effect, 1.0) == seeds


def test_seeds_needed_have_the_power_in_simulation():
    n, rng = seeds_needed(1.5, 1.0), np.random.default_rng(0)
    a, b = rng.normal(1.5, 1, (4000, n)), rng.normal(0, 1, (4000, n))
    power = np.mean(stats.ttest_ind(a, b, axis=1).pvalue < 0.05)
    assert 0.77 < power < 0.9


@pytest.mark.parametrize("command", [c["command"] for c in CLAIMS if "command" in c])
def test_launches_are_what_a_shell_would_start(command, tmp_path):
    """Executed by a shell whose ``accelerate`` and ``python`` leave a mark for each training."""
    counted = tmp_path / "counted"
    for name in ("accelerate", "python", ".venv/bin/python"):
        program = tmp_path / "bin" / os.path.basename(name)
        program.parent.mkdir(exist_ok=True)
        training = f'case "$*" in *bandpo.evaluate*) ;; *) echo run >> {counted} ;; esac'
        program.write_text(f"#!/bin/sh\n{training}\n")
        program.chmod(0o755)
    environment = {"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin"}
    subprocess.run(["sh", "-c", command], cwd=tmp_path, env=environment, check=True)
    assert len(counted.read_text().splitlines()) == launches(command)


@pytest.mark.parametrize(
    "row", PUBLISHED["results"], ids=lambda row: f"{row['claim']} {row['what']}"
)
def test_every_published_number_has_a_source_and_stands_in_the_register(row):
    assert row["source"]
    assert set(row["source"]) <= set(PUBLISHED["sources"])
    claim = next(c for c in CLAIMS if c["id"] == row["claim"])
    text = f"{claim['statement']} {claim.get('note', '')}"
    for value in row["values"].values():
        assert f"{abs(value):g}" in text or value == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: score_variance(1.2, 32), "mean must be a share between 0 and 1; got 1.2"),
        (lambda: score_variance(0.5, 0), "at least 1 sample; got 0"),
        (lambda: difference_variance(-0.1, 0.5, 2), "a must be a share"),
        (lambda: difference_variance(0.1, 1.5, 2), "b must be a share"),
        (lambda: least_evaluations(101.0, 1280), "percent / 100 must be a share"),
        (lambda: seeds_needed(0.0, 1.0), "gain and deviation must be positive"),
        (lambda: seeds_needed(1.0, float("nan")), "gain and deviation must be positive"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
