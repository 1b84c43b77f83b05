"""Bounds from a lookup table, for a radius and a divergence that stay fixed.

The table's cells are equal in log|log p|, which is the logit of p near p = 1 and spreads the tail;
within a cell the bound is linear in log p. That grid needs no logarithm to find a cell: the cell
is the leading bits of the float32 number -log p.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bandpo.divergences import Divergence, get_divergence
from bandpo.operator import log_band, saturation

__all__ = ["BandTable"]

# -log p from 2^-40 to 2^7: p from 1 - 1e-12 down to e^-128. The outermost cells go on linearly.
_OCTAVES = (-40, 7)
_MANTISSA_BITS = 23
_EXPONENT_BIAS = 127
_FINITE = 1e30


@dataclass(frozen=True, eq=False)
class BandTable:
    """Lookup table of both bounds; make one with `BandTable.build`.

    Parameters
    ----------
    lines : Tensor, shape (2 * cells, 2), float32
        Intercept and slope in -log p of each cell: 1 - lower first, then log upper.
    bits : int
        log2 of the cells per octave of -log p.
    error : float
        Largest relative error of 1 - lower and of log upper, measured inside every cell.
    """

    lines: Tensor
    bits: int
    error: float

    @classmethod
    def build(
        cls, divergence: str | Divergence = "kl", radius: float = 0.05, bits: int = 8
    ) -> BandTable:
        """Tabulate a band.

        Parameters
        ----------
        divergence, radius
            As in `log_band`; one radius for all tokens.
        bits : int
            log2 of the cells per octave, 1 to 14; the error falls by 4 for each one more.

        Raises
        ------
        ValueError
            If bits is out of range, or as in `log_band`.
        """
        if not 1 <= bits <= 14:
            raise ValueError(f"bits must be from 1 to 14, got {bits!r}")
        divergence = get_divergence(divergence)
        octaves = _OCTAVES[1] - _OCTAVES[0]
        steps = torch.arange(octaves * 2**bits + 1)
        mantissa = 1 + (steps % 2**bits).double() / 2**bits
        edges = torch.ldexp(mantissa, steps // 2**bits + _OCTAVES[0])

        def values(x: Tensor) -> tuple[Tensor, Tensor]:
            lower, upper = log_band(-x, divergence, radius)
            return -torch.expm1(lower), upper

        shrink, rise = values(edges)
        left = torch.stack([edges[:-1]] * 2)
        right = torch.stack([edges[1:]] * 2)
        at_left = torch.stack([shrink[:-1], rise[:-1]])
        at_right = torch.stack([shrink[1:], rise[1:]])
        # the cell where a side saturates gets the line of its unsaturated part: shrink is cut
        # at 1, log upper at -log p when the table is read
        lower_until, upper_from = saturation(divergence, radius)
        for side, p in ((0, lower_until), (1, upper_from)):
            if 0 < p < 1:
                kink = -math.log(p)
                cell = int(torch.searchsorted(edges, kink)) - 1
                if side == 0:
                    right[side, cell], at_right[side, cell] = kink, 1.0
                else:
                    left[side, cell], at_left[side, cell] = kink, kink
        slope = (at_right - at_left) / (right - left)
        lines = torch.stack([at_left - slope * left, slope], dim=-1).reshape(-1, 2).float()
        table = cls(lines, bits, math.nan)
        error = 0.0
        for part in (0.1, 0.3, 0.5, 0.7, 0.9):
            x = (edges[:-1] + part * edges.diff()).float()
            for exact, upward in zip(values(x.double()), (False, True), strict=True):
                bound = table.log_band_side(-x, torch.tensor(upward)).double()
                found = bound if upward else -torch.expm1(bound)
                error = max(error, ((found - exact).abs() / exact).max().item())
        return cls(lines, bits, error)

    def to(self, device: torch.device | str) -> BandTable:
        """The same table on another device."""
        return BandTable(self.lines.to(device), self.bits, self.error)

    def log_band(self, logp: Tensor) -> tuple[Tensor, Tensor]:
        """Bounds on the log ratio, as `bandpo.operator.log_band`, in float32.

        Parameters
        ----------
        logp : Tensor, any shape
            Log probabilities, at most 0; above 0 counts as 0. NaN gives NaN.
        """
        x, cell = self._locate(logp)
        shrink, rise = self._line(x, cell), self._line(x, cell + self._cells)
        return self._log_lower(shrink), self._log_upper(rise, x)

    def log_band_side(self, logp: Tensor, upward: Tensor) -> Tensor:
        """One bound a token, as `bandpo.operator.log_band_side`, in float32."""
        x, cell = self._locate(logp)
        line = self._line(x, torch.where(upward, cell + self._cells, cell))
        return torch.where(upward, self._log_upper(line, x), self._log_lower(line))

    @property
    def _cells(self) -> int:
        return self.lines.shape[0] // 2

    def _locate(self, logp: Tensor) -> tuple[Tensor, Tensor]:
        if not isinstance(logp, Tensor) or not logp.is_floating_point():
            raise TypeError(f"logp must be a floating-point tensor, got {logp!r}")
        x = (-logp.detach()).clamp(min=0).float()
        first = (_OCTAVES[0] + _EXPONENT_BIAS) << self.bits
        cell = (x.view(torch.int32) >> (_MANTISSA_BITS - self.bits)) - first
        return x, cell.clamp(0, self._cells - 1)

    def _line(self, x: Tensor, cell: Tensor) -> Tensor:
        lines = self.lines.view(-1)
        # p = 0 would give 0 * inf where a line is level
        return lines[2 * cell] + lines[2 * cell + 1] * x.clamp(max=_FINITE)

    def _log_lower(self, shrink: Tensor) -> Tensor:
        return torch.log1p(-shrink.clamp(0, 1))

    def _log_upper(self, rise: Tensor, x: Tensor) -> Tensor:
        return torch.minimum(rise.clamp(min=0) + (x - x.clamp(max=_FINITE)), x)
