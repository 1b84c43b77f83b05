"""The built pages as text: every link resolves, nothing comes from elsewhere, nothing leaks."""

import itertools
import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import yaml
from bs4 import BeautifulSoup

from bandpo.provenance import ROOT, commit

pytestmark = pytest.mark.book

HTML = ROOT / "build" / "html"
LOADS = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src"}
# Links in the head that a browser does not fetch.
NOT_FETCHED = {"canonical", "index", "search", "next", "prev", "author", "copyright"}
LEAKS = {
    "a figure without its picture": r"&lt;Figure size",
    "an object's address": r"object at 0x[0-9a-f]+",
    "a traceback": r"Traceback \(most recent call last\)",
    "an error output": r'class="output traceback|class="output stderr',
    "a problem": r'class="(?:xref )?problematic"',
    "an unresolved glue": r"No key .* found in glue|{glue:",
    "a directive that was not read": r"(?:```|:::)\{[a-z]",
    "a system message": r'class="system-message"',
    "a machine's path": re.escape(str(ROOT)),
}


@pytest.fixture(scope="module")
def pages():
    """Path below build/html -> the parsed page."""
    assert (HTML / "index.html").is_file(), "build/html is missing: build the book with `make book`"
    found = {
        path.relative_to(HTML).as_posix(): BeautifulSoup(path.read_text(), "html.parser")
        for path in sorted(HTML.rglob("*.html"))
        if "_static" not in path.parts
    }
    assert len(found) > 10
    return found


def is_external(address):
    return urlsplit(address).scheme in ("http", "https") or address.startswith("//")


def test_every_link_and_anchor_resolves(pages):
    anchors = {
        name: {tag["id"] for tag in page.select("[id]")}
        | {tag["name"] for tag in page("a", {"name": True})}
        for name, page in pages.items()
    }
    broken = []
    for name, page in pages.items():
        for link in page.select("a[href]"):
            address = urlsplit(link["href"])
            if address.scheme or address.netloc:
                continue
            target = (HTML / name).parent / unquote(address.path) if address.path else HTML / name
            inside = Path(target).resolve().relative_to(HTML.resolve()).as_posix()
            fragment = unquote(address.fragment)
            if not target.is_file():
                broken.append(f"{name}: {link['href']}: no such file")
            elif inside in anchors and fragment and fragment not in anchors[inside]:
                broken.append(f"{name}: {link['href']}: no such anchor")
    assert broken == []


def test_nothing_is_loaded_from_another_host_or_missing(pages):
    wrong = []
    for name, page in pages.items():
        for tag, attribute in LOADS.items():
            for element in page.select(f"{tag}[{attribute}]"):
                if tag == "link" and NOT_FETCHED.intersection(element.get("rel", [])):
                    continue
                address = element[attribute]
                path = (HTML / name).parent / unquote(urlsplit(address).path)
                if is_external(address) or not (address.startswith("data:") or path.is_file()):
                    wrong.append(f"{name}: <{tag}> {address}")
    styles = [(path, path.read_text(errors="replace")) for path in HTML.rglob("*.css")]
    wrong += [
        f"{path.relative_to(HTML)}: {address}"
        for path, text in styles
        for address in re.findall(r"""(?:url\(|@import\s+)['"]?([^'")\s]+)""", text)
        if is_external(address)
    ]
    assert wrong == []


@pytest.mark.parametrize("leak", LEAKS)
def test_nothing_leaks_into_a_page(pages, leak):
    found = {}
    for name in pages:
        if name.startswith("_modules/"):
            continue
        text = (HTML / name).read_text()
        if match := re.search(LEAKS[leak], text):
            found[name] = text[max(match.start() - 80, 0) : match.end() + 80]
    assert found == {}


def test_every_reference_became_a_link(pages):
    # Sphinx leaves the same <span class="xref">, with no link around it, where it found no target.
    bare = [
        f"{name}: {reference.get_text()}"
        for name, page in pages.items()
        for reference in page.select("article span.xref")
        if reference.find_parent("a") is None
    ]
    assert bare == []


def test_every_picture_has_a_text_in_its_place(pages):
    bare = [
        f"{name}: {image.get('src')}"
        for name, page in pages.items()
        for image in page.select("article img")
        if not image.get("alt", "").strip() or image["alt"].startswith(("../_images", "_images"))
    ]
    assert bare == []


def test_every_figure_has_a_caption(pages):
    bare = [
        f"{name}: {image.get('src')}"
        for name, page in pages.items()
        for image in page.select("div.cell_output img")
        if image.find_parent("figure") is None or not image.find_parent("figure").figcaption
    ]
    assert bare == []


def test_every_page_has_one_title_and_headings_in_order(pages):
    wrong = []
    for name, page in pages.items():
        levels = [int(heading.name[1]) for heading in page.select("article :is(h1, h2, h3, h4)")]
        if name.startswith(("book/", "notebooks/")):
            steps = itertools.pairwise(levels)
            if levels[:1] != [1] or levels.count(1) != 1 or any(b > a + 1 for a, b in steps):
                wrong.append(f"{name}: {levels}")
    assert wrong == []


def test_every_notebook_says_how_it_was_made_and_hands_out_the_copy(pages):
    notebooks = [name for name in pages if name.startswith("notebooks/")]
    assert notebooks
    for name in notebooks:
        box = pages[name].select_one("div.admonition.provenance")
        assert box is not None, name
        copy = (HTML / name).parent / unquote(box.select_one("a.download")["href"])
        assert '"bandpo"' in copy.read_text(), name


def test_every_statement_shows_its_tests(pages):
    kinds = ("theorem", "lemma", "proposition", "corollary")
    boxes = [
        box for page in pages.values() for kind in kinds for box in page.select(f"div.proof.{kind}")
    ]
    assert boxes
    assert [box["id"] for box in boxes if box.select_one("p.claim-badge a") is None] == []


def test_links_to_sources_are_pinned_to_the_commit(pages):
    revision = commit()["commit"]
    repository = yaml.safe_load((ROOT / "_config.yml").read_text())["repository"]["url"]
    links = [
        link["href"]
        for page in pages.values()
        for link in page.select("a[href*='/blob/'], a[href*='/tree/']")
        if link["href"].startswith(repository)
    ]
    assert links
    assert [link for link in links if revision not in link] == []


def test_the_search_index_knows_the_book(pages):
    index = (HTML / "searchindex.js").read_text()
    assert all(f'"{word}"' in index for word in ("book/claims", "notebooks/01_linear_bottleneck"))
