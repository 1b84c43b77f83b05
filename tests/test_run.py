"""``python -m bandpo.run`` on real notebooks, through the real papermill."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch
from repository import make_repository, write_notebook

from bandpo import kernels
from bandpo.profiles import Project
from bandpo.run import main

TRAIN = """\
07_train:
  grid: {seed: [1, 2]}
  show: "1"
08_look: {needs: [07_train]}
"""
RUN_CELL = (
    "import pathlib\nfolder = pathlib.Path(run_dir)\n"
    "before = sorted(path.name for path in folder.iterdir())\n"
    "(folder / 'metrics.jsonl').write_text(str(seed))\nprint(before)"
)
LOOK_CELL = (
    "import pathlib\n"
    "for path in sorted(pathlib.Path('build/runs/cpu').iterdir()):\n"
    "    print(path.name, (path / 'metrics.jsonl').read_text())"
)


def printed(copy):
    notebook = json.loads(copy.read_text())
    texts = [
        output.get("text", []) for cell in notebook["cells"] for output in cell.get("outputs", [])
    ]
    return "".join("".join(text) for text in texts)


def leftovers(root):
    return sorted(path.name for path in (root / "build").glob(".*"))


@pytest.fixture
def trained(tmp_path):
    make_repository(tmp_path, TRAIN)
    write_notebook(tmp_path, "07_train", "run_dir = 'x'\nseed = 0", RUN_CELL)
    write_notebook(tmp_path, "08_look", "", LOOK_CELL)
    return tmp_path


def test_a_grid_its_reader_and_a_second_call(trained, capsys):
    assert main([], trained) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sorted(line.split("  ")[0] for line in lines) == [
        "+ 07_train/1", "+ 07_train/2", "+ 08_look",
    ]  # fmt: skip
    assert lines[-1].startswith("+ 08_look")
    assert printed(trained / "build/executed/cpu/08_look.ipynb") == "1 1\n2 2\n"
    assert leftovers(trained) == []

    assert main([], trained) == 0
    assert capsys.readouterr().out.splitlines() == [
        "= 07_train/1  up to date", "= 07_train/2  up to date", "= 08_look  up to date",
    ]  # fmt: skip

    # One run gone: it and its reader run again, the other run is kept.
    (trained / "build/runs/cpu/2/notebook.ipynb").unlink()
    assert main(["08_look"], trained) == 0
    kept, *ran = capsys.readouterr().out.splitlines()
    assert kept == "= 07_train/1  up to date"
    assert [line.split("  ")[0] for line in ran] == ["+ 07_train/2", "+ 08_look"]
    # Same inputs, so the run could go on from what its folder held.
    assert "metrics.jsonl" in printed(trained / "build/runs/cpu/2/notebook.ipynb")


def test_a_run_folder_of_other_inputs_is_set_aside(trained):
    folder = trained / "build/runs/cpu/1"
    folder.mkdir(parents=True)
    (folder / "checkpoint").write_text("of another package")
    assert main(["07_train"], trained) == 0
    assert printed(folder / "notebook.ipynb") == "['.digest']\n"
    assert (trained / "build/retired/cpu/1/checkpoint").read_text() == "of another package"


def test_a_run_that_left_the_grid_is_not_read_any_more(trained, capsys):
    folder = trained / "build/runs/cpu/3"
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("3")
    assert main([], trained) == 0
    assert "~ 3  is no entry of a grid any more: moved to build/retired/cpu/3" in (
        capsys.readouterr().out
    )
    assert printed(trained / "build/executed/cpu/08_look.ipynb") == "1 1\n2 2\n"


def test_the_stamp_says_what_made_the_copy(tmp_path):
    make_repository(tmp_path, "01_a: {parameters: {radius: 1e-3}}")
    cell = "import os\nprint(radius, os.environ['OMP_NUM_THREADS'], os.getcwd())"
    write_notebook(tmp_path, "01_a", "radius = 0.05\nseed = 3", cell)
    assert main(["notebooks/01_a.ipynb"], tmp_path) == 0
    copy = tmp_path / "build/executed/cpu/01_a.ipynb"
    assert printed(copy) == f"0.001 1 {tmp_path}\n"
    stamp = json.loads(copy.read_text())["metadata"]["bandpo"]
    assert stamp["parameters"] == {"radius": 0.001, "seed": 3}
    assert stamp["given"] == ["radius"]
    assert stamp["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert stamp["machine"]["cores"] == os.cpu_count()
    assert stamp["seconds"] > 0
    assert Project("cpu", tmp_path).fault(Project("cpu", tmp_path).jobs("01_a")[0]) is None


def test_a_failing_notebook_is_kept_apart_and_the_good_copy_stays(tmp_path, capsys):
    make_repository(tmp_path, "01_a: {}\n02_b: {}\n03_c: {needs: [02_b]}")
    for stem in ("01_a", "02_b", "03_c"):
        write_notebook(tmp_path, stem, "x = 1", "print(x)")
    assert main([], tmp_path) == 0
    good = (tmp_path / "build/executed/cpu/02_b.ipynb").read_text()
    write_notebook(tmp_path, "02_b", "x = 1", "y = 0\nx / y", "print('never')")
    capsys.readouterr()

    assert main([], tmp_path) == 1
    out, err = capsys.readouterr()
    assert "x 02_b  failed after" in out
    assert "03_c" not in out
    assert "02_b: cell 'cell-0': ZeroDivisionError: division by zero" in err
    assert "----> 2" in err
    assert "\x1b[" not in err
    assert "build/failed/02_b.ipynb" in err
    assert (tmp_path / "build/executed/cpu/02_b.ipynb").read_text() == good
    assert "ZeroDivisionError" in (tmp_path / "build/failed/02_b.ipynb").read_text()
    assert leftovers(tmp_path) == []

    write_notebook(tmp_path, "02_b", "x = 1", "x / 2")
    assert main([], tmp_path) == 0
    assert not (tmp_path / "build/failed/02_b.ipynb").exists()


def test_a_kernel_that_dies_is_an_error(tmp_path, capsys):
    make_repository(tmp_path, "01_a: {}")
    write_notebook(tmp_path, "01_a", "", "import os\nos._exit(9)", "print('never')")
    assert main([], tmp_path) == 1
    assert "01_a: cell 'cell-1' did not run" in capsys.readouterr().err
    assert not (tmp_path / "build/executed").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["01_a", "-p", "radus", "0.1"], "unknown parameter 'radus' (did you mean 'radius'?)"),
        (["01_a", "-p", "radius", "big"], "radius = 'big' (str) cannot be read as float"),
        (["01_b"], "there is no notebooks/01_b.ipynb (did you mean '01_a'?)"),
        (["--profile", "gpu"], "there is no profile 'gpu'"),
        (["-p", "radius", "0.1"], "-p needs the notebook"),
    ],
)
def test_refused_before_anything_runs(tmp_path, capsys, arguments, message):
    make_repository(tmp_path, "01_a: {}")
    write_notebook(tmp_path, "01_a", "radius = 0.05")
    assert main(arguments, tmp_path) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "build").exists()


@pytest.mark.parametrize("jobs", ["0", "-1", "two"])
def test_the_number_of_jobs_is_checked(tmp_path, capsys, jobs):
    with pytest.raises(SystemExit) as caught:
        main(["--jobs", jobs], tmp_path)
    assert caught.value.code == 2
    assert jobs in capsys.readouterr().err


def test_a_dry_run_says_why_and_runs_nothing(tmp_path, capsys):
    make_repository(tmp_path, "01_a: {parameters: {radius: 0.1}}")
    write_notebook(tmp_path, "01_a", "radius = 0.05")
    assert main(["--dry-run"], tmp_path) == 0
    assert capsys.readouterr().out == "01_a  missing  {'radius': 0.1}\n"
    assert not (tmp_path / "build").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_ends_its_children_and_keeps_what_was_finished(tmp_path, number):
    make_repository(tmp_path, "01_a: {}\n02_slow: {}\n03_c: {}")
    write_notebook(tmp_path, "01_a", "x = 1", "print(x)")
    slow = "import pathlib, time\npathlib.Path('build/started').touch()\ntime.sleep(600)"
    write_notebook(tmp_path, "02_slow", "x = 1", slow)
    write_notebook(tmp_path, "03_c", "x = 1")
    # A shell's background jobs ignore Ctrl-C, and so does all that they start, such as these tests.
    code = (
        "import pathlib, signal, sys; from bandpo.run import main; "
        "signal.signal(signal.SIGINT, signal.default_int_handler); "
        "sys.exit(main(['--jobs', '1'], pathlib.Path(sys.argv[1])))"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    runner = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (tmp_path / "build/started").exists():
        assert runner.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    children = psutil.Process(runner.pid).children(recursive=True)
    assert len(children) >= 2, "papermill and its kernel"
    runner.send_signal(number)
    _, err = runner.communicate(timeout=30)
    assert runner.returncode == 130
    assert err == "interrupted; the same command goes on from what is finished\n"
    # A zombie has ended: it only waits for the machine's first process to take note.
    _, left = psutil.wait_procs(children, timeout=5)
    assert [child for child in left if child.status() != psutil.STATUS_ZOMBIE] == []
    executed = sorted(path.name for path in (tmp_path / "build/executed/cpu").iterdir())
    assert executed == ["01_a.ipynb"]
    assert leftovers(tmp_path) == []
    project = Project("cpu", tmp_path)
    assert [project.fault(job) for job in project.plan()] == [None, "missing", "missing"]


def test_the_environment_of_the_caller_does_not_leak_into_figures(tmp_path, monkeypatch):
    monkeypatch.setenv("MPLBACKEND", "Agg")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    make_repository(tmp_path, "01_a: {}")
    cell = "import os\nprint(os.environ['MPLBACKEND'], os.environ['OMP_NUM_THREADS'])"
    write_notebook(tmp_path, "01_a", "", cell)
    assert main([], tmp_path) == 0
    text = printed(tmp_path / "build/executed/cpu/01_a.ipynb")
    assert text == "module://matplotlib_inline.backend_inline 1\n"


@pytest.mark.parametrize("forks", [True, False])
def test_a_kernel_is_forked_where_that_is_safe_and_fresh_elsewhere(tmp_path, monkeypatch, forks):
    if forks and not kernels.can_fork():
        forks = False  # a machine with an accelerator: both cases take the fresh kernel
    monkeypatch.setattr(kernels, "can_fork", lambda: forks)
    make_repository(tmp_path, "01_a: {}")
    cell = (
        "import os, sys\nprint('papermill' in sys.modules, os.getcwd())\nsys.stderr.write('seen')"
    )
    write_notebook(tmp_path, "01_a", "", cell)
    assert main([], tmp_path) == 0
    copy = tmp_path / "build/executed/cpu/01_a.ipynb"
    assert printed(copy) == f"{forks} {tmp_path}\nseen"
    kernel = json.loads(copy.read_text())["metadata"]["kernelspec"]
    assert kernel["name"] == "python3"


def test_several_training_runs_find_their_libraries_imported(tmp_path):
    make_repository(tmp_path, TRAIN.replace("[1, 2]", "[1, 2, 3]"))
    write_notebook(
        tmp_path,
        "07_train",
        "run_dir = 'x'\nseed = 0",
        "import sys\nprint('trl' in sys.modules)\nimport torch\n"
        "torch.manual_seed(seed)\nprint(torch.rand(2).tolist())",
        "import matplotlib.pyplot as plt\nplt.plot([1, 2]);",
    )
    write_notebook(tmp_path, "08_look", "", LOOK_CELL.split("for")[0])
    code = "import sys, pathlib, bandpo.run as r; sys.exit(r.main([], pathlib.Path(sys.argv[1])))"
    # a process of its own: what the first call of this one had imported would be there already
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=300)
    assert done.returncode == 0
    for seed in (1, 2, 3):
        loaded, numbers = printed(tmp_path / f"build/runs/cpu/{seed}/notebook.ipynb").splitlines()
        assert loaded == str(kernels.can_fork())
        torch.manual_seed(seed)
        assert json.loads(numbers) == torch.rand(2).tolist()
        cells = json.loads((tmp_path / f"build/runs/cpu/{seed}/notebook.ipynb").read_text())[
            "cells"
        ]
        assert "image/png" in cells[-1]["outputs"][-1]["data"], "the figure is there"
