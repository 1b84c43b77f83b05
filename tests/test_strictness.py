import math
import runpy

import numpy as np
import pytest
import torch

from bandpo import inside_band
from bandpo.metrics import BAND_METRICS, averages, token_metrics
from bandpo.provenance import ROOT
from bandpo.rules import Band, Fixed, PerSide
from bandpo.strictness import Tokens, clip_rate, matched_radius


def tokens(n=4000, seed=0):
    """Tokens whose ratios spread more where the old probability is low."""
    rng = torch.Generator().manual_seed(seed)
    p = torch.rand(n, generator=rng, dtype=torch.float64).clamp(1e-4, 1 - 1e-4)
    logit = p.logit() + 0.5 * torch.randn(n, generator=rng, dtype=torch.float64)
    signs = torch.randint(-1, 2, (n,), generator=rng).double()
    return Tokens(p.log(), torch.nn.functional.logsigmoid(logit), signs)


@pytest.mark.parametrize("rule", [Fixed(), Band(), PerSide(Band("tv"), Fixed())], ids=str)
def test_the_clip_rate_is_the_one_that_the_trainer_logs(rule):
    t = tokens()
    bound = rule.log_bound(t.old_logps, t.advantages > 0).exp()
    row = [one[None] for one in (t.logps, t.old_logps, t.advantages)]
    logged = averages(
        token_metrics(
            *row,
            torch.ones_like(row[0], dtype=torch.bool),
            bound[None],
            tail_threshold=0.2,
            max_ratio=None,
        )
    )
    assert next(iter(BAND_METRICS)) == "band/clip_rate"
    assert clip_rate(t, rule) == pytest.approx(logged["band/clip_rate"], abs=1e-12)
    assert 0 < clip_rate(t, rule) < 0.5


def test_a_radius_matches_itself_and_meets_the_rate_of_another_divergence():
    t = tokens()
    assert matched_radius([t], Band("kl", 0.05), lambda r: Band("kl", r)) == pytest.approx(
        0.05, rel=0.01
    )
    found = matched_radius([t], Band("kl", 0.05), lambda r: Band("tv", r))
    wanted = clip_rate(t, Band("kl", 0.05))
    assert clip_rate(t, Band("tv", found)) == pytest.approx(wanted, abs=2 / len(t.logps))
    assert abs(clip_rate(t, Band("tv", 0.05)) - wanted) > 0.05 * wanted


def test_without_a_cap_it_is_a_quantile_of_the_tokens_binary_divergences():
    # A token lies outside the band of radius d exactly if its binary divergence exceeds d.
    t = tokens()
    found = matched_radius([t], Fixed(), lambda r: Band("kl", r, None))
    log_ratio = t.logps - t.old_logps
    moved = t.advantages * log_ratio > 0
    outside = [
        ~inside_band(t.old_logps[moved], t.logps[moved], "kl", radius=found * factor)
        for factor in (0.999, 1.001)
    ]
    more, less = (float(one.sum()) / len(t.logps) for one in outside)
    assert less - 1e-3 <= clip_rate(t, Fixed()) <= more + 1e-3


def test_every_task_weighs_the_same():
    small, large = tokens(500, seed=1), tokens(5000, seed=2)
    shifted = Tokens(large.old_logps, large.logps * 1.2, large.advantages)
    found = matched_radius([small, shifted], Band("kl", 0.05), lambda r: Band("chi2", r))
    excess = [
        clip_rate(one, Band("chi2", found)) - clip_rate(one, Band("kl", 0.05))
        for one in (small, shifted)
    ]
    assert sum(excess) == pytest.approx(0, abs=1 / 500)


def test_errors_say_what_is_wrong():
    one = torch.zeros(3)
    with pytest.raises(ValueError, match="rows of one length"):
        Tokens(one, one, torch.zeros(2))
    with pytest.raises(ValueError, match="rows of one length"):
        Tokens(*[torch.zeros(0)] * 3)
    with pytest.raises(ValueError, match="at least one task"):
        matched_radius([], Fixed(), lambda r: Band("kl", r))
    never = Tokens(one - 1, one - 1, one)
    far = Tokens(torch.full((9,), -1.0), torch.full((9,), -9.0), -torch.ones(9))
    with pytest.raises(ValueError, match=r"no radius from 0\.0001 to 10"):
        matched_radius([far], Fixed(1.0, 0.2), lambda r: Fixed(0.9 + r / 1e3))
    assert clip_rate(never, Band()) == 0


@pytest.mark.slow
def test_the_tool_records_what_the_trainer_sees():
    tool = runpy.run_path(str(ROOT / "tools" / "match_radius.py"))
    found = tool["record"]("scratchpad", seed=5, generations=3)
    ratio = (found.logps - found.old_logps).exp()
    assert len(ratio) > 3 * 3 * 128  # three later updates of three batches of 128 completions
    assert ratio.std() > 0.01
    assert set(np.sign(found.advantages.numpy())) <= {-1.0, 0.0, 1.0}
    numbers = tool["summary"]({"scratchpad": found})
    assert numbers["tokens"]["scratchpad"] == len(ratio)
    for matched in numbers["matched"].values():
        assert math.isclose(
            matched["clip_rate"]["scratchpad"],
            numbers["reference"]["clip_rate"]["scratchpad"],
            abs_tol=2 / len(ratio),
        )
