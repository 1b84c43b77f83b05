"""Run the tests of the trainer's hook against other versions of TRL and record what they found.

    python tools/trl_compat.py [VERSION ...]

For each version (the older ones below by default) this makes an environment in a temporary folder:
the locked packages of the Python that runs this script, with that TRL in front of the locked one.
It runs the hook's tests there and for the locked TRL, and writes
``book/results/measured/trl-compatibility.json``. Exit status 1 if a test failed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tempfile
import venv
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bandpo.provenance import commit, machine, tree_digest  # noqa: E402
from bandpo.runs import write_json  # noqa: E402

OLDER = ("1.14.2", "1.12.0", "1.9.2")
TESTS = ("tests/test_trainer_exactness.py",)
SOURCES = (
    *(f"bandpo/{name}.py" for name in ("trainer", "config", "clipping", "adaptive", "rules")),
    "tests/tiny.py",
    *TESTS,
)
PACKAGES = ("torch", "transformers", "accelerate", "peft", "datasets")
RECORD = ROOT / "book" / "results" / "measured" / "trl-compatibility.json"


def environment(folder: Path, trl: str) -> Path:
    """Make an environment with this TRL in front of the locked packages; return its Python."""
    venv.create(folder, with_pip=False)
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps"]
    subprocess.run([*pip, f"trl=={trl}"], check=True)
    paths = sysconfig.get_paths(vars={"base": str(folder), "platbase": str(folder)})
    (Path(paths["purelib"]) / "locked.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return python


def check(python: Path, trl: str, junit: Path) -> dict[str, Any]:
    """Run the tests with this Python; return how many there were and which failed."""
    script = "import trl; print(trl.__version__)"
    seen = subprocess.run([python, "-c", script], capture_output=True, text=True, check=True)
    if seen.stdout.strip() != trl:
        raise RuntimeError(f"the environment for TRL {trl} imports TRL {seen.stdout.strip()}")
    options = ["--noconftest", "-q", "-p", "no:cacheprovider", f"--junitxml={junit}"]
    subprocess.run([python, "-m", "pytest", *options, *TESTS], cwd=ROOT)
    suite = ElementTree.parse(junit).getroot()[0]
    if int(suite.attrib["skipped"]):
        raise RuntimeError(f"TRL {trl}: {suite.attrib['skipped']} tests were skipped")
    failed = [
        case.attrib["name"]
        for case in suite.iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    ]
    return {"trl": trl, "tests": int(suite.attrib["tests"]), "failed": failed}


def main(versions: list[str]) -> int:
    """Check each version and the locked one; write the record; 1 if a test failed."""
    with tempfile.TemporaryDirectory() as scratch:
        junit = Path(scratch) / "tests.xml"
        locked = version("trl")
        pythons = {locked: Path(sys.executable)}
        pythons |= {trl: environment(Path(scratch) / trl, trl) for trl in versions}
        results = [check(python, trl, junit) for trl, python in pythons.items()]
    record = {
        "date": datetime.now(UTC).date().isoformat(),
        **commit(),
        "sources": tree_digest(ROOT, SOURCES),
        "machine": machine(),
        "versions": {name: version(name) for name in PACKAGES},
        "results": results,
    }
    write_json(RECORD, record)
    for result in results:
        passed = result["tests"] - len(result["failed"])
        print(f"TRL {result['trl']}: {passed} of {result['tests']} tests passed")
    return int(any(result["failed"] for result in results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or list(OLDER)))
