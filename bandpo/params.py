"""The parameters of a notebook: literals in one tagged cell, checked before anything runs.

Papermill injects whatever it is given: an unknown name runs to the end with no effect, and
``-p flag false`` gives the string ``"false"``, which is true. Here both are errors.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

# What a parameter may be: what JSON holds.
Value = None | bool | int | float | str | list | dict


def read_defaults(notebook: Mapping[str, Any]) -> dict[str, Value]:
    """Return names and default values from the cell tagged ``parameters``.

    Parameters
    ----------
    notebook : Mapping
        The notebook's JSON.

    Raises
    ------
    ValueError
        If there is not exactly one such cell, or if it holds anything but assignments of literals
        to single names.
    """
    cells = [
        "".join(cell["source"])
        for cell in notebook["cells"]
        if cell["cell_type"] == "code" and "parameters" in cell["metadata"].get("tags", [])
    ]
    if len(cells) != 1:
        raise ValueError(f"a notebook needs one cell tagged 'parameters', this has {len(cells)}")
    return dict(_assignment(statement) for statement in ast.parse(cells[0]).body)


def _assignment(statement: ast.stmt) -> tuple[str, Value]:
    match statement:
        case ast.Assign(targets=[ast.Name(id=name)], value=expression):
            pass
        case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as expression):
            pass
        case _:
            raise ValueError(
                f"parameters cell, line {statement.lineno}: `{ast.unparse(statement)}` is not of "
                "the form `name = literal`; move it to a later cell"
            )
    try:
        value = ast.literal_eval(expression)
    except ValueError:
        value = ...
    if not _is_plain(value):
        raise ValueError(
            f"parameters cell, line {statement.lineno}: {name} = {ast.unparse(expression)} is not "
            "a literal None, bool, int, float, str, list or dict; derive it in a later cell"
        )
    return name, value


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) for key in value) and all(map(_is_plain, value.values()))
    return value is None or isinstance(value, bool | int | float | str)


def resolve(given: Mapping[str, Any], defaults: Mapping[str, Value]) -> dict[str, Value]:
    """Return the given parameters, each with the type of its default.

    Parameters
    ----------
    given : Mapping
        Values from a YAML file or strings from a command line.
    defaults : Mapping
        What :func:`read_defaults` returns.

    Returns
    -------
    dict
        The given names only, in the order of the defaults.

    Raises
    ------
    ValueError
        If a name is unknown; the message has the nearest known one.
    TypeError
        If a value does not have the type of its default and cannot be read as one.
    """
    for name in given:
        if name not in defaults:
            raise ValueError(
                f"unknown parameter {name!r}{did_you_mean(name, defaults)}; "
                f"this notebook has {', '.join(defaults) or 'none'}"
            )
    return {name: coerce(name, given[name], defaults[name]) for name in defaults if name in given}


def did_you_mean(name: str, known: Mapping[str, Any]) -> str:
    """Return ``" (did you mean 'x'?)"`` for the nearest known name, or nothing."""
    near = get_close_matches(name, known, n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def coerce(name: str, value: Any, default: Value) -> Value:
    """Return ``value`` as the type of ``default``.

    The text ``None`` is None whatever the default is, as in papermill; a default of None accepts
    any literal, and text that is no literal stays text. Text is read as a number, a truth value
    (``true``, ``false``), a list or a dict where the default is one; a whole float passes for an
    int, an int for a float. Members of a list take the type of the default's first member.

    Raises
    ------
    TypeError
        If that cannot be done without guessing.
    """
    if value is None or value == "None":
        return None
    if default is None:
        return _literal(value) if isinstance(value, str) else _plain(name, value)
    read = {bool: _bool, int: _int, float: _float, str: _str, list: _list, dict: _dict}
    kind = type(default)
    try:
        result = read[kind](value)
    except (ValueError, TypeError, SyntaxError, OverflowError, KeyError):
        raise TypeError(
            f"parameter {name} = {value!r} ({type(value).__name__}) cannot be read as "
            f"{kind.__name__}, the type of its default {default!r}"
        ) from None
    if isinstance(default, list) and default and isinstance(result, list):
        return [coerce(f"{name}[{i}]", item, default[0]) for i, item in enumerate(result)]
    return _plain(name, result)


def _plain(name: str, value: Any) -> Value:
    if not _is_plain(value):
        raise TypeError(
            f"parameter {name} = {value!r} is not a None, bool, int, float, str, list or dict"
        )
    return value


def _literal(text: str) -> Value:
    """Return the literal that the text spells, or the text itself."""
    spelled = {"true": True, "false": False}
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return spelled.get(text, text)
    return value if _is_plain(value) else text


def _bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    return {"true": True, "True": True, "false": False, "False": False}[value]


def _int(value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError(value)
    if isinstance(value, int):
        return value
    number = float(value)
    if not number.is_integer():
        raise ValueError(value)
    return int(value) if isinstance(value, str) and value.lstrip("+-").isdigit() else int(number)


def _float(value: Any) -> float:
    if isinstance(value, bool):
        raise TypeError(value)
    number = float(value)
    if math.isinf(number) and not str(value).lstrip("+-").startswith(("inf", "Inf")):
        raise OverflowError(value)
    return number


def _str(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(value)
    return value


def _list(value: Any) -> list[Any]:
    value = ast.literal_eval(value) if isinstance(value, str) else value
    if not isinstance(value, list):
        raise TypeError(value)
    return value


def _dict(value: Any) -> dict[str, Any]:
    value = ast.literal_eval(value) if isinstance(value, str) else value
    if not isinstance(value, dict):
        raise TypeError(value)
    return value
