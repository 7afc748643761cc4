"""Prose of the source, the tests and the documentation: hard phrases are counted, and names of tests are checked.

The rules are in CONTRIBUTING.md. `python tests/test_prose.py PATH …` prints every hit as `file:line: phrase: text`.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

PHRASES = re.compile(
    r"\b(who(?:ever)?|whom|nobody|somebody|everybody|anybody|no one|anew|as ever|for ever|wish(?:es|ed)?|heed\w*"
    r"|hears?|heard|is no more|that of|those of|(?:came|comes?|become|becomes|made|makes?) of|of one's own|of its own"
    r"|of their own|go(?:es)? on|went on|take[sn]? back|look(?:s|ed)? at|lies?|lets? \w+ be|nothing but|be it"
    r"|whereupon|told|tells?|begins?|began|begun|stands? for|at work|other than those|wants? to)\b",
    re.IGNORECASE,
)
# A clause as the subject of a sentence: "What a run is made of may depend on …".
CLAUSES = re.compile(
    r"(?:^|[.:] )(?:What|Who|Whoever|That|Of|Where) (?:a|an|the|it|is|has|was|does|comes|no|that)\b[^?]{10,}"
)

# Hits per 1,000 lines of prose, rounded up. A limit may only be lowered; the goal is 10 everywhere.
LIMITS: dict[str, int] = {}
GOAL = 10
# Limits below the goal, for areas that are almost free of hard phrases.
STRICT = {"tests": 3}

# A name states the claim and its actor, so that a failing line is understood without the file. These words hide the
# actor, or replace the word of the field: reject, report, continue, start, restore, evaluate, invalid.
NAME_WORDS = re.compile(
    r"_(refus\w*|anew|told|tells?|heard|hears?|who|whoever|whom|nobody|somebody|everybody|anybody|begins?|begun|began|stays?"
    r"|so_does|goes_on|go_on|as_ever|of_(?:its|their|ones)_own|takes?_over|given_up|wish\w*|taken_back|comes?_back|at_work"
    r"|passed_over|cannot_be_meant|makes_no_sense|mistakes_are_named|whatever)(?=_|$)|^test_(?:it|where|what|of_its)_"
)
LONGEST_NAME = 79


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of prose in a Python or Markdown file, each with its number."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        yield from _markdown_lines(source)
        return
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("# ")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            lines = (ast.get_docstring(node) or "").splitlines()
            start = node.body[0].lineno if lines else 0
            yield from (
                (start + at, line) for at, line in enumerate(lines) if not line.lstrip().startswith((">>>", "..."))
            )
        elif isinstance(node, ast.Raise) and node.exc is not None:
            for part in ast.walk(node.exc):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield part.lineno, part.value


def _markdown_lines(source: str) -> Iterator[tuple[int, str]]:
    is_code = False
    for number, line in enumerate(source.splitlines(), 1):
        if line.lstrip().startswith(("```", "~~~")):
            is_code = not is_code
        elif not is_code:
            yield number, line


def hits(path: Path) -> tuple[list[str], int]:
    """Return the hits of a file as `file:line: phrase: text`, and the number of its lines of prose."""
    lines = [(number, text) for number, text in texts(path) if text.strip()]
    found = [
        f"{path}:{number}: {match.group(0)[:40]!r}: {text.strip()[:140]}"
        for number, text in lines
        for match in (*PHRASES.finditer(text), *CLAUSES.finditer(text))
    ]
    return found, len(lines)


def areas() -> dict[str, list[Path]]:
    """Return the files of each package and of the documentation, by name."""
    source = ROOT / "src" / "dovetail"
    packages = sorted(path for path in source.iterdir() if path.is_dir() and any(path.rglob("*.py")))
    found = {f"src/{path.name}": sorted(path.rglob("*.py")) for path in packages}
    found["src"] = sorted(source.glob("*.py"))
    found["tests"] = sorted((ROOT / "tests").rglob("*.py"))
    found["docs"] = sorted((ROOT / "docs").rglob("*.md"))
    found["front"] = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")]
    return found


@pytest.mark.parametrize("area", areas())
def test_prose_has_few_hard_phrases(area: str) -> None:
    counted = [hits(path) for path in areas()[area]]
    found, num_lines = [hit for each, _ in counted for hit in each], sum(number for _, number in counted)
    limit = STRICT.get(area, LIMITS.get(area, GOAL))
    density = -(-1000 * len(found) // max(num_lines, 1))
    assert density <= limit, f"{area}: {density} hits per 1,000 lines, at most {limit}:\n" + "\n".join(found[:20])
    assert limit <= max(density + 5, GOAL), f"{area}: {density} hits per 1,000 lines; lower its limit of {limit}"


def test_a_limit_is_above_the_goal_and_has_an_area() -> None:
    assert all(limit > GOAL for limit in LIMITS.values())
    assert all(limit < GOAL for limit in STRICT.values())
    assert LIMITS.keys() | STRICT.keys() <= areas().keys()


def test_hits_are_found_in_docstrings_comments_messages_and_pages(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text('"""Whoever reads this."""\n# told\nraise ValueError("nobody")\n')
    assert [hit.split(": ")[1] for hit in hits(module)[0]] == ["'told'", "'Whoever'", "'nobody'"]
    page = tmp_path / "page.md"
    page.write_text("It goes on.\n```\nwho\n```\nWhat a run is made of may depend on much.\n")
    assert len(hits(page)[0]) == 3


def names_of_tests(source: str) -> list[str]:
    """Return the names of the test functions in the source of a module, in order."""
    return re.findall(r"^\s*(?:async )?def (test_\w+)", source, re.MULTILINE)


def hard_names(names: Iterable[str]) -> list[str]:
    """Return the names of tests with a word of `NAME_WORDS`, or with more than 79 characters."""
    return [name for name in names if NAME_WORDS.search(name) or len(name) > LONGEST_NAME]


def test_names_of_tests_state_a_claim_in_plain_words() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in areas()["tests"]
        for name in hard_names(names_of_tests(path.read_text(encoding="utf-8")))
    ]
    assert not found, "\n".join(found)


def test_a_hard_or_long_name_of_a_test_is_found() -> None:
    source = "def test_a_bad_value_is_refused(): ...\nasync def test_it_learns(): ...\ndef test_a_run_ends(): ...\n"
    assert hard_names(names_of_tests(source)) == ["test_a_bad_value_is_refused", "test_it_learns"]
    assert hard_names(["test_" + 74 * "a", "test_" + 75 * "a"]) == ["test_" + 75 * "a"]


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        root = Path(argument)
        for file in sorted(root.rglob("*")) if root.is_dir() else [root]:
            if file.suffix in (".py", ".md"):
                print(*hits(file)[0], sep="\n", end="\n" if hits(file)[0] else "")
