"""The explorer page in Chromium, opened from disk: numbers, address, pointer, touch, keys."""

import math

import pytest
import torch
from axe_playwright_python.sync_playwright import Axe

from bandpo.operator import log_band
from bandpo.provenance import ROOT

pytestmark = [pytest.mark.book, pytest.mark.browser]

PAGE = ROOT / "build" / "html" / "book" / "explorer.html"
DESKTOP = {"width": 1280, "height": 900}
PHONE = {"width": 390, "height": 844}


@pytest.fixture
def visit(browser):
    """Open the page in a fresh context; fail on console errors and on requests to other hosts."""
    contexts, problems = [], []

    def listen(page):
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda m: problems.append(m.text) if m.type == "error" else None)
        page.on(
            "request",
            lambda r: None if r.url.startswith(("file:", "data:")) else problems.append(r.url),
        )

    def open_page(state="", **options):
        assert PAGE.is_file(), f"{PAGE} is missing: build the book with `make book`"
        context = browser.new_context(**{"viewport": DESKTOP, **options})
        contexts.append(context)
        page = context.new_page()
        listen(page)
        page.goto(PAGE.as_uri() + state, wait_until="domcontentloaded")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not problems


def value(page, key):
    return float(page.get_attribute(f"#be-table [data-key={key}]", "data-value"))


def expected(p, divergence, radius):
    bounds = log_band(torch.tensor(math.log(p), dtype=torch.float64), divergence, radius)
    return [math.exp(bound) for bound in bounds]


def p_of(page):
    return float(page.get_attribute("#be-ratio", "aria-valuenow"))


@pytest.mark.parametrize(
    ("p", "divergence", "radius"),
    [
        (0.3, "kl", 0.05),
        (0.002, "reverse_kl", 0.05),
        (0.4, "tv", 0.1),
        (0.07, "chi2", 0.2),
        (0.0003, "neyman", 0.05),
        (0.6, "hellinger", 0.01),
        (0.25, "le_cam", 0.3),
        (0.91, "jensen_shannon", 0.05),
        (0.2, "alpha:-0.5", 0.05),
    ],
)
def test_numbers_match_the_package(visit, p, divergence, radius):
    name, _, alpha = divergence.partition(":")
    page = visit(f"#divergence={name}&p={p}&radius={radius}&alpha={alpha or 0.5}")
    lower, upper = expected(p, divergence, radius)
    assert value(page, "lower") == pytest.approx(lower, rel=1e-9)
    assert value(page, "upper") == pytest.approx(upper, rel=1e-9)
    assert value(page, "q-upper") == pytest.approx(p * upper, rel=1e-9)
    assert value(page, "move-down") == pytest.approx(p * (lower - 1), rel=1e-9)


def test_the_address_carries_the_state(visit):
    page = visit()
    page.select_option("#be-divergence", "chi2")
    page.fill("#be-radius", "0.2")
    page.fill("#be-p", "0,03")  # a decimal comma is understood
    page.fill("#be-low", "0.1")
    page.fill("#be-high", "0.5")
    page.fill("#be-cap", "2")
    page.check("[name=be-axis][value=linear]")
    address = page.evaluate("location.hash")
    assert address == page.get_attribute("#be-link", "href")
    keys = ("lower", "upper", "clip-lower", "clip-upper", "clip-move-up")
    before = [value(page, key) for key in keys]
    assert before[1:4] == [2, 0.9, 1.5]

    other = visit(address)
    assert [value(other, key) for key in keys] == before
    assert other.input_value("#be-divergence") == "chi2"
    assert other.input_value("#be-cap") == "2"
    assert other.is_checked("[name=be-axis][value=linear]")
    assert other.inner_html("#be-ratio") == page.inner_html("#be-ratio")


def test_a_changed_address_changes_the_page(visit):
    page = visit()
    page.evaluate("location.hash = '#divergence=tv&radius=0.1&p=0.4'")
    page.wait_for_function("document.querySelector('#be-p').value === '0.4'")
    assert value(page, "upper") == pytest.approx(1.25, rel=1e-12)


def test_what_the_address_gets_wrong_is_said(visit):
    page = visit("#divergence=toString&p=2&radius=0.1")
    problem = page.inner_text("#be-problem")
    assert "divergence=toString" in problem
    assert "p=2" in problem
    assert "radius" not in problem
    assert page.input_value("#be-radius") == "0.1"
    assert page.input_value("#be-divergence") == "kl"


def test_unusable_text_is_refused_and_named(visit):
    page = visit()
    before = value(page, "upper")
    page.fill("#be-radius", "-1")
    assert page.get_attribute("#be-radius", "aria-invalid") == "true"
    assert "radius δ must be between" in page.inner_text("#be-problem")
    assert value(page, "upper") == before
    page.locator("#be-radius").blur()
    assert page.input_value("#be-radius") == "0.05"
    assert page.get_attribute("#be-radius", "aria-invalid") is None
    assert page.is_hidden("#be-problem")


def test_keys_move_p(visit):
    page = visit("#p=0.1")
    page.focus("#be-ratio")
    page.keyboard.press("ArrowRight")
    assert p_of(page) == pytest.approx(1 / (1 + 9 * math.exp(-0.05)), rel=1e-2)
    page.keyboard.press("End")
    assert p_of(page) > 0.999
    page.keyboard.press("Home")
    assert p_of(page) < 2e-5
    page.focus("#be-p-slider")
    page.keyboard.press("ArrowRight")
    lower, upper = expected(p_of(page), "kl", 0.05)
    assert value(page, "upper") == pytest.approx(upper, rel=1e-9)
    assert value(page, "lower") == pytest.approx(lower, rel=1e-9, abs=1e-300)


def test_every_control_is_reached_by_the_tab_key(visit):
    page = visit("#divergence=alpha")
    page.focus("#be-divergence")
    reached = []
    for _ in range(14):
        reached.append(page.evaluate("document.activeElement.id || document.activeElement.name"))
        page.keyboard.press("Tab")
    for control in (
        *("be-radius", "be-radius-slider", "be-alpha", "be-alpha-slider", "be-p", "be-p-slider"),
        *("be-low", "be-high", "be-cap", "be-axis", "be-ratio", "be-share", "be-share-slider"),
    ):
        assert control in reached


def test_the_pointer_moves_p(visit):
    page = visit()
    area = page.locator("#be-ratio").bounding_box()
    middle = area["y"] + area["height"] / 2
    page.mouse.move(area["x"] + 0.3 * area["width"], middle)
    page.mouse.down()
    first = p_of(page)
    page.mouse.move(area["x"] + 0.7 * area["width"], middle, steps=4)
    second = p_of(page)
    page.mouse.up()
    page.mouse.move(area["x"] + 0.5 * area["width"], middle)
    # the axis spans five decades over 318 of 380 units
    assert math.log10(second / first) == pytest.approx(0.4 * 380 / 318 * 5, abs=0.05)
    assert p_of(page) == second


def test_the_pointer_moves_the_old_policy_in_the_triangle(visit):
    page = visit()
    page.locator("#be-ternary").scroll_into_view_if_needed()
    area = page.locator("#be-ternary").bounding_box()
    scale = area["width"] / 380
    page.mouse.click(area["x"] + 160 * scale, area["y"] + (292 - 0.5 * 264) * scale)
    assert p_of(page) == pytest.approx(0.5, abs=0.01)
    assert float(page.input_value("#be-share")) == pytest.approx(0.5, abs=0.02)


def test_touch_on_a_phone(visit):
    page = visit(viewport=PHONE, has_touch=True, is_mobile=True)
    page.locator("#be-move").scroll_into_view_if_needed()
    area = page.locator("#be-move").bounding_box()
    page.touchscreen.tap(area["x"] + 0.5 * area["width"], area["y"] + 0.4 * area["height"])
    assert p_of(page) == pytest.approx(10 ** (5 * ((190 - 52) / 318 - 1)), rel=0.05)


def test_a_phone_needs_no_sideways_scrolling(visit):
    page = visit("#divergence=alpha&p=0.0001&cap=10", viewport=PHONE)
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    for part in ("#be-ratio", "#be-move", "#be-ternary", "#be-table", ".be-controls"):
        box = page.locator(part).bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 390


def test_links_in_the_text_set_a_state(visit):
    page = visit()
    links = page.locator("a[data-state]")
    assert links.count() == 3
    for index, divergence in enumerate(("kl", "chi2", "tv")):
        links.nth(index).click()
        page.wait_for_function(f"location.hash.includes('divergence={divergence}&')")
        assert page.input_value("#be-divergence") == divergence
        assert page.is_hidden("#be-problem")


def test_changes_are_announced_once(visit):
    page = visit("#p=0.3")
    page.fill("#be-p", "0.25")
    page.wait_for_function(
        "document.querySelector('#be-status').textContent.startsWith('At p = 0.25')"
    )
    assert page.get_attribute("#be-status", "role") == "status"


def test_a_cap_binds_and_is_shown(visit):
    page = visit("#p=0.001&cap=10")
    assert value(page, "upper") == 10
    assert "cap; else 53.548" in page.inner_text("#be-table [data-key=upper]")
    assert page.locator("#be-ratio .be-uncapped").count() == 1
    page.fill("#be-cap", "")
    assert value(page, "upper") == pytest.approx(expected(0.001, "kl", 0.05)[1], rel=1e-9)
    assert page.locator("#be-ratio .be-uncapped").count() == 0


def test_the_region_touches_the_band_lines(visit):
    page = visit("#p=0.3&share=0.4&divergence=jensen_shannon")
    heights = page.evaluate(
        "document.querySelector('#be-ternary .be-region').getAttribute('points')"
        ".split(' ').map((point) => Number(point.split(',')[1]))"
    )
    lines = page.eval_on_selector_all(
        "#be-ternary .be-band", "lines => lines.map((line) => Number(line.getAttribute('y1')))"
    )
    assert min(heights) == pytest.approx(min(lines), abs=0.011)
    assert max(heights) == pytest.approx(max(lines), abs=0.011)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_accessibility(visit, theme):
    page = visit("#divergence=alpha&cap=5&p=0.01", color_scheme=theme)
    page.evaluate(f"document.documentElement.dataset.theme = '{theme}'")
    # no preload: it would fetch the style sheets again, which a page from disk may not
    found = Axe().run(page, "#explorer-app", {"preload": False}).response["violations"]
    assert not [(v["id"], [n["html"] for n in v["nodes"]]) for v in found]


def test_without_javascript_the_page_says_where_else(visit):
    page = visit(java_script_enabled=False)
    assert "bandpo.band" in page.inner_text("#explorer-app")
