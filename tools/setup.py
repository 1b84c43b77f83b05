"""Make .venv from the lock files, once: ``python3 tools/setup.py [--browser]``.

Runs on whatever ``python3`` is at hand, with the standard library alone. It looks for a Python that
the package supports, installs exactly what the lock files name, and leaves a stamp, so that the
next call has nothing to do. A set-up that was interrupted is started anew. With ``--browser`` it
also sees to a Chromium for the tests of the built book.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"
STAMP = VENV / "setup-digest"
UNFINISHED = VENV / "setup-unfinished"
LOG = VENV / "setup.log"
SUPPORTED = ("3.11", "3.12", "3.13")
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# PyTorch's default build for Linux brings the CUDA libraries.
NEEDED_GIB = 12 if platform.system() == "Linux" else 4
NO_NETWORK = re.compile(
    r"NewConnectionError|NameResolutionError|ConnectTimeout|ReadTimeout|ProxyError|"
    r"Network is unreachable|Temporary failure in name resolution|getaddrinfo failed"
)


class SetupError(Exception):
    """What is wrong and what to do about it, in one line."""


def digest() -> str:
    """Return the digest of everything that decides what the environment holds."""
    names = ("requirements.lock", "requirements-nodeps.lock", "pyproject.toml", "tools/setup.py")
    total = hashlib.sha256()
    for name in names:
        total.update(name.encode() + b"\0" + (ROOT / name).read_bytes())
    return total.hexdigest()


def find_python() -> str:
    """Return a Python that the package supports and that can make environments."""
    seen = []
    for command in (sys.executable, *(f"python{version}" for version in SUPPORTED)):
        path = shutil.which(command)
        if path is None:
            continue
        try:
            version = _output(path, "-c", "import sys; print('%d.%d' % sys.version_info[:2])")
        except (OSError, subprocess.CalledProcessError):
            continue
        if version not in SUPPORTED:
            seen.append(version)
            continue
        try:
            _output(path, "-c", "import venv, ensurepip")
        except subprocess.CalledProcessError:
            raise SetupError(
                f"{path} has no venv module; install it (Debian, Ubuntu: "
                f"apt-get install python{version}-venv) and run this again"
            ) from None
        return path
    raise SetupError(
        f"Python {', '.join(SUPPORTED[:-1])} or {SUPPORTED[-1]} is needed, found "
        f"{', '.join(sorted(set(seen))) or 'none'}; install one and run this again"
    )


def make_environment() -> None:
    """Create or complete .venv, unless its stamp says that nothing has changed."""
    wanted = digest()
    if STAMP.is_file() and STAMP.read_text() == wanted and not UNFINISHED.exists():
        return
    healthy = _runs(_python(), "-m", "pip", "--version") and not UNFINISHED.exists()
    if not healthy:
        python = find_python()
        free = shutil.disk_usage(str(ROOT)).free / 2**30
        if free < NEEDED_GIB:
            raise SetupError(f"{free:.1f} GiB of disk are free; .venv needs {NEEDED_GIB} GiB")
        print(f"set-up: new environment in .venv with {python}", flush=True)
        _call(python, "-m", "venv", "--clear", str(VENV))
    UNFINISHED.touch()
    LOG.write_text("")
    torch = next(
        line
        for line in (ROOT / "requirements.lock").read_text().splitlines()
        if line.startswith("torch==")
    )
    # Alone and first: its build, with or without CUDA, then holds for everything that needs it.
    _pip(torch)
    _pip("-r", "requirements.lock")
    _pip("--no-deps", "-r", "requirements-nodeps.lock")
    _pip("--no-deps", "--editable", ".")
    STAMP.write_text(wanted)
    UNFINISHED.unlink()


def find_browser() -> str | None:
    """Return the path of an installed Chromium or Chrome, or None."""
    return next((path for path in map(shutil.which, BROWSERS) if path), None)


def see_to_browser() -> None:
    """Install Chromium where there is none."""
    if find_browser() or _playwright_has_chromium():
        return
    print("set-up: Chromium for the tests of the built book", flush=True)
    if hasattr(os, "geteuid") and os.geteuid() == 0 and shutil.which("apt-get"):
        _runs("apt-get", "update")
        if _runs("apt-get", "install", "-y", "--no-install-recommends", "chromium"):
            return
    if _runs(_python(), "-m", "playwright", "install", "chromium"):
        return
    raise SetupError(
        "no Chromium was found or could be installed; install chromium or google-chrome "
        "with the system's package manager and run this again"
    )


def _playwright_has_chromium() -> bool:
    code = (
        "from playwright.sync_api import sync_playwright as s\n"
        "with s() as p: import os, sys; sys.exit(not os.path.exists(p.chromium.executable_path))"
    )
    return _runs(_python(), "-c", code)


def _python() -> str:
    return str(VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python"))


def _pip(*arguments: str) -> None:
    print(f"set-up: pip install {' '.join(arguments)}", flush=True)
    _call(_python(), "-m", "pip", "install", "--disable-pip-version-check", *arguments)


def _call(*command: str) -> None:
    """Run a command with its output in the log; say in one line why it failed."""
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    text = done.stdout.decode(errors="replace")
    if VENV.is_dir():
        with LOG.open("a") as log:
            log.write(text)
    if done.returncode == 0:
        return
    if "No space left on device" in text:
        raise SetupError(f"the disk is full; .venv needs {NEEDED_GIB} GiB")
    if NO_NETWORK.search(text):
        raise SetupError("pip could not reach a package index; check network and proxy, run again")
    last = (text.strip().splitlines() or ["no output"])[-1]
    raise SetupError(f"`{' '.join(command[1:5])} ...` failed: {last} (all of it: {LOG})")


def _runs(*command: str) -> bool:
    """Return whether a command can be run and succeeds."""
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True).returncode == 0
    except OSError:
        return False


def _output(*command: str) -> str:
    return subprocess.check_output(command, stderr=subprocess.DEVNULL).decode().strip()


def main() -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="tools/setup.py", description="Make .venv, once.")
    parser.add_argument("--browser", action="store_true", help="see to a Chromium, too")
    options = parser.parse_args()
    try:
        make_environment()
        if options.browser:
            see_to_browser()
    except SetupError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; run the same command again", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
