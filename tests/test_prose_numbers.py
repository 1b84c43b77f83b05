"""Every number typed into a theory chapter is computed again, from the registry of such numbers."""

import math

import numpy as np
import pytest
import yaml
from claims_reference import bounds, g, mp, mpf, q_upper
from prose import typed_numbers
from scipy.optimize import brentq
from scipy.stats import norm

from bandpo.provenance import ROOT

THEORY = ROOT / "book" / "theory"
REGISTRY = yaml.safe_load((ROOT / "tests" / "prose_numbers.yaml").read_text())
PAGES = sorted(path.stem for path in THEORY.glob("*.md"))


def fixed(epsilon):
    return lambda p: 1 + epsilon


def uncapped_dcpo(p):
    return 0.5 + 0.5 * math.sqrt(1 + 4 * 0.2 / p)


def capped(upper):
    return lambda p: min(upper(p), 10)


def upper(name):
    return lambda p: bounds(name, p, 0.05)[1]


def lower(name):
    return lambda p: bounds(name, p, 0.05)[0]


def where(function, value):
    """Return the p at which a bound has a value."""
    return brentq(lambda p: function(p) - value, 1e-3, 0.99)


def updates(upper, p, goal=0.5):
    """Return how many updates a token needs, each to its upper bound."""
    count = 0
    while p < goal:
        p, count = min(p * upper(p), 1 - 1e-12), count + 1
    return count


def saturated_from(name):
    """Return the p from which a token may take all mass at radius 0.05."""
    return brentq(lambda p: float(g(name, p, 1 / p)) - 0.05, 1e-6, 1 - 1e-12)


def gap_of_kl(p, radius):
    """Return 1/p minus the upper bound of KL."""
    with mp.workdps(60):
        return (1 - q_upper("kl", p, radius)) / mpf(p)


def newton_error(steps):
    """Return the largest relative error of log r after some Newton steps, on the chapter's grid."""
    worst = mpf(0)
    with mp.workdps(50):
        for p in (1e-8, 1e-4, 0.01, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99, 0.9999, 1 - 1e-7):
            for radius in (1e-3, 0.01, 0.05, 0.3, 2):
                p, d = mpf(p), mpf(radius)

                def step(t, p=p, d=d):
                    r = mp.exp(t)
                    value = -p * t - (1 - p) * mp.log((1 - p * r) / (1 - p)) - d
                    return t + value * (1 - p * r) / (p * (1 - r))

                path = [-(d / p + mp.sqrt(2 * d * (1 - p) / p))]
                for _ in range(10):
                    path.append(step(path[-1]))
                worst = max(worst, abs(path[steps] / path[-1] - 1))
    return worst


def spread_of_radii(kappa):
    """Return kappa² over the share of a band's width that evenly spread radii lose."""
    width = np.sqrt(1 + kappa * np.linspace(-1, 1, 100_001)).mean()
    return kappa**2 / (1 - width)


NAMES = {
    **{"math": math, "np": np, "bounds": bounds, "g": g, "q_upper": q_upper, "where": where},
    **{"fixed": fixed, "dcpo": capped(uncapped_dcpo), "uncapped_dcpo": uncapped_dcpo},
    **{
        "capped": capped,
        "upper": upper,
        "lower": lower,
        "updates": updates,
        "saturated_from": saturated_from,
    },
    **{"gap_of_kl": gap_of_kl, "newton_error": newton_error, "normal_quantile": norm.ppf},
    "spread_of_radii": spread_of_radii,
}


def agrees(typed, value):
    """Return whether a value, rounded or cut as the typed number is, is that number."""
    if isinstance(value, bool | np.bool_):
        return bool(value)
    mantissa, _, power = typed.replace(" ", "").partition("\\cdot10^")
    scale = 10.0 ** int(power.strip("{}")) if power else 1.0
    number = mantissa.removesuffix("\\ldots").rstrip("\\%").replace(",", "")
    unit = 10.0 ** -len(number.partition(".")[2])
    difference = float(value) / scale - float(number)
    if mantissa.endswith("\\ldots"):
        return 0 <= difference < unit
    return abs(difference) <= unit / 2 * (1 + 1e-9)


@pytest.mark.parametrize("page", PAGES)
def test_every_typed_number_is_registered(page):
    entry = REGISTRY.get(page, {})
    known = [*entry.get("given", []), *(key for key in entry if key != "given")]
    typed = typed_numbers((THEORY / f"{page}.md").read_text())
    missing = sorted(set(typed) - set(known))
    assert missing == [], f"{page}: say in tests/prose_numbers.yaml where these come from"
    assert sorted(set(known) - set(typed)) == [], f"{page}: registered, but no longer on the page"
    assert len(known) == len(set(known))


COMPUTED = [
    (page, typed, expression)
    for page, entry in REGISTRY.items()
    for typed, expressions in entry.items()
    if typed != "given"
    for expression in (expressions if isinstance(expressions, list) else [expressions])
]


@pytest.mark.parametrize(("page", "typed", "expression"), COMPUTED)
def test_every_registered_number_is_what_its_page_says(page, typed, expression):
    value = eval(str(expression), {**NAMES})
    assert agrees(typed, value), f"{page} says {typed}, but {expression} is {value}"


def test_a_wrong_digit_is_noticed():
    assert agrees("0.540", 0.54049)
    assert not agrees("0.540", 0.5406)
    assert agrees("0.087\\ldots", 0.08799)
    assert not agrees("0.087\\ldots", 0.0869)
    assert agrees("3.1 \\cdot 10^{-4}", 3.14e-4)
    assert not agrees("3.1 \\cdot 10^{-4}", 3.2e-4)
    assert not agrees("10^{-24}", False)
    assert not agrees("47", 46)


def test_numbers_are_found_in_prose_and_tables_and_not_in_code():
    text = (
        "At $p = 0.25$ it is $3.1 \\cdot 10^{-4}$, below $10^{-24}$, 60% of 1,280;\n"
        "float64, $\\frac12$, 3 rows\n"
        "{prf:ref}`thm-12` and `x = 0.77`\n\n| a | 7 |\n"
    )
    found = typed_numbers(text)
    assert found == ["0.25", "3.1 \\cdot 10^{-4}", "10^{-24}", "60%", "1,280", "7"]
