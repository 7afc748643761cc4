"""The site: the pages of this folder as they stand, the papers of the repository, and a page for every public module.

Nothing is listed twice. What the contents pages link is the navigation, and `__all__` is the reference.
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

# Pages that list others. Each says in its links what is below it, and in which order.
CONTENTS = ("index", "algorithms", "migration/index", "api/index")
# What lies beside this folder and is read on the site as well.
PAPERS = ("README.md", "CONTRIBUTING.md", "AGENTS.md", "SECURITY.md", "CHANGELOG.md", "benchmarks/RESULTS.md")

LINK = re.compile(r"\]\((?P<path>[^)\s:#]+)(?P<anchor>#[^)\s]*)?\)")


def read_source(app: Sphinx, docname: str, source: list[str]) -> None:
    """Point links out of the folder at the site's own pages, and give a contents page its hidden toctrees."""
    folder = (DOCS / docname).parent
    text = rebased(source[0], folder, folder)
    if docname in CONTENTS:
        text += "".join(f"\n\n{toctree}" for toctree in toctrees(text))
    source[0] = text


def toctrees(text: str) -> Iterator[str]:
    """A toctree of every cell that is nothing but a link, for each section, with its heading as the caption."""
    for section in re.split(r"^(?=##)", text, flags=re.MULTILINE):
        rows = re.findall(r"\| \[([^\]]+)\]\(([^)\s:#]+)\.(?:md|markdown|rst)\) \|", section)
        if rows:
            heading = re.match(r"##+ (.+)", section)
            caption = f":caption: {heading[1]}\n" if heading else ""
            entries = [f"{title.replace('`', '')} <{path}>" for title, path in rows]
            yield "\n".join(["```{toctree}", f":hidden:\n{caption}", *entries, "```"])


def rebased(text: str, old: Path, new: Path) -> str:
    """The text with its relative links, as if it lay in another folder, and those to papers and modules led here."""

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
    """Let the theme make its navigation of titles: for every page it copies all that it finds, and drops the rest."""
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
    """The contents of every page without its headings and names: its title, and the toctrees below it."""
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
    """Write what is not a page of this folder: the papers, and the reference of every public module."""
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
    """Write a file, unless it says the same already: what is new is read again."""
    path.parent.mkdir(exist_ok=True)
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def public_modules() -> list[str]:
    """The modules that the page of the reference links."""
    text = (DOCS / "api" / "index.md").read_text(encoding="utf-8")
    return [module_name(Path(path)) for path in re.findall(r"\]\(([^)\s]+\.py)\)", text)]


def module_name(path: Path) -> str:
    """The name of a module, of its file below `src`."""
    parts = path.with_suffix("").parts
    parts = parts[len(parts) - parts[::-1].index("src") :]
    return ".".join(parts).removesuffix(".__init__")


def reference(module: ModuleType, modules: dict[str, ModuleType]) -> Iterator[str]:
    """The page of a module: what it says of itself, a table of its names, and those that belong to it in full."""
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
    """Whether a thing prints as where it lies in memory, which tells a reader nothing."""
    return repr(thing).startswith("<")


def note_second_names(app: Sphinx, env: BuildEnvironment) -> None:
    """Let a name that several modules export lead to its one place, whichever of them it is asked of."""
    objects = env.domains.python_domain.objects
    modules = {name: importlib.import_module(name) for name in public_modules()}
    for owner, module in modules.items():
        for name in module.__all__:
            thing = getattr(module, name)
            place = objects.get(f"{home_of(thing, name, modules)}.{name}")
            if place and f"{owner}.{name}" not in objects:
                objects[f"{owner}.{name}"] = place._replace(aliased=True)


def home_of(thing: object, name: str, modules: dict[str, ModuleType]) -> str:
    """The public module that is nearest to where a thing is written, of those that have it."""
    written = getattr(thing, "__module__", None) or ""
    owners = [each for each, module in modules.items() if name in module.__all__ and getattr(module, name) is thing]
    return max(owners, key=lambda owner: (f"{written}.".startswith(f"{owner}."), len(owner)))


def members(kind: type, modules: dict[str, ModuleType]) -> list[str]:
    """What a class documents itself, and what it has from bases that are described nowhere else."""
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
    """Whether a method or a property has a docstring of its own; any other value has that of its class."""
    return bool(member.__doc__) and (inspect.isroutine(member) or inspect.isdatadescriptor(member))


def is_forwarded(member: object) -> bool:
    """Whether a property only passes on what another object has, and says nothing itself."""
    return isinstance(member, property) and not inspect.isfunction(member.fget)


def read_docstring(app: Sphinx, what: str, name: str, thing: object, options: object, lines: list[str]) -> None:
    """Spell literals and code as reStructuredText does: two backticks for one, and two colons before code."""
    text = "\n".join(lines)
    # A value that nobody describes has the docstring of its type.
    if what == "data" and text.strip() == (inspect.getdoc(thing) or "").strip():
        text = f"An instance of `{type(thing).__qualname__}`." if has_address(thing) else ""
    text = re.sub(r"(?<!`)`([^`]+)`(?!`)", r"``\1``", text)
    text = re.sub(r"^( *)(.*\S):\n\n(?=\1 {4}[^\s-])", r"\1\2::\n\n", text, flags=re.MULTILINE)
    lines[:] = text.split("\n")


def setup(app: Sphinx) -> None:
    """Hang the functions on what Sphinx says."""
    app.connect("builder-inited", write_pages)
    app.connect("source-read", read_source)
    # Before napoleon reads it: a colon inside a literal is no separator to it.
    app.connect("autodoc-process-docstring", read_docstring, priority=400)
    # Before the theme asks for it.
    app.connect("html-page-context", narrow_navigation, priority=400)
    app.connect("env-updated", note_second_names)
