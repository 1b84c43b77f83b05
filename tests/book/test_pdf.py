"""Printing: a page of the built book becomes a PDF with its mathematics set."""

import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from bandpo.provenance import ROOT

pytestmark = [pytest.mark.book, pytest.mark.browser]

HTML = ROOT / "build" / "html"
PAPER = round((210 - 2 * 17) / 25.4 * 96)  # px between the margins of tools/pdf.py
# What keeps code whole or scrolls it: its frame would stay behind, empty, at a page's end.
FRAMED = """() => [...document.querySelectorAll(".bd-article .highlight pre")].flatMap((code) => {
  const found = [];
  for (let box = code; box && !box.matches("section, .admonition"); box = box.parentElement) {
    const { breakInside, overflow, display } = getComputedStyle(box);
    if (breakInside !== "auto" || overflow !== "visible" || display !== "block")
      found.push(`${box.className}: ${breakInside}, ${overflow}, ${display}`);
  }
  return found;
})"""


def test_a_page_is_printed(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import pdf

    assert HTML.is_dir(), f"{HTML} is missing: build the book with `make book`"
    target = tmp_path / "page.pdf"
    # In a thread of its own: this one may hold the browser of other tests.
    with pdf.served(HTML) as address, ThreadPoolExecutor(1) as thread:
        thread.submit(pdf.print_page, f"{address}/book/theory/04_band.html", target).result()
    content = target.read_bytes()
    assert content.startswith(b"%PDF-")
    assert len(re.findall(rb"/Type\s*/Page\b", content)) >= 2
    assert b"http://127.0.0.1" not in content, "a link leads to the server of the printing"
    assert list(tmp_path.iterdir()) == [target]


def test_no_page_is_wider_than_paper_and_code_runs_over_its_end(browser):
    pages = sorted((HTML / "notebooks").glob("*.html"))
    assert pages, f"{HTML} is missing: build the book with `make book`"
    with browser.new_context(viewport={"width": PAPER, "height": 980}) as context:
        page = context.new_page()
        page.emulate_media(media="print")
        for path in pages:
            page.goto(path.as_uri())
            page.evaluate("window.MathJax && MathJax.startup.promise.then(() => 0)")
            width = page.evaluate("document.documentElement.scrollWidth")
            assert width <= PAPER, f"{path.name} is {width} px wide on paper of {PAPER} px"
            assert page.evaluate(FRAMED) == [], path.name
