"""What makes the site whole by itself: local MathJax, needed scripts only, links to this commit."""

from __future__ import annotations

import os
import shutil
from importlib.metadata import files
from importlib.metadata import version as installed
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.config import Config
from sphinx.util.docutils import SphinxDirective

import bandpo
from bandpo.provenance import commit

_MATHJAX = "tex-svg-full.js"


class PinnedCode(SphinxDirective):
    """A block of code in which REPOSITORY and COMMIT stand for those of this build."""

    required_arguments = 1
    has_content = True

    def run(self) -> list[nodes.Node]:
        text = "\n".join(self.content)
        text = text.replace("REPOSITORY", self.config.companion_repository)
        text = text.replace("COMMIT", self.config.companion_revision)
        return [nodes.literal_block(text, text, language=self.arguments[0])]


def repository(configured: str) -> str:
    """Return the address of the repository: on GitHub Actions its own, so that a fork's book is
    the fork's; elsewhere the configured one."""
    name = os.environ.get("GITHUB_REPOSITORY")
    server = os.environ.get("GITHUB_SERVER_URL", "https://github.com")
    return f"{server}/{name}" if name else configured.rstrip("/")


def pin_links(app: Sphinx, config: Config) -> None:
    """Point links to sources at the commit of this build, and name it in the footer."""
    options = config.html_theme_options
    url = options["repository_url"] = repository(options["repository_url"])
    head = commit(Path(app.srcdir))
    revision = head["commit"] or "main"
    options["repository_branch"] = revision
    config.companion_repository = url
    config.companion_revision = revision
    config.companion_source_url = f"{url}/blob/{revision}"
    state = " with uncommitted changes" if head["dirty"] else ""
    options["extra_footer"] = (
        f"<p>bandpo {bandpo.__version__}, commit "
        f'<a href="{url}/tree/{revision}">{revision[:12]}</a>{state}</p>'
    )


def needed_assets(
    app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: nodes.document | None
) -> None:
    """Take out what a page asks for twice, and sphinx-thebe, which Jupyter Book always adds: no
    page runs code in the browser."""
    for kind in ("script_files", "css_files"):
        once = {_identity(one): one for one in context.get(kind, []) if not _is_thebe(one)}
        context[kind] = list(once.values())


def _identity(asset: Any) -> str:
    body = getattr(asset, "attributes", {}).get("body") or ""
    return f"{getattr(asset, 'filename', asset) or ''} {body}"


def _is_thebe(asset: Any) -> bool:
    return "thebe" in _identity(asset).lower()


def mend_roles(
    app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: nodes.document | None
) -> None:
    """Take a role off that docutils gives to bibliographies: their entries are no list items."""
    if "body" in context:
        context["body"] = context["body"].replace(
            '<div role="list" class="citation-list">', '<div class="citation-list">'
        )


def copy_mathjax(app: Sphinx, error: Exception | None) -> None:
    """Put MathJax's one file beside the pages (``build-finished``)."""
    if error is not None or app.builder.format != "html":
        return
    found = next(
        one for one in files("sphinx-mathjax-offline") or [] if one.name == _MATHJAX
    ).locate()
    target = Path(app.outdir) / "_static" / "mathjax" / _MATHJAX
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(str(found), target)


def setup(app: Sphinx) -> dict[str, Any]:
    if not installed("jupyter-book").startswith("1."):
        raise RuntimeError(
            f"jupyter-book {installed('jupyter-book')} does not read _config.yml: "
            "install the version that requirements.lock names"
        )
    for name in ("repository", "revision", "source_url"):
        app.add_config_value(f"companion_{name}", "", "env")
    app.add_directive("pinned-code", PinnedCode)
    app.config.templates_path.append(str(Path(__file__).parent / "templates"))
    app.config.mathjax_path = f"mathjax/{_MATHJAX}"
    app.connect("config-inited", pin_links)
    app.connect("html-page-context", needed_assets, priority=900)
    app.connect("html-page-context", mend_roles)
    app.connect("build-finished", copy_mathjax)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
