"""Parameters of notebooks: what is refused, and what a value becomes."""

import math

import pytest

from bandpo.params import coerce, read_defaults, resolve


def notebook(*cells: str) -> dict:
    tagged = {"tags": ["parameters"]}
    return {"cells": [{"cell_type": "code", "source": one, "metadata": tagged} for one in cells]}


def test_defaults_are_literals_of_every_kind_in_order():
    cell = (
        "# a comment\nradius: float = 0.05\nseeds = [1, -2]\nrule = 'kl'\ncap = None\non = True\n"
        "more = {'a': [1.0]}\n"
    )
    assert read_defaults(notebook(cell)) == {
        "radius": 0.05, "seeds": [1, -2], "rule": "kl", "cap": None, "on": True,
        "more": {"a": [1.0]},
    }  # fmt: skip


@pytest.mark.parametrize("cells", [[], ["x = 1", "y = 2"]])
def test_exactly_one_parameters_cell(cells):
    with pytest.raises(ValueError, match=f"has {len(cells)}"):
        read_defaults(notebook(*cells))


@pytest.mark.parametrize(
    "cell",
    ["y = 2 * x", "x = 1 + 1", "x = (1, 2)", "x = {1}", "x = b''", "x = {1: 2}", "x = [(1,)]"],
)
def test_derived_and_unpassable_values_are_refused(cell):
    with pytest.raises(ValueError, match=r"is not a literal.*derive it in a later cell"):
        read_defaults(notebook(cell))


@pytest.mark.parametrize("cell", ["import os", "x, y = 1, 2", "x += 1", "x: int", "print(1)"])
def test_anything_but_assignments_is_refused(cell):
    with pytest.raises(ValueError, match="name = literal"):
        read_defaults(notebook("a = 1\n" + cell))


def test_unknown_name_is_refused_with_the_nearest():
    with pytest.raises(ValueError, match=r"'radus' .did you mean 'radius'.*has radius, seed"):
        resolve({"radus": 1}, {"radius": 0.05, "seed": 1})


def test_resolve_keeps_the_given_names_alone():
    assert resolve({"seed": "3"}, {"radius": 0.05, "seed": 1}) == {"seed": 3}


@pytest.mark.parametrize(
    ("value", "default", "expected"),
    [
        ("false", True, False),
        ("True", False, True),
        (False, True, False),
        ("3", 1, 3),
        ("1e3", 1, 1000),
        (4.0, 1, 4),
        ("12345678901234567890", 1, 12345678901234567890),
        ("1e-3", 0.05, 0.001),
        (1, 0.05, 1.0),
        ("-inf", 0.05, -math.inf),
        ("tv", "kl", "tv"),
        ("1", "kl", "1"),
        ("[1, 2]", [3], [1, 2]),
        (["1e-3", 2], [0.5], [0.001, 2.0]),
        ("[]", [0.5], []),
        ("{'a': 1}", {}, {"a": 1}),
        ("None", 10.0, None),
        (None, 10.0, None),
        ("0.5", None, 0.5),
        ("true", None, True),
        ("kl", None, "kl"),
        ([1], None, [1]),
    ],
)
def test_values_take_the_type_of_the_default(value, default, expected):
    result = coerce("x", value, default)
    assert result == expected
    assert type(result) is type(expected)


def test_nan_stays_nan():
    assert math.isnan(coerce("x", "nan", 0.5))


@pytest.mark.parametrize(
    ("value", "default"),
    [
        ("yes", True), (1, True), ([], True), ("", True), ("1.5", 1), (True, 1), ("x", 1),
        ("inf", 1), ("x", 0.5), (True, 0.5), ([1], 0.5), ("1e999", 0.5), (3, "kl"), ("1, 2", [1]),
        ("os", [1]), ("5", [1]), (["x"], [1]), ("[]", {}), ({1: 2}, {}), ((1,), None),
    ],
)  # fmt: skip
def test_values_of_another_type_are_refused(value, default):
    with pytest.raises(TypeError, match=r"parameter x"):
        coerce("x", value, default)
