"""Experiment files of Determined: the guide is true for every key that it names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from dovetail import Batches, Epochs
from dovetail.config import parse_config
from dovetail.errors import ConfigError
from dovetail.search.schema import StorageConfig, read_experiment
from dovetail.search.space import Space

GUIDE = Path(__file__).parents[2] / "docs" / "migration" / "determined.md"
FILE = """
name: mnist
description: a file with every key
labels: [a, b]
project: p
workspace: w
entrypoint: model_def:MyTrial
hyperparameters:
  global_batch_size: 64
  constant: {type: const, val: 3}
  width: {type: int, minval: 1, maxval: 4}
  rate: {type: log, base: 10, minval: -4, maxval: -1}
  net:
    dropout: {type: double, minval: 0.1, maxval: 0.5}
    act: {type: categorical, vals: [relu, tanh]}
searcher:
  name: SEARCHER
  metric: validation_loss
  smaller_is_better: false
  source_trial_id: 3
min_validation_period: {batches: 100}
min_checkpoint_period: {epochs: 1}
perform_initial_validation: true
checkpoint_policy: all
scheduling_unit: 50
max_restarts: 2
data: {url: here}
resources: {slots_per_trial: 2}
optimizations: {aggregation_frequency: 4, average_aggregated_gradients: false}
environment: {environment_variables: [A=1]}
reproducibility: {experiment_seed: 7}
profiling: {enabled: true}
checkpoint_storage:
  type: shared_fs
  host_path: /checkpoints
  save_experiment_best: 1
  save_trial_best: 2
  save_trial_latest: 3
"""
LENGTH = "max_length: {epochs: 4}"
OPTIONS = {
    "single": LENGTH,
    "grid": f"{LENGTH}\n  max_concurrent_trials: 2",
    "random": f"{LENGTH}\n  max_trials: 8\n  max_concurrent_trials: 0",
    "async_halving": "max_trials: 8\n  num_rungs: 2\n  divisor: 4\n  max_time: 16\n  time_metric: epochs",
    "adaptive_asha": "max_trials: 8\n  max_time: 16\n  time_metric: epochs\n  mode: aggressive\n  max_rungs: 3\n"
    "  bracket_rungs: [2]\n  divisor: 4",
}


def text_for(searcher: str) -> str:
    text = FILE.replace("name: SEARCHER", f"name: {searcher}\n  {OPTIONS[searcher]}")
    if searcher == "grid":
        text = text.replace("maxval: 4}", "maxval: 4, count: 2}").replace("maxval: -1}", "maxval: -1, count: 2}")
        text = text.replace("maxval: 0.5}", "maxval: 0.5, count: 2}")
    return text


def rows(heading: str) -> list[list[str]]:
    """Return the cells of the table below a heading of the page."""
    text = re.split(rf"\n##+ {heading}\n", GUIDE.read_text(encoding="utf-8"))[1].split("\n#")[0]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| `")]


SAME = rows("Experiment files")


@pytest.mark.parametrize("searcher", OPTIONS)
def test_a_file_with_every_key_is_read_without_a_warning(searcher: str) -> None:
    # Warnings are errors.
    config = read_experiment(parse_config(text_for(searcher)))
    assert config.entrypoint == ["model_def:MyTrial"]
    assert (config.name, config.labels, config.project, config.workspace) == ("mnist", ["a", "b"], "p", "w")
    assert (config.searcher.name, config.searcher.metric) == (searcher, "validation_loss")
    assert (config.searcher.smaller_is_better, config.searcher.source_trial_id) == (False, 3)
    assert (config.min_validation_period, config.min_checkpoint_period) == (Batches(100), Epochs(1))
    assert (config.perform_initial_validation, config.checkpoint_policy, config.max_restarts) == (True, "all", 2)
    assert (config.raw["scheduling_unit"], config.data, config.slots) == (50, {"url": "here"}, 2)
    assert config.raw["optimizations"] == {"aggregation_frequency": 4, "average_aggregated_gradients": False}
    assert (config.environment, config.seed, config.profiling) == ({"A": "1"}, 7, True)
    assert config.checkpoint_storage == StorageConfig(Path("/checkpoints"), None, 1, 2, 3)
    assert list(Space(config.hyperparameters).parameters) == ["width", "rate", "net.dropout", "net.act"]


def test_every_key_listed_as_equal_in_the_docs_is_in_these_files() -> None:
    files: Any = [parse_config(text_for(searcher)) for searcher in OPTIONS]
    keys = {name for file in files for name in (*file, *(f"{a}.{b}" for a in file for b in _keys(file[a])))}
    words = {word for searcher in OPTIONS for word in re.findall(r"\w+", text_for(searcher))}
    same = [left for left, right in SAME if right.startswith("the same") and not left.startswith(("`entry", "`.det"))]
    named = [snippet for left in same for snippet in re.findall(r"`(.*?)`", left)]
    assert len(named) > 40
    # A type, the name of a searcher and the like have no separate place in a file.
    unknown = {snippet for snippet in named if snippet not in keys | words | {"directory"}}
    assert unknown == set()


@pytest.mark.parametrize("row", [row[0] for row in SAME if row[0].startswith("`entrypoint")])
def test_every_entrypoint_listed_in_the_docs_is_read(row: str) -> None:
    for snippet in re.findall(r"`(entrypoint: .*?)`", row):
        config = read_experiment(parse_config(f"{snippet}\nsearcher: {{name: single, {LENGTH}}}\n"))
        assert config.entrypoint


@pytest.mark.parametrize(
    ("snippet", "sentence"),
    [
        ("determined.launch.horovod", "there is no determined.launch.horovod here"),
        ("determined.launch.deepspeed", "there is no determined.launch.deepspeed here"),
        ("determined.launch.torch_distributed --nproc_per_node 4 -- train.py", "expected no options before --"),
    ],
)
def test_launchers_that_need_a_change_are_rejected_with_this_change(snippet: str, sentence: str) -> None:
    assert any(f"`{snippet}`" in row[0] for row in rows("Experiment files and commands"))
    with pytest.raises(ConfigError, match=sentence):
        read_experiment(parse_config(f"entrypoint: python3 -m {snippet}\nsearcher: {{name: single}}\n"))


def test_unsupported_keys_are_listed_in_a_warning() -> None:
    text = "entrypoint: a b\nsearcher: {name: single, source_checkpoint_uuid: x}\nrecords_per_epoch: 3\nslurm: {}\n"
    with pytest.warns(UserWarning, match=r"are ignored: records_per_epoch, slurm, searcher\.source_checkpoint_uuid"):
        read_experiment(parse_config(text))


def _keys(value: Any) -> list[str]:
    return list(value) if isinstance(value, dict) else []
