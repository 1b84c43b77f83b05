r"""A radius of its own for each token, at the same mean radius: the rule `AdaptiveBand`.

A signal that the old policy gives to each token orders the tokens of a batch. The radius of a
token is the given one, raised or lowered in proportion to its place in that order:

.. math::
    \delta_t = \delta\,(1 + \kappa\,\rho_t), \qquad
    \rho_t = \frac{\#\{s : x_s < x_t\} - \#\{s : x_s > x_t\}}{n}

``kappa`` is the adaptivity. The ranks ``rho_t`` lie in (-1, 1) and add up to 0, so the mean
radius is ``delta`` whatever the signal, and equal signals give every token ``delta``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real

import torch
from torch import Tensor

from bandpo.divergences import Divergence
from bandpo.import_path import load
from bandpo.rules import Band, ClipRule

__all__ = [
    "SIGNALS",
    "AdaptiveBand",
    "Signal",
    "centered_ranks",
    "entropy",
    "get_signal",
    "surprisal",
]

#: From a batch of completions to one number a token. The batch holds, under TRL's names, what is
#: known when old log-probabilities are computed: `AdaptiveBand.measure` says what.
Signal = Callable[[Mapping[str, Tensor]], Tensor]


def entropy(batch: Mapping[str, Tensor]) -> Tensor:
    """Entropy of the old policy at each token's position (nats), at the sampling temperature."""
    return batch["entropies"]


def surprisal(batch: Mapping[str, Tensor]) -> Tensor:
    """Minus the log-probability of each token under the old policy (nats)."""
    return -batch["old_per_token_logps"]


SIGNALS: dict[str, Signal] = {"entropy": entropy, "surprisal": surprisal}


def get_signal(spec: str | Signal) -> Signal:
    """Resolve a signal.

    Parameters
    ----------
    spec : str or callable
        ``"entropy"``, ``"surprisal"``, an import path ``"package.module:name"`` of a function, or
        the function.

    Returns
    -------
    callable
        Takes the batch that `AdaptiveBand.measure` describes, returns a tensor of shape (B, T).

    Raises
    ------
    TypeError
        If spec is neither, or the import path names no function.
    ValueError
        If the name is not known or the import fails.
    """
    if callable(spec):
        return spec
    if not isinstance(spec, str):
        raise TypeError(f"signal must be a name or a function, got {spec!r}")
    if spec in SIGNALS:
        return SIGNALS[spec]
    if ":" not in spec:
        raise ValueError(
            f"unknown signal {spec!r}; known are {', '.join(SIGNALS)} and an import path "
            "'package.module:name'"
        )
    found = load(spec, "signal")
    if not callable(found):
        raise TypeError(f"signal {spec!r} must name a function, got {found!r}")
    return found


def centered_ranks(signal: Tensor, batch: Tensor) -> Tensor:
    """Share of the batch with a smaller signal, minus the share with a larger one.

    Parameters
    ----------
    signal : Tensor, any shape
    batch : Tensor, any shape
        The signals of all tokens that count.

    Returns
    -------
    Tensor, shape and dtype of `signal`
        In (-1, 1) for a token of the batch, 0 for all of them if they are equal. Over the batch
        the numerators are integers whose sum is 0.
    """
    ordered = batch.flatten().sort().values
    below = torch.searchsorted(ordered, signal.contiguous())
    not_above = torch.searchsorted(ordered, signal.contiguous(), right=True)
    return (below + not_above - ordered.numel()).to(signal.dtype) / ordered.numel()


@dataclass(frozen=True)
class AdaptiveBand(ClipRule):
    """A Band whose radius differs between tokens; over a batch its mean is the given radius.

    The rule has bounds only after `radii` has seen a whole batch: ``with_radius`` then gives the
    Band of these tokens. In a loop of your own:

    >>> rule = AdaptiveBand("kl", 0.05, adaptivity=0.5)
    >>> old_logps = torch.tensor([[-0.1, -2.0, -5.0]], dtype=torch.float64)
    >>> entropies = torch.tensor([[0.2, 1.5, 0.9]], dtype=torch.float64)
    >>> radius = rule.radii(entropies, entropies)
    >>> [round(x, 4) for x in radius[0].tolist()]
    [0.0333, 0.0667, 0.05]
    >>> band = rule.with_radius(radius)  # for clipped_surrogate

    Parameters
    ----------
    divergence, max_ratio
        As in `bandpo.rules.Band`.
    radius : float, positive and finite
        Mean radius of the tokens of a batch.
    signal : str or callable
        What orders the tokens; see `get_signal`.
    adaptivity : float, in (-1, 1)
        Radii lie between ``1 - abs(adaptivity)`` and ``1 + abs(adaptivity)`` times `radius`.
        Positive: more room where the signal is large. Negative: more where it is small. 0 is Band.
    """

    divergence: str | Divergence = "kl"
    radius: float = 0.05
    max_ratio: float | None = 10.0
    signal: str | Signal = "entropy"
    adaptivity: float = 0.5

    def __post_init__(self) -> None:
        if isinstance(self.radius, Tensor):
            raise TypeError("radius must be a number, the mean of the radii; got a tensor")
        Band(self.divergence, self.radius, self.max_ratio)  # checks all three
        get_signal(self.signal)
        check_adaptivity("adaptivity", self.adaptivity)

    def measure(self, batch: Mapping[str, Tensor], mask: Tensor) -> Tensor:
        """Evaluate the signal on completions.

        Parameters
        ----------
        batch : Mapping of str to Tensor
            At least ``old_per_token_logps``, ``entropies`` (both nats), ``completion_ids`` and
            ``completion_mask``, all of shape (B, T), and ``advantages``, shape (B,). Padding may
            hold anything.
        mask : bool Tensor, shape (B, T)
            True for the tokens that count.

        Returns
        -------
        Tensor, shape (B, T)

        Raises
        ------
        TypeError, ValueError
            If the signal is no tensor of that shape, or NaN at a token that counts.
        """
        found = get_signal(self.signal)(batch)
        shape = batch["old_per_token_logps"].shape
        if not isinstance(found, Tensor):
            raise TypeError(f"signal {self.signal!r} must return a tensor, got {found!r}")
        if found.shape != shape:
            raise ValueError(
                f"signal {self.signal!r} must return one number a token, shape {tuple(shape)}; "
                f"got shape {tuple(found.shape)}"
            )
        if (found.isnan() & mask).any():
            raise ValueError(f"signal {self.signal!r} is NaN at a completion token")
        return found.detach()

    def radii(self, signal: Tensor, batch: Tensor) -> Tensor:
        """Radius of each token.

        Parameters
        ----------
        signal : Tensor, any shape
            The signals of some tokens of the batch.
        batch : Tensor, any shape
            The signals of all its tokens, those of other processes included, without padding.

        Returns
        -------
        Tensor, shape and dtype of `signal`
            Over the batch, the mean is `radius`.

        Raises
        ------
        ValueError
            If a signal of the batch is NaN: it has no place in an order.
        """
        if batch.isnan().any():
            raise ValueError("batch must hold the signals of tokens that count; one of them is NaN")
        return self.radius * (1 + self.adaptivity * centered_ranks(signal, batch))

    def with_radius(self, radius: Tensor) -> Band:
        return Band(self.divergence, radius, self.max_ratio)

    def log_bounds(self, old_logps: Tensor) -> tuple[Tensor, Tensor]:
        raise TypeError(
            "AdaptiveBand has no bounds before each token has its radius: use "
            "rule.with_radius(rule.radii(signal, signal)), signal being that of the whole batch"
        )


def check_adaptivity(name: str, value: float) -> None:
    """Raise ValueError, naming the argument, unless the value is a number in (-1, 1)."""
    if not (isinstance(value, Real) and -1 < value < 1):
        raise ValueError(f"{name} must be a number between -1 and 1; got {value!r}")
