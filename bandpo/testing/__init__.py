"""The contract that a divergence must meet before its bounds can be trusted.

`check_divergence` examines f itself, then the bounds that follow from it over a grid of
probabilities and radii. Each check says what must hold, by how much and where it fails, and what
that would do to training.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import Any

from bandpo.divergences import Divergence, get_divergence
from bandpo.testing.bounds import bound_checks, solver_checks
from bandpo.testing.checks import Check
from bandpo.testing.generator import generator_checks

#: Without these no bound can be computed at all.
_NEEDED = ("elementwise", "finite")

__all__ = ["Check", "ContractError", "Report", "check_divergence"]


@dataclass(frozen=True)
class Report:
    """What `check_divergence` found.

    Parameters
    ----------
    divergence : str
        Name of the divergence.
    radius : float
        Radius at which its bounds were checked, besides a tenth of it and ten times as much.
    checks : tuple of Check
        In the order in which they were made. The bounds are examined only where f gives a finite
        number for each ratio; otherwise the checks end there.
    """

    divergence: str
    radius: float
    checks: tuple[Check, ...]

    @property
    def violations(self) -> tuple[Check, ...]:
        """The checks that failed."""
        return tuple(check for check in self.checks if not check.passed)

    @property
    def passed(self) -> bool:
        """Whether none failed."""
        return not self.violations

    def rows(self) -> list[dict[str, Any]]:
        """One row for each check, for `bandpo.plotting.table`."""
        return [
            {
                "check": check.name,
                "must hold": check.requires,
                "largest error": check.size,
                "allowed": check.tolerance,
                "where": check.where,
                "verdict": "holds" if check.passed else "VIOLATED",
            }
            for check in self.checks
        ]

    def __str__(self) -> str:
        if self.passed:
            return f"divergence {self.divergence!r} keeps its contract: {len(self.checks)} checks"
        lines = [f"divergence {self.divergence!r} breaks its contract"]
        lines += [f"- {check}" for check in self.violations]
        return "\n".join(lines)


class ContractError(ValueError):
    """A divergence breaks its contract; ``report`` holds every check."""

    def __init__(self, report: Report) -> None:
        super().__init__(str(report))
        self.report = report


def check_divergence(divergence: str | Divergence, radius: float = 0.05) -> Report:
    """Check that a divergence is what a trust region needs, and that its bounds hold.

    Parameters
    ----------
    divergence : str or Divergence
        What `get_divergence` takes.
    radius : float
        Size of the trust region, in the divergence's unit. The bounds are checked at a tenth of
        it, at it and at ten times it, and errors of f count in proportion to it.

    Returns
    -------
    Report
        Every check, all of them passed.

    Raises
    ------
    ContractError
        A ValueError that lists every violation: what, by how much, where, and what it would break
        in training.
    TypeError, ValueError
        If the divergence cannot be found or the radius is no positive finite number.

    Notes
    -----
    f is examined at ratios from 1e-40 to 1e40, bounds at p from 1e-13 to 1 - 1e-13. A finite
    sample cannot prove convexity: a dent narrower than
    the grid, 0.1 % from 1e-3 to 1e3 and 5 % beyond, is not seen. A limit
    that is approached so slowly that no float shows it is taken as declared.

    Examples
    --------
    >>> str(check_divergence("chi2"))
    "divergence 'chi2' keeps its contract: 18 checks"
    """
    divergence = get_divergence(divergence)
    if isinstance(radius, bool) or not isinstance(radius, Real):
        raise TypeError(f"radius must be a number, got {radius!r}")
    if not 0 < 10 * radius < math.inf:
        raise ValueError(f"radius must be positive and finite, got {radius!r}")
    radius = float(radius)
    checks = generator_checks(divergence, radius)
    if all(check.passed for check in checks if check.name in _NEEDED):
        checks += bound_checks(divergence, radius)
        if all(check.passed for check in checks):
            checks += solver_checks(divergence, radius)
    report = Report(divergence.name, radius, tuple(checks))
    if not report.passed:
        raise ContractError(report)
    return report
