"""Tables of the book as HTML, for `bandpo.plotting.table`."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from IPython.display import HTML


def table(
    data: Any,
    formats: Mapping[str, str] | None = None,
    caption: str | None = None,
) -> HTML:
    """Return a table that looks like every other table of the book.

    Parameters
    ----------
    data : DataFrame or sequence of mappings
        One mapping (column -> value) a row, all with the same columns. A DataFrame's named index
        becomes its first columns.
    formats : mapping, optional
        Column -> format specification for numbers, such as ``{"reward": ".3f"}``. Other floats are
        shown with four significant digits.
    caption : str, optional
        A line above the table.

    Returns
    -------
    IPython.display.HTML
        Text is escaped, numbers are right-aligned; MathJax sets ``\\(p\\)`` in cells and headers.
    """
    from IPython.display import HTML

    rows = _rows(data)
    if not rows:
        raise ValueError("data has no rows; a table needs at least one")
    columns = list(rows[0])
    for number, row in enumerate(rows):
        if list(row) != columns:
            raise ValueError(f"row {number} has columns {list(row)}, the first row has {columns}")
    specs = dict(formats or {})
    if unknown := sorted(set(specs) - set(map(str, columns))):
        raise ValueError(f"formats names unknown columns {unknown}; the columns are {columns}")
    numeric = {c for c in columns if any(_is_number(row[c]) for row in rows)}

    def row_of(tag: str, texts: Iterable[str]) -> str:
        cells = zip(columns, texts, strict=True)
        return f"<tr>{''.join(_element(tag, text, c in numeric) for c, text in cells)}</tr>"

    head = row_of("th", map(str, columns))
    body = "".join(
        row_of("td", (_text(row[c], specs.get(str(c), ".4g")) for c in columns)) for row in rows
    )
    title = f"<caption>{html.escape(caption, quote=False)}</caption>" if caption else ""
    name = html.escape(caption or "table")
    return HTML(
        f'<div class="table-scroll" tabindex="0" role="region" aria-label="{name}">'
        f'<table class="dataframe tex2jax_process">{title}'
        f"<thead>{head}</thead><tbody>{body}</tbody></table></div>"
    )


def _element(tag: str, text: str, numeric: bool) -> str:
    kind = ' class="num"' if numeric else ""
    return f"<{tag}{kind}>{html.escape(text, quote=False)}</{tag}>"


def _rows(data: Any) -> Sequence[Mapping[Any, Any]]:
    if hasattr(data, "to_dict"):  # a DataFrame
        named = any(name is not None for name in data.index.names)
        records: list[Mapping[Any, Any]] = (data.reset_index() if named else data).to_dict(
            "records"
        )
        return records
    return list(data)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, np.number)) and not isinstance(value, (bool, np.bool_))


def _text(value: Any, spec: str) -> str:
    """Format one value; a missing one is an en dash, minus signs are typographic."""
    if value is None or value != value:
        return "–"
    if not _is_number(value):
        return str(value)
    if isinstance(value, (int, np.integer)) and spec == ".4g":
        spec = "d"
    return format(value, spec).replace("-", "−")
