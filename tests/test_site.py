"""The site: it builds without a warning, has every page and every public name, and loads no other resource."""

from __future__ import annotations

import html
import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.version_info < (3, 11), reason="Sphinx 9 needs Python 3.11"),
]
in_a_browser = pytest.mark.skipif(BROWSER is None, reason="NOT TESTED: there is no chromium (apt-get install chromium)")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site. That this fixture is made says that no page and no docstring has a fault that Sphinx knows."""
    out = tmp_path_factory.mktemp("site")
    options = ["--quiet", "--fail-on-warning", "--keep-going", "--jobs", "2"]
    # No proxy leads anywhere: a build that asks the network for something fails.
    nowhere = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", *options, str(DOCS), str(out)],
        env={**os.environ, **nowhere},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return out


def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def pages_of(site: Path) -> dict[Path, str]:
    return {page: read(page) for page in site.rglob("*.html")}


def guide() -> set[str]:
    return {str(page.relative_to(DOCS).with_suffix(".html")) for page in DOCS.rglob("*.md")}


def modules() -> list[str]:
    return re.findall(r"^\| \[`([\w.]+)`\]", read(DOCS / "api" / "index.md"), re.MULTILINE)


def test_every_page_of_the_guide_is_on_the_site(site: Path) -> None:
    assert {page for page in guide() if not (site / page).exists()} == set()


def test_the_navigation_has_every_page(site: Path) -> None:
    sidebar = read(site / "index.html").partition('class="sidebar-tree"')[2].partition("</aside>")[0]
    linked = set(re.findall(r'href="([^"#]+)', sidebar))
    assert guide() - linked == {"index.html"}


def test_every_public_name_is_in_the_inventory(site: Path) -> None:
    from sphinx.util.inventory import InventoryFile

    inventory = InventoryFile.loads((site / "objects.inv").read_bytes(), uri="").data
    described = {name for kind, names in inventory.items() if kind.startswith("py:") for name in names}
    public = {f"{module}.{name}" for module in modules() for name in importlib.import_module(module).__all__}
    assert public - described == set()


def test_a_name_of_several_modules_has_one_reference_entry(site: Path) -> None:
    from sphinx.util.inventory import InventoryFile

    classes = InventoryFile.loads((site / "objects.inv").read_bytes(), uri="").data["py:class"]
    places = {classes[name].uri for name in ("dovetail.Trainer", "dovetail.trainers.Trainer")}
    assert places == {"api/dovetail.trainers.html#dovetail.trainers.Trainer"}


def test_a_class_shows_what_its_hidden_bases_document(site: Path) -> None:
    described = re.findall(r'id="dovetail\.trainers\.Trainer\.(\w+)"', read(site / "api" / "dovetail.trainers.html"))
    assert {"fit", "evaluate", "predict", "train_step"} <= set(described)


# Resources that a browser fetches with a page: the source of an element, and the links of its head.
LOADED = re.compile(r'<(?:script|img|iframe|source|video|embed)\b[^>]*\bsrc="([^"]+)"|<link\b[^>]*\bhref="([^"]+)"')
# The same in a stylesheet, if it names a host.
IMPORTED = re.compile(r"""(?:@import|url\()\s*["']?((?:https?:)?//[^"')]+)""")


def test_no_page_loads_anything_from_another_host(site: Path) -> None:
    loaded = {source or link for text in pages_of(site).values() for source, link in LOADED.findall(text)}
    assert loaded
    assert {source for source in loaded if re.match(r"(https?:)?//", source)} == set()


def test_no_stylesheet_loads_anything_from_another_host(site: Path) -> None:
    sheets = [read(sheet) for sheet in site.rglob("*.css")]
    assert sheets
    assert [source for text in sheets for source in IMPORTED.findall(text)] == []


def test_every_link_inside_the_site_has_its_anchor(site: Path) -> None:
    pages = pages_of(site)
    anchors = {page: set(map(html.unescape, re.findall(r'\bid="([^"]+)"', text))) for page, text in pages.items()}
    broken = set()
    for page, text in pages.items():
        for href in set(re.findall(r'<a\b[^>]*\bhref="([^"]+)"', text)):
            link = urlsplit(html.unescape(href))
            if link.scheme or not (link.path or link.fragment):
                continue
            goal = (page.parent / unquote(link.path)).resolve() if link.path else page
            if not goal.exists() or (link.fragment and unquote(link.fragment) not in anchors[goal]):
                broken.add(f"{page.relative_to(site)}: {href}")
    assert broken == set()


# ------------------------------------------------------------------ in a browser


def shown(page: str, profile: Path) -> str:
    """The rendered page of a browser without a network, scripts included."""
    assert BROWSER is not None
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}", "--window-size=1200,800"]
    offline = ["--host-resolver-rules=MAP * ~NOTFOUND", "--virtual-time-budget=5000"]
    command = [BROWSER, *options, *offline, "--dump-dom", page]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


@in_a_browser
def test_every_code_block_has_a_copy_button(site: Path, tmp_path: Path) -> None:
    page = shown((site / "start.html").as_uri(), tmp_path)
    assert page.count('class="copybtn') == page.count('<div class="highlight">') > 0


@in_a_browser
def test_the_site_search_finds_a_page_without_a_server(site: Path, tmp_path: Path) -> None:
    page = shown(f"{(site / 'search.html').as_uri()}?q=accumulation", tmp_path)
    assert 'href="loop.html' in page.partition('id="search-results"')[2]
