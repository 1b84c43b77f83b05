"""Divergences to try in notebook 11, and a place for yours.

Name one by its import path, ``notebooks.divergences:JEFFREYS``, in commands
given in the root of the repository.
"""

import math

from bandpo import Divergence

# KL in both directions, added (Jeffreys 1946).
JEFFREYS = Divergence(
    "jeffreys",
    f=lambda u: (u - 1) * u.log(),
    f_at_zero=math.inf,
    slope_at_infinity=math.inf,
)

# Half the squared log ratio, in use as an estimate of KL from samples. No
# f-divergence, for it bends down where u > e. Here to be refused.
SQUARED_LOG = Divergence(
    "squared_log",
    f=lambda u: 0.5 * u.log() ** 2,
    f_at_zero=math.inf,
    slope_at_infinity=0.0,
)
