"""The clip rules: what bounds each of them puts on the ratio of a token.

Rules are frozen dataclasses of a few numbers; `bandpo.clipping` makes them from the flat fields of
a configuration and applies them.
"""

from __future__ import annotations

import abc
import math
from dataclasses import dataclass, field
from numbers import Real

import torch
from torch import Tensor

from bandpo.divergences import Divergence, get_divergence
from bandpo.operator import log_band, log_band_side

#: Old log-probabilities are raised to this value before any ratio is formed. A sampled token has
#: p < e^-80 only through numerical noise, and the ratio stays inside float32 (e^80 = 5.5e34).
MIN_LOGP = -80.0


class ClipRule(abc.ABC):
    """What every clip rule offers: bounds on the log-ratio from the old log-probability.

    Floating dtypes follow the operator's contract: float64 in, float64 out; anything narrower
    comes back as float32.
    """

    @abc.abstractmethod
    def log_bounds(self, old_logps: Tensor) -> tuple[Tensor, Tensor]:
        """Both bounds.

        Parameters
        ----------
        old_logps : Tensor, any shape
            Log-probabilities (nats) of the sampled tokens under the old policy, at most 0.

        Returns
        -------
        log_lower, log_upper : Tensor, shape of `old_logps`
            Bounds on ``log q - log p`` with ``log_lower <= 0 <= log_upper``.
        """

    def log_bound(self, old_logps: Tensor, upward: Tensor) -> Tensor:
        """The one bound of each token that its advantage can reach.

        Parameters
        ----------
        old_logps : Tensor, any shape
            As for `log_bounds`.
        upward : bool Tensor, broadcastable to `old_logps`
            True where the advantage is positive: the ratio is pushed up, so the upper bound acts.

        Returns
        -------
        Tensor, shape of `old_logps`
            ``log_upper`` where `upward`, else ``log_lower``.
        """
        log_lower, log_upper = self.log_bounds(old_logps)
        return torch.where(upward, log_upper, log_lower)

    def with_radius(self, radius: Tensor) -> ClipRule:
        """Return the rule once each token's radius is known.

        Parameters
        ----------
        radius : Tensor, broadcastable to the tokens
            What `bandpo.adaptive.AdaptiveBand.radii` returns.

        Returns
        -------
        ClipRule
            The rule itself, if it leaves the radius of its tokens to nobody else.
        """
        return self


@dataclass(frozen=True)
class Fixed(ClipRule):
    """The same interval ``[1 - epsilon_low, 1 + epsilon_high]`` for every token.

    ``Fixed(0.2, 0.2)`` is the rule of PPO and GRPO, ``Fixed(0.2, 0.28)`` Clip-Higher (DAPO).

    Parameters
    ----------
    epsilon_low : float, in (0, 1]
    epsilon_high : float, positive and finite
    """

    epsilon_low: float = 0.2
    epsilon_high: float = 0.2

    def __post_init__(self) -> None:
        check_positive("epsilon_low", self.epsilon_low)
        check_positive("epsilon_high", self.epsilon_high)
        if self.epsilon_low > 1:
            raise ValueError(
                f"epsilon_low must be at most 1 (a ratio is never negative); got {self.epsilon_low}"
            )

    def log_bounds(self, old_logps: Tensor) -> tuple[Tensor, Tensor]:
        like = _at_least_float32(old_logps)
        log_lower = math.log1p(-self.epsilon_low) if self.epsilon_low < 1 else -math.inf
        return (
            torch.full_like(like, log_lower),
            torch.full_like(like, math.log1p(self.epsilon_high)),
        )


@dataclass(frozen=True)
class DCPO(ClipRule):
    r"""Dynamic clipping of DCPO: the interval where ``|r - 1| r p <= epsilon``.

    .. math::
        \text{lower} = \tfrac12 + \tfrac12\sqrt{\max(1 - 4\epsilon_\text{low}/p,\, 0)}, \qquad
        \text{upper} = \tfrac12 + \tfrac12\sqrt{1 + 4\epsilon_\text{high}/p}

    The upper bound leaves the simplex (``upper > 1/p``) for ``p > 1 / (1 + epsilon_high)``; with
    the published 0.20 that is ``p > 5/6``.

    Parameters
    ----------
    epsilon_low, epsilon_high : float, positive and finite
        Published values 0.16 and 0.20.
    max_ratio : float or None
        Cap on the upper bound; None for no cap.
    """

    epsilon_low: float = 0.16
    epsilon_high: float = 0.20
    max_ratio: float | None = 10.0

    def __post_init__(self) -> None:
        check_positive("epsilon_low", self.epsilon_low)
        check_positive("epsilon_high", self.epsilon_high)
        check_max_ratio("max_ratio", self.max_ratio)

    def log_bounds(self, old_logps: Tensor) -> tuple[Tensor, Tensor]:
        logp = _at_least_float32(old_logps)
        inverse = torch.exp(-logp.clamp(min=MIN_LOGP))  # 1/p
        lower = 0.5 + 0.5 * torch.sqrt((1 - 4 * self.epsilon_low * inverse).clamp(min=0))
        upper = 0.5 + 0.5 * torch.sqrt(1 + 4 * self.epsilon_high * inverse)
        return lower.log(), _cap(upper.log(), self.max_ratio)


@dataclass(frozen=True)
class Band(ClipRule):
    """The exact range that a trust region in an f-divergence leaves to one token's ratio.

    Parameters
    ----------
    divergence : str or Divergence
        A registered name, ``"package.module:Name"``, or an object.
    radius : float or Tensor broadcastable to the tokens, positive and finite
        Radius of the trust region (nats for KL). Equal radii are not equal strictness across
        divergences.
    max_ratio : float or None
        Cap on the upper bound (10 in the published runs); None for the exact upper bound. Where
        the cap binds, the room to grow is again linear in p.
    """

    divergence: str | Divergence = "kl"
    radius: float | Tensor = 0.05
    max_ratio: float | None = 10.0

    def __post_init__(self) -> None:
        get_divergence(self.divergence)
        if not isinstance(self.radius, Tensor):  # log_band looks at the values of a tensor
            check_positive("radius", self.radius)
        check_max_ratio("max_ratio", self.max_ratio)

    def log_bounds(self, old_logps: Tensor) -> tuple[Tensor, Tensor]:
        log_lower, log_upper = log_band(old_logps, self.divergence, self.radius)
        return log_lower, _cap(log_upper, self.max_ratio)

    def log_bound(self, old_logps: Tensor, upward: Tensor) -> Tensor:
        # One solve a token instead of two. The cap never touches a lower bound, which is at most 0.
        return _cap(log_band_side(old_logps, upward, self.divergence, self.radius), self.max_ratio)


@dataclass(frozen=True)
class RelaxedBand(ClipRule):
    """Union of a Band and a fixed interval: never tighter than either (the paper's ablation).

    Leaves the simplex where ``1 + epsilon_high > 1/p``.
    """

    band: Band = field(default_factory=Band)
    fixed: Fixed = field(default_factory=lambda: Fixed(0.2, 0.28))

    def log_bounds(self, old_logps: Tensor) -> tuple[Tensor, Tensor]:
        band_lower, band_upper = self.band.log_bounds(old_logps)
        fixed_lower, fixed_upper = self.fixed.log_bounds(old_logps)
        return torch.minimum(band_lower, fixed_lower), torch.maximum(band_upper, fixed_upper)

    def log_bound(self, old_logps: Tensor, upward: Tensor) -> Tensor:
        band = self.band.log_bound(old_logps, upward)
        fixed = self.fixed.log_bound(old_logps, upward)
        return torch.where(upward, torch.maximum(band, fixed), torch.minimum(band, fixed))


@dataclass(frozen=True)
class PerSide(ClipRule):
    """Upper bound of one rule, lower bound of another (for example Band above, fixed 0.8 below)."""

    above: ClipRule
    below: ClipRule

    def log_bounds(self, old_logps: Tensor) -> tuple[Tensor, Tensor]:
        return self.below.log_bounds(old_logps)[0], self.above.log_bounds(old_logps)[1]

    def log_bound(self, old_logps: Tensor, upward: Tensor) -> Tensor:
        return torch.where(
            upward,
            self.above.log_bound(old_logps, upward),
            self.below.log_bound(old_logps, upward),
        )

    def with_radius(self, radius: Tensor) -> ClipRule:
        return PerSide(self.above.with_radius(radius), self.below.with_radius(radius))


def _at_least_float32(logp: Tensor) -> Tensor:
    return logp if logp.dtype == torch.float64 else logp.float()


def _cap(log_upper: Tensor, max_ratio: float | None) -> Tensor:
    return log_upper if max_ratio is None else log_upper.clamp(max=math.log(max_ratio))


def check_positive(name: str, value: float) -> None:
    """Raise ValueError, naming the argument, unless the value is a positive finite number."""
    if not (isinstance(value, Real) and 0 < value < math.inf):
        raise ValueError(f"{name} must be a positive finite number; got {value!r}")


def check_max_ratio(name: str, value: float | None) -> None:
    """Raise ValueError, naming the argument, unless the value is None or a finite cap above 1."""
    if value is not None and not (isinstance(value, Real) and 1 < value < math.inf):
        raise ValueError(
            f"{name} must be a finite number above 1, or None for no cap; got {value!r}"
        )
