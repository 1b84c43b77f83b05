"""bandpo.integrations.verl against the losses of verl itself.

Run by ``python tools/verl_env.py`` in an environment that has verl; figures are recorded there.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import verl
from hydra import compose, initialize_config_dir
from hydra.errors import InstantiationException
from omegaconf import DictConfig, OmegaConf
from torch import Tensor
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY, get_policy_loss_fn
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass, validate_config
from verl.workers.config import ActorConfig
from verl.workers.utils.losses import ppo_loss

from bandpo.clipping import DCPO, Band, Fixed, PerSide, RelaxedBand
from bandpo.integrations.verl import LOSS_MODE, BandPolicyLossConfig, band_policy_loss
from bandpo.operator import binary_divergence, inside_band

ROOT = Path(__file__).resolve().parents[2]
VERL_CONFIG = str(Path(verl.__file__).parent / "trainer" / "config")
ACTOR = "actor_rollout_ref.actor."
LOSS = ACTOR + "policy_loss."
TARGET = f"{LOSS}_target_=bandpo.integrations.verl.BandPolicyLossConfig"
# what verl asks of every run
REQUIRED = (
    f"{ACTOR}ppo_micro_batch_size_per_gpu=4",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4",
    "actor_rollout_ref.rollout.n=16",
)
AGG_MODES = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)
# as one of two ranks, the second with its own micro-batch
ONE_OF_TWO_RANKS = {
    "dp_size": 2,
    "batch_num_tokens": 1000,
    "global_batch_size": 32,
    "loss_scale_factor": 100,
}


@cache
def verl_config(*overrides: str) -> DictConfig:
    """verl's PPO configuration under command-line overrides."""
    with initialize_config_dir(VERL_CONFIG, version_base=None):
        return compose("ppo_trainer", overrides=[*REQUIRED, *overrides])


def actor_config(*overrides: str) -> ActorConfig:
    """The actor's part, built as verl's workers build it."""
    return omega_conf_to_dataclass(verl_config(*overrides).actor_rollout_ref.actor)


def bandpo_config(*overrides: str, **fields: Any) -> ActorConfig:
    """The actor's part with the loss of this package."""
    rule = [f"+{LOSS}{name}={'null' if v is None else v}" for name, v in fields.items()]
    return actor_config(TARGET, f"{LOSS}loss_mode={LOSS_MODE}", *rule, *overrides)


@dataclass
class Batch:
    """What verl hands to a policy loss; float64 unless converted."""

    old_log_prob: Tensor
    log_prob: Tensor
    advantages: Tensor
    response_mask: Tensor
    rollout_is_weights: Tensor | None = None

    def run(self, loss_mode: str, agg_mode: str, config: ActorConfig) -> Result:
        """Loss, gradient and metrics of a registered policy loss."""
        log_prob = self.log_prob.clone().requires_grad_()
        loss, metrics = get_policy_loss_fn(loss_mode)(
            old_log_prob=self.old_log_prob,
            log_prob=log_prob,
            advantages=self.advantages,
            response_mask=self.response_mask,
            loss_agg_mode=agg_mode,
            config=config,
            rollout_is_weights=self.rollout_is_weights,
        )
        loss.backward()
        return Result(loss.detach(), log_prob.grad, metrics)

    @property
    def tokens(self) -> int:
        return int(self.response_mask.sum())


@dataclass
class Result:
    loss: Tensor
    gradient: Tensor
    metrics: dict[str, float]


def random_batch(seed: int, *, weights: bool = False, rows: int = 16, length: int = 64) -> Batch:
    """Tokens from rare to near certain, moved far enough to leave every interval on both sides."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    logits = 3 * normal(rows, length)
    lengths = torch.randint(1, length + 1, (rows,), generator=draw)
    lengths[0] = 0  # a sequence of which nothing counts
    mask = torch.arange(length) < lengths[:, None]
    moved = logits + 1.5 * normal(rows, length)
    return Batch(
        old_log_prob=torch.nn.functional.logsigmoid(logits).masked_fill(~mask, 0.0),
        log_prob=torch.nn.functional.logsigmoid(moved).masked_fill(~mask, 0.0),
        advantages=normal(rows, length).masked_fill(~mask, 0.0),
        response_mask=mask,
        rollout_is_weights=normal(rows, length).exp() if weights else None,
    )


#: every aggregation, alone and as one of two ranks, with and without rollout correction, each
#: with a batch of its own
SCENARIOS = [
    pytest.param(
        random_batch(seed, weights=weights),
        agg_mode,
        info,
        id=f"{agg_mode}-{'two-ranks' if info else 'alone'}-{'weights' if weights else 'plain'}",
    )
    for seed, (agg_mode, info, weights) in enumerate(
        itertools.product(AGG_MODES, ({}, ONE_OF_TWO_RANKS), (False, True))
    )
]


def relative(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference, relative to the largest entry."""
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


def metric_difference(ours: Result, theirs: Result) -> float:
    assert set(theirs.metrics) <= set(ours.metrics)
    return max(abs(ours.metrics[name] - value) for name, value in theirs.metrics.items())


def assert_equal(figures: dict[str, float]) -> None:
    # verl averages its own shares in float32
    limits = {"loss": 1e-12, "gradient": 1e-12, "metrics": 1e-7}
    assert all(value < limits[name] for name, value in figures.items()), figures


@pytest.mark.parametrize(("batch", "agg_mode", "info"), SCENARIOS)
@pytest.mark.parametrize(
    ("low", "high", "dual_clip"), [(0.2, 0.2, 3.0), (0.2, 0.28, 5.0), (0.5, 1.5, 1.2)]
)
def test_constant_bounds_are_vanilla(
    batch: Batch,
    agg_mode: str,
    info: dict[str, int],
    low: float,
    high: float,
    dual_clip: float,
    record_property: Callable[[str, object], None],
) -> None:
    clips = (
        f"{ACTOR}clip_ratio_low={low}",
        f"{ACTOR}clip_ratio_high={high}",
        f"{ACTOR}clip_ratio_c={dual_clip}",
    )
    vanilla, fixed = actor_config(*clips), bandpo_config(*clips, clip_rule="fixed")
    vanilla.global_batch_info.update(info)
    fixed.global_batch_info.update(info)
    theirs = batch.run("vanilla", agg_mode, vanilla)
    ours = batch.run(LOSS_MODE, agg_mode, fixed)
    # the comparison is not empty: both clips act
    assert theirs.metrics["actor/pg_clipfrac"] > 0.05
    assert theirs.metrics["actor/pg_clipfrac_lower"] > 0
    figures = {
        "loss": relative(ours.loss, theirs.loss),
        "gradient": relative(ours.gradient, theirs.gradient),
        "metrics": metric_difference(ours, theirs),
    }
    assert_equal(figures)
    record_property("fact", "constant bounds = `vanilla`")
    record_property("tokens", batch.tokens)
    for name, value in figures.items():
        record_property(name, value)


@pytest.mark.parametrize(("batch", "agg_mode", "info"), SCENARIOS)
@pytest.mark.parametrize("radius", [0.02, 0.05, 0.15])
@pytest.mark.parametrize(("divergence", "loss_mode"), [("kl", "dppo_kl"), ("tv", "dppo_tv")])
def test_band_gradient_is_dppo(
    batch: Batch,
    agg_mode: str,
    info: dict[str, int],
    radius: float,
    divergence: str,
    loss_mode: str,
    record_property: Callable[[str, object], None],
) -> None:
    # verl's dppo truncates ratios at clip_ratio_c, Band clips there for A < 0: out of reach here
    no_cap = f"{ACTOR}clip_ratio_c=1e6"
    clips = (f"{ACTOR}clip_ratio_low={radius}", f"{ACTOR}clip_ratio_high={radius}", no_cap)
    dppo = actor_config(*clips)
    band = bandpo_config(
        no_cap, band_divergence=divergence, band_radius=radius, band_max_ratio=None
    )
    dppo.global_batch_info.update(info)
    band.global_batch_info.update(info)
    theirs = batch.run(loss_mode, agg_mode, dppo)
    ours = batch.run(LOSS_MODE, agg_mode, band)
    for sign in (1, -1):  # both sides are clipped, and neither wholly
        side = ours.gradient[batch.response_mask & (sign * batch.advantages > 0)]
        assert 0.02 < (side == 0).double().mean() < 0.9
    assert torch.equal(ours.gradient == 0, theirs.gradient == 0)
    figures = {
        "gradient": relative(ours.gradient, theirs.gradient),
        "metrics": metric_difference(ours, theirs),
    }
    assert_equal(figures)
    # equal gradients of unequal objectives: theirs is a score-function surrogate
    assert relative(ours.loss, theirs.loss) > 1e-3
    record_property("fact", f"gradient of {divergence.upper()}-Band = `{loss_mode}`")
    record_property("tokens", batch.tokens)
    for name, value in figures.items():
        record_property(name, value)


@pytest.mark.parametrize(("divergence", "loss_mode"), [("kl", "dppo_kl"), ("tv", "dppo_tv")])
def test_beyond_the_ratio_cap_band_stops_and_dppo_truncates(
    divergence: str, loss_mode: str
) -> None:
    """For A < 0 and r > clip_ratio_c Band, as vanilla, has no gradient; DPPO has -A c."""
    batch = Batch(
        old_log_prob=torch.tensor([[0.1, 0.1]], dtype=torch.float64).log(),
        log_prob=torch.tensor([[0.5, 0.2]], dtype=torch.float64).log(),
        advantages=torch.tensor([[-1.0, -1.0]], dtype=torch.float64),
        response_mask=torch.ones(1, 2, dtype=torch.bool),
    )
    theirs = batch.run(loss_mode, "token-sum", actor_config())
    ours = batch.run(LOSS_MODE, "token-sum", bandpo_config(band_divergence=divergence))
    torch.testing.assert_close(theirs.gradient, torch.tensor([[3.0, 2.0]], dtype=torch.float64))
    torch.testing.assert_close(ours.gradient, torch.tensor([[0.0, 2.0]], dtype=torch.float64))


@pytest.mark.parametrize(
    "divergence", ["kl", "reverse_kl", "chi2", "hellinger", "alpha:0.5", "bandpo.divergences:TV"]
)
def test_gradient_is_zero_exactly_outside_the_band(divergence: str) -> None:
    batch = random_batch(seed=3)
    config = bandpo_config(
        f"{ACTOR}clip_ratio_c=1e6", band_divergence=divergence, band_max_ratio=None
    )
    gradient = batch.run(LOSS_MODE, "token-sum", config).gradient
    away = (batch.log_prob - batch.old_log_prob) * batch.advantages > 0
    outside = ~inside_band(batch.old_log_prob, batch.log_prob, divergence, 0.05)
    counts = batch.response_mask
    assert torch.equal(gradient[counts] == 0, (away & outside)[counts])
    assert (gradient[~counts] == 0).all()


def test_no_token_of_the_batches_sits_on_its_bound() -> None:
    """Else the equalities of masks above would hang on the 1e-8 in verl's logarithm."""
    for scenario, divergence in itertools.product(SCENARIOS, ("kl", "tv")):
        batch = scenario.values[0]
        value = binary_divergence(batch.old_log_prob, batch.log_prob, divergence)
        for radius in (0.02, 0.05, 0.15):
            assert (value - radius).abs()[batch.response_mask].min() > 1e-8


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({}, Band("kl", 0.05, 10.0)),
        ({"band_divergence": "chi2", "band_radius": 0.1}, Band("chi2", 0.1, 10.0)),
        ({"band_max_ratio": None}, Band("kl", 0.05, None)),
        ({"clip_rule": "fixed"}, Fixed(0.16, 0.28)),
        ({"clip_rule": "dcpo"}, DCPO(0.16, 0.28, 10.0)),
        ({"clip_rule": "relaxed_band"}, RelaxedBand(Band(), Fixed(0.16, 0.28))),
        ({"clip_rule_below": "fixed"}, PerSide(Band(), Fixed(0.16, 0.28))),
    ],
)
def test_rules_by_configuration(fields: dict[str, Any], rule: object) -> None:
    config = bandpo_config(f"{ACTOR}clip_ratio_low=0.16", f"{ACTOR}clip_ratio_high=0.28", **fields)
    assert config.policy_loss.rule(config.clip_ratio_low, config.clip_ratio_high) == rule


def test_clip_ratio_stands_in_for_a_side_that_is_null() -> None:
    batch = random_batch(seed=4)
    one = (
        f"{ACTOR}clip_ratio=0.3",
        f"{ACTOR}clip_ratio_low=null",
        f"{ACTOR}clip_ratio_high=null",
    )
    theirs = batch.run("vanilla", "token-mean", actor_config(*one))
    ours = batch.run(LOSS_MODE, "token-mean", bandpo_config(*one, clip_rule="fixed"))
    assert relative(ours.gradient, theirs.gradient) < 1e-12


def test_tail_metrics_are_shares_of_the_tokens_that_count() -> None:
    # of ten tokens that count: tail up (clipped, not), tail down (clipped, not), others
    old = [0.1, 0.1, 0.1, 0.1, 0.1, 0.5, 0.5, 0.5, 0.5, 0.9]
    new = [0.9, 0.11, 0.001, 0.09, 0.3, 0.99, 0.5, 0.01, 0.5, 0.9]
    advantages = [1.0, 1.0, -1.0, -1.0, 0.0, 1.0, 1.0, -1.0, -1.0, 1.0]
    batch = Batch(
        old_log_prob=torch.tensor([[*old, 0.01]], dtype=torch.float64).log(),
        log_prob=torch.tensor([[*new, 0.9]], dtype=torch.float64).log(),
        advantages=torch.tensor([[*advantages, 1.0]], dtype=torch.float64),
        response_mask=torch.tensor([[True] * 10 + [False]]),
    )
    metrics = batch.run(LOSS_MODE, "token-mean", bandpo_config()).metrics
    assert {name: metrics[name] for name in metrics if name != "actor/ppo_kl"} == pytest.approx(
        {
            "actor/pg_clipfrac": 0.4,
            "actor/pg_clipfrac_lower": 0.0,
            "actor/tail_up_frac": 0.2,
            "actor/tail_down_frac": 0.2,
            "actor/tail_clip_high_frac": 0.1,
            "actor/tail_clip_low_frac": 0.1,
        },
        abs=1e-8,
    )
    fewer = batch.run(LOSS_MODE, "token-mean", bandpo_config(tail_threshold=0.05)).metrics
    assert fewer["actor/tail_up_frac"] == 0.0


@pytest.mark.parametrize("rule", ["band", "fixed", "dcpo", "relaxed_band"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_extreme_log_probabilities_give_finite_gradients(rule: str, dtype: torch.dtype) -> None:
    values = torch.tensor([0.0, -1e-7, -1.0, -30.0, -90.0, -300.0, -1e4], dtype=dtype)
    pairs = torch.cartesian_prod(values, values)
    for advantage in (1.0, -1.0):
        batch = Batch(
            old_log_prob=pairs[:, :1],
            log_prob=pairs[:, 1:],
            advantages=torch.full_like(pairs[:, :1], advantage),
            response_mask=torch.ones_like(pairs[:, :1], dtype=torch.bool),
        )
        result = batch.run(
            LOSS_MODE, "token-sum", bandpo_config(clip_rule=rule, band_max_ratio=None)
        )
        assert result.loss.isfinite()
        assert result.gradient.isfinite().all()


def test_a_batch_of_which_nothing_counts() -> None:
    batch = random_batch(seed=5)
    batch.response_mask = torch.zeros_like(batch.response_mask)
    result = batch.run(LOSS_MODE, "token-sum", bandpo_config())
    assert result.loss == 0
    assert set(result.metrics.values()) == {0.0}


def test_verls_own_loss_entry_picks_the_rule_by_configuration() -> None:
    """ppo_loss is what verl's actor workers call; it finds the loss by policy_loss.loss_mode."""
    batch = random_batch(seed=6, weights=True)
    rows, length = batch.response_mask.shape
    prompts = torch.ones(rows, 1, dtype=torch.long)
    data = tu.get_tensordict(
        {
            "prompts": prompts,
            "responses": torch.ones(rows, length, dtype=torch.long),
            "attention_mask": torch.ones(rows, 1 + length, dtype=torch.long),
            "response_mask": batch.response_mask,
            "old_log_probs": batch.old_log_prob,
            "advantages": batch.advantages,
            "rollout_is_weights": batch.rollout_is_weights,
        },
        {"dp_size": 1, "batch_num_tokens": batch.tokens, "global_batch_size": rows},
    )
    # verl's models give a log probability to every position, shifted left by one
    shifted = torch.cat([batch.log_prob, torch.zeros(rows, 1, dtype=torch.float64)], dim=1)
    config = bandpo_config(band_divergence="chi2", band_radius=0.1)
    loss, metrics = ppo_loss(config, {"log_probs": shifted.flatten()}, data)
    config.global_batch_info.update(
        dp_size=1, batch_num_tokens=batch.tokens, global_batch_size=rows, loss_scale_factor=None
    )
    expected = batch.run(LOSS_MODE, "token-mean", config)
    torch.testing.assert_close(loss, expected.loss)
    assert {name: metrics[name].aggregate() for name in expected.metrics} == expected.metrics


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("band_radius=-1", "radius must be a positive finite number; got -1"),
        ("band_radius=wide", "radius must be a positive finite number; got 'wide'"),
        ("band_divergence=kullback", "unknown divergence 'kullback'"),
        ("band_max_ratio=0.5", "max_ratio must be a finite number above 1"),
        ("clip_rule=bandit", "clip_rule must be one of fixed, dcpo, band, relaxed_band"),
        ("clip_rule_below=bandit", "clip_rule_below must be one of"),
        ("tail_threshold=2", "tail_threshold must be in"),
        ("band_raduis=0.1", "unexpected keyword argument 'band_raduis'"),
        ("loss_mode=vanilla", "loss_mode is 'vanilla', a loss that ignores the clip rule"),
    ],
)
def test_verls_validation_refuses_a_bad_configuration(override: str, message: str) -> None:
    mode = f"{LOSS}loss_mode={LOSS_MODE}"
    bad = f"{LOSS}{override}" if override.startswith("loss_mode") else f"+{LOSS}{override}"
    config = verl_config(TARGET, mode, bad)
    with pytest.raises(InstantiationException, match=message):
        validate_config(config, use_reference_policy=False, use_critic=False)


def test_the_loss_refuses_a_configuration_without_its_fields() -> None:
    batch = random_batch(seed=7)
    with pytest.raises(TypeError, match=r"policy_loss\._target_=bandpo\.integrations\.verl\.Band"):
        batch.run(LOSS_MODE, "token-mean", actor_config(f"{LOSS}loss_mode={LOSS_MODE}"))


def test_the_dual_clip_is_above_one() -> None:
    batch = random_batch(seed=7)
    with pytest.raises(ValueError, match=r"clip_ratio_c.*above 1, got 0\.9"):
        batch.run(LOSS_MODE, "token-mean", bandpo_config(f"{ACTOR}clip_ratio_c=0.9"))


def test_the_chapters_command_is_a_configuration_that_verl_accepts() -> None:
    chapter = (ROOT / "book" / "frameworks.md").read_text(encoding="utf-8")
    command = chapter.split("python -m verl.trainer.main_ppo", 1)[1].split("```", 1)[0]
    overrides = command.replace("\\\n", " ").split()
    with initialize_config_dir(VERL_CONFIG, version_base=None):
        config = compose("ppo_trainer", overrides=overrides)
    validate_config(config, use_reference_policy=True, use_critic=False)
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    assert isinstance(actor.policy_loss, BandPolicyLossConfig)
    assert actor.policy_loss.rule() == Band("kl", 0.05, 10.0)
    # the published set-up, as far as the command states it
    assert (actor.clip_ratio_c, actor.kl_loss_coef, actor.loss_agg_mode, actor.rollout_n) == (
        10,
        0.001,
        "seq-mean-token-mean",
        16,
    )


def test_a_ray_worker_registers_the_loss_when_it_builds_its_configuration() -> None:
    import ray

    @ray.remote
    def worker(actor: dict[str, Any]) -> tuple[bool, bool, str]:
        from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
        from verl.utils.config import omega_conf_to_dataclass

        before = "bandpo" in POLICY_LOSS_REGISTRY
        config = omega_conf_to_dataclass(actor)
        return before, "bandpo" in POLICY_LOSS_REGISTRY, repr(config.policy_loss.rule())

    config = verl_config(TARGET, f"{LOSS}loss_mode={LOSS_MODE}", f"+{LOSS}band_radius=0.1")
    actor = OmegaConf.to_container(config.actor_rollout_ref.actor, resolve=True)
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    try:
        before, after, rule = ray.get(worker.remote(OmegaConf.create(actor)))
    finally:
        ray.shutdown()
    assert (before, after, rule) == (False, True, repr(Band("kl", 0.1)))


def test_registered_under_its_name() -> None:
    assert POLICY_LOSS_REGISTRY[LOSS_MODE] is band_policy_loss
