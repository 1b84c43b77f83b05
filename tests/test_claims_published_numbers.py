"""Arithmetic on published numbers: what they can and cannot mean."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest


@pytest.mark.claim("C13")
def test_the_published_mean_at_32_is_no_share_of_40_problems_times_32() -> None:
    possible = np.round(100 * np.arange(40 * 32 + 1) / (40 * 32), 2)
    assert 55.17 not in possible
    assert 45.94 in possible


@pytest.mark.claim("C14")
def test_best_of_a_bootstrap_with_replacement_is_not_pass_at_k() -> None:
    # one success among 32 samples: pass@32 is 1, best of 32 drawn with replacement is not
    assert pytest.approx(0.638, abs=5e-4) == 1 - (31 / 32) ** 32
    rng = np.random.default_rng(0)
    success = np.arange(32) == 0
    draws = success[rng.integers(0, 32, size=(20000, 32))].any(axis=1)
    assert draws.mean() == pytest.approx(0.638, abs=0.01)
    assert success.any()


@pytest.mark.claim("C19")
def test_sixty_percent_of_all_tail_tokens_needs_almost_no_tail() -> None:
    total = 0.00131  # overall clip rate in the first logged steps
    for tail_share, tail_rate in product((0.0022, 0.01, 0.1), (0.6,)):
        assert tail_share * tail_rate > total
    assert total / 0.6 < 0.0022
