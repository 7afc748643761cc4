from __future__ import annotations

import json
import os
import random
import re
import warnings
from pathlib import Path
from typing import Any

import pytest

from dovetail.checks import ConfigErrors
from dovetail.config import hyperparameters, parse_config
from dovetail.errors import ConfigError
from dovetail.runtime.cores import NO_CARDS
from dovetail.search import schema
from dovetail.search.schema import ExperimentConfig, StorageConfig, read_experiment
from dovetail.search.searchers import make_searcher, searchers
from dovetail.search.searchers.registry import COMMON
from dovetail.search.space import Space
from dovetail.units import Batches, Epochs

STUDY: Any = None  # not read

FULL = """\
name: digits
description: a small network
labels: [demo, "2"]
project: vision
workspace: home
entrypoint: python3 -u train.py --data "my data"
hyperparameters:
  lr:
    type: log
    base: 10
    minval: -4
    maxval: -1
    count: 4
  net:
    width: {type: int, minval: 8, maxval: 64, count: 3}
    act:
      type: categorical
      vals: [relu, tanh]
  dropout:
    type: double
    minval: 0
    maxval: 0.5
    count: 2
  decay:
    type: const
    val: 1e-4
  global_batch_size: 64
searcher:
  name: adaptive_asha
  metric: accuracy
  smaller_is_better: false
  max_length:
    epochs: 20
  max_trials: 16
  max_concurrent_trials: 2
  mode: standard
  divisor: 4
  max_rungs: 3
  bracket_rungs: [3, 2]
  source_trial_id: 7
resources:
  slots_per_trial: 2
  cluster: local
max_restarts: 3
min_validation_period: {epochs: 1}
min_checkpoint_period:
  batches: 100
checkpoint_policy: all
perform_initial_validation: true
checkpoint_storage:
  type: shared_fs
  host_path: /data
  storage_path: digits
  save_experiment_best: 1
  save_trial_best: 2
  save_trial_latest: 3
data:
  folder: /data/digits
reproducibility:
  experiment_seed: 42
environment:
  environment_variables:
    - OMP_NUM_THREADS=1
    - EMPTY=
optimizations:
  aggregation_frequency: 2
profiling:
  enabled: true
"""

GRID = """\
# grid.yaml
entrypoint_script: python3 train.py
hyperparameters:
    global_batch_size:
        type: categorical
        vals: [16, 32, 64]
searcher:
    name: "grid"
    max_length:
        epochs: 20
"""

PBT = """\
entrypoint: [python3, train.py]
hyperparameters:
  lr: {type: log, minval: -4, maxval: -1}
searcher:
  name: pbt
  metric: loss
  time_metric: batches
  max_time: 1000
  population_size: 8
  num_rounds: 4
  truncate_fraction: 0.25
  perturb_factors: [0.5, 2]
  resample_probability: 0.1
checkpoint_storage:
  type: s3
  bucket: models
  prefix: digits/
"""

INFERENCE = """\
# batch_inference.yaml
entrypoint_script: python3 batch_inference.py
data:
    trial_id: 777
    batch_size: 64
resources:
    slots: 8
"""


def read(text: str, *overrides: str, **options: Any) -> ExperimentConfig:
    return read_experiment(parse_config(text, "experiment.yaml"), overrides, **options)


def refusals(text: str, *overrides: str, **options: Any) -> list[str]:
    with pytest.raises(ConfigErrors) as caught:
        read(text, *overrides, **options)
    return caught.value.problems


def test_a_file_is_read_into_its_settings() -> None:
    config = read(FULL)
    assert (config.name, config.description, config.labels) == ("digits", "a small network", ["demo", "2"])
    assert (config.project, config.workspace) == ("vision", "home")
    assert config.entrypoint == ["python3", "-u", "train.py", "--data", "my data"]
    assert (config.slots, config.cluster, config.max_restarts) == (2, "local", 3)
    assert (config.min_validation_period, config.min_checkpoint_period) == (Epochs(1), Batches(100))
    assert (config.checkpoint_policy, config.perform_initial_validation) == ("all", True)
    assert config.checkpoint_storage == StorageConfig(Path("/data/digits"), None, 1, 2, 3)
    assert (config.data, config.seed, config.profiling) == ({"folder": "/data/digits"}, 42, True)
    assert config.environment == {"OMP_NUM_THREADS": "1", "EMPTY": ""}
    assert config.hyperparameters == parse_config(FULL)["hyperparameters"]
    searcher = config.searcher
    assert (searcher.name, searcher.metric, searcher.smaller_is_better) == ("adaptive_asha", "accuracy", False)
    assert (searcher.max_length, searcher.time_metric, searcher.source_trial_id) == (Epochs(20), "epochs", 7)
    assert searcher.options == {
        "max_trials": 16,
        "max_concurrent_trials": 2,
        "max_time": 20,
        "divisor": 4,
        "sampler": "random",
        "mode": "standard",
        "max_rungs": 3,
        "bracket_rungs": [3, 2],
    }


def test_missing_keys_have_their_defaults() -> None:
    config = read("{entrypoint: python3 train.py, searcher: {name: single, metric: loss}}")
    assert (config.name, config.labels, config.slots, config.cluster) == ("experiment", [], 1, None)
    assert (config.max_restarts, config.seed, config.checkpoint_policy) == (5, 0, "best")
    assert (config.min_validation_period, config.min_checkpoint_period) == (Batches(0), Batches(0))
    assert config.checkpoint_storage == StorageConfig(None, None, 0, 1, 1)
    assert (config.data, config.environment, config.profiling) == ({}, {}, False)


def test_defaults_are_not_shared() -> None:
    first, second = (read("{entrypoint: a b, searcher: {name: single, metric: loss}}") for _ in range(2))
    first.data["x"] = 1
    first.labels.append("x")
    assert (second.data, second.labels) == ({}, [])


def test_a_null_value_equals_a_missing_key() -> None:
    config = read("{entrypoint: a b, data: , resources: null, searcher: {name: single, metric: loss, max_length: }}")
    assert (config.data, config.slots, config.searcher.max_length) == ({}, 1, None)
    assert config.raw == {"name": "experiment", "entrypoint": "a b", "searcher": {"name": "single", "metric": "loss"}}


def test_an_experiment_is_named_after_its_file(tmp_path: Path) -> None:
    path = tmp_path / "const.yaml"
    path.write_text("{entrypoint: a b, searcher: {name: single, metric: loss}}")
    assert read_experiment(path).name == "const"
    assert read_experiment(path).raw["name"] == "const"


def test_a_missing_file_raises_a_one_sentence_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: cannot be read: No such file or directory"):
        read_experiment(tmp_path / "none.yaml")


def test_a_searcher_that_compares_trials_requires_a_metric() -> None:
    assert refusals(GRID, "searcher.name=tpe", "searcher.max_trials=4") == [
        "experiment.yaml:7:1: searcher.metric: missing: the validation metric that trials are compared by, such as "
        "validation_loss"
    ]


@pytest.mark.parametrize(("overrides", "metric"), [((), ""), (("searcher.metric=loss",), "loss")])
def test_the_grid_of_the_seed_document_is_read_as_printed(overrides: tuple[str, ...], metric: str) -> None:
    config = read(GRID, *overrides)
    assert config.searcher.metric == metric
    searcher = make_searcher(config.searcher, Space(config.hyperparameters), config.seed)
    sizes = [searcher.suggest(STUDY, number) for number in range(4)]
    assert [size and size.params for size in sizes] == [{"global_batch_size": size} for size in (16, 32, 64)] + [None]
    assert config.searcher.max_length == Epochs(20)
    assert config.raw["searcher"]["max_length"] == {"epochs": 20}


def test_the_job_of_the_seed_document_needs_no_searcher() -> None:
    config = read(INFERENCE, kind="job")
    assert config.entrypoint == ["python3", "batch_inference.py"]
    assert (config.slots, config.data) == (8, {"trial_id": 777, "batch_size": 64})


def test_the_configuration_of_a_trial_is_plain_and_can_be_read_again() -> None:
    config = read(FULL, "searcher.max_length=30", "min_validation_period=5", "optimizations.aggregation_frequency=1e1")
    raw = json.loads(json.dumps(config.raw))
    assert raw == config.raw
    assert raw["searcher"]["max_length"] == {"batches": 30}
    assert raw["min_validation_period"] == {"batches": 5}
    assert raw["optimizations"]["aggregation_frequency"] == 10
    again = read_experiment(raw)
    assert again == config


def test_constants_are_read_as_in_a_single_run() -> None:
    constants = "hyperparameters: {a: 1, b: {c: {type: const, val: [1]}}}"
    text = f"{{entrypoint: a b, {constants}, searcher: {{name: single, metric: x}}}}"
    config = read(text)
    assert Space(config.hyperparameters).hparams({}) == hyperparameters(parse_config(text))


@pytest.mark.parametrize(
    ("storage", "expected"),
    [
        ("some/folder", StorageConfig(Path("some/folder"))),
        ("s3://bucket/models", StorageConfig(url="s3://bucket/models")),
        ("{host_path: /data}", StorageConfig(Path("/data"))),
        ("{type: directory, container_path: /data}", StorageConfig(Path("/data"))),
        ("{type: s3, bucket: b, prefix: /a/b/}", StorageConfig(url="s3://b/a/b")),
        ("{type: gcs, bucket: b}", StorageConfig(url="gs://b")),
        ("{type: azure, container: c}", StorageConfig(url="az://c")),
        ("{type: url, url: 'memory://x', save_trial_best: 0}", StorageConfig(url="memory://x", save_trial_best=0)),
        ("{save_trial_latest: 5}", StorageConfig(save_trial_latest=5)),
    ],
)
def test_checkpoint_storage_has_several_kinds(storage: str, expected: StorageConfig) -> None:
    text = f"{{entrypoint: a b, checkpoint_storage: {storage}, searcher: {{name: single, metric: loss}}}}"
    assert read(text).checkpoint_storage == expected


def test_environment_variables_may_be_a_mapping() -> None:
    environment = "environment: {environment_variables: {A: text, B: 1, C: true, D: 0.5}}"
    text = f"{{entrypoint: a b, {environment}, searcher: {{name: single, metric: x}}}}"
    assert read(text).environment == {"A": "text", "B": "1", "C": "true", "D": "0.5"}


# Settings of the command line


def test_a_command_line_setting_is_parsed_as_in_a_file() -> None:
    config = read(
        FULL, "searcher.max_trials=4", "name='7'", "data.sizes=[1, 2]", "hyperparameters.lr=0.1", "labels=", "data.x= a"
    )
    assert (config.searcher.options["max_trials"], config.name, config.labels) == (4, "7", [])
    assert config.data == {"folder": "/data/digits", "sizes": [1, 2], "x": "a"}
    assert config.hyperparameters["lr"] == 0.1
    assert config.raw["searcher"]["max_trials"] == 4


def test_a_setting_may_create_a_section() -> None:
    assert read(GRID, "searcher.metric=loss", "resources.slots_per_trial=3").slots == 3


def test_the_given_configuration_is_not_changed() -> None:
    given = parse_config(FULL)
    read_experiment(given, ["searcher.max_trials=4"])
    assert given == parse_config(FULL)


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        ("searcher.max_trials", "expected a setting such as section.key=4, got 'searcher.max_trials'"),
        ("=3", "expected a setting such as section.key=4, got '=3'"),
        ("a..b=3", "expected a setting such as section.key=4, got 'a..b=3'"),
        ("name=[", "expected a value such as 4, relu or [1, 2], got '[': quote it"),
        ("name=a: b", "expected a value such as 4, relu or [1, 2], got 'a: b': quote it"),
        ("name=1\nlabels: 3", "expected a value such as 4, relu or [1, 2], got '1\\nlabels: 3': quote it"),
        ("name.first=1", "expected name to be 'key: value' lines, got 'digits'"),
        ("searcher.max_trials=0", "expected a whole number of at least 1, got 0"),
        ("searcher.max_trails=4", "unknown key: did you mean 'max_trials'?"),
        ("searcher={name: random, metric: x}", "searcher.max_trials: missing: how many trials to run"),
    ],
)
def test_a_mistake_in_a_setting_names_the_setting(setting: str, problem: str) -> None:
    (found,) = refusals(FULL, setting)
    assert found.startswith(f"{setting}: {problem}")


# Mistakes


def test_all_mistakes_are_reported_at_once_with_their_places() -> None:
    text = """\
entrypiont: python3 train.py
hyperparameters:
  lr: {type: double, minval: 0}
searcher:
  name: random
  metric: loss
  max_trials: many
resources:
  slots_per_trial: -1
"""
    assert [problem.split(" (known")[0] for problem in refusals(text)] == [
        "experiment.yaml:1:1: entrypiont: unknown key: did you mean 'entrypoint'?",
        "experiment.yaml:9:3: resources.slots_per_trial: expected a whole number from 0 to 4096, got -1",
        "experiment.yaml:3:3: hyperparameters.lr.maxval: missing",
        "experiment.yaml:7:3: searcher.max_trials: expected a whole number of at least 1, got 'many'",
        "experiment.yaml:1:1: entrypoint: missing: the command of a trial, such as python3 train.py",
    ]


def test_one_error_contains_all_mistakes() -> None:
    with pytest.raises(ConfigError) as caught:
        read("{nam: 1, max_restarts: x}")
    assert str(caught.value).count("\n") == 3


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (
            "entrypoint: model_def:MyTrial",
            "searcher.max_length: missing: how long a trial of model_def:MyTrial trains, such as {epochs: 10}",
        ),
        ("entrypoint: python3 -m determined.launch.horovod a.py", "there is no determined.launch.horovod here), got"),
        ("entrypoint: 'python3 \"train.py'", "expected a command (no closing quotation), got"),
        ("entrypoint: []", "expected a command such as python3 train.py, or a trial class such as model_def:MyTrial,"),
        ("entrypoint: [python3, 3]", "expected text as item 2, got ['python3', 3]"),
        ("max_restarts: -1", "expected a whole number of at least 0, got -1"),
        ("max_restarts: true", "expected a whole number of at least 0, got True"),
        ("perform_initial_validation: 1", "expected true or false, got 1"),
        ("checkpoint_policy: bets", "expected one of best, all, none (did you mean 'best'?), got 'bets'"),
        ("min_validation_period: {epoch: 1}", "expected one of epochs, batches, records and updates with a whole "),
        ("min_validation_period: {epochs: [1]}", "expected one of epochs, batches, records and updates with a whole "),
        ("searcher: grid", "expected 'key: value' lines, got 'grid'"),
        ("labels: demo", "expected a list, got 'demo'"),
        ("data: 3", "expected 'key: value' lines, got 3"),
        ("environment: {environment_variables: [A]}", "expected items such as NAME=value, got ['A']"),
        ("environment: {environment_variables: {A B: 1}}", "expected names of letters, digits and _, not 'A B',"),
        ("checkpoint_storage: {type: s4}", "expected one of shared_fs, directory, s3, gcs, azure, url"),
        ("checkpoint_storage: {type: s3}", "missing"),
        (
            "checkpoint_storage: {host_path: /a, storage_path: ../b}",
            "expected a folder inside of host_path, got '../b'",
        ),
        ("resources: {slots: 1, slots_per_trial: 1}", "the same as slots_per_trial: expected one of them, got both"),
        ("reproducibility: {experiment_seed: -1}", "expected a whole number from 0 to 4294967295, got -1"),
        ("max_restarts: 1e400", "expected a number that fits a float"),
    ],
)
def test_each_mistake_raises_a_one_sentence_error(line: str, sentence: str) -> None:
    lines = {"entrypoint": "entrypoint: a b", "searcher": "searcher: {name: single, metric: x}"}
    lines[line.partition(":")[0]] = line
    with pytest.raises(ConfigError) as caught:
        read("\n".join(lines.values()))
    (problem,) = str(caught.value).splitlines()
    assert sentence in problem


def test_both_spellings_of_the_command_together_are_rejected() -> None:
    text = "{entrypoint: a b, entrypoint_script: a b, searcher: {name: single, metric: loss}}"
    (problem,) = refusals(text)
    assert problem.startswith("experiment.yaml:1:19: entrypoint_script: the same as entrypoint")


@pytest.mark.parametrize("key", ["slots_per_trial", "slots"])
def test_zero_slots_mean_one_process_without_graphics_cards(key: str) -> None:
    config = read(f"{{entrypoint: a b, resources: {{{key}: 0}}, searcher: {{name: single, metric: loss}}}}")
    assert (config.slots, config.environment) == (1, NO_CARDS)
    one = read(f"{{entrypoint: a b, resources: {{{key}: 1}}, searcher: {{name: single, metric: loss}}}}")
    assert (one.slots, one.environment) == (1, {})


def test_a_grid_without_a_count_is_reported_at_the_range() -> None:
    text = (
        "entrypoint: a b\nhyperparameters:\n  n: {type: int, minval: 1, maxval: 2}\nsearcher: {name: grid, metric: x}"
    )
    (problem,) = refusals(text)
    assert problem.startswith("experiment.yaml:3:3: hyperparameters.n: a grid needs 'count'")


CLASS = """\
entrypoint: model_def:MyTrial
searcher:
  name: single
  metric: loss
  max_length: {epochs: 3}
"""


def test_a_trial_class_is_an_entrypoint_and_reads_its_scheduling_unit() -> None:
    config = read(f"{CLASS}scheduling_unit: 10\n")
    assert config.entrypoint == ["model_def:MyTrial"]
    assert config.raw["scheduling_unit"] == 10
    assert refusals(f"{CLASS}scheduling_unit: 0\n") == [
        "experiment.yaml:6:1: scheduling_unit: expected a whole number of at least 1, got 0"
    ]


def test_a_trial_class_is_searched_in_the_code_folder(tmp_path: Path) -> None:
    (tmp_path / "model_def.py").write_text("class MyTrail: pass\n")
    (problem,) = refusals(CLASS, context_dir=tmp_path)
    assert problem == (
        "experiment.yaml:1:1: entrypoint: unknown class of an entrypoint in model_def.py 'MyTrial': "
        "did you mean 'MyTrail'? (known: MyTrail)"
    )


@pytest.mark.parametrize(
    ("searcher", "is_enough"),
    [
        ("{name: random, max_trials: 2, max_length: 100}", True),
        ("{name: random, max_trials: 2}", False),
        ("{name: async_halving, metric: a, num_rungs: 2, max_trials: 2, max_time: 8, time_metric: epochs}", True),
        ("{name: async_halving, metric: a, num_rungs: 2, max_trials: 2, max_time: 8, time_metric: hours}", False),
    ],
)
def test_a_trial_class_requires_a_length(searcher: str, is_enough: bool) -> None:
    text = f"entrypoint: model_def:MyTrial\nsearcher: {searcher}\nmin_validation_period: {{epochs: 1}}\n"
    if is_enough:
        assert read(text).entrypoint == ["model_def:MyTrial"]
    else:
        (problem,) = refusals(text)
        assert problem.startswith("experiment.yaml:2:1: searcher.max_length: missing: how long a trial of model_def:My")


def test_a_search_that_cannot_stop_class_trials_early_warns() -> None:
    searcher = "{name: adaptive_asha, metric: a, max_trials: 2, max_length: {epochs: 8}}"
    text = f"entrypoint: model_def:MyTrial\nsearcher: {searcher}\n"
    with pytest.warns(UserWarning, match="min_validation_period: missing, so trials of model_def:MyTrial valid"):
        read(text)
    # Warnings are errors.
    read(f"{text}min_validation_period: {{epochs: 1}}\n")
    read(text.replace("model_def:MyTrial", "python3 train.py"))


def test_a_job_rejects_a_trial_class() -> None:
    (problem,) = refusals("entrypoint: model_def:MyTrial", kind="job")
    assert problem == (
        "experiment.yaml:1:1: entrypoint: expected a command such as python3 predict.py: a job does not train "
        "model_def:MyTrial"
    )


def test_unsupported_determined_keys_are_listed_in_one_warning() -> None:
    text = """\
entrypoint: a b
scheduling_unit: 100
resources: {resource_pool: big, slots_per_trial: 2}
searcher: {name: single, metric: loss, source_checkpoint_uuid: x}
checkpoint_storage: {type: shared_fs, host_path: /a, propagation: rprivate}
"""
    with pytest.warns(UserWarning, match="are ignored") as caught:
        assert read(text).slots == 2
    assert [str(warning.message) for warning in caught] == [
        "keys without an effect here are ignored: scheduling_unit, resources.resource_pool, "
        "searcher.source_checkpoint_uuid, checkpoint_storage.propagation"
    ]


def test_keys_without_effect_in_a_job_are_ignored_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="are ignored: searcher"):
        read("{entrypoint: a b, searcher: {name: nonsense}}", kind="job")


# Files that were changed at random

KNOWN = {
    *schema._TRIAL_KEYS,
    *(name for keys in (*schema._SECTIONS.values(), *schema._STORAGES.values()) for name in keys),
    *schema._RETENTION,
    *COMMON,
    *(name for known in searchers.names() for name in searchers.get(known).options),
    *("type", "base", "minval", "maxval", "count", "vals", "val"),
}
KEY = re.compile(r"^( *)([a-z_]+):")
VALUES = ["", "3", "-1", "0", "1e3", "2.5", ".nan", ".inf", "true", "text", "[]", "{}", "[1, {a: 2}]", "{a: {b: c}}"]
VALUES += ["'", "!!python/object:os.system x", "*x", "&x", "9" * 99, "log", "grid", "cmaes", "{epochs: 3}", "\x00", "é"]


def misspelt(key: str, chance: random.Random) -> str:
    """Return a key with one letter lost, doubled or exchanged, that is no other key."""
    while True:
        at = chance.randrange(len(key) - 1)
        found = chance.choice(
            [key[:at] + key[at + 1 :], key[: at + 1] + key[at:], key[:at] + key[at + 1] + key[at] + key[at + 2 :]]
        )
        if found != key and found not in KNOWN:
            return found


def mutated(text: str, chance: random.Random) -> tuple[str, int | None]:
    """Return a file with one change, and the line of a known key that it misspells."""
    lines = text.splitlines()
    keys = [number for number, line in enumerate(lines) if (match := KEY.match(line)) and match[2] in KNOWN]
    at = chance.choice(keys)
    match = KEY.match(lines[at])
    assert match is not None
    kind = chance.choice(["misspell", "misspell", "value", "value", "delete", "duplicate", "indent", "noise", "cut"])
    if kind == "misspell":
        lines[at] = f"{match[1]}{misspelt(match[2], chance)}:{lines[at][match.end() :]}"
        return "\n".join(lines), at + 1
    if kind == "value":
        lines[at] = f"{match[0]} {chance.choice(VALUES)}"
    elif kind == "delete":
        del lines[at : at + chance.randint(1, 3)]
    elif kind == "duplicate":
        lines.insert(chance.randrange(len(lines)), lines[at])
    elif kind == "indent":
        lines[at] = " " * chance.randint(0, 6) + lines[at].strip()
    else:
        whole, where = "\n".join(lines), chance.randrange(len(text))
        noise = "".join(chance.choice(" \n\t:{}[],'\"#&*!|>%@-abc09é\x00\ud800") for _ in range(chance.randint(1, 6)))
        return (whole[:where] + noise + whole[where:] if kind == "noise" else whole[:where]), None
    return "\n".join(lines), None


def try_mutations(seeds: range) -> int:
    """Read files with one change each, and return how many of them were refused."""
    texts = [(FULL, "trial"), (GRID + "    metric: loss\n", "trial"), (PBT, "trial"), (INFERENCE, "job")]
    refused = 0
    for seed in seeds:
        chance = random.Random(seed)
        text, kind = texts[seed % len(texts)]
        changed, line = mutated(text, chance)
        try:
            config = read(changed, kind=kind)
            make_searcher(config.searcher, Space(config.hyperparameters), config.seed)
            json.dumps(config.raw)
            assert line is None, f"a misspelt key was taken, seed {seed}"
        except ConfigError as error:
            refused += 1
            problems = str(error).splitlines()
            assert all(problem.startswith("experiment.yaml:") for problem in problems), seed
            if line is not None:
                assert any(
                    problem.startswith(f"experiment.yaml:{line}:") and "unknown key" in problem for problem in problems
                ), seed
    return refused


@pytest.mark.full_size
@pytest.mark.filterwarnings("ignore:keys without an effect here")
@pytest.mark.filterwarnings("ignore:pbt. a truncate_fraction of")
def test_random_invalid_files_raise_only_configuration_errors() -> None:
    # All of them take seconds: `DOVETAIL_TORTURE=1`.
    count = 5000 if os.environ.get("DOVETAIL_TORTURE") == "1" else 1000
    assert try_mutations(range(count)) > count // 2


def test_the_unmodified_files_are_valid() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for text in (FULL, GRID + "    metric: loss\n", PBT):
            read(text)
