"""Profiles: from a YAML file to jobs, and when a copy is up to date."""

import json

import pytest
from repository import make_repository, write_notebook

from bandpo.profiles import Project
from bandpo.provenance import content_digest

GRID = """\
01_a: {parameters: {radius: 0.1}}
07_train:
  parameters: {steps: 3}
  grid:
    rule:
      grpo: {clip_rule: fixed}
      kl-band: {clip_rule: band, radius: 0.05}
    seed: [1, 2]
  show: kl-band-1
08_look: {needs: [07_train]}
"""


@pytest.fixture
def root(tmp_path):
    make_repository(tmp_path, GRID)
    write_notebook(tmp_path, "01_a", "radius = 0.05")
    write_notebook(
        tmp_path,
        "07_train",
        "run_dir = 'x'\nsteps = 1\nclip_rule = 'fixed'\nradius = 0.2\nseed = 0",
    )
    write_notebook(tmp_path, "08_look", "")
    write_notebook(tmp_path, "11_mine", "f = 'kl'")
    return tmp_path


def write_profile(root, text):
    (root / "notebooks" / "params" / "cpu.yaml").write_text(text)


def test_a_grid_is_every_combination_named_by_its_labels(root):
    jobs = Project("cpu", root).jobs("07_train")
    assert [job.name for job in jobs] == [
        "07_train/grpo-1", "07_train/grpo-2", "07_train/kl-band-1", "07_train/kl-band-2",
    ]  # fmt: skip
    assert jobs[2].parameters == {
        "run_dir": "build/runs/cpu/kl-band-1",
        "steps": 3,
        "clip_rule": "band",
        "radius": 0.05,
        "seed": 1,
    }
    assert jobs[2].copy == root / "build/runs/cpu/kl-band-1/notebook.ipynb"


def test_a_list_of_grids_is_their_union_in_that_order(root):
    write_profile(
        root,
        "07_train:\n  grid:\n"
        "    - &first {rule: {grpo: {clip_rule: fixed}}, seed: [2, 3]}\n"
        "    - {<<: *first, seed: [1]}\n"
        "    - {radius: [0.1], seed: [1]}\n"
        "  show: grpo-1",
    )
    jobs = Project("cpu", root).jobs("07_train")
    names = ["grpo-2", "grpo-3", "grpo-1", "0.1-1"]
    assert [job.name for job in jobs] == [f"07_train/{name}" for name in names]
    assert jobs[2].parameters["clip_rule"] == "fixed"
    assert jobs[3].parameters["radius"] == 0.1
    assert "clip_rule" not in jobs[3].parameters


def test_the_book_shows_the_named_run(root):
    project = Project("cpu", root)
    assert project.shown("07_train").name == "07_train/kl-band-1"
    assert project.shown("01_a").copy == root / "build/executed/cpu/01_a.ipynb"


def test_a_plan_has_what_is_needed_before_it_is_needed(root):
    project = Project("cpu", root)
    names = [job.name for job in project.plan(["08_look"])]
    assert names[-1] == "08_look"
    assert len(names) == 5
    assert [job.notebook for job in project.plan()] == ["01_a", *["07_train"] * 4, "08_look"]


def test_overrides_make_one_run_apart_from_the_profile(root):
    (job,) = Project("cpu", root).plan(["07_train"], {"radius": "0.3"})
    assert job.copy == root / "build/executed/custom/07_train.ipynb"
    assert job.parameters == {"steps": 3, "radius": 0.3}


def test_overrides_leave_the_needed_notebooks_alone(root):
    write_notebook(root, "08_look", "bins = 3")
    jobs = Project("cpu", root).plan(["08_look"], {"bins": "5"})
    assert [dict(job.parameters) for job in jobs][-1] == {"bins": 5}
    assert all("bins" not in job.parameters for job in jobs[:-1])


def test_a_notebook_that_the_profile_does_not_name_runs_with_its_defaults(root):
    (job,) = Project("cpu", root).plan(["11_mine"])
    assert job.parameters == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("01_b: {}", "no notebooks/01_b.ipynb .did you mean '01_a'"),
        ("01_a: 3", "01_a: 3 is not a mapping"),
        ("01_a: {paramters: {}}", "unknown key 'paramters' .did you mean 'parameters'"),
        ("01_a: {needs: 07_train}", "needs must be a list"),
        ("01_a: {parameters: [", "profile cpu"),
        ("[1]", "profile cpu: a mapping"),
        ("07_train: {grid: {seed: [1]}, show: x}", "show = 'x' is no entry.*it has 1"),
        ("07_train: {grid: {seed: [1]}}", "show = None is no entry"),
        ("07_train: {grid: {seed: 1}, show: x}", "grid axis 'seed' must be a list"),
        ("07_train: {grid: 3, show: x}", "grid must be a dict or a list, not 3"),
        ("07_train: {grid: [3], show: x}", "a grid must be a mapping from axes, not 3"),
        ("07_train: {grid: [{seed: [1]}, {seed: [1]}], show: '1'}", "two entries.*'1'"),
        ("07_train: {grid: {seed: [1, 1]}, show: '1'}", "two entries.*'1'"),
        ("01_a: {needs: [12_x]}", "no notebooks/12_x.ipynb"),
        ("01_a: {needs: [08_look]}\n08_look: {needs: [01_a]}", "01_a -> 08_look -> 01_a"),
        ("01_a: {parameters: {radus: 1}}", "01_a, profile cpu: unknown parameter 'radus'"),
    ],
)
def test_a_malformed_profile_is_refused(root, text, message):
    write_profile(root, text)
    with pytest.raises(ValueError, match=message):
        Project("cpu", root).plan()


def test_unknown_profile_and_wrong_type_are_refused(root):
    with pytest.raises(ValueError, match=r"no profile 'cpo' .did you mean 'cpu'.*; there are cpu"):
        Project("cpo", root)
    write_profile(root, "01_a: {parameters: {radius: high}}")
    with pytest.raises(TypeError, match="01_a, profile cpu: parameter radius = 'high'"):
        Project("cpu", root).plan()


def test_a_grid_needs_a_run_dir(root):
    write_notebook(root, "07_train", "seed = 1")
    write_profile(root, "07_train: {grid: {seed: [1]}, show: '1'}")
    with pytest.raises(ValueError, match="unknown parameter 'run_dir'"):
        Project("cpu", root).plan()


# --- when a copy is up to date; the real papermill is in test_run.py --------------------------


def pretend(project, job):
    """Write what the executor leaves after a run that succeeded."""
    notebook = json.loads(job.source.read_text())
    for cell in notebook["cells"]:
        cell["metadata"]["papermill"] = {"exception": False}
    stamp = {"digest": project.job_digest(job), "content": content_digest(notebook)}
    notebook["metadata"]["bandpo"] = stamp
    job.copy.parent.mkdir(parents=True, exist_ok=True)
    job.copy.write_text(json.dumps(notebook))


def edit(path, change):
    notebook = json.loads(path.read_text())
    change(notebook)
    path.write_text(json.dumps(notebook))


def fault(root, stem="01_a"):
    project = Project("cpu", root)
    return project.fault(project.jobs(stem)[0])


@pytest.fixture
def executed(root):
    project = Project("cpu", root)
    for job in project.plan():
        pretend(project, job)
    return root


def test_a_fresh_copy_has_no_fault(executed):
    assert {fault(executed, stem) for stem in ("01_a", "07_train", "08_look")} == {None}


@pytest.mark.parametrize(
    "change",
    [
        lambda root: (root / "bandpo" / "core.py").write_text("x = 2\n"),
        lambda root: (root / "bandpo" / "new.py").write_text(""),
        lambda root: (root / "requirements.lock").write_text("numpy==2.1\n"),
        lambda root: (root / "requirements-nodeps.lock").write_text("x==1\n"),
        lambda root: write_profile(root, "01_a: {parameters: {radius: 0.2}}"),
        lambda root: write_notebook(root, "01_a", "radius = 0.05", "1 + 1"),
    ],
    ids=["module changed", "module added", "lock", "second lock", "parameters", "notebook"],
)
def test_a_copy_is_stale_when_anything_that_went_in_has_changed(executed, change):
    change(executed)
    assert fault(executed) == "stale"


def test_byte_code_and_hidden_files_do_not_count(executed):
    (executed / "bandpo" / "__pycache__").mkdir()
    (executed / "bandpo" / "__pycache__" / "core.pyc").write_text("")
    (executed / "bandpo" / ".core.py.swp").write_text("")
    assert fault(executed) is None


def test_a_copy_is_stale_when_a_run_that_it_reads_changed_or_is_gone(executed):
    run = executed / "build/runs/cpu/grpo-2"
    (run / "metrics.jsonl").write_text("{}\n")
    assert fault(executed, "08_look") == "stale"
    (run / "metrics.jsonl").unlink()
    assert fault(executed, "08_look") is None
    (run / "notebook.ipynb").unlink()
    assert fault(executed, "08_look") == "stale"
    assert fault(executed, "01_a") is None


def test_a_copy_is_stale_when_a_folder_that_it_needs_changed(root):
    write_profile(root, "01_a: {needs: [book/results]}")
    project = Project("cpu", root)
    pretend(project, project.jobs("01_a")[0])
    assert fault(root) is None
    (root / "book" / "results").mkdir()
    (root / "book" / "results" / "gpu.json").write_text("{}")
    assert fault(root) == "stale"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda nb: nb["cells"][1].update(outputs=[{"output_type": "stream"}]), "altered"),
        (lambda nb: nb["cells"][0].update(source="# Another title"), "altered"),
        (lambda nb: nb["metadata"].pop("bandpo"), "failed"),
        (lambda nb: nb["cells"][1]["metadata"]["papermill"].update(exception=None), "failed"),
        (
            lambda nb: nb["cells"][1].update(
                outputs=[{"output_type": "error", "ename": "E", "evalue": "", "traceback": []}]
            ),
            "failed",
        ),
    ],
    ids=["outputs", "text", "stamp", "status", "error"],
)
def test_a_copy_that_was_edited_or_failed_is_told_apart(executed, change, expected):
    edit(executed / "build/executed/cpu/01_a.ipynb", change)
    assert fault(executed) == expected


def test_a_missing_and_a_torn_copy(executed):
    copy = executed / "build/executed/cpu/01_a.ipynb"
    copy.write_text(copy.read_text()[:100])
    assert fault(executed) == "failed"
    copy.unlink()
    assert fault(executed) == "missing"
