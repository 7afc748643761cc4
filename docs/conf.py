"""Settings of the site: the pages of this folder, the papers of the repository, and a page for every public module.

The links of the contents pages are the navigation, and `__all__` of the modules is the reference.
"""

from __future__ import annotations

import importlib
import inspect
import os.path
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.pycode import ModuleAnalyzer

import dovetail

DOCS = Path(__file__).parent
ROOT = DOCS.parent

# ------------------------------------------------------------------ settings

project = "Dovetail"
author = "The Dovetail authors"
copyright = author
version = release = dovetail.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
source_suffix = {".md": "markdown", ".markdown": "markdown", ".rst": "restructuredtext"}
root_doc = "index"

html_theme = "furo"
html_title = f"Dovetail {release}"
html_copy_source = False
html_static_path = ["static"]
html_css_files = ["site.css"]
smartquotes = False

# The anchors of GitHub, so that a link works in both places.
myst_heading_anchors = 6

napoleon_numpy_docstring = False
napoleon_use_ivar = True
autosummary_generate = False
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
maximum_signature_line_length = 100
toc_object_entries_show_parents = "hide"

copybutton_exclude = ".linenos, .gp, .go"

# ------------------------------------------------------------------ navigation

# Pages that list other pages. The links of each are its part of the navigation, in the same order.
CONTENTS = ("index", "algorithms", "migration/index", "api/index")
# Files outside of this folder that are pages of the site as well.
PAPERS = ("README.md", "CONTRIBUTING.md", "AGENTS.md", "SECURITY.md", "CHANGELOG.md", "benchmarks/RESULTS.md")

LINK = re.compile(r"\]\((?P<path>[^)\s:#]+)(?P<anchor>#[^)\s]*)?\)")


def read_source(app: Sphinx, docname: str, source: list[str]) -> None:
    """Replace links out of the folder by links to pages of the site, and add hidden toctrees to a contents page."""
    folder = (DOCS / docname).parent
    text = rebased(source[0], folder, folder)
    if docname in CONTENTS:
        text += "".join(f"\n\n{toctree}" for toctree in toctrees(text))
    source[0] = text


def toctrees(text: str) -> Iterator[str]:
    """Yield one toctree per section, of the table cells that contain only a link; its caption is the heading."""
    for section in re.split(r"^(?=##)", text, flags=re.MULTILINE):
        rows = re.findall(r"\| \[([^\]]+)\]\(([^)\s:#]+)\.(?:md|markdown|rst)\) \|", section)
        if rows:
            heading = re.match(r"##+ (.+)", section)
            caption = f":caption: {heading[1]}\n" if heading else ""
            entries = [f"{title.replace('`', '')} <{path}>" for title, path in rows]
            yield "\n".join(["```{toctree}", f":hidden:\n{caption}", *entries, "```"])


def rebased(text: str, old: Path, new: Path) -> str:
    """Return the text with its relative links for another folder; links to papers and modules lead to their pages."""

    def moved(match: re.Match[str]) -> str:
        goal = (old / match["path"]).resolve()
        if not goal.exists():
            return match[0]
        if goal in map(ROOT.joinpath, PAPERS):
            goal = DOCS / "project" / f"{goal.stem.lower()}.markdown"
        elif goal.suffix == ".py" and (ROOT / "src") in goal.parents and module_name(goal) in public_modules():
            goal = DOCS / "api" / f"{module_name(goal)}.rst"
        return f"]({os.path.relpath(goal, new)}{match['anchor'] or ''})"

    return LINK.sub(moved, text)


def narrow_navigation(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: object) -> None:
    """Give the theme only the titles of pages: it copies the whole contents for every page, which is slow."""
    whole = context["toctree"]

    def titles(**options: Any) -> str:
        contents = app.env.tocs
        app.env.tocs = narrow_contents(app.env)
        try:
            return str(whole(**options))
        finally:
            app.env.tocs = contents

    context["toctree"] = titles


@cache
def narrow_contents(env: BuildEnvironment) -> dict[str, nodes.bullet_list]:
    """Return the title of every page and the toctrees below it, without headings and names."""
    narrow = {}
    for page, contents in env.tocs.items():
        narrow[page] = title = contents.deepcopy()
        below = list(title.findall(addnodes.toctree))
        del title[0][1:]
        if below:
            title[0].append(nodes.bullet_list("", *below))
    return narrow


# ------------------------------------------------------------------ generated pages


def write_pages(app: Sphinx) -> None:
    """Write the generated pages: the papers, and the reference of every public module."""
    for paper in map(ROOT.joinpath, PAPERS):
        text = rebased(paper.read_text(encoding="utf-8"), paper.parent, DOCS / "project")
        write(DOCS / "project" / f"{paper.stem.lower()}.markdown", text)
    modules = {name: importlib.import_module(name) for name in public_modules()}
    for name, module in modules.items():
        write(DOCS / "api" / f"{name}.rst", "\n".join(reference(module, modules)) + "\n")
    for page in DOCS.joinpath("api").glob("*.rst"):
        if page.stem not in modules:
            # A module that was moved or removed since the last build; Sphinx would fail to import it.
            page.unlink()


def write(path: Path, text: str) -> None:
    """Write a file unless its content is the same: Sphinx reads every new file again."""
    path.parent.mkdir(exist_ok=True)
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def public_modules() -> list[str]:
    """Return the names of the modules that the page of the reference links to."""
    text = (DOCS / "api" / "index.md").read_text(encoding="utf-8")
    return [module_name(Path(path)) for path in re.findall(r"\]\(([^)\s]+\.py)\)", text)]


def module_name(path: Path) -> str:
    """Return the name of a module from the path of its file below `src`."""
    parts = path.with_suffix("").parts
    parts = parts[len(parts) - parts[::-1].index("src") :]
    return ".".join(parts).removesuffix(".__init__")


def reference(module: ModuleType, modules: dict[str, ModuleType]) -> Iterator[str]:
    """Yield the page of a module: its docstring, a table of its names, and the full text of the names it defines."""
    name = module.__name__
    names = [each for each in module.__all__ if not isinstance(getattr(module, each), ModuleType)]
    yield from (name, "=" * len(name), "", f".. automodule:: {name}", "")
    if names:
        yield from (".. autosummary::", "   :nosignatures:", "", *(f"   {each}" for each in names), "")
    for each in names:
        thing = getattr(module, each)
        if home_of(thing, each, modules) != name:
            continue
        kind = "class" if isinstance(thing, type) else "function" if inspect.isroutine(thing) else "data"
        yield f".. auto{kind}:: {each}"
        if isinstance(thing, type):
            yield "   :show-inheritance:"
            if described := members(thing, modules):
                yield f"   :members: {', '.join(described)}"
        elif kind == "data" and has_address(thing):
            yield "   :no-value:"
        yield ""


def has_address(thing: object) -> bool:
    """Return whether an object prints its address in memory, which is useless for a reader."""
    return repr(thing).startswith("<")


def note_second_names(app: Sphinx, env: BuildEnvironment) -> None:
    """Link every name that several modules export to the one place that describes it."""
    objects = env.domains.python_domain.objects
    modules = {name: importlib.import_module(name) for name in public_modules()}
    for owner, module in modules.items():
        for name in module.__all__:
            thing = getattr(module, name)
            place = objects.get(f"{home_of(thing, name, modules)}.{name}")
            if place and f"{owner}.{name}" not in objects:
                objects[f"{owner}.{name}"] = place._replace(aliased=True)


def home_of(thing: object, name: str, modules: dict[str, ModuleType]) -> str:
    """Return the public module that exports an object and is nearest to the module that defines it."""
    written = getattr(thing, "__module__", None) or ""
    owners = [each for each, module in modules.items() if name in module.__all__ and getattr(module, name) is thing]
    return max(owners, key=lambda owner: (f"{written}.".startswith(f"{owner}."), len(owner)))


def members(kind: type, modules: dict[str, ModuleType]) -> list[str]:
    """Return the documented members of a class, including members of bases that no page describes."""
    public = {id(getattr(module, name)) for module in modules.values() for name in module.__all__}
    elsewhere = {ancestor for base in kind.__mro__[1:] if id(base) in public for ancestor in base.__mro__}
    found: dict[str, None] = {}
    for base in kind.__mro__:
        if base in elsewhere or not base.__module__.startswith("dovetail"):
            continue
        attributes = ModuleAnalyzer.for_module(base.__module__).find_attr_docs()
        for name, member in vars(base).items():
            described = is_described(member) or (base.__qualname__, name) in attributes
            if not name.startswith("_") and described and not is_forwarded(inspect.getattr_static(kind, name)):
                found[name] = None
    return list(found)


def is_described(member: object) -> bool:
    """Return whether a method or a property has a docstring; the docstring of any other value is its class's."""
    return bool(member.__doc__) and (inspect.isroutine(member) or inspect.isdatadescriptor(member))


def is_forwarded(member: object) -> bool:
    """Return whether a property only forwards an attribute of another object."""
    return isinstance(member, property) and not inspect.isfunction(member.fget)


def read_docstring(app: Sphinx, what: str, name: str, thing: object, options: object, lines: list[str]) -> None:
    """Convert literals and code to reStructuredText: two backticks for one, and two colons before code."""
    text = "\n".join(lines)
    # A value without a description has the docstring of its type.
    if what == "data" and text.strip() == (inspect.getdoc(thing) or "").strip():
        text = f"An instance of `{type(thing).__qualname__}`." if has_address(thing) else ""
    text = re.sub(r"(?<!`)`([^`]+)`(?!`)", r"``\1``", text)
    text = re.sub(r"^( *)(.*\S):\n\n(?=\1 {4}[^\s-])", r"\1\2::\n\n", text, flags=re.MULTILINE)
    lines[:] = text.split("\n")


def setup(app: Sphinx) -> None:
    """Connect the functions to the events of Sphinx."""
    app.connect("builder-inited", write_pages)
    app.connect("source-read", read_source)
    # Before napoleon: it takes a colon inside of a literal as a separator.
    app.connect("autodoc-process-docstring", read_docstring, priority=400)
    # Before the theme requests the navigation.
    app.connect("html-page-context", narrow_navigation, priority=400)
    app.connect("env-updated", note_second_names)
