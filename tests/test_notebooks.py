"""The notebooks as they are committed: clean, runnable by papermill, readable on a page."""

import ast
import json

import nbformat
import pytest
import yaml

from bandpo.params import read_defaults
from bandpo.profiles import Project
from bandpo.provenance import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PROFILES = sorted((ROOT / "notebooks" / "params").glob("*.yaml"))
COLUMNS = 76

pytestmark = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


@pytest.fixture
def notebook(path):
    return json.loads(path.read_text(encoding="utf-8"))


def code_cells(notebook):
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def source(cell):
    return "".join(cell["source"])


def test_it_is_a_valid_notebook_for_the_python3_kernel(path, notebook):
    nbformat.validate(nbformat.from_dict(notebook))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"


def test_it_has_no_outputs_and_no_counts(path, notebook):
    assert [cell["id"] for cell in code_cells(notebook) if cell["outputs"]] == []
    assert [cell["id"] for cell in code_cells(notebook) if cell["execution_count"]] == []
    assert {"papermill", "bandpo", "widgets"}.isdisjoint(notebook["metadata"])


def test_its_cell_ids_are_words_that_stay(path, notebook):
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(set(ids)) == len(ids)
    # Eight hexadecimal digits are what a tool makes up.
    made_up = [one for one in ids if len(one) == 8 and set(one) <= set("0123456789abcdef")]
    assert made_up == []


def test_it_begins_with_a_title_and_what_it_shows(path, notebook):
    first = notebook["cells"][0]
    assert first["cell_type"] == "markdown"
    title, *rest = source(first).split("\n", 1)
    assert title.startswith("# ")
    assert rest[0].strip()


def test_its_parameters_are_literals_in_the_first_code_cell(path, notebook):
    assert "parameters" in code_cells(notebook)[0]["metadata"].get("tags", [])
    assert read_defaults(notebook)


def test_its_parameters_are_all_used(path, notebook):
    later = "\n".join(source(cell) for cell in code_cells(notebook)[1:])
    names = {node.id for node in ast.walk(ast.parse(later)) if isinstance(node, ast.Name)}
    assert set(read_defaults(notebook)) - names == set()


def test_its_code_fits_the_page(path, notebook):
    long = [
        f"{cell['id']}: {line}"
        for cell in code_cells(notebook)
        for line in source(cell).splitlines()
        if len(line) > COLUMNS
    ]
    assert long == []


def test_its_figures_have_a_name_a_caption_and_a_text_for_who_cannot_see_them(path, notebook):
    for cell in code_cells(notebook):
        shown = cell["metadata"].get("mystnb", {})
        if "figure" in shown or "image" in shown:
            assert shown["figure"]["name"].startswith("fig-"), cell["id"]
            assert shown["figure"]["caption"].strip(), cell["id"]
            assert shown["image"]["alt"].strip(), cell["id"]


def test_its_last_code_asserts_what_the_prose_says(path, notebook):
    tree = ast.parse(source(code_cells(notebook)[-1]))
    assert any(isinstance(node, ast.Assert) for node in ast.walk(tree))


def test_it_names_no_machine(path, notebook):
    text = "\n".join(source(cell) for cell in notebook["cells"])
    assert [word for word in ("/home/", "/root/", "/tmp/", "C:\\") if word in text] == []


@pytest.mark.parametrize("profile", PROFILES, ids=lambda profile: profile.stem)
def test_its_parameters_in_every_profile_are_in_order(path, profile):
    project = Project(profile.stem)
    assert project.jobs(path.stem)


def test_the_cpu_profile_and_the_book_have_it(path):
    assert path.stem in Project("cpu").sections
    toc = yaml.safe_load((ROOT / "_toc.yml").read_text())
    files = [chapter["file"] for part in toc["parts"] for chapter in part["chapters"]]
    assert f"notebooks/{path.stem}" in files
