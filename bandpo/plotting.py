"""One visual language for every figure and table of the book.

The same SVG is shown on a white page, on a dark page and in print, so every color here is of
middle lightness: it keeps a contrast of at least 3:1 (WCAG 2.2, graphical objects) on both
backgrounds. No grey can do better than 4.2:1 on both, and middle lightness leaves room for seven
hues that stay apart for readers with deuteranopia, protanopia or tritanopia; further names share a
hue with a relative and differ from it by their dashes. Lines carry their names at their ends, so
that no reader has to match colors with a legend; where they run too close for that, a legend stands
above the panels, where it covers nothing. A phone shrinks a figure to about six tenths, so no text
in one is smaller than `SMALLEST`.
"""

from __future__ import annotations

import sys
import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from numpy.typing import ArrayLike
from scipy.optimize import isotonic_regression

from bandpo._tables import table

if TYPE_CHECKING:
    from matplotlib.typing import LineStyleType

__all__ = [
    "INK",
    "SMALLEST",
    "color",
    "figure",
    "interval",
    "label_ends",
    "legend_above",
    "line",
    "log_p_axis",
    "names",
    "table",
    "use_style",
]

INK = "#7a7d82"
"""Text and axes: 4.1:1 on white, 4.3:1 and 4.5:1 on the theme's dark backgrounds."""

SMALLEST = 9.0
"""Size of the smallest text in a figure, in points: about 7 pixels on a phone."""

_BLUE, _AMBER, _GREEN = "#2f94d4", "#c48200", "#0a7a47"
_PINK, _VIOLET, _PLUM, _RUST = "#fa4c7a", "#7440fa", "#924f87", "#b43c0c"

_SOLID: LineStyleType = "-"
_DASHED: LineStyleType = (0, (5, 2))
_DASHDOT: LineStyleType = (0, (6, 2, 1.2, 2))
_DOTTED: LineStyleType = (0, (1.2, 1.8))


@dataclass(frozen=True)
class _Look:
    label: str
    color: str
    dashes: LineStyleType = _SOLID


# Fixed rules are dashed, bands are solid, what mixes or varies a band is dash-dotted or dotted;
# rules that are no clips take what is left.
_RULES = {
    "grpo": _Look("GRPO", INK, _DASHED),
    "clip-higher": _Look("Clip-Higher", _AMBER, _DASHED),
    "dcpo": _Look("DCPO", _PLUM, _DASHDOT),
    "kl-band": _Look("KL-Band", _BLUE),
    "tv-band": _Look("TV-Band", _GREEN),
    "chi2-band": _Look("χ²-Band", _PINK),
    "relaxed-band": _Look("Relaxed Band", _VIOLET, _DASHDOT),
    "band-above": _Look("Band above", _RUST, _DASHDOT),
    "band-below": _Look("Band below", _AMBER, _DASHDOT),
    "adaptive-band": _Look("Adaptive Band", _BLUE, _DOTTED),
    "dppo": _Look("DPPO", _GREEN, _DOTTED),
    "cispo": _Look("CISPO", _AMBER),
    "sapo": _Look("SAPO", _GREEN, _DASHED),
    "smoothing": _Look("Smoothing", _PLUM, _DOTTED),
}
_DIVERGENCES = {
    "kl": _Look("KL", _BLUE),
    "reverse_kl": _Look("reverse KL", _BLUE, _DASHED),
    "tv": _Look("TV", _GREEN),
    "chi2": _Look("χ²", _PINK),
    "neyman": _Look("Neyman χ²", _PINK, _DASHED),
    "hellinger": _Look("Hellinger", _VIOLET),
    "le_cam": _Look("Le Cam", _PLUM),
    "jensen_shannon": _Look("Jensen–Shannon", _AMBER),
    "alpha": _Look("α", INK, _DASHDOT),
}
_LOOKS = _RULES | _DIVERGENCES

# Widths in inches; a page's text column is about 7.1 inches wide on a desk and 3.9 on a phone.
_WIDTHS = {"full": 6.4, "half": 3.4}
_LEGEND_LINE = 30  # characters; a fork may have a long name

_STYLE: dict[str, Any] = {
    "figure.facecolor": "none",
    "figure.constrained_layout.use": True,
    "savefig.facecolor": "none",
    "savefig.edgecolor": "none",
    "svg.hashsalt": "bandpo",
    "font.family": ["DejaVu Sans"],
    "font.size": 10.5,
    "mathtext.fontset": "dejavusans",
    "text.color": INK,
    "axes.facecolor": "none",
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.labelsize": 10.5,
    "axes.linewidth": 0.9,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.titlepad": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.prop_cycle": cycler(color=[_BLUE, _AMBER, _GREEN, _PINK, _VIOLET, _PLUM]),
    "grid.color": INK,
    "grid.alpha": 0.22,
    "grid.linewidth": 0.7,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.labelsize": 9.5,
    "ytick.labelsize": 9.5,
    "xtick.major.size": 3.5,
    "ytick.major.size": 3.5,
    "xtick.minor.visible": False,
    "ytick.minor.visible": False,
    "legend.frameon": False,
    "legend.fontsize": 9.5,
    "lines.linewidth": 2.0,
    "lines.markersize": 5.0,
    "patch.linewidth": 0.8,
    "image.cmap": "viridis",
}


def use_style() -> None:
    """Set matplotlib's defaults for this book; in a notebook, output reproducible SVG.

    The same figure gives the same bytes: element ids are salted with a fixed string and the date is
    left out. Call it once, after the imports. Figures keep the exact size that `figure` gave them.
    """
    plt.style.use(["default", _STYLE])
    ipython = sys.modules.get("IPython")
    if ipython is not None and ipython.get_ipython() is not None:
        from matplotlib_inline.backend_inline import set_matplotlib_formats

        set_matplotlib_formats("svg", metadata={"Date": None}, bbox_inches=None)


def names() -> tuple[str, ...]:
    """Return every name that has a color: the rules, then the divergences."""
    return tuple(_LOOKS)


def _look(name: str) -> _Look:
    family = "alpha" if name.startswith("alpha:") else name
    if family not in _LOOKS:
        raise ValueError(f"no color for {name!r}; the names are {', '.join(names())}")
    return _LOOKS[family]


def color(name: str) -> str:
    """Return the color of a clipping rule or a divergence.

    Parameters
    ----------
    name : str
        One of `names()`, or ``"alpha:VALUE"``.

    Returns
    -------
    str
        ``"#rrggbb"``, at least 3:1 on the book's light and dark pages.

    Raises
    ------
    ValueError
        If the name is unknown; the message lists the names.
    """
    return _look(name).color


def line(name: str) -> dict[str, Any]:
    """Return color, line style and label, for ``ax.plot(x, y, **line(name))``.

    Parameters
    ----------
    name : str
        One of `names()`, or ``"alpha:VALUE"`` (labeled with its value).

    Returns
    -------
    dict
        Keys ``color``, ``linestyle`` and ``label``. No two names share both color and line style
        within the rules or within the divergences.
    """
    look = _look(name)
    label = f"α = {name.removeprefix('alpha:')}" if name.startswith("alpha:") else look.label
    return {"color": look.color, "linestyle": look.dashes, "label": label}


def figure(
    width: Literal["full", "half"] = "full",
    height: float | None = None,
    ncols: int = 1,
    nrows: int = 1,
    **subplots: Any,
) -> tuple[Figure, Any]:
    """Make a figure that fits the page's text column.

    Parameters
    ----------
    width : {"full", "half"}
        6.4 or 3.4 inches.
    height : float, optional
        Inches. By default each row of panels is as high as suits its panels' width.
    ncols, nrows : int
        Number of panels.
    **subplots
        Passed to `matplotlib.pyplot.subplots`, such as ``sharey=True``.

    Returns
    -------
    fig : Figure
    ax : Axes or ndarray of Axes
        An array as soon as there is more than one panel.
    """
    if width not in _WIDTHS:
        raise ValueError(f"width must be one of {', '.join(_WIDTHS)}, got {width!r}")
    if height is None:
        panel = _WIDTHS[width] / ncols
        height = nrows * float(np.clip(0.62 * panel, 2.3, 3.7))
    return plt.subplots(nrows, ncols, figsize=(_WIDTHS[width], height), **subplots)


def log_p_axis(ax: Axes, low: float = 1e-6, high: float = 1.0) -> None:
    """Make the x axis a logarithmic axis of the old policy's token probability.

    Parameters
    ----------
    ax : Axes
    low, high : float
        Limits, with 0 < low < high <= 1. Each decade gets a tick; 0.1 and 1 are written out.
    """
    if not 0 < low < high <= 1:
        raise ValueError(f"low and high must satisfy 0 < low < high <= 1, got {low!r} and {high!r}")
    exponents = range(int(np.ceil(np.log10(low) - 1e-9)), int(np.floor(np.log10(high) + 1e-9)) + 1)
    plain = {0: "1", -1: "0.1"}
    ticks = {10.0**n: plain.get(n, rf"$10^{{{n}}}$") for n in exponents}
    ax.set_xscale("log")
    ax.set_xlim(low, high)
    ax.xaxis.set_major_locator(FixedLocator(list(ticks)))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: ticks.get(value, "")))
    ax.set_xlabel("old probability of the token, $p$")


def label_ends(ax: Axes, side: Literal["left", "right"] = "right", gap: float = 1.25) -> None:
    """Write each line's label at its end, in its color, instead of a legend.

    Labels that would overlap are moved apart by the least total squared distance. Call it last,
    once the limits are set: a line is labeled where it leaves the axes.

    Parameters
    ----------
    ax : Axes
    side : {"left", "right"}
        Use the left where lines spread out toward the left, as bounds do toward small p; the y
        axis then moves to the right.
    gap : float
        Least distance between two labels, in font sizes.
    """
    if side not in ("left", "right"):
        raise ValueError(f"side must be 'left' or 'right', got {side!r}")
    lines = [line for line in ax.get_lines() if not str(line.get_label()).startswith("_")]
    ends = [(line, *end) for line in lines if (end := _end(ax, line, side)) is not None]
    if not ends:
        return
    if side == "left":
        ax.yaxis.tick_right()
        ax.yaxis.set_label_position("right")
        ax.spines["left"].set_visible(False)
        ax.spines["right"].set_visible(True)
    root = cast(Figure, ax.get_figure(root=True))
    root.draw_without_rendering()  # settles the layout, hence the distances in points
    heights = ax.transData.transform([(x, y) for _, x, y in ends])[:, 1] * 72.0 / root.dpi
    size = float(mpl.rcParams["legend.fontsize"])
    order = np.argsort(heights, kind="stable")
    steps = gap * size * np.arange(len(ends))
    spread = isotonic_regression(heights[order] - steps).x + steps
    for index, target in zip(order, spread, strict=True):
        line, x, y = ends[index]
        ax.annotate(
            str(line.get_label()),
            xy=(x, y),
            xytext=(5 if side == "right" else -5, float(target - heights[index])),
            textcoords="offset points",
            color=line.get_color(),
            fontsize=size,
            ha="left" if side == "right" else "right",
            va="center",
            annotation_clip=False,
        )


def legend_above(fig: Figure) -> None:
    """Write one legend for all panels of a figure above them, in as many columns as fit.

    Parameters
    ----------
    fig : Figure
        Each label is written once, long ones in several lines.

    Raises
    ------
    ValueError
        If nothing in the figure has a label.
    """
    looks: dict[str, Any] = {}
    for ax in fig.axes:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            looks.setdefault(textwrap.fill(label, _LEGEND_LINE), handle)
    if not looks:
        raise ValueError("fig must show something that has a label; give ax.plot a label")
    for columns in range(len(looks), 0, -1):
        legend = fig.legend(looks.values(), looks.keys(), loc="outside upper left", ncols=columns)
        fig.draw_without_rendering()  # settles the layout, hence its place
        if columns == 1 or legend.get_window_extent().x1 <= fig.bbox.x1:
            return
        legend.remove()


def _end(ax: Axes, line: Any, side: str) -> tuple[float, float] | None:
    """Return the line's outermost point that the axes show, or None if they show none."""
    x, y = (np.asarray(values, dtype=float) for values in line.get_data())
    (left, right), (bottom, top) = sorted(ax.get_xlim()), sorted(ax.get_ylim())
    shown = np.flatnonzero((x >= left) & (x <= right) & (y >= bottom) & (y <= top))
    if not shown.size:
        return None
    at = shown[np.argmax(x[shown]) if side == "right" else np.argmin(x[shown])]
    return float(x[at]), float(y[at])


def interval(
    ax: Axes, x: ArrayLike, center: ArrayLike, low: ArrayLike, high: ArrayLike, name: str
) -> None:
    """Draw a center line (mean, IQM, ...) with its shaded interval estimate.

    Parameters
    ----------
    ax : Axes
    x, center, low, high : array_like, shape (n,)
        With low <= center <= high wherever all three are finite.
    name : str
        One of `names()`: gives color, line style and label.
    """
    x, center, low, high = (np.asarray(values, dtype=float) for values in (x, center, low, high))
    if not x.shape == center.shape == low.shape == high.shape:
        shapes = [values.shape for values in (x, center, low, high)]
        raise ValueError(f"x, center, low and high must have one shape, got {shapes}")
    if (low > center).any() or (center > high).any():
        raise ValueError(
            "low <= center <= high must hold at every point; are low and high swapped?"
        )
    ax.fill_between(x, low, high, color=color(name), alpha=0.2, linewidth=0)
    ax.plot(x, center, **line(name))
