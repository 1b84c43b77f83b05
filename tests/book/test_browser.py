"""Every page in Chromium, opened from disk: console, requests, phone, dark mode, accessibility."""

import pytest
from axe_playwright_python.sync_playwright import Axe

from bandpo.provenance import ROOT

pytestmark = [pytest.mark.book, pytest.mark.browser]

HTML = ROOT / "build" / "html"
DESKTOP = {"width": 1280, "height": 900}
PHONE = {"width": 390, "height": 844}
SERIOUS = ("serious", "critical")


class Visitor:
    """Opens pages from disk and notes what goes wrong on each."""

    def __init__(self, context):
        self.context = context
        self.problems = {}

    def visit(self, path):
        page = self.context.new_page()
        notes = self.problems.setdefault(path.relative_to(HTML).as_posix(), [])
        page.on("pageerror", lambda error: notes.append(str(error)))
        page.on(
            "console",
            lambda m: notes.append(m.text) if m.type == "error" else None,
        )
        local = ("file:", "data:", "blob:")
        page.on("request", lambda r: None if r.url.startswith(local) else notes.append(r.url))
        page.goto(path.as_uri())
        page.evaluate("window.MathJax && MathJax.startup && MathJax.startup.promise")
        return page


@pytest.fixture(scope="module")
def visitor(browser):
    assert HTML.is_dir(), "build/html is missing: build the book with `make book`"
    context = browser.new_context(viewport=DESKTOP, color_scheme="light")
    yield Visitor(context)
    context.close()


@pytest.fixture(scope="module")
def visits(visitor):
    """Page -> what was found on it: problems, width on a phone, violations in light and dark."""
    axe = Axe()
    found = {}
    paths = [p for folder in ("book", "notebooks") for p in sorted((HTML / folder).rglob("*.html"))]
    for path in paths:
        page = visitor.visit(path)
        name = path.relative_to(HTML).as_posix()
        light = violations(axe, page, {})
        page.evaluate("document.documentElement.dataset.theme = 'dark'")
        page.emulate_media(color_scheme="dark", reduced_motion="reduce")
        dark = violations(axe, page, {"runOnly": ["color-contrast"]})
        body = page.evaluate("getComputedStyle(document.body).backgroundColor")
        page.set_viewport_size(PHONE)
        width = page.evaluate("document.documentElement.scrollWidth")
        page.close()
        found[name] = {
            "problems": visitor.problems[name],
            "light": light,
            "dark": dark,
            "background": [int(part) for part in body.strip("rgba()").split(",")[:3]],
            "width": width,
        }
    return found


def violations(axe, page, options):
    """Return rule: number of elements, and the first of them, for serious violations.

    Formulas are left out: thousands of paths that MathJax alone decides on.
    """
    options = {"preload": False, "resultTypes": ["violations"], **options}
    context = {"exclude": ["mjx-container"]}
    return [
        f"{one['id']}: {len(one['nodes'])} elements, the first: {one['nodes'][0]['html'][:160]}"
        for one in axe.run(page, context, options).response["violations"]
        if one["impact"] in SERIOUS
    ]


def test_no_console_error_and_no_request_to_another_host(visits):
    assert {name: one["problems"] for name, one in visits.items() if one["problems"]} == {}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_serious_accessibility_violation(visits, scheme):
    assert {name: one[scheme] for name, one in visits.items() if one[scheme]} == {}


def test_a_phone_shows_every_page_without_sideways_scrolling(visits):
    wide = {name: one["width"] for name, one in visits.items() if one["width"] > PHONE["width"]}
    assert wide == {}


def test_dark_pages_are_dark(visits):
    light = {n: one["background"] for n, one in visits.items() if max(one["background"]) > 63}
    assert light == {}


def test_formulas_are_typeset(visitor):
    page = visitor.visit(HTML / "book" / "notation.html")
    assert page.locator("mjx-container").count() > 10
    assert page.locator("mjx-merror, [data-mjx-error]").count() == 0
    page.close()


def test_search_finds_a_word_from_disk(visitor):
    page = visitor.visit(HTML / "search.html")
    page.goto((HTML / "search.html").as_uri() + "?q=scalarization")
    page.wait_for_selector("#search-results li")
    assert "theory" in page.inner_html("#search-results")
    page.close()
    assert visitor.problems["search.html"] == []
