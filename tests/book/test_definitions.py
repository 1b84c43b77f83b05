"""Glossary terms in Chromium: pointing, tabbing or tapping shows what they mean."""

import pytest
from axe_playwright_python.sync_playwright import Axe
from visitor import DESKTOP, PHONE, Visitor, violations

pytestmark = [pytest.mark.book, pytest.mark.browser]

PAGE = "book/theory/02_bottleneck.html"
TERM = "article a[href*='#term-simplex']"


@pytest.fixture
def visit(browser):
    contexts = []

    def open_page(name=PAGE, **options):
        context = browser.new_context(**{"viewport": DESKTOP, **options})
        contexts.append(context)
        return Visitor(context).visit(name)

    yield open_page
    for context in contexts:
        context.close()


def test_pointing_at_a_term_shows_what_it_means(visit):
    page = visit()
    box = page.locator("#definition-simplex")
    assert box.is_hidden()
    page.locator(TERM).hover()
    assert "set of all probability distributions" in box.inner_text()
    assert box.is_visible()
    box.hover()  # the pointer may move into the box
    page.wait_for_timeout(300)
    assert box.is_visible()
    page.keyboard.press("Escape")
    assert box.is_hidden()
    page.locator(TERM).hover()
    page.locator("article h1").hover()
    box.wait_for(state="hidden")


def test_the_keyboard_reaches_it(visit):
    page = visit()
    term = page.locator(TERM)
    term.focus()
    box = page.locator(f"#{term.get_attribute('aria-describedby')}")
    assert box.is_visible()
    assert box.get_attribute("role") == "tooltip"
    page.keyboard.press("Tab")
    box.wait_for(state="hidden")
    term.focus()
    page.keyboard.press("Enter")
    page.wait_for_url("**/glossary.html#term-simplex")


def test_the_first_tap_shows_it_and_the_second_follows(visit):
    page = visit(viewport=PHONE, has_touch=True, is_mobile=True)
    page.locator(TERM).tap()
    box = page.locator("#definition-simplex")
    assert box.is_visible()
    place = box.bounding_box()
    assert place["x"] >= 0
    assert place["x"] + place["width"] <= PHONE["width"]
    page.locator("article h1").tap()
    assert box.is_hidden()
    page.locator(TERM).tap()
    assert box.is_visible()
    page.locator(TERM).tap()
    page.wait_for_url("**/glossary.html#term-simplex")


def test_every_definition_is_whole_and_inside_the_page(visit):
    page = visit("book/index.html", viewport=PHONE)
    terms = page.locator("article a[href*='#term-']")
    assert terms.count() >= 4
    for term in terms.all():
        term.focus()
        box = page.locator(f"#{term.get_attribute('aria-describedby')}")
        box.wait_for(state="visible")
        place = box.bounding_box()
        assert place["x"] >= 0
        assert place["x"] + place["width"] <= PHONE["width"]
    assert page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_an_open_definition_is_accessible(visit, scheme):
    page = visit(color_scheme=scheme)
    page.evaluate(f"document.documentElement.dataset.theme = '{scheme}'")
    page.locator(TERM).focus()
    assert violations(Axe(), page, {}) == []
