"""``tools/setup.py``: one-line errors, nothing done twice, a fresh start after an interruption."""

import ast
import os
import subprocess
import sys
from collections import namedtuple
from importlib import util

import pytest

from bandpo.provenance import ROOT


@pytest.fixture
def setup(tmp_path, monkeypatch):
    """The script as a module that works on an empty repository and runs no pip."""
    spec = util.spec_from_file_location("setup_tool", ROOT / "tools" / "setup.py")
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "setup.py").write_text("")
    (tmp_path / "requirements.lock").write_text("numpy==2.0\ntorch==2.13.0\n")
    (tmp_path / "requirements-nodeps.lock").write_text("")
    (tmp_path / "pyproject.toml").write_text("")
    venv = tmp_path / ".venv"
    names = {"VENV": "", "STAMP": "setup-digest", "UNFINISHED": "setup-unfinished"}
    for name, file in {**names, "LOG": "setup.log"}.items():
        monkeypatch.setattr(module, name, venv / file)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["setup.py"])
    return module


@pytest.fixture
def calls(setup, monkeypatch):
    """What would have been installed; making the environment is real, pip is not."""
    made = []
    monkeypatch.setattr(setup, "_pip", lambda *arguments: made.append(arguments))
    return made


def test_it_installs_torch_first_then_the_locks_and_then_nothing(setup, calls):
    assert setup.main() == 0
    assert calls[0][0] == "torch==2.13.0"
    assert calls[1:] == [
        ("-r", "requirements.lock"),
        ("--no-deps", "-r", "requirements-nodeps.lock"),
        ("--no-deps", "--editable", "."),
    ]
    assert not setup.UNFINISHED.exists()
    del calls[:]
    assert setup.main() == 0
    assert calls == []

    # Another lock: the environment stays, the packages are brought up to date.
    (setup.VENV / "kept").touch()
    (setup.ROOT / "requirements.lock").write_text("torch==2.14.0\n")
    assert setup.main() == 0
    assert calls[0][0] == "torch==2.14.0"
    assert (setup.VENV / "kept").exists()


def test_an_interrupted_set_up_starts_anew(setup, calls, monkeypatch, capsys):
    def interrupt(*arguments):
        (setup.VENV / "half").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(setup, "_pip", interrupt)
    assert setup.main() == 130
    assert capsys.readouterr().err == "interrupted; run the same command again\n"
    assert setup.UNFINISHED.exists()
    monkeypatch.setattr(setup, "_pip", lambda *arguments: calls.append(arguments))
    assert setup.main() == 0
    assert not (setup.VENV / "half").exists()
    assert len(calls) == 4


def failing(path, text):
    """Make a command that prints a text and fails."""
    path.write_text(f"#!/bin/sh\necho '{text}'\nexit 1\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("Failed to establish a new connection: NewConnectionError", "could not reach a package"),
        ("OSError: [Errno 28] No space left on device", "the disk is full"),
        ("ERROR: something else", "failed: ERROR: something else (all of it:"),
    ],
)
def test_what_pip_says_becomes_one_line(setup, monkeypatch, capsys, said, message):
    bin_ = setup.VENV / "bin"
    bin_.mkdir(parents=True)
    python = failing(bin_ / "python", said)
    monkeypatch.setattr(setup, "_python", lambda: str(python))
    monkeypatch.setattr(setup, "_runs", lambda *command: True)
    assert setup.main() == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not setup.STAMP.exists()


def test_a_python_that_is_too_old_is_named(setup, monkeypatch, capsys):
    monkeypatch.setattr(setup, "_output", lambda *command: "3.9")
    assert setup.main() == 1
    assert capsys.readouterr().err == (
        "error: Python 3.11, 3.12 or 3.13 is needed, found 3.9; install one and run this again\n"
    )


def test_a_python_without_venv_is_named(setup, monkeypatch, capsys):
    def output(*command):
        if "ensurepip" in command[-1]:
            raise subprocess.CalledProcessError(1, command)
        return "3.12"

    monkeypatch.setattr(setup, "_output", output)
    assert setup.main() == 1
    assert "has no venv module; install it" in capsys.readouterr().err


def test_too_little_disk_is_said_before_anything_is_made(setup, monkeypatch, capsys):
    usage = namedtuple("usage", "free")(2**30)
    monkeypatch.setattr(setup.shutil, "disk_usage", lambda path: usage)
    assert setup.main() == 1
    needed = 12 if sys.platform == "linux" else 4
    assert f"1.0 GiB of disk are free; .venv needs {needed} GiB" in capsys.readouterr().err
    assert not setup.VENV.exists()


def test_it_finds_chromium_on_the_path(setup, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert setup.find_browser() is None
    failing(tmp_path / "chromium-browser", "")
    assert setup.find_browser() == str(tmp_path / "chromium-browser")


def test_a_missing_browser_is_said_with_what_to_do(setup, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["setup.py", "--browser"])
    monkeypatch.setattr(setup, "find_browser", lambda: None)
    monkeypatch.setattr(setup, "make_environment", lambda: None)
    monkeypatch.setattr(setup, "_runs", lambda *command: False)
    assert setup.main() == 1
    assert "no Chromium was found or could be installed" in capsys.readouterr().err


def test_any_python_3_can_read_the_script():
    """An old ``python3`` must get as far as the message that it is too old."""
    ast.parse((ROOT / "tools" / "setup.py").read_text(), feature_version=(3, 7))


def test_the_lock_names_a_jupyter_book_that_reads_config():
    lock = (ROOT / "requirements.lock").read_text()
    assert "\njupyter-book==1." in lock
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
