"""Chapter "Ratio clipping": importance weighting, and what a clip does to a gradient."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from claims_reference import policies

from bandpo.clipping import DCPO, Band, ClipRule, Fixed, RelaxedBand, clipped_surrogate

torch.set_num_threads(1)

NEVER = Fixed(1.0, 1e9)
RULES: list[ClipRule] = [
    Fixed(0.2, 0.2),
    Fixed(0.2, 0.28),
    DCPO(),
    Band("kl", 0.05, None),
    Band("tv", 0.05),
    Band("chi2", 0.3, None),
    RelaxedBand(),
]


@pytest.mark.claim("prop-importance")
@pytest.mark.parametrize("seed", range(5))
def test_weighted_old_samples_give_the_gradient_of_the_new_policy(seed: int) -> None:
    old, new = (torch.from_numpy(x) for x in policies(40, 2, seed, spread=2.0))
    advantages = torch.from_numpy(np.random.default_rng(seed).normal(size=40))
    logits = new.log().requires_grad_()
    objective = clipped_surrogate(logits.log_softmax(0), old.log(), advantages, NEVER)
    (gradient,) = torch.autograd.grad((old * objective).sum(), logits)
    # E_{a ~ Q}[A (e_a - Q)] written out
    expected = new * advantages - new * (new * advantages).sum()
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.claim("prop-importance")
def test_gradient_of_a_log_probability_in_the_logits() -> None:
    (policy,) = (torch.from_numpy(x) for x in policies(7, 1, seed=3))
    logits = policy.log().requires_grad_()
    for a in range(7):
        (gradient,) = torch.autograd.grad(logits.log_softmax(0)[a], logits)
        expected = torch.nn.functional.one_hot(torch.tensor(a), 7) - policy
        torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-15)


@pytest.mark.claim("prop-clip-mask")
@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_clip_is_a_switch_on_the_side_of_the_advantage(rule: ClipRule) -> None:
    rng = np.random.default_rng(1)
    p = rng.uniform(1e-3, 0.99, size=4000)
    q = p * np.exp(rng.normal(size=4000))
    p, q = p[q < 1], q[q < 1]
    advantage = rng.choice([-1.5, 0.0, 0.7, 2.0], size=p.size)
    old = torch.from_numpy(np.log(p))
    low, high = (x.exp().numpy() for x in rule.log_bounds(old))
    new = torch.from_numpy(np.log(q)).requires_grad_()
    objective = clipped_surrogate(new, old, torch.from_numpy(advantage), rule)
    (gradient,) = torch.autograd.grad(objective.sum(), new)

    r = q / p
    by_definition = np.minimum(r * advantage, np.clip(r, low, high) * advantage)
    one_sided = np.select(
        [advantage > 0, advantage < 0],
        [advantage * np.minimum(r, high), advantage * np.maximum(r, low)],
    )
    np.testing.assert_allclose(objective.detach(), by_definition, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(by_definition, one_sided, rtol=1e-14, atol=1e-14)
    masked = ((advantage > 0) & (r > high)) | ((advantage < 0) & (r < low))
    assert masked.any()
    assert not masked.all()
    # d/d log q of M A r; in particular no gradient pulls a ratio back
    np.testing.assert_allclose(gradient, ~masked * advantage * r, rtol=1e-12, atol=1e-14)


@pytest.mark.claim("prop-clip-mask")
@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_no_limit_on_the_side_away_from_the_push(rule: ClipRule) -> None:
    old = torch.tensor([1e-6], dtype=torch.float64).log()
    new = torch.tensor([0.9], dtype=torch.float64).log()
    down = clipped_surrogate(new, old, torch.tensor([-1.0]), rule)
    torch.testing.assert_close(down, torch.tensor([-0.9e6], dtype=torch.float64), rtol=1e-9, atol=0)
