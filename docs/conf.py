"""How the documentation is built: Sphinx, MyST and furo; `make docs`."""

from __future__ import annotations

import re

from sphinx.application import Sphinx

import stretto

project = "stretto"
author = "the stretto maintainers"
copyright = "the stretto maintainers"
release = stretto.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"stretto {release}"
# `like this` is code in our docstrings, as it is in Markdown.
default_role = "code"

myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_include_init_with_doc = False

FENCE = re.compile(r"(?P<indent>\s*)```(?P<language>\w*)\s*")


def translate_fences(lines: list[str]) -> list[str]:
    """Return a docstring's lines with Markdown's fenced blocks written as Sphinx writes them."""
    translated: list[str] = []
    is_inside = False
    for line in lines:
        fence = FENCE.fullmatch(line)
        if fence is None:
            translated.append(f"    {line}" if is_inside and line else line)
        elif is_inside:
            translated.append("")
            is_inside = False
        else:
            language = fence["language"] or "text"
            translated += ["", f"{fence['indent']}.. code-block:: {language}", ""]
            is_inside = True
    return translated


def process_docstring(*event: object) -> None:
    """Let docstrings use Markdown's fences: a hook of autodoc, whose last argument is edited."""
    lines = event[-1]
    assert isinstance(lines, list)
    lines[:] = translate_fences(lines)


def setup(app: Sphinx) -> None:
    """Connect the hook; Sphinx calls this."""
    app.connect("autodoc-process-docstring", process_docstring, priority=400)
