"""How the documentation is built: Sphinx, MyST and furo; `make docs`."""

from __future__ import annotations

import re
import sys
import urllib.error
import urllib.request
from pathlib import Path

from sphinx.application import Sphinx

import stretto
import stretto.config

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "_ext"))

# autodoc shows what a module holds: what is imported on demand is put there.
vars(stretto.config)["build_trainer"] = stretto.config.build_trainer

project = "stretto"
author = "the stretto maintainers"
copyright = "the stretto maintainers"
release = stretto.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "names",
]
exclude_patterns = ["_build", "_ext", "_templates"]
templates_path = ["_templates"]
html_theme = "furo"
html_title = f"stretto {release}"
# `like this` is code in our docstrings, as it is in Markdown.
default_role = "code"

myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3

autosummary_generate = True
autosummary_ignore_module_all = False
autodoc_member_order = "bysource"
# Each page has a copy of the table of contents: with 1,100 names, that takes half of the build.
toc_object_entries = False
# Links into packages of others are made where their index is found; ours must all resolve.
# `stretto.module.file.Name` is a base or an alias without a page: public names are found before.
# `Annotated` is looked up in the module whose alias has it.
nitpick_ignore_regex = [
    *((r"py:.*", name) for name in (r"(?!stretto\.).*", r"stretto\.\w+\.\w+\..*")),
    (r"py:.*", r"stretto\.\w+\.Annotated"),
]
# `stretto.training` exports what `stretto.settings` defines, and both are described.
suppress_warnings = ["ref.python"]
# Adapters are described without the frameworks that they adapt.
autodoc_mock_imports = [
    *("accelerate", "composer", "lightning", "megatron", "nemo_automodel", "ray", "torchtitan"),
    *("transformers", "tyro"),
]
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_include_init_with_doc = False

TORCH = "https://docs.pytorch.org/docs/stable/"


def is_reachable(url: str) -> bool:
    """Whether a page can be read now: without a network, the build only leaves out its links."""
    try:
        with urllib.request.urlopen(url, timeout=3):
            return True
    except (urllib.error.URLError, OSError):
        return False


intersphinx_mapping = {"torch": (TORCH, None)} if is_reachable(f"{TORCH}objects.inv") else {}

FENCE = re.compile(r"(?P<indent>\s*)```(?P<language>\w*)\s*")
CODE = re.compile(r"(`[^`]*`)")


def escape_bars(line: str) -> str:
    """Return a line of text in which `|x|` outside of code is an absolute value, as it is meant."""
    parts = CODE.split(line)
    return "".join(part if part.startswith("`") else part.replace("|", "\\|") for part in parts)


def translate(lines: list[str]) -> list[str]:
    """Return a docstring's lines as Sphinx wants them: Markdown's fences become its code blocks."""
    translated: list[str] = []
    is_fenced = is_doctest = False
    for line in lines:
        is_doctest = line.lstrip().startswith(">>>") or (is_doctest and bool(line.strip()))
        fence = FENCE.fullmatch(line)
        if fence is None and is_fenced:
            translated.append(f"    {line}" if line else line)
        elif fence is None:
            translated.append(line if is_doctest else escape_bars(line))
        elif is_fenced:
            translated.append("")
            is_fenced = False
        else:
            language = fence["language"] or "text"
            translated += ["", f"{fence['indent']}.. code-block:: {language}", ""]
            is_fenced = True
    return translated


def process_docstring(*event: object) -> None:
    """Read docstrings as Markdown: a hook of autodoc, whose last argument is edited."""
    lines = event[-1]
    assert isinstance(lines, list)
    lines[:] = translate(lines)


def setup(app: Sphinx) -> None:
    """Connect the hooks; Sphinx calls this."""
    app.connect("autodoc-process-docstring", process_docstring, priority=400)
