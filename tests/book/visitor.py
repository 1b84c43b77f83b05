"""Opens the built pages in Chromium, from disk, and notes what goes wrong and what is fetched."""

from pathlib import Path
from urllib.parse import unquote, urlsplit

from bandpo.provenance import ROOT

HTML = ROOT / "build" / "html"
DESKTOP = {"width": 1280, "height": 900}
PHONE = {"width": 390, "height": 844}
SERIOUS = ("serious", "critical")
LOCAL = ("file:", "data:", "blob:")


class Visitor:
    """One browser context; page below build/html -> problems, and files that were fetched."""

    def __init__(self, context):
        self.context = context
        self.problems = {}
        self.fetched = {}

    def visit(self, name):
        assert HTML.is_dir(), "build/html is missing: build the book with `make book`"
        page = self.context.new_page()
        problems = self.problems.setdefault(name, [])
        fetched = self.fetched.setdefault(name, set())

        def request(one):
            if not one.url.startswith(LOCAL):
                problems.append(one.url)
            elif one.url.startswith("file:"):
                fetched.add(Path(unquote(urlsplit(one.url).path)))

        page.on("request", request)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda m: problems.append(m.text) if m.type == "error" else None)
        page.goto((HTML / name).as_uri())
        page.evaluate("window.MathJax && MathJax.startup && MathJax.startup.promise.then(() => 0)")
        return page


def dark(page):
    """Show a page in the dark theme, with nothing in transition."""
    _theme(page, "dark")


def light(page):
    """Show a page in the light theme, with nothing in transition."""
    _theme(page, "light")


def _theme(page, name):
    page.emulate_media(color_scheme=name, reduced_motion="reduce")
    page.evaluate(f"document.documentElement.dataset.theme = '{name}'")


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
