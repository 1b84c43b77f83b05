"""Chapter "The gradient needs no root": masks from the divergence, equality with DPPO."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from claims_reference import NAMES, b, divergence, policies

from bandpo.clipping import Band, clipped_surrogate
from bandpo.operator import inside_band, log_band

torch.set_num_threads(1)


def pairs(count: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Old and new probabilities around and across the bounds, and advantages of both signs."""
    rng = np.random.default_rng(seed)
    logit = rng.normal(scale=3, size=count)
    p = 1 / (1 + np.exp(-logit))
    q = 1 / (1 + np.exp(-logit - rng.normal(scale=1.2, size=count)))
    return p, q, rng.choice([-2.0, -0.3, 0.5, 1.0], size=count)


def gradient(rule: Band, p: np.ndarray, q: np.ndarray, advantage: np.ndarray) -> np.ndarray:
    """d objective / d log q by automatic differentiation."""
    new = torch.from_numpy(np.log(q)).requires_grad_()
    objective = clipped_surrogate(
        new, torch.from_numpy(np.log(p)), torch.from_numpy(advantage), rule
    )
    return torch.autograd.grad(objective.sum(), new)[0].numpy()


@pytest.mark.claim("B1", "thm-root-free")
@pytest.mark.parametrize("share_inside", [0.3, 0.8])
@pytest.mark.parametrize("name", NAMES)
def test_gradient_of_the_clip_is_read_off_the_divergence(name: str, share_inside: float) -> None:
    p, q, advantage = pairs(400, seed=4)
    cost = np.array([float(b(name, *one)) for one in zip(p, q, strict=True)])
    radius = float(np.quantile(cost, share_inside))
    clear = np.abs(cost / radius - 1) > 1e-6  # not on a bound
    masked = (advantage * (q - p) > 0) & (cost > radius)
    assert 20 < masked.sum() < 380
    found = gradient(Band(name, radius, None), p, q, advantage)
    np.testing.assert_allclose(
        found[clear], (~masked * advantage * q / p)[clear], rtol=1e-12, atol=1e-15
    )


@pytest.mark.claim("B1", "thm-root-free")
@pytest.mark.parametrize("name", NAMES)
def test_inside_band_agrees_with_the_roots(name: str) -> None:
    p, q, _ = pairs(4000, seed=7)
    logp, logq = torch.from_numpy(np.log(p)), torch.from_numpy(np.log(q))
    low, high = log_band(logp, name, 0.05)
    log_r = logq - logp
    clear = ((log_r - low).abs() > 1e-7) & ((log_r - high).abs() > 1e-7 * (1 - logp.exp()))
    by_roots = (low <= log_r) & (log_r <= high)
    asked = inside_band(logp, logq, name, 0.05)
    assert clear.float().mean() > 0.99
    assert 0.05 < asked.double().mean() < 0.95
    assert torch.equal(asked[clear], by_roots[clear])


@pytest.mark.claim("B1", "thm-root-free")
def test_with_a_cap() -> None:
    p, q = np.array([1e-4, 1e-4, 1e-4, 0.5]), np.array([9.9e-4, 1.1e-3, 1e-9, 0.55])
    assert all(b("kl", *one) < 0.05 for one in zip(p[:2], q[:2], strict=True))
    found = gradient(Band("kl", 0.05, 10.0), p, q, np.ones(4))
    np.testing.assert_allclose(found, [9.9, 0.0, 1e-5, 1.1], rtol=1e-9)


@pytest.mark.claim("B1", "thm-root-free")
def test_value_differs_from_the_masked_objective_by_a_constant() -> None:
    p, q, advantage = pairs(500, seed=1)
    rule = Band("kl", 0.05, None)
    tensors = [torch.from_numpy(x) for x in (np.log(q), np.log(p), advantage)]
    value = clipped_surrogate(*tensors, rule).numpy()
    low, high = (x.exp().numpy() for x in rule.log_bounds(tensors[1]))
    masked = gradient(rule, p, q, advantage) == 0
    bound = np.where(advantage > 0, high, low)
    expected = np.where(masked, advantage * bound, advantage * q / p)
    np.testing.assert_allclose(value, expected, rtol=1e-12)


def binary_kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()


def binary_tv(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return (p - q).abs()


@pytest.mark.claim("B2", "cor-dppo")
@pytest.mark.parametrize(
    ("name", "distance", "radius"),
    [("kl", binary_kl, 0.05), ("tv", binary_tv, 0.15), ("tv", binary_tv, 0.01)],
)
@pytest.mark.parametrize("seed", range(4))
def test_band_and_dppo_have_the_same_logit_gradient(
    name: str, distance, radius: float, seed: int
) -> None:
    old, new = (torch.from_numpy(x) for x in policies(300, 2, seed, spread=2.5))
    new = (0.7 * new.log() + 0.3 * old.log()).softmax(0)
    rng = np.random.default_rng(seed)
    sample = torch.from_numpy(rng.choice(300, size=600, p=old.numpy()))
    advantage = torch.from_numpy(rng.choice([-1.0, 0.0, 1.0], size=600))

    logits = new.log().requires_grad_()
    logp = logits.log_softmax(0)[sample]
    band = clipped_surrogate(logp, old.log()[sample], advantage, Band(name, radius, None))
    (by_band,) = torch.autograd.grad(band.sum(), logits, retain_graph=True)

    # the definition of DPPO: a constant mask on the unclipped objective
    p, q = old[sample], logp.exp()
    far = distance(p, q) > radius
    blocked = ((advantage > 0) & (q > p) & far) | ((advantage <= 0) & (q < p) & far)
    assert blocked.any()
    assert not blocked.all()
    dppo = (~blocked).detach() * (q / p) * advantage
    (by_dppo,) = torch.autograd.grad(dppo.sum(), logits)
    torch.testing.assert_close(by_band, by_dppo, rtol=1e-10, atol=1e-12)


@pytest.mark.claim("B2", "cor-dppo")
@pytest.mark.parametrize("name", ["kl", "tv"])
def test_a_finer_partition_masks_at_least_as_much(name: str) -> None:
    for seed in range(10):
        new, old = policies(50, 2, seed, spread=1.5)
        top = np.argsort(-old)[:8]
        rest = np.setdiff1d(np.arange(50), top)
        parts = [*([i] for i in top), rest]
        finer = divergence(name, *(np.array([x[part].sum() for part in parts]) for x in (new, old)))
        for a in top:
            assert finer >= b(name, old[a], new[a]) - 1e-12
