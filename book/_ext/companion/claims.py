"""Under each numbered statement: the tests that check it, from the run that built the book.

``tests/conftest.py`` writes ``build/claims.json``. A theorem, lemma, proposition or corollary with
no passing test is a warning (``companion.unchecked``), and so is a result that was obtained with
another package or other tests (``companion.stale``).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

from bandpo.provenance import claims_digest

logger = logging.getLogger(__name__)

CHECKED = ("theorem", "lemma", "proposition", "corollary")
STATUSES = (
    "proved and checked",
    "checked numerically",
    "reproduced at small scale",
    "contradicted",
    "contradicted at small scale",
    "not run here",
)


@dataclass(frozen=True)
class Evidence:
    """The tests of one statement: test function -> outcomes of its cases."""

    tests: dict[str, list[str]]

    @property
    def cases(self) -> int:
        return sum(map(len, self.tests.values()))

    @property
    def passed(self) -> bool:
        outcomes = [one for case in self.tests.values() for one in case]
        return "passed" in outcomes and "failed" not in outcomes

    @property
    def text(self) -> str:
        tests = "1 test" if len(self.tests) == 1 else f"{len(self.tests)} tests"
        return tests if self.cases == len(self.tests) else f"{tests}, {self.cases} cases"


@cache
def read_results(root: Path) -> tuple[dict[str, dict[str, Any]], str | None]:
    """Return test -> result, and what is wrong with the file (None, missing or stale)."""
    try:
        claims = json.loads((root / "build" / "claims.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}, "missing"
    return ({}, "stale") if claims["digest"] != claims_digest(root) else (claims["tests"], None)


@cache
def read_evidence(root: Path) -> tuple[dict[str, Evidence], str | None]:
    """Return label -> evidence, and what is wrong with the file of results."""
    results, fault = read_results(root)
    labels: dict[str, dict[str, list[str]]] = {}
    for node, result in results.items():
        for label in result["claims"]:
            function = node.partition("[")[0]
            labels.setdefault(label, {}).setdefault(function, []).append(result["outcome"])
    return {label: Evidence(tests) for label, tests in labels.items()}, fault


def load(app: Sphinx) -> None:
    """Read the results once a build (``builder-inited``)."""
    read_results.cache_clear()
    read_evidence.cache_clear()
    _, fault = read_evidence(Path(app.srcdir))
    if fault is not None:
        logger.warning(
            "the test results of the statements are %s: run `pytest -m claim`",
            fault, type="companion", subtype=fault,
        )  # fmt: skip


def add_badges(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Append a badge to each numbered statement (``doctree-resolved``)."""
    found, _ = read_evidence(Path(app.srcdir))
    for node in doctree.findall(nodes.Element):
        if node.get("realtype") not in CHECKED:
            continue
        label = node["label"]
        evidence = found.get(label)
        if evidence is None or not evidence.passed:
            logger.warning(
                "no passing test has the mark claim(%r), or one with it fails",
                label, location=docname, type="companion", subtype="unchecked",
            )  # fmt: skip
            continue
        badge = nodes.paragraph(classes=["claim-badge"])
        badge += nodes.Text("✓ checked by ")
        badge += _link(app, docname, label, evidence.text)
        node += badge


def _link(app: Sphinx, docname: str, label: str, text: str) -> nodes.Node:
    page = app.config.companion_tests_page
    uri = app.builder.get_relative_uri(docname, page) + f"#{anchor(label)}"
    return nodes.reference("", text, refuri=uri, internal=True)


def anchor(label: str) -> str:
    """Return the id of a statement's row in the table of tests."""
    return nodes.make_id(f"tests-{label}")


class ClaimsTable(SphinxDirective):
    """The register ``book/claims.yaml`` as a table, each row with its evidence."""

    def run(self) -> list[nodes.Node]:
        path = Path(self.env.srcdir) / "book" / "claims.yaml"
        self.env.note_dependency(str(path))
        claims = yaml.safe_load(path.read_text(encoding="utf-8"))
        lines = ["| id | statement | where | status and evidence |", "|---|---|---|---|"]
        lines += [self._row(claim) for claim in claims]
        return [
            nodes.container("", *self.parse_text_to_nodes("\n".join(lines)), classes=["claims"])
        ]

    def _row(self, claim: dict[str, Any]) -> str:
        evidence = self._evidence(claim)
        where = [_role(label) for label in claim.get("where", [])]
        if claim.get("notebook"):
            where.append("{doc}`/notebooks/" + claim["notebook"] + "`")
        kind = nodes.make_id(claim["status"])
        status = f'<span class="status status-{kind}">{claim["status"]}</span>'
        if evidence:
            uri = self.env.app.builder.get_relative_uri(
                self.env.docname, self.config.companion_tests_page
            )
            links = [
                f'<a class="reference internal" href="{uri}#{anchor(one)}">{one}: {e.text}</a>'
                for one, e in evidence.items()
            ]
            status += "<br>" + "<br>".join(links)
        for key in ("command", "note"):
            if claim.get(key):
                status += "<br>" + (f"`{claim[key]}`" if key == "command" else claim[key])
        statement = claim["statement"] + (f" ({claim['source']})" if claim.get("source") else "")
        identity = f'<span id="claim-{nodes.make_id(claim["id"])}">{claim["id"]}</span>'
        cells = [identity, statement, "<br>".join(where), status]
        return "| " + " | ".join(str(c).replace("\n", " ").strip() for c in cells) + " |"

    def _evidence(self, claim: dict[str, Any]) -> dict[str, Evidence]:
        if claim["status"] not in STATUSES:
            raise self.error(f"{claim['id']}: status {claim['status']!r} is none of {STATUSES}")
        known, _ = read_evidence(Path(self.env.srcdir))
        names = [claim["id"], *claim.get("where", [])]
        found = {name: known[name] for name in names if name in known}
        failed = [name for name, evidence in found.items() if not evidence.passed]
        if failed or (not found and claim["status"] != "not run here"):
            logger.warning(
                "claim %s is said to be %s, but %s", claim["id"], claim["status"],
                f"tests of {failed} fail" if failed else f"no test has a mark of {names}",
                location=self.env.docname, type="companion", subtype="unchecked",
            )  # fmt: skip
        return found


def _role(label: str) -> str:
    if "/" in label:
        return "{doc}`/" + label.lstrip("/") + "`"
    return "{prf:ref}`" + label + "`"


class TestsTable(SphinxDirective):
    """Every marked test by statement, linked to its source at the commit of the build."""

    def run(self) -> list[nodes.Node]:
        rows = []
        found, _ = read_evidence(Path(self.env.srcdir))
        for label, evidence in sorted(found.items()):
            item = nodes.definition_list_item()
            name = nodes.literal("", label)
            item += nodes.term("", "", name, nodes.Text(f": {evidence.text}"), ids=[anchor(label)])
            tests = nodes.bullet_list()
            for test, outcomes in sorted(evidence.tests.items()):
                passed = outcomes.count("passed")
                text = f" {passed} of {len(outcomes)} passed"
                link = nodes.reference("", "", nodes.literal("", test), refuri=self._source(test))
                tests += nodes.list_item("", nodes.paragraph("", "", link, nodes.Text(text)))
            item += nodes.definition("", tests)
            rows.append(item)
        return [nodes.definition_list("", *rows, classes=["tests"])]

    def _source(self, test: str) -> str:
        file, *_, function = test.split("::")
        lines = (Path(self.env.srcdir) / file).read_text(encoding="utf-8").splitlines()
        number = next((i for i, line in enumerate(lines, 1) if f"def {function}(" in line), 1)
        return f"{self.config.companion_source_url}/{file}#L{number}"


def always_read(app: Sphinx, *_: Any) -> list[str]:
    """Read the page of tests at every build: it shows results that Sphinx does not watch."""
    return [page for page in (app.config.companion_tests_page,) if page in app.env.found_docs]


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_config_value("companion_tests_page", "book/status", "env")
    app.connect("builder-inited", load)
    app.connect("env-get-outdated", always_read)
    app.connect("doctree-resolved", add_badges)
    app.add_directive("claims-table", ClaimsTable)
    app.add_directive("tests-table", TestsTable)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
