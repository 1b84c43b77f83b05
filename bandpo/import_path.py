"""Objects by import path, ``"package.module:Name"``: how a user's own parts are named in a run."""

from __future__ import annotations

import importlib
from typing import Any


def load(path: str, what: str) -> Any:
    """Return the object that an import path names.

    Parameters
    ----------
    path : str
        ``"package.module:Name"``.
    what : str
        What the object is wanted as, for the message.

    Raises
    ------
    ValueError
        If the import fails or the module has no such name.
    """
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{what} {path!r} cannot be imported: {error}") from error
