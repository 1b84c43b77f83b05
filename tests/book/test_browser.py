"""Every page in Chromium, opened from disk: console, requests, phone, dark mode, accessibility."""

import io
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from axe_playwright_python.sync_playwright import Axe
from bs4 import BeautifulSoup
from chromium import chromium
from PIL import Image
from visitor import DESKTOP, HTML, PHONE, Visitor, dark, light, violations

pytestmark = [pytest.mark.book, pytest.mark.browser]

CONTRAST = {"runOnly": ["color-contrast", "link-in-text-block"]}
# axe takes minutes for what it need not see: the paths of formulas, which are left out, and the
# words of code beyond the first of each class, which are like it.
LIGHTEN = """() => {
  for (const formula of document.querySelectorAll('mjx-container')) formula.replaceChildren();
  const seen = new Set();
  for (const span of document.querySelectorAll('.highlight pre span')) {
    if (seen.has(span.className)) span.replaceWith(...span.childNodes);
    seen.add(span.className);
  }
}"""
# How many icons are drawn, and how many are not.
ICONS = """() => [
  document.querySelectorAll('svg.svg-inline--fa').length,
  document.querySelectorAll('i[class*=fa-], svg.svg-inline--fa .missing').length,
]"""
# Name of each figure's file, and how much smaller than drawn it is shown.
SCALES = """() => [...document.querySelectorAll('figure img')]
  .map((one) => [one.src, one.clientWidth / one.naturalWidth])"""
# What no scrolling brings into sight: beyond the window, or hidden by the box around it.
CUT = """() => [...document.querySelectorAll('article *')]
  .filter((one) => one.getClientRects().length)
  .filter((one) => !one.closest('svg *, mjx-assistive-mml, .headerlink'))
  .filter((one) => {
    const right = one.getBoundingClientRect().right;
    for (let box = one; box.localName !== 'article'; box = box.parentElement) {
      const style = getComputedStyle(box);
      if (['auto', 'scroll'].includes(style.overflowX)) return false;
      const hides = box !== one && style.overflowX === 'hidden' && box.clientWidth > 1;
      if (hides && right > box.getBoundingClientRect().right + 1) return true;
    }
    return right > innerWidth + 1;
  })
  .map((one) => one.outerHTML.slice(0, 160))"""


def smallest_text(url):
    """Return the size in pixels of the smallest text that a figure sets, its exponents aside.

    Matplotlib draws text as outlines in units of a hundredth of the font size, in points.
    """
    drawn = Path(unquote(urlsplit(url).path)).read_text()
    turned = r"(?: rotate\([^)]*\))?"
    sizes = re.findall(rf'"translate\([^)]*\){turned} scale\(([\d.]+) -', drawn)
    return min(100 * float(size) for size in sizes) * 96 / 72


@pytest.fixture(scope="module")
def visitor(browser):
    context = browser.new_context(viewport=DESKTOP, color_scheme="light")
    yield Visitor(context)
    context.close()


@pytest.fixture(scope="module")
def visits():
    """Page -> what was found on it: in light at 1280 pixels, in dark at 390."""
    names = [
        path.relative_to(HTML).as_posix()
        for folder in ("book", "notebooks")
        for path in sorted((HTML / folder).rglob("*.html"))
    ]
    assert names, "build/html is missing: build the book with `make book`"
    # axe takes seconds a page, so two browsers share the pages.
    with ThreadPoolExecutor(2) as threads:
        halves = threads.map(look, (names[::2], names[1::2]))
        return {name: one for half in halves for name, one in half.items()}


def look(names):
    """Visit pages with a browser of its own; return what was found on each."""
    with chromium() as browser:
        visitor = Visitor(browser.new_context(viewport=DESKTOP, color_scheme="light"))
        return look_at(visitor, names)


def look_at(visitor, names):
    axe = Axe()
    found = {}
    for name in names:
        page = visitor.visit(name)
        one = found[name] = {"fetched": set(visitor.fetched[name])}
        one["cut at 1280"] = page.evaluate(CUT)
        one["icons"] = page.evaluate(ICONS)
        one["pictures"] = [
            picture.screenshot(animations="disabled")
            for picture in page.locator("figure img").all()
        ]
        page.set_viewport_size(PHONE)
        one["width"] = page.evaluate("document.documentElement.scrollWidth")
        one["cut at 390"] = page.evaluate(CUT)
        one["text"] = [
            smallest_text(url) * scale
            for url, scale in page.evaluate(SCALES)
            if url.endswith(".svg")
        ]
        page.evaluate(LIGHTEN)
        dark(page)
        body = page.evaluate("getComputedStyle(document.body).backgroundColor")
        one["background"] = [int(part) for part in body.strip("rgba()").split(",")[:3]]
        one["phone"] = violations(axe, page, CONTRAST)
        page.set_viewport_size(DESKTOP)
        if name == "book/index.html":  # what stands beside the text is the same on every page
            one["dark"] = violations(axe, page, CONTRAST)
        light(page)
        one["light"] = violations(axe, page, {})
        page.close()
        one["problems"] = visitor.problems[name]
    return found


def found(visits, key):
    return {name: one[key] for name, one in visits.items() if one.get(key)}


def test_no_console_error_and_no_request_to_another_host(visits):
    assert found(visits, "problems") == {}


@pytest.mark.parametrize("scheme", ["light", "dark", "phone"])
def test_no_serious_accessibility_violation(visits, scheme):
    assert found(visits, scheme) == {}


def test_a_phone_shows_every_page_without_sideways_scrolling(visits):
    wide = {name: one["width"] for name, one in visits.items() if one["width"] > PHONE["width"]}
    assert wide == {}


def test_the_text_of_figures_is_readable_on_a_phone(visits):
    assert sum(len(one["text"]) for one in visits.values()) > 20
    small = {n: min(one["text"]) for n, one in visits.items() if min(one["text"], default=9) < 6.5}
    assert small == {}


@pytest.mark.parametrize("width", [1280, 390])
def test_no_code_formula_or_table_is_cut(visits, width):
    assert found(visits, f"cut at {width}") == {}


def test_dark_pages_are_dark(visits):
    light = {n: one["background"] for n, one in visits.items() if max(one["background"]) > 63}
    assert light == {}


def test_every_icon_is_drawn(visits):
    wrong = {n: one["icons"] for n, one in visits.items() if one["icons"][0] < 5 or one["icons"][1]}
    assert wrong == {}


def test_a_page_fetches_what_its_weight_counts(visits, monkeypatch):
    from bandpo.provenance import ROOT

    monkeypatch.syspath_prepend(ROOT / "book" / "_ext")
    from companion.weight import loads, weigh

    status = BeautifulSoup((HTML / "book" / "status.html").read_text(), "html.parser")
    stated = {
        (HTML / "book" / row.a["href"]).resolve(): int(row("td")[-1].text)
        for row in status.select("table.weights tbody tr")
        if row.a["href"] != "#"
    }
    for name, one in visits.items():
        counted = loads((HTML / name).resolve())
        fetched = {path.resolve() for path in one["fetched"]}
        assert fetched <= counted, name
        # fonts and the logo, which the browser may have from the page before
        assert {path.suffix for path in counted - fetched} <= {".woff2", ".svg"}, name
        if name != "book/status.html":
            total = weigh(HTML / name)["total"]
            assert stated[(HTML / name).resolve()] == -(-total // 1024), name


def blank(picture):
    """Return whether a picture shows next to nothing: one color nearly everywhere."""
    image = Image.open(io.BytesIO(picture)).convert("L")
    histogram = image.histogram()
    return max(histogram) > 0.995 * sum(histogram) or sum(map(bool, histogram)) < 8


def test_no_figure_is_blank(visits):
    assert sum(len(one["pictures"]) for one in visits.values()) > 20
    assert {n for n, one in visits.items() if any(map(blank, one["pictures"]))} == set()


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_key_pages_are_not_blank(visitor, size, scheme):
    for name in ("book/index.html", "book/explorer.html", "notebooks/02_band_operator.html"):
        page = visitor.visit(name)
        page.set_viewport_size(size)
        if scheme == "dark":
            dark(page)
        picture = page.screenshot()
        page.close()
        histogram = Image.open(io.BytesIO(picture)).convert("L").histogram()
        ground = max(range(256), key=histogram.__getitem__)
        assert ground > 240 if scheme == "light" else ground < 64, name
        assert 0.4 < histogram[ground] / sum(histogram) < 0.97, name


def test_formulas_are_typeset(visitor):
    page = visitor.visit("book/notation.html")
    assert page.locator("mjx-container").count() > 10
    assert page.locator("mjx-merror, [data-mjx-error]").count() == 0
    page.close()


def test_search_finds_a_word_from_disk(visitor):
    page = visitor.visit("search.html")
    page.goto((HTML / "search.html").as_uri() + "?q=scalarization")
    page.wait_for_selector("#search-results li")
    assert "theory" in page.inner_html("#search-results")
    page.close()
    assert visitor.problems["search.html"] == []


def test_the_search_box_of_a_page_leads_to_results(visitor):
    page = visitor.visit("book/index.html")
    page.keyboard.press("Control+k")
    page.locator("#pst-search-dialog input[name=q]").fill("saturation")
    page.keyboard.press("Enter")
    page.wait_for_selector("#search-results li")
    page.close()
