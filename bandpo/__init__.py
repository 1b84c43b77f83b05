"""Ratio bounds from f-divergences (Band), clip rules built on them, and a TRL trainer for them."""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

# name -> module that defines it; resolved on first use, so that the numerical half never pays
# for transformers and TRL.
_LAZY = {
    "Divergence": "divergences",
    "get_divergence": "divergences",
    "list_divergences": "divergences",
    "band": "operator",
    "log_band": "operator",
    "log_band_side": "operator",
    "inside_band": "operator",
    "BandTable": "table",
    "check_divergence": "testing",
    "clipped_surrogate": "clipping",
    "BandPOConfig": "trainer",
    "BandPOTrainer": "trainer",
}

__all__ = sorted(_LAZY)


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(f"bandpo.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'bandpo' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])
