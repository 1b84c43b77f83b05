"""The built pages as text: every link resolves, nothing comes from elsewhere, nothing leaks."""

import itertools
import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import yaml
from bs4 import BeautifulSoup

import bandpo
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


@pytest.fixture(scope="module")
def chapters():
    """The pages of the contents: part -> names, such as book/theory/04_band."""
    toc = yaml.safe_load((ROOT / "_toc.yml").read_text())
    return {part["caption"]: [one["file"] for one in part["chapters"]] for part in toc["parts"]}


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
        if name.startswith(("book/", "notebooks/"))
        for image in page.select("article img")
        if len(image.get("alt", "")) < 40 or image["alt"].startswith(("../_images", "_images"))
    ]
    assert bare == []


def test_every_figure_has_a_number_and_a_caption_that_says_what_to_see(pages):
    bare = []
    for name, page in pages.items():
        for image in page.select("div.cell_output img"):
            figure = image.find_parent("figure")
            caption = figure and figure.select_one("figcaption .caption-text")
            if not caption or len(caption.text) < 40 or not figure.select_one(".caption-number"):
                bare.append(f"{name}: {image.get('src')}")
    assert bare == []


def test_every_page_opens_with_its_point(pages, chapters):
    names = ["book/index", *itertools.chain.from_iterable(chapters.values())]
    wrong = []
    for name in names:
        first = pages[f"{name}.html"].select_one("article h1").find_next_sibling()
        if not first.get_text().startswith("The point."):
            wrong.append(f"{name}: {first.get_text()[:60]}")
    assert wrong == []


def test_every_chapter_ends_with_what_to_remember(pages, chapters):
    # A notebook has one section more: the asserts of what it says.
    names = ["book/index", "book/run", *chapters["Theory"], *chapters["Notebooks"]]
    titles = {
        name: [h.find(string=True, recursive=False) for h in pages[f"{name}.html"].select("h2")]
        for name in names
    }
    assert [n for n in names if "What to remember" not in titles[n][-2:]] == []


def test_the_index_lists_every_chapter_with_its_command_and_minutes(pages, chapters):
    rows = pages["book/index.html"].select(".chapters tbody tr")
    links = [row.a["href"] for row in rows]
    files = [*chapters["Theory"], *chapters["Notebooks"]]
    stems = [Path(link).stem for link in links]
    assert stems == [Path(file).name for file in files]
    for row, file in zip(rows, files, strict=True):
        shows, command, minutes = (cell.get_text() for cell in row("td")[1:])
        assert len(shows) > 15, file
        if file != "book/explorer":
            assert command.startswith(("pytest tests/", "python -m bandpo.run ")), file
            assert re.fullmatch(r"< 0\.1|\d+\.\d", minutes), file


def test_the_status_page_is_whole(pages, chapters):
    status = pages["book/status.html"]
    text = status.select_one("article").get_text()
    rows = {row("td")[0].get_text(): row("td") for row in status.select("tbody tr")}
    for name in chapters["Notebooks"]:
        title = pages[f"{name}.html"].select_one("article h1").find(string=True)
        assert float(rows[title][3].get_text()) > 0, title
    assert "torch" in rows
    assert "machine" in rows
    weights = status.select("table.weights tbody tr")
    assert len(weights) == 1 + sum(map(len, chapters.values()))
    assert "prop-mirror" in text
    assert "not on paper" not in text


def test_the_reference_is_whole(pages):
    page = pages["book/reference.html"]
    titles = [h.find(string=True, recursive=False) for h in page.select("article h2")]
    wanted = {"Operator", "Divergences", "Clip rules", "Trainer", "Recipes", "Metrics"}
    assert wanted < set(titles)
    recipes = {p.relative_to(ROOT).as_posix() for p in (ROOT / "bandpo/recipes").rglob("*.yaml")}
    links = [link["href"] for link in page.select("a[href*='/bandpo/recipes/']")]
    assert {link[link.index("bandpo/recipes/") :] for link in links} == recipes
    cff = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    cited = page.select_one("#how-to-cite pre").get_text()
    assert cited.count("@misc{") == 1 + len(cff["references"])
    assert all(work["title"] in cited for work in [cff, *cff["references"]])
    changes = [h.get_text() for h in pages["book/changelog.html"].select("article h2")]
    assert any(title.startswith(bandpo.__version__) for title in changes)


def test_the_footer_names_version_and_commit(pages):
    for name, page in pages.items():
        if name.startswith(("book/", "notebooks/")):
            footer = page.select_one("footer.bd-footer-content").get_text()
            assert f"bandpo {bandpo.__version__}" in footer, name
            assert commit()["commit"][:12] in footer, name


def test_every_notebook_opens_in_binder_and_colab_at_this_commit(pages, chapters):
    revision = commit()["commit"]
    for page in ("run", *chapters["Notebooks"]):
        name = page if "/" in page else f"book/{page}"
        links = [link["href"] for link in pages[f"{name}.html"].select("a[href]")]
        for stem in chapters["Notebooks"] if page == "run" else [page]:
            path = f"{stem}.ipynb"
            assert (ROOT / path).is_file()
            for host in ("mybinder.org/v2/gh/", "colab.research.google.com/github/"):
                found = [a for a in links if host in a and unquote(a).endswith(path)]
                assert found, f"{name}: {host} {path}"
                assert all(revision in address for address in found), name


def test_small_print(pages):
    """Numbers from code have a minus, "%" and punctuation stay in line, intervals stand back."""
    prose = {name: page.select("article :is(p, li)") for name, page in pages.items()}
    numbers = [one.text for page in pages.values() for one in page.select(".pasted-text")]
    assert any(one.startswith("−") for one in numbers)
    assert [one for one in numbers if one.startswith("-")] == []
    torn = [
        (name, text)
        for name, paragraphs in prose.items()
        for paragraph in paragraphs
        for text in paragraph.find_all(string=re.compile(r"\d %|^ %"))
        if not text.find_parent(["code", "pre", "table", "svg"])
    ]
    assert torn == []
    formulas = [
        (name, formula.next_sibling)
        for name, page in pages.items()
        for formula in page.select("article p > span.math")
        if re.match(r"[.,;:]", str(formula.next_sibling))
    ]
    assert formulas == []
    asides = [one.text for one in pages["notebooks/08_training_dynamics.html"].select("p .aside")]
    assert len(asides) > 10
    assert all(re.fullmatch(r"\(.*\d to .*\d.*\)", one, re.DOTALL) for one in asides)


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


def test_links_to_sources_are_pinned_to_the_commit(pages, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "book" / "_ext")
    from companion.site import repository as published

    revision = commit()["commit"]
    configured = yaml.safe_load((ROOT / "_config.yml").read_text())["repository"]["url"]
    repository = published(configured)
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
