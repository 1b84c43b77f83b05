"""Chromium without a window, the system's own if there is one."""

import runpy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bandpo.provenance import ROOT

_ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@contextmanager
def chromium() -> Iterator[Any]:
    """Start a browser, which belongs to the thread that starts it, and close it at the end."""
    from playwright.sync_api import sync_playwright

    find = runpy.run_path(str(ROOT / "tools" / "setup.py"))["find_browser"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find(), args=_ARGUMENTS)
        yield browser
        browser.close()
