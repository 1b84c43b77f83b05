"""Run tests/integrations in an environment of its own and record what they found.

    python tools/verl_env.py

Builds ``build/verl-env`` from ``tools/verl-requirements.lock`` (again only if that file changed),
runs the tests there, and writes

- ``book/results/measured/verl-equivalence.json``: date, versions, and the figures of each fact;
- ``book/results/measured/verl-equivalence.md``: the same as the tables that the book includes.

Nothing is written unless every test passes and none is skipped.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import venv
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bandpo.provenance import commit, machine, tree_digest  # noqa: E402

LOCK = ROOT / "tools" / "verl-requirements.lock"
ENVIRONMENT = ROOT / "build" / "verl-env"
JUNIT = ROOT / "build" / "verl-tests.xml"
MEASURED = ROOT / "book" / "results" / "measured"
PACKAGES = ("verl", "torch", "transformers", "ray", "hydra-core", "tensordict")


def environment() -> Path:
    """The environment's Python, built if it is not there or the lock file changed."""
    python = ENVIRONMENT / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    # written last, so that an interrupted build is started over
    stamp = ENVIRONMENT / "lock.sha256"
    digest = hashlib.sha256(LOCK.read_bytes()).hexdigest()
    if not stamp.is_file() or stamp.read_text() != digest:
        shutil.rmtree(ENVIRONMENT, ignore_errors=True)
        venv.create(ENVIRONMENT, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", "-r", LOCK], check=True)
        stamp.write_text(digest)
    return python


def run_tests(python: Path) -> int:
    """Run the tests, without this project's conftest.py and options: they need its environment."""
    options = [
        "--noconftest",
        "-o",
        "addopts=",
        "-o",
        "junit_family=xunit1",
        "-p",
        "no:cacheprovider",
        "-q",
    ]
    return subprocess.run(
        [python, "-m", "pytest", *options, f"--junitxml={JUNIT}", ROOT / "tests" / "integrations"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ).returncode


def collect(junit: Path) -> dict[str, Any]:
    """What the tests recorded of each fact: cases and tokens summed, of the others the largest."""
    suite = ElementTree.parse(junit).getroot()[0]
    if int(suite.attrib["skipped"]):
        raise SystemExit(f"{suite.attrib['skipped']} tests were skipped: see {junit}")
    facts: dict[str, dict[str, Any]] = {}
    for case in suite.iter("testcase"):
        figures = {p.attrib["name"]: p.attrib["value"] for p in case.iter("property")}
        if "fact" not in figures:
            continue
        fact = facts.setdefault(figures.pop("fact"), {"cases": 0, "tokens": 0})
        fact["cases"] += 1
        fact["tokens"] += int(figures.pop("tokens"))
        for name, value in figures.items():
            fact[name] = max(fact.get(name, 0.0), float(value))
    return {"tests": int(suite.attrib["tests"]), "facts": facts}


def versions(python: Path) -> dict[str, str]:
    """Versions in the environment, as its own metadata gives them."""
    script = (
        "import platform, sys; from importlib.metadata import version; "
        "print(platform.python_version(), *map(version, sys.argv[1:]))"
    )
    run = subprocess.run(
        [python, "-c", script, *PACKAGES], check=True, capture_output=True, text=True
    )
    return dict(zip(("python", *PACKAGES), run.stdout.split(), strict=True))


def sources_digest() -> str:
    """Digest of what the record speaks of: the integration and its tests."""
    return tree_digest(ROOT, ["bandpo/integrations", "tests/integrations"])


def table(record: dict[str, Any]) -> str:
    """The record as the Markdown that the chapter includes."""
    columns = ("loss", "gradient", "metrics")
    lines = [
        "| fact | comparisons | tokens compared | loss | gradient | metrics |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for fact, figures in record["facts"].items():
        cells = [f"{figures[c]:.0e}" if c in figures else "" for c in columns]
        lines.append(f"| {fact} | {figures['cases']} | {figures['tokens']} | {' | '.join(cells)} |")
    names = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    lines += ["", f"Run on {record['date']} ({record['tests']} tests passed): {names}."]
    return "\n".join(lines) + "\n"


def write(path: Path, text: str) -> None:
    """Write a whole file or none."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def main() -> int:
    """Build, test, record; the exit status of pytest."""
    JUNIT.parent.mkdir(exist_ok=True)
    python = environment()
    status = run_tests(python)
    if status:
        return status
    record = {
        "date": datetime.now(UTC).date().isoformat(),
        **commit(),
        "sources": sources_digest(),
        "machine": machine(),
        "versions": versions(python),
        **collect(JUNIT),
    }
    MEASURED.mkdir(parents=True, exist_ok=True)
    text = json.dumps(record, indent=2, ensure_ascii=False)
    write(MEASURED / "verl-equivalence.json", text + "\n")
    write(MEASURED / "verl-equivalence.md", table(record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
