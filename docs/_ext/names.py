"""Links: every public name in the text, and every type in a signature, leads to its page."""

from __future__ import annotations

import importlib
import re
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx

import stretto

MODULES = (*stretto._MODULES, "config", "training.algorithms")
CALL = re.compile(r"(?P<name>[A-Za-z_][\w.]*)(?P<call>\(.*\))?", re.DOTALL)


def public_names() -> dict[str, str]:
    """Return where each public name has its page."""
    found: dict[str, str] = {}
    for short in MODULES:
        module = importlib.import_module(f"stretto.{short}")
        names = getattr(module, "__all__", None) or [
            name for name in vars(module) if name.endswith("Error")
        ]
        for name in names:
            found.setdefault(name, f"stretto.{short}.{name}")
    found.update({name: f"{module}.{name}" for name, module in stretto._HOME.items()})
    return found


NAMES = public_names()


def target_of(text: str) -> str | None:
    """Return the page of a name that a text of code is or calls; None if it is something else."""
    match = CALL.fullmatch(text)
    if match is None:
        return None
    name = match["name"].removeprefix("stretto.")
    if name in NAMES and (name[0].isupper() or match["call"] or match["name"] != name):
        return NAMES[name]
    module, _, last = name.rpartition(".")
    is_ours = module in MODULES or f"stretto.{module}" in map(home, NAMES.values())
    return NAMES[last] if last in NAMES and is_ours else None


def home(name: str) -> str:
    """Return the module of a dotted name."""
    return name.rpartition(".")[0]


def is_theirs(node: nodes.Node, page: str) -> bool:
    """Whether code is another package's: the first column of a table of equivalents."""
    entry = node
    while entry is not None and not isinstance(entry, nodes.entry):
        entry = entry.parent
    return page.startswith("coming-from/") and entry is not None and not entry.parent.index(entry)


def link_names(app: Sphinx, tree: nodes.document) -> None:
    """Make links of names in the text of pages that are written by hand."""
    page = app.env.docname
    if page.startswith(("reference/api", "decisions/", "changelog")):
        return
    for literal in list(tree.findall(nodes.literal)):
        target = target_of(literal.astext())
        inside = (nodes.reference, addnodes.pending_xref, nodes.title)
        if target is None or isinstance(literal.parent, inside) or is_theirs(literal, page):
            continue
        link = addnodes.pending_xref(
            "", refdomain="py", reftype="obj", reftarget=target, refexplicit=True, refwarn=True
        )
        link["refdoc"] = page
        literal.replace_self(link)
        link += literal


def find_public(app: Sphinx, env: Any, node: Any, content: nodes.Node) -> Any:
    """Resolve a name by its last part: `stretto.timing.time.Time` has its page as `timing.Time`."""
    if node.get("refdomain") != "py":
        return None
    last = node["reftarget"].rpartition(".")[2]
    public = NAMES.get(last)
    if public is None or public == node["reftarget"]:
        return None
    domain = env.get_domain("py")
    return domain.resolve_xref(env, node["refdoc"], app.builder, "obj", public, node, content)


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect the hooks; Sphinx calls this."""
    app.connect("doctree-read", link_names)
    app.connect("missing-reference", find_public)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
