"""The contract check accepts the package's divergences and names what is wrong with others."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from bandpo import closed_forms
from bandpo.divergences import Divergence, get_divergence, list_divergences
from bandpo.testing import check_divergence

CHI2 = get_divergence("chi2")


@pytest.mark.parametrize("name", [*list_divergences(), "alpha:0.5", "alpha:-1.5", "alpha:3"])
def test_the_registered_pass(name):
    check_divergence(name)


def test_three_lines_pass():
    check_divergence(Divergence("jeffreys", lambda u: (u - 1) * u.log(), math.inf, math.inf))
    check_divergence(
        Divergence("hockey_stick", lambda u: (u - 1.5).clamp(min=0), 0.0, 1.0), radius=0.01
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"f": lambda u: (u - 1) ** 2 + 1}, r"f\(1\) must be 0, is 1.0"),
        ({"f": lambda u: torch.sin(u - 1)}, "must be convex"),
        ({"f": lambda u: (u - 2).log()}, "must be finite"),
        ({"f": lambda u: u.sum()}, "must map a float64 tensor"),
        ({"f_at_zero": 2.0}, "f_at_zero is declared 2.0, but f tends to 1"),
        ({"f_at_zero": math.inf}, "f_at_zero is declared infinite, but f tends to 1"),
        ({"slope_at_infinity": 3.0}, "slope_at_infinity is declared 3.0"),
        ({"closed_form": closed_forms.tv}, "closed form's lower bound is not that of f"),
    ],
)
def test_what_is_wrong_is_named(change, words):
    with pytest.raises(ValueError, match=f"'chi2': .*{words}"):
        check_divergence(dataclasses.replace(CHI2, **change))
