"""The documentation is true: its code runs, its links exist, and its tables equal the code."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.main import get_group

import dovetail
from dovetail import callbacks
from dovetail.algorithms import algorithms
from dovetail.cli import checkpoint as checkpoint_commands
from dovetail.federated.config import FederatedConfig
from dovetail.trainers import TrainerOptions, base, schedules, strategies
from dovetail.trainers.composable import ComposableTrainer
from dovetail.trainers.single_process import SingleProcessTrainer

ROOT = Path(__file__).parent.parent
GUIDE = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [ROOT / "README.md", *GUIDE]
EVERYTHING = [
    *PAGES,
    ROOT / "CONTRIBUTING.md",
    ROOT / "AGENTS.md",
    ROOT / "SECURITY.md",
    ROOT / "CHANGELOG.md",
    ROOT / "benchmarks" / "RESULTS.md",
]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


# What torch seeds its generator with in a fresh process, where a reader runs a block.
FRESH_SEED = 67280421310721

# ------------------------------------------------------------------ code blocks


@dataclass
class Block:
    """A fenced block of Python. `marker` is the HTML comment right before it, if there is one."""

    page: Path
    line: int
    code: str
    marker: str

    @property
    def place(self) -> str:
        return f"{name_of(self.page)}:{self.line}"


def blocks_of(page: Path) -> Iterator[Block]:
    fence = re.compile(r"(?:<!-- (?P<marker>[^\n]*) -->\n+)?^```python\n(?P<code>.*?)^```$", re.DOTALL | re.MULTILINE)
    text = page.read_text(encoding="utf-8")
    for match in fence.finditer(text):
        line = text.count("\n", 0, match.start("code"))
        yield Block(page, line, match["code"], match["marker"] or "")


def chains() -> list[list[Block]]:
    """Blocks that share a namespace: each one, and the following that are marked as its continuation."""
    found: list[list[Block]] = []
    for page in PAGES:
        for block in blocks_of(page):
            if block.marker == "continues":
                found[-1].append(block)
            else:
                found.append([block])
    return found


CHAINS = chains()


@pytest.mark.usefixtures("forking")
@pytest.mark.parametrize("chain", CHAINS, ids=[chain[0].place for chain in CHAINS])
def test_code_blocks_of_the_docs_run(chain: list[Block], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(FRESH_SEED)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block in chain:
        if block.marker.startswith("no-run:"):
            pytest.skip(f"{block.place}: {block.marker}")
        # Empty lines in front, so that a traceback has the line of the page.
        source = "\n" * block.line + block.code
        exec(compile(source, str(block.page), "exec", dont_inherit=True), namespace)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_code_block_is_found_and_its_marker_known(page: Path) -> None:
    blocks = list(blocks_of(page))
    assert len(blocks) == page.read_text(encoding="utf-8").count("```python")
    markers = [block.marker for block in blocks if block.marker]
    assert all(marker == "continues" or re.fullmatch(r"no-run: .+", marker) for marker in markers), markers


# ------------------------------------------------------------------ links and commands


@pytest.mark.parametrize("page", EVERYTHING, ids=name_of)
def test_relative_links_of_the_docs_exist(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        goal = (page.parent / path).resolve() if path else page
        assert goal.exists(), f"{name_of(page)}: {target}"
        if anchor:
            assert anchor in anchors_of(goal), f"{name_of(page)}: {target}"


# Pages that list others, a page per row. The navigation of the site is built from them.
CONTENTS = [ROOT / "docs" / name for name in ("index.md", "algorithms.md", "migration/index.md")]


@pytest.mark.parametrize("page", EVERYTHING, ids=name_of)
def test_project_paths_in_the_docs_exist(page: Path) -> None:
    named = re.findall(r"`((?:src|tests|benchmarks|examples)/[\w./-]+)`", page.read_text(encoding="utf-8"))
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_the_contents_page_has_one_row_per_guide_page() -> None:
    rows = [
        (contents.parent / target).resolve()
        for contents in CONTENTS
        for target in re.findall(r"\| \[[^\]]+\]\(([^)\s:#]+\.md)\) \|", contents.read_text(encoding="utf-8"))
    ]
    outside = [page for page in EVERYTHING if page not in GUIDE]
    assert sorted(rows) == sorted({*GUIDE, *outside} - {ROOT / "docs" / "index.md"})


def is_ours(kind: Any) -> bool:
    return str(kind.__module__).startswith("dovetail.")


def test_every_algorithm_has_a_row_and_a_page() -> None:
    rows = [row for row in table_rows("algorithms.md") if row[1].startswith("[`")]
    # A how-to registers another one.
    known = {name: kind.__name__ for name in algorithms.names() if is_ours(kind := algorithms.get(name))}
    assert {row[0].strip("`"): re.findall(r"`(\w+)`", row[1])[0] for row in rows} == known
    linked = {re.findall(r"\(algorithms/(\w+\.md)\)", row[1])[0] for row in rows}
    assert linked == {page.name for page in GUIDE if page.parent.name == "algorithms"} - {"results.md"}


@pytest.mark.parametrize("page", EVERYTHING, ids=name_of)
def test_commands_in_the_docs_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert set(re.findall(r"(?:`|^)make ([a-z]+)", text, re.MULTILINE)) <= set(targets)
    assert set(re.findall(r"dovetail checkpoint ([a-z]+)", text)) <= set(get_group(checkpoint_commands.app).commands)


def test_the_agents_notes_list_every_make_target() -> None:
    listed = re.findall(r"^([a-z]+):.*##", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    named = re.findall(r"^\| `make ([a-z]+)` \|", (ROOT / "AGENTS.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert {*named, "help"} == set(listed)


def without_code(page: Path) -> str:
    return re.sub(r"^```.*?^```$|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def anchors_of(page: Path) -> set[str]:
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_readme_has_the_numbers_of_the_benchmarks() -> None:
    results = (ROOT / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8")
    tables = {title: re.findall(rf"^## {title}$(.*?)^\d+ ", results, re.DOTALL | re.MULTILINE)[0] for title in MEASURED}
    reasons = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Five reasons")[2].partition("## ")[0]
    missing = {}
    for title, (rows, digits) in MEASURED.items():
        for row in rows:
            number = re.findall(rf"^\| {re.escape(row)} \| ([\d.]+) \|", tables[title], re.MULTILINE)[0]
            if f" {float(number):.{digits}f}" not in reasons.replace("[", " "):
                missing[row] = number
    assert missing == {}


# Rows of the first table of a section that the README cites, and with how many digits.
MEASURED = {
    "The loop": (
        (
            "dovetail, as a new user gets it",
            "fabric",
            "ignite, displays off",
            "skorch",
            "accelerate",
            "lightning, displays off",
            "transformers",
            "keras, on torch",
        ),
        2,
    ),
    "Several processes": (("dovetail: MLP", "dovetail: wide MLP, 4 MB"), 2),
    "Experiments": (("1 at a time",), 0),
}


def test_every_file_has_the_same_version() -> None:
    places = {
        "pyproject.toml": r'^version = "([^"]+)"$',
        "CITATION.cff": r"^version: (.+)$",
        "CHANGELOG.md": r"^## (\d[\w.]*) - \d{4}-\d\d-\d\d$",
    }
    found = {
        name: re.findall(pattern, (ROOT / name).read_text(encoding="utf-8"), re.MULTILINE)[:1]
        for name, pattern in places.items()
    }
    assert found == {name: [dovetail.__version__] for name in places}


def test_every_heading_of_the_faq_is_part_of_the_message_that_its_block_raises() -> None:
    text = (ROOT / "docs" / "faq.md").read_text(encoding="utf-8")
    wrong = []
    for section in re.split(r"^### ", text, flags=re.MULTILINE)[1:]:
        heading, _, rest = section.partition("\n")
        code = "".join(re.findall(r"^```python\n(.*?)^```$", rest, re.DOTALL | re.MULTILINE))
        calls = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
        messages = [ast.literal_eval(call.args[0]) for call in calls if ast.unparse(call.func) == "says"]
        # An ellipsis matches any text.
        pattern = ".*".join(re.escape(part.strip()) for part in heading.split("…"))
        if not messages or not all(re.search(pattern, message) for message in messages):
            wrong.append(heading)
    assert wrong == []


def test_the_page_of_the_examples_has_every_program() -> None:
    page = (ROOT / "docs" / "examples.md").read_text(encoding="utf-8")
    programs = [path for path in (ROOT / "examples").iterdir() if not path.name.startswith(("_", "."))]
    assert sorted(set(re.findall(r"\(\.\./examples/([\w.]+)[/)]", page))) == sorted(path.name for path in programs)


def test_the_page_of_the_installation_has_every_extra() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    section = project.partition("[project.optional-dependencies]\n")[2].partition("\n[")[0]
    rows = [row[0] for row in table_rows("install.md") if row[0].startswith("`")]
    listed = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(listed) == sorted(re.findall(r"^(\w+) = \[", section, re.MULTILINE))


# ------------------------------------------------------------------ names

MODULES = [
    "dovetail",
    "dovetail.federated.algorithms",
    "dovetail.callbacks",
    "dovetail.checkpoint",
    "dovetail.compat.lernomatic",
    "dovetail.compat.marlin",
    "dovetail.compat.plato",
    "dovetail.compat.zae_engine",
    "dovetail.federated.clients",
    "dovetail.data",
    "dovetail.federated.data",
    "dovetail.federated.data.partition",
    "dovetail.errors",
    "dovetail.core",
    "dovetail.federated",
    "dovetail.federated.backends",
    "dovetail.federated.postprocess",
    "dovetail.federated.robust",
    "dovetail.federated.selection",
    "dovetail.federated.validation",
    "dovetail.history",
    "dovetail.launch",
    "dovetail.pytorch",
    "dovetail.pytorch.samplers",
    "dovetail.search",
    "dovetail.federated.servers",
    "dovetail.federated.servers.building",
    "dovetail.federated.servers.fedavg",
    "dovetail.federated.servers.reading",
    "dovetail.federated.servers.results",
    "dovetail.tracking",
    "dovetail.trainers",
    "dovetail.trainers.addons",
    "dovetail.trainers.composable",
    "dovetail.trainers.lr_finder",
    "dovetail.trainers.registry",
    "dovetail.trainers.schedules",
    "dovetail.trainers.strategies",
    "dovetail.units",
]


def test_the_api_reference_has_every_module_of_the_guide() -> None:
    page = ROOT / "docs" / "api" / "index.md"
    rows = dict(re.findall(r"^\| \[`([\w.]+)`\]\(([^)]+)\)", page.read_text(encoding="utf-8"), re.MULTILINE))
    assert set(MODULES) - set(rows) == set()
    assert {name: (page.parent / target).resolve() for name, target in rows.items()} == {
        name: Path(inspect.getfile(importlib.import_module(name))) for name in rows
    }


def test_the_main_names_of_the_reference_are_public() -> None:
    unknown = {}
    for row in table_rows("api/index.md"):
        modules, names = re.findall(r"`(dovetail[\w.]*)`", row[0]), re.findall(r"`(\w+)`", row[-1])
        if modules and (wrong := set(names) - set(importlib.import_module(modules[0]).__all__)):
            unknown[modules[0]] = wrong
        assert not modules or names, row
    assert unknown == {}


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_is_documented(module: str) -> None:
    words = set(re.findall(r"\w+", "\n".join(page.read_text(encoding="utf-8") for page in PAGES)))
    names = {name for name in importlib.import_module(module).__all__ if not name.startswith("__")}
    assert names - words == set()


def test_the_architecture_page_names_every_verb() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert {verb for verb in base.Trainer.__abstractmethods__ if f"`{verb}" not in text} == set()


# ------------------------------------------------------------------ tables


def test_the_documented_federation_settings_equal_the_configuration() -> None:
    documented = [(row[0], row[1]) for row in table_rows("federated.md") if len(row) == 3 and row[0] != "key"]
    known = []
    for section in dataclasses.fields(FederatedConfig):
        values = vars(getattr(FederatedConfig(), section.name))
        for name, value in values.items():
            spelled = yaml_text(value) if value not in (None, {}, ()) else ""
            known.append(("any other key" if name == "options" else f"`{name}`", spelled))
    assert [row for row in documented if set(row[0]) != {"-"}] == known


def yaml_text(value: object) -> str:
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{', '.join(value) if isinstance(value, tuple) else value}`"


def test_the_documented_options_equal_those_of_the_trainer() -> None:
    documented = [(row[0], row[1]) for row in table_rows("options.md") if row[0].startswith("`")]
    parameters = list(inspect.signature(SingleProcessTrainer.__init__).parameters.values())[1:-1]
    known: list[Any] = [*parameters, *dataclasses.fields(TrainerOptions)]
    assert documented == [(f"`{each.name}`", f"`{shown(each.default)}`") for each in known]


def test_the_documented_callback_arguments_equal_the_code() -> None:
    documented = {row[0].strip("`") for row in table_rows("callbacks.md") if re.match(r"`[A-Z]\w*\(", row[0])}
    known = {
        f"{name}({arguments(kind)})"
        for name in callbacks.__all__
        if name not in ("Callback", "Monitor", "PlatoAdapter")
        if isinstance(kind := getattr(callbacks, name), type) and issubclass(kind, callbacks.Callback)
    }
    assert documented == known


def test_the_documented_hooks_equal_those_of_a_callback() -> None:
    documented = [row[0].strip("`") for row in table_rows("callbacks.md") if row[0].startswith("`on_")]
    hooks = {name: hook for name, hook in vars(callbacks.Callback).items() if name.startswith("on_")}
    assert documented == [
        f"{name}({', '.join(list(inspect.signature(hook).parameters)[1:])})" for name, hook in hooks.items()
    ]


def test_the_documented_schedule_arguments_equal_the_code() -> None:
    documented = {row[0].strip("`") for row in table_rows("schedules.md") if "(" in row[0]}
    kinds = [getattr(schedules, name) for name in schedules.__all__ if name != "SchedulerBase"]
    concrete = {
        kind
        for kind in kinds
        if issubclass(kind, (schedules.Schedule, schedules.SchedulerBase)) and not inspect.isabstract(kind)
    }
    assert documented == {f"{kind.__name__}({own_arguments(kind)})" for kind in concrete}


def own_arguments(kind: type[Any]) -> str:
    """The arguments of a constructor, without those that the page names once for all schedules."""
    if not dataclasses.is_dataclass(kind):
        return arguments(kind)
    shared = {field.name for field in dataclasses.fields(schedules.LRSchedule)}
    own = [field for field in dataclasses.fields(kind) if field.init and field.name not in shared]
    required = [field.name for field in own if field.default is dataclasses.MISSING]
    return ", ".join(required + [f"{field.name}={shown(field.default)}" for field in own if field.name not in required])


# What each page says once for many strategies: bases, and the keywords of every learning rate.
ABSTRACT = (
    strategies.Anchored,
    strategies.ModelUpdateStrategy,
    strategies.NestingStepStrategy,
    strategies.Strategy,
)
TIMING = ("interval", "frequency")


def test_the_documented_strategy_arguments_equal_the_code() -> None:
    documented = [row[0].strip("`") for row in table_rows("strategies.md") if re.match(r"`[A-Z]\w*\(", row[0])]
    kinds = [getattr(strategies, name) for name in strategies.__all__]
    concrete = [
        kind
        for kind in kinds
        if isinstance(kind, type) and issubclass(kind, strategies.Strategy) and not inspect.isabstract(kind)
        if kind not in ABSTRACT
    ]
    timed = strategies.TimedSchedulerStrategy
    known = [f"{kind.__name__}({arguments(kind, TIMING if issubclass(kind, timed) else ())})" for kind in concrete]
    assert sorted(documented) == sorted(known)


def test_the_documented_strategy_methods_equal_the_code() -> None:
    cells = [cell.strip("`") for row in table_rows("strategies.md") for cell in row[:2]]
    documented = [cell for cell in cells if re.match(r"[a-z_]+\(", cell)]
    kinds = [
        strategies.LossCriterionStrategy,
        strategies.OptimizerStrategy,
        strategies.TrainingStepStrategy,
        strategies.LRSchedulerStrategy,
        strategies.ModelUpdateStrategy,
        strategies.DataLoaderStrategy,
        strategies.TestingStrategy,
        strategies.Strategy,
    ]
    assert documented == [
        f"{name}({', '.join(list(inspect.signature(method).parameters)[1:])})"
        for kind in kinds
        for name, method in vars(kind).items()
        if inspect.isfunction(method)
    ]


def test_the_documented_context_state_keys_equal_the_code() -> None:
    documented = {row[0].strip('`"') for row in table_rows("strategies.md") if row[0].startswith('`"')}
    trainer = ComposableTrainer(
        torch.nn.Linear(2, 2), data_loader_strategy="DynamicBatchSizeDataLoaderStrategy", verbose=False
    )
    trainer.fit((torch.zeros(4, 2), torch.zeros(4, dtype=torch.int64)), max_length=dovetail.Epochs(1))
    assert documented == set(trainer.context.state)


def table_rows(page: str) -> list[list[str]]:
    """The cells of every row of every table of a page, headings included."""
    lines = (ROOT / "docs" / page).read_text(encoding="utf-8").splitlines()
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines if line.startswith("|")]


def arguments(kind: type[Any], without: Sequence[str] = ()) -> str:
    """The parameters of a constructor as a reader writes them."""
    spelled = []
    for parameter in inspect.signature(kind).parameters.values():
        if parameter.name in without:
            continue
        default = "" if parameter.default is parameter.empty else f"={shown(parameter.default)}"
        # Without its annotation a parameter prints as its name, with the stars that belong to it.
        name = str(parameter.replace(annotation=parameter.empty, default=parameter.empty))
        spelled.append(f"{name}{default}")
    return ", ".join(spelled)


def shown(default: Any) -> str:
    if isinstance(default, str):
        return f'"{default}"'
    return default.__name__ if callable(default) else repr(default)
