"""The figures' visual language: reproducible, readable on both pages, distinguishable by all."""

import io
import itertools
import re
import subprocess
import sys

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from colorspacious import cspace_convert

from bandpo import plotting

PAGES = {"white": "#ffffff", "book dark": "#14181e", "theme dark": "#121212"}
VISIONS = (None, "deuteranomaly", "protanomaly", "tritanomaly")
FAMILIES = {"rules": plotting._RULES, "divergences": plotting._DIVERGENCES}


@pytest.fixture(autouse=True)
def _style():
    plotting.use_style()
    yield
    plt.close("all")
    mpl.rcParams.update(mpl.rcParamsDefault)


def rgb(code):
    return np.array([int(code[i : i + 2], 16) / 255 for i in (1, 3, 5)])


def contrast(one, other):
    """WCAG 2.2 contrast ratio of two colors."""
    linear = [
        np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)
        for c in map(rgb, (one, other))
    ]
    dark, light = sorted(float(c @ [0.2126, 0.7152, 0.0722]) for c in linear)
    return (light + 0.05) / (dark + 0.05)


def seen(code, vision):
    """CAM02-UCS coordinates of a color as a reader with full `vision` deficiency sees it."""
    color = rgb(code)
    if vision is not None:
        space = {"name": "sRGB1+CVD", "cvd_type": vision, "severity": 100}
        color = np.clip(cspace_convert(color, space, "sRGB1"), 0, 1)
    return cspace_convert(color, "sRGB1", "CAM02-UCS")


def svg(draw):
    fig = draw()
    buffer = io.BytesIO()
    fig.savefig(buffer, format="svg", metadata={"Date": None})
    plt.close(fig)
    return buffer.getvalue()


def sample():
    fig, ax = plotting.figure()
    p = np.geomspace(1e-6, 1, 50)
    ax.plot(p, 1 + np.sqrt(0.05 * (1 - p) / p), **plotting.line("chi2-band"))
    ax.plot(p, np.full_like(p, 1.2), **plotting.line("grpo"))
    plotting.log_p_axis(ax)
    ax.set_yscale("log")
    plotting.label_ends(ax)
    return fig


def test_contrast_helper_agrees_with_the_definition():
    assert contrast("#ffffff", "#000000") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.005)


@pytest.mark.parametrize("page", PAGES)
def test_everything_drawn_is_readable_on_every_page(page):
    assert contrast(plotting.INK, PAGES[page]) >= 4.1
    for name in plotting.names():
        assert contrast(plotting.color(name), PAGES[page]) >= 3, name


@pytest.mark.parametrize("vision", VISIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_names_of_a_family_differ_in_dashes_or_clearly_in_color(family, vision):
    # CAM02-UCS distance 10 is about ten just-noticeable differences.
    for (a, one), (b, other) in itertools.combinations(FAMILIES[family].items(), 2):
        if one.dashes == other.dashes:
            distance = np.linalg.norm(seen(one.color, vision) - seen(other.color, vision))
            assert distance >= 12, (a, b, distance)


@pytest.mark.parametrize("vision", VISIONS)
def test_a_band_its_sides_and_the_fixed_clip_differ_clearly_in_color(vision):
    # They cross each other in one figure, where dashes alone are hard to follow.
    four = ("grpo", "kl-band", "band-above", "band-below")
    for a, b in itertools.combinations(four, 2):
        distance = np.linalg.norm(seen(plotting.color(a), vision) - seen(plotting.color(b), vision))
        assert distance >= 12, (a, b, distance)


def test_no_two_names_of_a_family_look_alike():
    for family in FAMILIES.values():
        looks = [(look.color, look.dashes) for look in family.values()]
        assert len(set(looks)) == len(looks)


def test_no_text_is_too_small_for_a_phone():
    texts = [key for key in plotting._STYLE if key.endswith(("labelsize", "titlesize", "fontsize"))]
    assert len(texts) == 5
    assert min(plotting._STYLE[key] for key in [*texts, "font.size"]) >= plotting.SMALLEST


def test_a_divergence_and_its_band_share_a_color():
    for name in ("kl", "tv", "chi2"):
        assert plotting.color(name) == plotting.color(f"{name}-band")


def test_unknown_name_lists_the_names():
    with pytest.raises(ValueError, match=r"'kl_band'.*kl-band.*jensen_shannon"):
        plotting.color("kl_band")


def test_alpha_carries_its_value():
    assert plotting.line("alpha:0.5")["label"] == "α = 0.5"
    assert plotting.color("alpha:0.5") == plotting.color("alpha")


def test_the_same_figure_gives_the_same_bytes():
    first, second = svg(sample), svg(sample)
    assert first == second
    assert b"<dc:date>" not in first


def test_the_same_figure_gives_the_same_bytes_in_another_process(tmp_path):
    script = tmp_path / "draw.py"
    script.write_text(
        "import sys\nsys.path[:0] = sys.argv[1:]\nimport test_plotting as t\n"
        "t.plotting.use_style()\nsys.stdout.buffer.write(t.svg(t.sample))\n"
    )
    folder = __file__.rpartition("/")[0]
    other = subprocess.run([sys.executable, script, folder], capture_output=True, check=True).stdout
    assert other == svg(sample)


def test_background_is_transparent_and_text_is_ink():
    text = svg(sample).decode()
    assert not re.search(r"fill: #(fff|000)", text)
    assert plotting.INK in text


def test_notebook_output_is_svg_of_exact_size_without_date():
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    notebook = nbformat.v4.new_notebook(
        cells=[
            nbformat.v4.new_code_cell(
                "from bandpo import plotting\nplotting.use_style()\n"
                "fig, ax = plotting.figure(height=3)\nax.plot([1, 2]);"
            )
        ]
    )
    nbclient.NotebookClient(notebook, kernel_name="python3", timeout=120).execute()
    (output,) = (o for o in notebook.cells[0].outputs if o.output_type == "display_data")
    image = output.data["image/svg+xml"]
    assert 'width="460.8pt"' in image
    assert 'height="216pt"' in image
    assert "<dc:date>" not in image


def test_figure_shapes_and_sizes():
    fig, ax = plotting.figure()
    assert fig.get_figwidth() == 6.4
    assert isinstance(ax, mpl.axes.Axes)
    fig, axes = plotting.figure("half", height=4.0, nrows=2)
    assert tuple(fig.get_size_inches()) == (3.4, 4.0)
    assert axes.shape == (2,)
    with pytest.raises(ValueError, match="width must be one of full, half, got 'wide'"):
        plotting.figure("wide")


def test_log_p_axis_ticks_every_decade():
    _, ax = plotting.figure()
    plotting.log_p_axis(ax, low=1e-4)
    ax.figure.canvas.draw()
    assert [t.get_text() for t in ax.get_xticklabels()] == [
        "$10^{-4}$",
        "$10^{-3}$",
        "$10^{-2}$",
        "0.1",
        "1",
    ]
    with pytest.raises(ValueError, match="low and high"):
        plotting.log_p_axis(ax, low=0.0)


def test_end_labels_do_not_overlap_and_stay_inside_the_figure():
    fig, ax = plotting.figure()
    for name, height in zip(plotting.names()[:6], (1, 1.001, 1.002, 1.5, 1.501, 9), strict=True):
        ax.plot([0, 1], [0, height], **plotting.line(name))
    ax.set_ylim(0, 4)
    plotting.label_ends(ax)
    fig.canvas.draw()
    boxes = sorted((t.get_window_extent() for t in ax.texts), key=lambda b: b.y0)
    assert len(boxes) == 6
    for low, high in itertools.pairwise(boxes):
        assert low.y1 <= high.y0 + 0.5
    assert max(b.x1 for b in boxes) <= fig.bbox.x1
    colors = {t.get_text(): t.get_color() for t in ax.texts}
    assert colors["KL-Band"] == plotting.color("kl-band")


def test_end_labels_on_the_left_move_the_y_axis_to_the_right():
    fig, ax = plotting.figure()
    p = np.geomspace(1e-6, 1, 50)
    ax.plot(p, 1 + 0.05 / p, **plotting.line("tv-band"))
    plotting.log_p_axis(ax)
    ax.set_ylim(0, 100)  # the line leaves through the top
    plotting.label_ends(ax, side="left")
    fig.canvas.draw()
    (label,) = ax.texts
    assert label.xy[1] <= 100
    assert label.get_window_extent().x1 < ax.transData.transform(label.xy)[0]
    assert ax.yaxis.get_label_position() == "right"
    with pytest.raises(ValueError, match="side must be 'left' or 'right', got 'top'"):
        plotting.label_ends(ax, side="top")


def test_end_labels_need_no_line():
    _, ax = plotting.figure()
    plotting.label_ends(ax)
    assert not ax.texts


def test_a_legend_above_names_every_line_once_and_covers_no_panel():
    fig, axes = plotting.figure(ncols=2, height=3)
    for ax in axes:
        for name in plotting._RULES:
            ax.plot([0, 1], [0, 1], **plotting.line(name))
        ax.set_title("a title")
    plotting.legend_above(fig)
    (legend,) = fig.legends
    assert [t.get_text() for t in legend.texts] == [r.label for r in plotting._RULES.values()]
    box = legend.get_window_extent()
    assert box.x0 >= 0
    assert box.x1 <= fig.bbox.x1
    assert box.y1 <= fig.bbox.y1
    for ax in axes:
        assert ax.get_tightbbox().y1 <= box.y0


def test_a_legend_above_wraps_a_long_name():
    fig, ax = plotting.figure("half")
    name = "a_divergence_with_a_name_of_forty_letters"
    ax.plot([0, 1], [0, 1], label=name)
    ax.plot([0, 1], [1, 0], **plotting.line("grpo"))
    plotting.legend_above(fig)
    (legend,) = fig.legends
    lines = legend.texts[0].get_text().splitlines()
    assert len(lines) == 2
    assert "".join(lines) == name
    assert legend.get_window_extent().x1 <= fig.bbox.x1


def test_a_legend_above_needs_labels():
    fig, ax = plotting.figure()
    ax.plot([0, 1], [0, 1])
    with pytest.raises(ValueError, match="label"):
        plotting.legend_above(fig)


def test_interval_draws_center_and_band():
    _, ax = plotting.figure()
    x = np.arange(4.0)
    plotting.interval(ax, x, x, x - 1, x + 1, "kl-band")
    assert ax.lines[0].get_label() == "KL-Band"
    box = ax.collections[0].get_datalim(ax.transData)
    assert (box.y0, box.y1) == (-1, 4)
    with pytest.raises(ValueError, match="swapped"):
        plotting.interval(ax, x, x, x + 1, x - 1, "kl-band")
    with pytest.raises(ValueError, match="one shape"):
        plotting.interval(ax, x, x, x[:2], x, "kl-band")


def test_table_escapes_aligns_and_formats():
    rows = [
        {"rule": "a<b & \\(p\\)", "value": -1.23456, "n": 12345},
        {"rule": "c", "value": None, "n": 7},
    ]
    text = plotting.table(rows, {"value": ".2f"}, caption="Rules").data
    assert '<table class="dataframe' in text
    assert "<caption>Rules</caption>" in text
    assert "<td>a&lt;b &amp; \\(p\\)</td>" in text
    assert '<td class="num">−1.23</td><td class="num">12345</td>' in text
    assert '<td class="num">–</td>' in text
    assert '<th>rule</th><th class="num">value</th>' in text


def test_table_of_a_dataframe_keeps_a_named_index():
    frame = pd.DataFrame({"x": [1.0, np.nan]}, index=pd.Index(["a", "b"], name="key"))
    text = plotting.table(frame).data
    assert "<th>key</th>" in text
    assert '<td>b</td><td class="num">–</td>' in text
    assert "<th>key</th>" not in plotting.table(frame.reset_index(drop=True)).data


@pytest.mark.parametrize(
    ("data", "formats", "message"),
    [
        ([], None, "no rows"),
        ([{"a": 1}, {"b": 2}], None, "row 1 has columns"),
        ([{"a": 1}], {"b": ".2f"}, "unknown columns"),
    ],
)
def test_table_refuses_what_it_cannot_show(data, formats, message):
    with pytest.raises(ValueError, match=message):
        plotting.table(data, formats)
