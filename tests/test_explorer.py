"""The explorer's numbers, computed by node, against high precision and the package."""

import json
import shutil
import subprocess
from pathlib import Path

import mpmath as mp
import numpy as np
import pytest
import torch

from bandpo.operator import log_band

SCRIPT = Path(__file__).parents[1] / "book/_static/band-math.js"
NAMES = ("kl", "reverse_kl", "tv", "chi2", "neyman", "hellinger", "le_cam", "jensen_shannon")
POWERS = ("alpha:-1.5", "alpha:-0.3", "alpha:0.25", "alpha:0.75", "alpha:1.5", "alpha:3")
PROBABILITIES = (1e-7, 1e-4, 0.003, 0.05, 0.3, 0.5, 0.77, 0.95, 0.999, 1 - 1e-6)
RADII = (1e-3, 0.05, 0.4, 1.5)
LOG_BOUNDS = """return data.map((c) => {
  const b = BandMath.band(...c);
  return [b.logLower, b.logUpper];
})"""


def node(body, data):
    """Run JavaScript with `BandMath` and `data` in scope; return its value by way of JSON."""
    executable = shutil.which("node")
    if executable is None:
        pytest.fail("node is not on PATH: the explorer's numbers cannot be checked; install nodejs")
    program = (
        f"const BandMath = require({json.dumps(str(SCRIPT))});"
        "const data = JSON.parse(require('fs').readFileSync(0, 'utf8'));"
        f"console.log(JSON.stringify((() => {{ {body} }})()));"
    )
    done = subprocess.run(
        [executable, "-e", program], input=json.dumps(data), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def generator(name):
    """Return f as the book defines it, with its two limits, for mpmath numbers."""
    half, log = mp.mpf("0.5"), mp.log
    if name.startswith("alpha:"):
        a = mp.mpf(name.removeprefix("alpha:"))
        return (
            lambda u: (u**a - a * u + a - 1) / (a * (a - 1)),
            1 / a if a > 0 else mp.inf,
        )
    return {
        "kl": (lambda u: -log(u), mp.inf),
        "reverse_kl": (lambda u: u * log(u), mp.mpf(0)),
        "tv": (lambda u: half * abs(u - 1), half),
        "chi2": (lambda u: (u - 1) ** 2, mp.mpf(1)),
        "neyman": (lambda u: (1 - u) ** 2 / u, mp.inf),
        "hellinger": (lambda u: (mp.sqrt(u) - 1) ** 2, mp.mpf(1)),
        "le_cam": (lambda u: (u - 1) ** 2 / (u + 1), mp.mpf(1)),
        "jensen_shannon": (
            lambda u: half * (u * log(u) - (1 + u) * log((1 + u) / 2)),
            half * log(2),
        ),
    }[name]


def log_root(name, p, radius, upper):
    """Log of one bound, bisected in log q or log(1 - q) with 60 digits; -inf where it is 0."""
    f, at_zero = generator(name)
    p, radius = mp.mpf(p), mp.mpf(radius)
    moved, other = (1 - p, p) if upper else (p, 1 - p)  # the probability that shrinks

    def excess(share):  # `moved` shrinks to moved * share, the rest grows
        shrunk = moved * (at_zero if share == 0 else f(share))
        return shrunk + other * f((1 - moved * share) / other) - radius

    if excess(mp.mpf(0)) <= 0:
        share = mp.mpf(0)
    else:
        near, far = mp.mpf(-60), mp.mpf(60)  # of log(-log share)
        for _ in range(110):
            middle = (near + far) / 2
            near, far = (near, middle) if excess(mp.exp(-mp.exp(middle))) > 0 else (middle, far)
        share = mp.exp(-mp.exp(near))
        if not upper:
            return -mp.exp(near)
    if upper:
        return mp.log((1 - (1 - p) * share) / p)
    return -mp.inf


@pytest.mark.parametrize("name", NAMES + POWERS)
def test_bounds_match_high_precision(name):
    cases = [[p, name, radius] for p in PROBABILITIES for radius in RADII]
    found = node(LOG_BOUNDS, cases)
    with mp.workdps(60):
        for (p, _, radius), bounds in zip(cases, found, strict=True):
            for value, upper in zip(bounds, (False, True), strict=True):
                expected = log_root(name, p, radius, upper)
                where = f"{name}, p={p}, radius={radius}, {'upper' if upper else 'lower'}"
                if expected == -mp.inf:
                    assert value is None, where
                else:
                    assert value is not None, where
                    assert abs(value - expected) <= 1e-12 * abs(expected), where


@pytest.mark.parametrize("name", NAMES + POWERS)
def test_bounds_match_the_package(name):
    p = np.concatenate([np.geomspace(1e-6, 0.5, 60), 1 - np.geomspace(1e-6, 0.5, 60)])
    for radius in (0.01, 0.05, 0.5):
        found = node(LOG_BOUNDS, [[x, name, radius] for x in p.tolist()])
        found = np.array([[-np.inf if x is None else x for x in bounds] for bounds in found])
        bounds = log_band(torch.from_numpy(p).log(), name, radius)
        # log p resolves 1 - p no better than this, whatever the solver
        slack = 1e-9 + 4e-16 / (1 - p)
        for mine, theirs in zip(found.T, bounds, strict=True):
            expected = theirs.numpy()
            assert (np.isneginf(mine) == np.isneginf(expected)).all()
            finite = np.isfinite(expected)
            error = np.abs(mine[finite] - expected[finite])
            assert (error <= slack[finite] * np.abs(expected[finite])).all()


@pytest.mark.parametrize("name", [*NAMES, "alpha:0.25", "alpha:3"])
@pytest.mark.parametrize("P", [(0.2, 0.5, 0.3), (0.03, 0.01, 0.96), (0.85, 0.1, 0.05)])
def test_the_band_is_the_projection_of_the_trust_region(name, P):
    found = node(
        "const [P, name, radius] = data; const points = BandMath.ball(P, name, radius, 90);"
        "return {points, d: points.map((Q) => BandMath.divergence(Q, P, name)),"
        " band: BandMath.band(P[0], name, radius)}",
        [P, name, 0.05],
    )
    points = np.array(found["points"])
    assert points.sum(axis=1) == pytest.approx(1, abs=1e-12)
    assert (points >= 0).all()
    # On the boundary: either the divergence is the radius, or the simplex ends first.
    inside = points.min(axis=1) > 1e-15
    assert np.array(found["d"])[inside] == pytest.approx(0.05, rel=1e-9)
    assert (np.array(found["d"])[~inside] <= 0.05 * (1 + 1e-9)).all()
    first = points[:, 0]
    assert first.max() == pytest.approx(P[0] * found["band"]["upper"], rel=1e-9)
    assert first.min() == pytest.approx(P[0] * found["band"]["lower"], rel=1e-9, abs=1e-15)


def test_ball_against_an_independent_divergence():
    P, radius = np.array([0.2, 0.5, 0.3]), 0.05
    points = np.array(node("return BandMath.ball(...data)", [list(P), "kl", radius]))
    kl = (P * np.log(P / points)).sum(axis=1)
    assert kl == pytest.approx(radius, rel=1e-9)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ([0, "kl", 0.05], "p must lie between 0 and 1, got 0"),
        ([0.5, "kl", -1], "radius must be positive and finite, got -1"),
        ([0.5, "toString", 0.05], "unknown divergence toString; known are kl"),
        ([0.5, "alpha:x", 0.05], "alpha: must be a finite number"),
    ],
)
def test_bad_input_is_refused(case, message):
    found = node(
        "try { BandMath.band(...data) } catch (e) { return `${e.name} ${e.message}` }", case
    )
    assert message in found
    assert found.startswith("RangeError")


def test_missing_node_fails_with_a_clear_message(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(pytest.fail.Exception, match="install nodejs"):
        node("return 1", None)
