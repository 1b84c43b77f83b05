"""Band bounds to 50 digits, straight from the definition of g_f and from nothing in the package.

A root is found in T = -log r by halving a bracket whose signs are evaluated with mpmath, then
polished; closed forms are never used.
"""

from __future__ import annotations

import functools

import mpmath as mp

DIGITS = 50


def _js(u):
    return (u * mp.log(u) - (1 + u) * mp.log((1 + u) / 2)) / 2 if u else mp.log(2) / 2


def _alpha(a):
    a = mp.mpf(a)
    return lambda u: (u**a - a * u + a - 1) / (a * (a - 1))


F = {
    "kl": lambda u: -mp.log(u),
    "reverse_kl": lambda u: u * mp.log(u) if u else mp.mpf(0),
    "tv": lambda u: abs(u - 1) / 2,
    "chi2": lambda u: (u - 1) ** 2,
    "neyman": lambda u: (1 - u) ** 2 / u,
    "hellinger": lambda u: (mp.sqrt(u) - 1) ** 2,
    "le_cam": lambda u: (u - 1) ** 2 / (u + 1),
    "jensen_shannon": _js,
    "alpha:0.5": _alpha("0.5"),
    "alpha:-1.5": _alpha("-1.5"),
    "alpha:3": _alpha("3"),
    "alpha:0.9375": _alpha("0.9375"),
    "jeffreys": lambda u: (u - 1) * mp.log(u),
}
INFINITE_AT_ZERO = {"kl", "neyman", "alpha:-1.5", "jeffreys"}


def g(name, logp, t):
    """g_f at r = e^t; t = -inf stands for r = 0."""
    with mp.workdps(DIGITS + 20):
        p, not_p = mp.exp(logp), -mp.expm1(logp)
        f, r = F[name], mp.exp(t)
        c = 1 - mp.expm1(t) * p / not_p
        if (r == 0 and name in INFINITE_AT_ZERO) or c <= 0:
            return mp.inf
        return p * f(r) + not_p * f(c)


def _drop(name, p, not_p, radius):
    f = F[name]

    def excess(t):
        r, c = mp.exp(-t), 1 - mp.expm1(-t) * p / not_p
        return p * f(r) + not_p * f(c) - radius

    if name not in INFINITE_AT_ZERO and p * f(mp.mpf(0)) + not_p * f(1 / not_p) <= radius:
        return mp.inf
    low, high = mp.mpf("1e-200"), mp.mpf(1)
    while excess(high) < 0:
        low, high = high, high * high * 4
    while excess(low) > 0:
        low = low * low
    while high > low * (1 + mp.mpf("1e-9")):
        middle = mp.sqrt(low * high)
        low, high = (middle, high) if excess(middle) < 0 else (low, middle)
    return mp.findroot(
        excess,
        (low, high),
        solver="anderson",
        tol=mp.mpf(10) ** -DIGITS,
        verify=False,
        maxsteps=200,
    )


@functools.cache
def log_band(name, logp, radius):
    """(log lower, log upper) for float logp < 0 and float radius, as mpmath numbers."""
    with mp.workdps(2 * DIGITS + 40):
        radius = mp.mpf(radius)
        p, not_p = mp.exp(logp), -mp.expm1(logp)
        lower = -_drop(name, p, not_p, radius)
        upper = mp.log1p(-mp.expm1(-_drop(name, not_p, p, radius)) * not_p / p)
        return lower, upper
