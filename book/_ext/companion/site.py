"""What makes the site whole by itself: local MathJax, no script twice, links to this commit."""

from __future__ import annotations

import shutil
from importlib.metadata import files
from importlib.metadata import version as installed
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.config import Config

import bandpo
from bandpo.provenance import commit

_MATHJAX = "tex-svg-full.js"


def pin_links(app: Sphinx, config: Config) -> None:
    """Point links to sources at the commit of this build, and name it in the footer."""
    options = config.html_theme_options
    url = options["repository_url"].rstrip("/")
    head = commit(Path(app.srcdir))
    revision = head["commit"] or "main"
    options["repository_branch"] = revision
    config.companion_source_url = f"{url}/blob/{revision}"
    state = " with uncommitted changes" if head["dirty"] else ""
    options["extra_footer"] = (
        f"<p>bandpo {bandpo.__version__}, commit "
        f'<a href="{url}/tree/{revision}">{revision[:12]}</a>{state}</p>'
    )


def drop_repeated_scripts(
    app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: nodes.document | None
) -> None:
    """Keep the first of equal scripts: sphinx-thebe is loaded twice and would throw."""
    kept: dict[tuple[str, str], Any] = {}
    for script in context.get("script_files", []):
        attributes = getattr(script, "attributes", {})
        name = str(getattr(script, "filename", script) or "")
        kept.setdefault((name, attributes.get("body", "")), script)
    context["script_files"] = list(kept.values())


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
    app.add_config_value("companion_source_url", "", "env")
    app.config.mathjax_path = f"mathjax/{_MATHJAX}"
    app.connect("config-inited", pin_links)
    app.connect("html-page-context", drop_repeated_scripts, priority=900)
    app.connect("html-page-context", mend_roles)
    app.connect("build-finished", copy_mathjax)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
