"""Record which tests check which statement of the book, in ``build/claims.json``.

The book's build reads that file and refuses it when the package or the tests have changed since.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bandpo.provenance import claims_digest
from bandpo.runs import write_json

_PROPERTY = "claims"
_results: dict[str, dict[str, Any]] = {}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        claims = [str(one) for mark in item.iter_markers("claim") for one in mark.args]
        if claims:
            item.user_properties.append((_PROPERTY, claims))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    claims = dict(report.user_properties).get(_PROPERTY)
    if claims is None:
        return
    result = _results.setdefault(
        report.nodeid, {"claims": claims, "outcome": "passed", "seconds": 0.0}
    )
    result["seconds"] += report.duration
    if report.outcome != "passed":
        result["outcome"] = report.outcome


def pytest_sessionfinish(session: pytest.Session) -> None:
    # With xdist the workers run the tests and the controller sees every report.
    if _results and not hasattr(session.config, "workerinput"):
        root = session.config.rootpath
        record(root / "build" / "claims.json", _results, claims_digest(root))


def record(path: Path, results: dict[str, dict[str, Any]], digest: str) -> None:
    """Add results to those that were obtained with the same package and tests; drop all others."""
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        before = {}
    kept = before["tests"] if before.get("digest") == digest else {}
    write_json(path, {"digest": digest, "tests": {**kept, **results}})


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    from chromium import chromium  # not at hand where this file alone is copied

    with chromium() as one:
        yield one
