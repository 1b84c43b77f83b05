"""Printing: a page of the built book becomes a PDF with its mathematics set."""

import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from bandpo.provenance import ROOT

pytestmark = [pytest.mark.book, pytest.mark.browser]

HTML = ROOT / "build" / "html"


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
    assert list(tmp_path.iterdir()) == [target]
