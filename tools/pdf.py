"""The whole book as build/bandpo-companion.pdf: one HTML page, printed by Chromium.

Run it from an environment that has the book's packages: ``python tools/pdf.py``. The notebooks must
have been executed, as for the book itself.
"""

from __future__ import annotations

import http.server
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from playwright.sync_api import sync_playwright
from setup import find_browser

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "pdf"
TARGET = ROOT / "build" / "bandpo-companion.pdf"

FOOTER = """<div style="font: 7.5pt sans-serif; color: #666; width: 100%; text-align: center">
<span class="pageNumber"></span> / <span class="totalPages"></span></div>"""

# A link to a chapter leads to its place in the same file; what lies outside it has no address on
# paper.
OWN_LINKS = """() => {
  for (const link of document.querySelectorAll("a[href]")) {
    if (link.origin !== location.origin) continue;
    const id = decodeURIComponent(link.hash.slice(1));
    if (id && document.getElementById(id)) link.setAttribute("href", "#" + id);
    else link.removeAttribute("href");
  }
}"""


def single_page() -> Path:
    """Build the book as one page; return the folder that holds it as ``all.html``."""
    command = [str(Path(sys.executable).with_name("jupyter-book")), "build", str(ROOT)]
    command += ["--builder", "singlehtml", "--all", "--path-output", str(BUILD)]
    subprocess.run(command, cwd=ROOT, check=True)
    folder = BUILD / "_build" / "singlehtml"
    # Sphinx writes the page where the root document lies, with links that start at the top.
    shutil.copy(folder / "book" / "index.html", folder / "all.html")
    return folder


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve a folder on this machine alone; a page from disk may not load all that it needs."""
    handler = partial(_Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def print_page(address: str, target: Path) -> None:
    """Print a page in the light theme, once its mathematics is set; replace target at the end."""
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=find_browser(), args=["--no-sandbox", "--disable-gpu"]
        )
        page = chromium.new_page(color_scheme="light", viewport={"width": 1000, "height": 1400})
        page.add_init_script("localStorage.setItem('mode', 'light')")
        page.goto(address)
        page.evaluate("MathJax.startup.promise.then(() => null)")
        page.wait_for_load_state("networkidle")
        page.evaluate(OWN_LINKS)
        new = target.with_suffix(".new.pdf")
        page.pdf(
            path=new,
            format="A4",
            print_background=True,
            display_header_footer=True,
            header_template="<span></span>",
            footer_template=FOOTER,
            margin={"top": "18mm", "bottom": "18mm", "left": "17mm", "right": "17mm"},
            outline=True,
            tagged=True,
        )
        chromium.close()
    new.replace(target)


def main() -> None:
    with served(single_page()) as address:
        print_page(f"{address}/all.html", TARGET)
    print(f"The book on paper: {TARGET.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
