"""Wrong configurations of every kind are refused before a model loads, in a sentence that helps."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from tiny import settings
from trl import GRPOConfig, GRPOTrainer

from bandpo.clipping import DCPO, Band, Fixed, PerSide, RelaxedBand
from bandpo.divergences import Divergence
from bandpo.trainer import BandPOConfig, BandPOTrainer

CONCAVE = Divergence("concave", lambda u: u.sqrt() - 1, math.inf, 0.0)


def config(folder: Path, **changes: Any) -> BandPOConfig:
    return BandPOConfig(**settings(folder, **changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"clip_rule": "ppo"}, "clip_rule must be one of fixed, dcpo, band, relaxed_band"),
        ({"clip_rule_below": "ppo"}, "clip_rule_below must be one of"),
        ({"band_divergence": "kll"}, "kll"),
        ({"band_divergence": "no.such.module:Name"}, "no.such.module"),
        ({"band_divergence": "test_trainer_config:CONCAVE"}, "'concave' breaks.*\n- convex: "),
        ({"band_radius": 0.0}, "radius must be a positive finite number; got 0.0"),
        ({"band_radius": math.nan}, "radius must be a positive finite number"),
        ({"band_radius": "0.05"}, "radius must be a positive finite number; got '0.05'"),
        ({"band_max_ratio": 1.0}, "max_ratio must be a finite number above 1"),
        ({"clip_rule": "fixed", "epsilon": 0.0}, "epsilon_low must be a positive finite number"),
        ({"clip_rule": "fixed", "epsilon_high": -0.1}, "epsilon_high must be a positive"),
        ({"tail_threshold": 0.0}, r"tail_threshold must lie in \(0, 1\); got 0.0"),
        ({"tail_threshold": 1.0}, "tail_threshold"),
        ({"loss_type": "cispo"}, "'cispo' does not"),
        ({"loss_type": "sapo"}, "loss_type must be one of grpo, bnpo, dr_grpo, dapo"),
        ({"loss_type": "luspo"}, "'luspo' does not"),
        ({"loss_type": "vespo"}, "'vespo' does not"),
        ({"importance_sampling_level": "sequence"}, "importance_sampling_level must be 'token'"),
        ({"delta": 4.0}, "delta must be at least the largest upper bound, 10 here; got 4"),
        ({"delta": 1e6, "band_max_ratio": None}, "largest upper bound, inf here"),
        ({"delta": 1.1, "clip_rule": "fixed"}, "largest upper bound, 1.2 here"),
        (
            {
                "delta": 1.25,
                "clip_rule": "relaxed_band",
                "band_max_ratio": 1.2,
                "epsilon_high": 0.3,
            },
            "largest upper bound, 1.3 here",
        ),
        ({"delta": 5.0, "clip_rule": "dcpo"}, "largest upper bound, 10 here"),
    ],
)
def test_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(tmp_path, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"delta": 10.0},
        {"delta": 1.2, "clip_rule": "fixed"},
        {"delta": 10.0, "clip_rule": "dcpo", "epsilon": 0.16},
        {"loss_type": "dr_grpo"},
        {"band_divergence": "alpha:0.5"},
        {"band_max_ratio": None},
    ],
)
def test_accepted(tmp_path: Path, changes: dict[str, Any]) -> None:
    config(tmp_path, **changes)


def test_fields_become_rules(tmp_path: Path) -> None:
    assert config(tmp_path).rule() == Band("kl", 0.05, 10.0)
    assert config(tmp_path, clip_rule="fixed", epsilon_high=0.28).rule() == Fixed(0.2, 0.28)
    assert config(tmp_path, clip_rule="dcpo", epsilon=0.16, epsilon_high=0.2).rule() == DCPO()
    assert config(tmp_path, clip_rule="relaxed_band", epsilon_high=0.28).rule() == RelaxedBand()
    assert config(tmp_path, clip_rule_below="fixed").rule() == PerSide(Band(), Fixed(0.2, 0.2))


def test_liger_is_refused_where_it_bypasses_the_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to TRL 1.12, use_liger_kernel computed the loss in a kernel that knows no such bounds."""
    monkeypatch.setattr(GRPOTrainer, "compute_liger_loss", lambda self: None, raising=False)
    with pytest.raises(ValueError, match="use_liger_kernel must be False"):
        config(tmp_path, use_liger_kernel=True)


@pytest.mark.parametrize(
    ("changes", "warned"),
    [
        ({"num_iterations": 4, "save_steps": 6}, True),
        ({"num_iterations": 4, "save_steps": 8}, False),
        ({"num_iterations": 1, "steps_per_generation": 4, "save_steps": 6}, True),
        ({"num_iterations": 4, "save_steps": 6, "save_strategy": "no"}, False),
    ],
)
def test_checkpoints_off_the_generation_cycle_are_named(
    tmp_path: Path, changes: dict[str, Any], warned: bool
) -> None:
    """Resuming in mid-cycle generates anew, so the run is no longer the uninterrupted one."""
    cautions = config(tmp_path, **{"save_strategy": "steps"} | changes).cautions()
    assert any("Set save_steps to a multiple of 4" in text for text in cautions) is warned


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"clip_rule": "fixed", "band_radius": 0.1}, "band_radius=0.1 has no effect"),
        ({"clip_rule": "dcpo", "band_divergence": "tv"}, "band_divergence='tv' has no effect"),
        ({"clip_rule": "fixed", "band_max_ratio": None}, "band_max_ratio=None has no effect"),
        ({"band_adaptivity": 0.2}, "reads it: adaptive_band."),
        ({"epsilon": 0.3}, "reads it: fixed, dcpo, relaxed_band."),
        ({"epsilon_high": 0.28}, "epsilon_high=0.28 has no effect"),
        ({"epsilon_high": 0.2}, None),  # the same as leaving it out
        ({"clip_rule_below": "fixed", "epsilon": 0.3}, None),
        ({"clip_rule": "fixed", "clip_rule_below": "band", "band_radius": 0.1}, None),
        ({"clip_rule": "relaxed_band", "epsilon_high": 0.28, "band_radius": 0.1}, None),
        ({"clip_rule": "dcpo", "band_max_ratio": None}, None),
        ({"clip_rule": "adaptive_band", "band_adaptivity": 0.2}, None),
    ],
)
def test_settings_that_no_rule_reads_are_named(
    tmp_path: Path, changes: dict[str, Any], told: str | None
) -> None:
    about = [text for text in config(tmp_path, **changes).cautions() if "no effect" in text]
    assert len(about) == (told is not None)
    assert told is None or told in about[0]


@pytest.mark.parametrize(
    ("divergence", "radius", "free"),
    [
        ("tv", 5.0, True),
        ("tv", 0.3, False),  # a token of 0.01 reaches 0.31
        ("kl", 50.0, True),
        ("kl", 0.3, False),
        ("hellinger", 0.05, False),
    ],
)
def test_a_radius_that_clips_nothing_is_named(
    tmp_path: Path, divergence: str, radius: float, free: bool
) -> None:
    changes = {"band_divergence": divergence, "band_radius": radius}
    cautions = config(tmp_path, **changes).cautions()
    assert any("leaves nearly every ratio free" in text for text in cautions) is free


def test_a_plain_grpo_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="args must be a BandPOConfig, got GRPOConfig"):
        BandPOTrainer("no-model-is-loaded", None, GRPOConfig(**settings(tmp_path)))
