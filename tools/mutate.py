"""Break each formula of the package in turn and show that a claim test notices.

A mutant is a copy of the package with one change in one formula: a sign turned, a power or root
changed, a factor or divisor dropped, a comparison or a choice of side reversed. For each, the claim
tests run in a forked process until one fails. The results go to
``book/results/measured/mutations.json`` and, as a table, to ``book/mutations.md``.

    python tools/mutate.py              all mutants; exit code 1 if one survives
    python tools/mutate.py --list       what would be changed
    python tools/mutate.py tv neyman    the formulas of these names only; nothing is written
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "book" / "results" / "measured" / "mutations.json"
PAGE = ROOT / "book" / "mutations.md"

#: Where the formulas are, and the chapters whose tests should notice, the likeliest first.
FORMULAS: dict[str, dict[str, tuple[str, ...]]] = {
    "bandpo/divergences.py": {
        name: ("trust_regions", "band")
        for name in (
            "KL", "REVERSE_KL", "TV", "CHI2", "NEYMAN", "HELLINGER", "LE_CAM",
            "_jensen_shannon", "alpha_divergence",
        )
    },
    "bandpo/closed_forms.py": {
        name: ("closed_forms", "limits")
        for name in ("_log_lower", "_log_upper", "tv", "chi2", "neyman", "hellinger", "le_cam")
    },
    "bandpo/elementary.py": {"inverse_odds": ("solvers", "closed_forms")},
    "bandpo/solvers.py": {
        "binary_divergence": ("band", "gradient"),
        "_kl_binary_divergence": ("gradient", "band"),
        "_term": ("limits", "band"),
        "kl_drop": ("solvers", "limits"),
        "_newton": ("solvers", "limits"),
        "_newton_side": ("gradient", "ratio_clipping"),
        "generic_drop": ("limits",),
        "_mirrored": ("limits",),
        "_mirrored_side": ("gradient",),
    },
    "bandpo/operator.py": {
        "inside_band": ("gradient",),
        "saturation": ("band",),
        "limits": ("limits",),
    },
    "bandpo/rules.py": {
        "Fixed.log_bounds": ("bottleneck", "ratio_clipping"),
        "DCPO.log_bounds": ("bottleneck",),
        "RelaxedBand.log_bounds": ("not_promised",),
        "RelaxedBand.log_bound": ("ratio_clipping",),
        "PerSide.log_bounds": ("not_promised",),
        "_cap": ("not_promised", "bottleneck"),
    },
    "bandpo/adaptive.py": {
        "surprisal": ("adaptive",),
        "centered_ranks": ("adaptive",),
        "AdaptiveBand.radii": ("adaptive",),
    },
    "bandpo/clipping.py": {"clipped_surrogate": ("ratio_clipping", "gradient")},
}  # fmt: skip

#: Act only where a float can hardly tell a probability from 0 or 1: no claim is about them.
GUARDS = {"below", "FLOOR", "finfo", "_SMALLEST", "MIN_LOGP"}

#: Changes of one kind in one formula; the outermost expressions come first.
EACH_KIND = 2

#: Changes that leave the value of a formula as it is.
EQUIVALENT = {
    ("alpha_divergence", "alpha < 0.5"),  # two forms of one formula, either side of the middle
}

SWAPPED = {"minimum": "maximum", "maximum": "minimum", "min": "max", "max": "min"}
REVERSED = {ast.LtE: ast.Gt, ast.Lt: ast.GtE, ast.Gt: ast.LtE, ast.GtE: ast.Lt}


@dataclass(frozen=True)
class Mutant:
    """One change: the formula, its kind, the expression before and after."""

    file: str
    formula: str
    kind: str
    line: int
    before: str
    after: str
    source: str

    def summary(self) -> dict[str, str | int]:
        return {k: v for k, v in asdict(self).items() if k != "source"}


def changes(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """The changed versions of one expression."""
    if isinstance(node, ast.BinOp):
        if isinstance(node.op, ast.Add | ast.Sub):
            turned = ast.Sub() if isinstance(node.op, ast.Add) else ast.Add()
            yield "sign", ast.BinOp(node.left, turned, node.right)
        elif isinstance(node.op, ast.Mult):
            simple = isinstance(node.left, ast.Constant | ast.Name)
            yield "factor", node.right if simple else node.left
        elif isinstance(node.op, ast.Div):
            yield "factor", node.left
        elif isinstance(node.op, ast.Pow):
            higher = ast.BinOp(node.right, ast.Add(), ast.Constant(1))
            yield "power", ast.BinOp(node.left, ast.Pow(), higher)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        if not isinstance(node.operand, ast.Constant):
            yield "sign", node.operand
    elif isinstance(node, ast.Compare) and type(node.ops[0]) in REVERSED:
        reverse = REVERSED[type(node.ops[0])]()
        yield "side", ast.Compare(node.left, [reverse], node.comparators)
    elif isinstance(node, ast.Subscript) and ast.unparse(node.slice) in ("0", "1"):
        other = "1" if ast.unparse(node.slice) == "0" else "0"
        yield "side", ast.Subscript(node.value, ast.Name(other), ast.Load())
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        name = node.func.attr
        if name == "sqrt":
            yield "power", node.args[0] if node.args else node.func.value
        elif name in ("minimum", "maximum"):
            func = ast.Attribute(node.func.value, SWAPPED[name], ast.Load())
            yield "side", ast.Call(func, node.args, node.keywords)
        elif name == "clamp" and len(node.keywords) == 1 and node.keywords[0].arg in SWAPPED:
            keyword = ast.keyword(SWAPPED[node.keywords[0].arg], node.keywords[0].value)
            yield "side", ast.Call(node.func, node.args, [keyword])


def find(tree: ast.Module, name: str) -> ast.AST:
    """The definition or assignment of a dotted name."""
    scope: ast.AST = tree
    for part in name.split("."):
        scope = next(
            (
                node
                for node in scope.body  # type: ignore[attr-defined]
                if getattr(node, "name", None) == part
                or (isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) == part)
            ),
            ast.Pass(),
        )
        if isinstance(scope, ast.Pass):
            raise ValueError(f"no formula {name!r}; bring FORMULAS up to date")
    return scope


def _is_guard(node: ast.AST, depth: int = 3) -> bool:
    """Whether the expression is about a guard: one is named at most three levels down."""
    if getattr(node, "id", getattr(node, "attr", None)) in GUARDS:
        return True
    return depth > 0 and any(_is_guard(n, depth - 1) for n in ast.iter_child_nodes(node))


class _Replace(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        return self.new if node is self.old else self.generic_visit(node)


def mutants(root: Path, only: list[str]) -> Iterator[Mutant]:
    """All changes of all formulas, in the order of the file."""
    for file, formulas in FORMULAS.items():
        tree = ast.parse((root / file).read_text(encoding="utf-8"))
        for formula in formulas:
            if only and formula not in only:
                continue
            count: Counter[str] = Counter()
            for node in ast.walk(find(tree, formula)):
                if _is_guard(node) or (formula, _text(node)) in EQUIVALENT:
                    continue
                for kind, new in changes(node):
                    count[kind] += 1
                    if count[kind] > EACH_KIND:
                        continue
                    memo = {id(node): node}  # keep the identity of what is replaced
                    broken = _Replace(node, new).visit(copy.deepcopy(tree, memo))
                    yield Mutant(
                        file, formula, kind, node.lineno,  # type: ignore[attr-defined]
                        _text(node), _text(new),
                        ast.unparse(ast.fix_missing_locations(broken)),
                    )  # fmt: skip


def _text(node: ast.AST) -> str:
    return ast.unparse(node) if isinstance(node, ast.expr) else ""


def caught_by(mutant: Mutant, work: Path) -> str | None:
    """The first test that fails with the mutant in place; None if it survives."""
    target = work / mutant.file
    original = target.read_text(encoding="utf-8")
    report = work / "failed.txt"
    report.unlink(missing_ok=True)
    target.write_text(mutant.source, encoding="utf-8")
    child = os.fork()
    if child == 0:
        _run_tests(work, FORMULAS[mutant.file][mutant.formula], report)
    os.waitpid(child, 0)
    target.write_text(original, encoding="utf-8")
    return report.read_text(encoding="utf-8") if report.exists() else None


def _run_tests(work: Path, chapters: tuple[str, ...], report: Path) -> None:
    """In the forked process: run tests until one fails, name it in the report, and exit."""
    import pytest

    class First:
        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.failed:
                _name(report.nodeid)

        def pytest_collectreport(self, report: pytest.CollectReport) -> None:
            if report.failed:
                _name(report.nodeid)

    def _name(nodeid: str) -> None:
        report.write_text(nodeid, encoding="utf-8")

    os.chdir(work)
    sys.path.insert(0, str(work))
    for name in list(sys.modules):  # the copies must be imported, not what pytest holds already
        if name.partition(".")[0] in ("bandpo", "tests") or "claims" in name:
            del sys.modules[name]
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 1)
    os.dup2(devnull, 2)
    sys.dont_write_bytecode = True
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    files = [f"tests/test_claims_{chapter}.py" for chapter in chapters]
    try:
        quick = ["-x", "-q", "-p", "no:cacheprovider", "--assert=plain", "-m", "claim"]
        code = pytest.main([*quick, *files], plugins=[First()])
        if code not in (0, 1) and not report.exists():
            report.write_text(f"pytest stops with code {int(code)}", encoding="utf-8")
    finally:
        os._exit(0)


def prepare(work: Path) -> None:
    """Copy the package and the claim tests, and load what every fork needs."""
    shutil.copytree(ROOT / "bandpo", work / "bandpo", ignore=shutil.ignore_patterns("__pycache__"))
    (work / "tests").mkdir()
    for file in (ROOT / "tests").glob("*claims*.py"):
        shutil.copy(file, work / "tests")
    shutil.copy(ROOT / "pyproject.toml", work)
    import cvxpy  # noqa: F401
    import flint  # noqa: F401
    import mpmath  # noqa: F401
    import pytest  # noqa: F401
    import scipy.optimize
    import scipy.stats  # noqa: F401
    import statsmodels.stats.proportion  # noqa: F401
    import torch
    import torch._dynamo

    torch.set_num_threads(1)


def page(results: list[dict[str, str | int]]) -> str:
    """The table of the reference chapter."""
    caught = sum(r["caught_by"] != "" for r in results)
    head = f"""\
# Broken formulas

**The point.** A test that cannot fail shows nothing. Each formula of the package was broken in
every way listed here, one at a time, and a claim test noticed.

{caught} of {len(results)} mutants were caught. `python tools/mutate.py` made this page: it turns a
sign, changes a power or a root, drops a factor or a divisor, or reverses a comparison or the choice
of a side, in a copy of the package, and runs the claim tests until one fails.
"""
    lines = [
        head,
        "::::{container} cards mutants",
        "",
        "| formula | change | from | to | noticed by |",
        "| --- | --- | --- | --- | --- |",
    ]
    for r in results:
        before, after = (f"`{r[key]}`".replace("|", "\\|") for key in ("before", "after"))
        test = str(r["caught_by"]).rpartition("::")[2].partition("[")[0]
        noticed = f"`{test}`" if test else "**nothing**"
        lines.append(f"| `{r['formula']}` | {r['kind']} | {before} | {after} | {noticed} |")
    return "\n".join([*lines, "", "::::"]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("formulas", nargs="*", help="names of formulas; all if none is given")
    parser.add_argument("--list", action="store_true", help="show the changes, run nothing")
    arguments = parser.parse_args()
    every = list(mutants(ROOT, arguments.formulas))
    if not every:
        parser.error(f"no formula named {', '.join(arguments.formulas)}; see FORMULAS")
    if arguments.list:
        for m in every:
            print(f"{m.file}:{m.line} {m.formula} [{m.kind}] {m.before}  ->  {m.after}")
        return 0
    results: list[dict[str, str | int]] = []
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder))
        for m in every:
            start = time.perf_counter()
            test = caught_by(m, Path(folder))
            results.append({**m.summary(), "caught_by": test or ""})
            print(
                f"{'caught  ' if test else 'SURVIVED'} {m.formula} [{m.kind}] "
                f"{m.before} -> {m.after} ({time.perf_counter() - start:.1f} s)",
                flush=True,
            )
    survived = sum(r["caught_by"] == "" for r in results)
    if not arguments.formulas:
        RESULTS.parent.mkdir(parents=True, exist_ok=True)
        RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        PAGE.write_text(page(results), encoding="utf-8")
    print(f"{len(results) - survived} of {len(results)} mutants caught")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
