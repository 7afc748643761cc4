from __future__ import annotations

import copy
import json
import math
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.config import Config, hyperparameters, load_config, locate, parse_config, parse_scalar, trial_length
from dovetail.errors import ConfigError, UnknownNameError
from dovetail.units import Batches, Epochs, Records, TrainUnit

EXPERIMENT = """\
name: digits
hyperparameters:
  lr: 1e-3
  net: {width: 64, layers: [1, 2]}
searcher:
  name: single
  max_length:
    - epochs: 20
"""


def read(text: str) -> dict[str, Any]:
    return parse_config(text, "experiment.yaml")


def refusal(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read(text)
    return str(caught.value)


def test_a_file_is_read_as_its_values(tmp_path: Path) -> None:
    path = tmp_path / "experiment.yaml"
    path.write_text(EXPERIMENT + "label: Müller\n", encoding="utf-8")
    assert load_config(path) == {
        "name": "digits",
        "hyperparameters": {"lr": 0.001, "net": {"width": 64, "layers": [1, 2]}},
        "searcher": {"name": "single", "max_length": [{"epochs": 20}]},
        "label": "Müller",
    }


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("1E+2", 100.0),
        (".5", 0.5),
        ("3.", 3.0),
        ("-7", -7),
        ("+7", 7),
        ("010", 10),
        ("0x1f", 31),
        ("0o17", 15),
        ("10_000", 10_000),
        ("-.inf", -math.inf),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        # What YAML 1.1 makes booleans, dates and times of.
        ("no", "no"),
        ("on", "on"),
        ("2026-01-31", "2026-01-31"),
        ("1:30", "1:30"),
        ("'1e-3'", "1e-3"),
        ('"true"', "true"),
        ("1e", "1e"),
        ("_1", "_1"),
        ("relu", "relu"),
        ("a b", "a b"),
        ("http://host:80/", "http://host:80/"),
    ],
)
def test_a_scalar_is_read_as_yaml_1_2_reads_it(text: str, value: object) -> None:
    in_file, alone = read(f"key: {text}")["key"], parse_scalar(text)
    assert (in_file, type(in_file)) == (alone, type(alone)) == (value, type(value))


def test_nan_is_read_as_a_number() -> None:
    assert math.isnan(parse_scalar(".nan"))


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_every_float_is_read_as_python_writes_it(number: float) -> None:
    assert parse_scalar(repr(number)) == number


@pytest.mark.parametrize("text", ["a: b", "[1, 2]", "[1", "*x", "- 1", "a\n---\nb"])
def test_a_file_that_is_not_one_value_is_rejected(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^expected one value such as 1e-3, true or relu, got "):
        parse_scalar(text)


@pytest.mark.parametrize(
    ("keys", "place"),
    [
        ((), "1:1"),
        (("name",), "1:1"),
        (("hyperparameters",), "2:1"),
        (("hyperparameters", "lr"), "3:3"),
        (("hyperparameters", "net", "width"), "4:9"),
        (("hyperparameters", "net", "layers", 1), "4:32"),
        (("searcher", "max_length", 0, "epochs"), "8:7"),
        (("searcher", "metric"), "5:1"),
        (("searcher", "metric", "name"), "5:1"),
    ],
)
def test_a_key_is_found_at_its_line_and_column(keys: tuple[str | int, ...], place: str) -> None:
    assert parse_config(EXPERIMENT, "experiment.yaml").where(*keys) == f"experiment.yaml:{place}"


def test_a_copy_keeps_the_source_positions() -> None:
    config = parse_config(EXPERIMENT, "experiment.yaml")
    for same in (copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert isinstance(same, Config)
        assert (same, same.where("searcher", "name")) == (config, "experiment.yaml:6:3")


def test_the_path_is_named_as_it_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "grid.yaml").write_text("a: 1\n")
    monkeypatch.chdir(tmp_path)
    assert load_config("grid.yaml").where("a") == "grid.yaml:1:1"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "1:1: expected 'key: value' lines, got nothing"),
        ("# only a comment", "1:1: expected 'key: value' lines, got nothing"),
        ("- 1", "1:1: expected 'key: value' lines, got a list"),
        ("lr", "1:1: expected 'key: value' lines, got 'lr'"),
        ("a: 1\nb:\n  c: 1\n  c: 2", "4:3: the key 'c' occurs twice"),
        ("1: one", "1:1: expected text as a key, got 1: write '1' in quotes"),
        ("? [a]\n: 1", "1:3: expected text as a key, got something else"),
        (
            "a: !!python/name:os.system x",
            "1:4: expected a plain value, got the tag 'tag:yaml.org,2002:python/name:os.system'",
        ),
        ("a: !!str 1", "1:4: expected a plain value, got the tag 'tag:yaml.org,2002:str'"),
        ("a: !env HOME", "1:4: expected a plain value, got the tag '!env'"),
        ("!!str a: 1", "1:1: expected text as a key, got something else"),
        ("a: 1\n---\nb: 2", "2:1: expected one document, got a second one"),
        ("a: *b", "1:4: expected an anchor &b that ends before *b, got none"),
        ("a: &a [*a]", "1:8: expected an anchor &a that ends before *a, got none"),
        ("a: {<<: 3}", "1:5: expected a mapping or a list of them after '<<', got 3"),
        ("a: 1e999", "1:4: expected a number that fits a float, got 1e999; infinity is .inf"),
        ("a: " + "9" * 101, "1:4: expected a number of at most 100 digits, got 101"),
        ("a: [1", "1:6: expected ',' or ']', but got the end of the text while parsing a flow sequence"),
        ("a: b: c", "1:5: mapping values are not allowed here"),
        ("a:\n\t- b", "2:1: found character '\\t' that cannot start any token while scanning for the next token"),
        ("a: 1\nb: \x07", "2:4: the character '\\x07' is not allowed"),
    ],
)
def test_a_mistake_in_a_file_raises_one_sentence_with_its_place(text: str, sentence: str) -> None:
    assert refusal(text) == f"experiment.yaml:{sentence}"


def test_text_in_another_encoding_is_rejected_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "experiment.yaml"
    path.write_bytes("ä: 1\nb: Mü".encode() + "ü".encode("latin-1"))
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert str(caught.value) == f"{path}:2:6: expected text in UTF-8, got another encoding"


def test_a_byte_order_mark_is_not_part_of_the_first_key() -> None:
    assert read("\ufeffa: 1") == {"a": 1}


def test_a_file_that_is_too_large_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "experiment.yaml"
    path.write_bytes(b"#" * (1 << 18) + b"\na: 1")
    with pytest.raises(ConfigError, match="expected a file of at most 262144 bytes, got more"):
        load_config(path)


def test_a_missing_file_raises_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"absent\.yaml"):
        load_config(tmp_path / "absent.yaml")


def test_exponential_aliases_are_rejected() -> None:
    lines = ["a0: &a0 [x]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12))]
    assert refusal("\n".join(lines)).endswith("expected at most 10,000 keys and values, counting aliases, got more")


def test_a_file_with_too_many_keys_is_rejected_at_the_first_excess_key() -> None:
    text = "".join(f"key{number}: 1\n" for number in range(49_000))
    assert (
        refusal(text) == "experiment.yaml:5000:10: expected at most 10,000 keys and values, counting aliases, got more"
    )
    assert len(read("".join(f"key{number}: 1\n" for number in range(4_999)))) == 4_999


@pytest.mark.parametrize(
    "text",
    [
        "a: " + "[" * 5000,
        "- " * 5000,
        "\n".join(["a0: &a0 [x]", *(f"a{n}: &a{n} [*a{n - 1}]" for n in range(1, 200))]),
    ],
)
def test_nesting_that_is_too_deep_is_rejected(text: str) -> None:
    assert refusal(text).endswith("expected at most 64 levels, got more")


def test_an_alias_is_an_independent_copy() -> None:
    config = read("base: &base {layers: [1]}\ncopy: *base")
    config["copy"]["layers"].append(2)
    assert config == {"base": {"layers": [1]}, "copy": {"layers": [1, 2]}}


def test_a_merge_key_fills_in_missing_keys() -> None:
    text = "one: &one {a: 1, b: 1}\ntwo: {<<: [*one, {b: 2, c: 2}], a: 0}\nthree: {<<: *one}\nfour: {<<: []}\n'<<': 5"
    config = parse_config(text, "experiment.yaml")
    assert config["two"] == {"a": 0, "b": 1, "c": 2}
    assert (config["three"], config["four"], config["<<"]) == ({"a": 1, "b": 1}, {}, 5)
    assert config.where("two", "b") == "experiment.yaml:1:18"


TEXTS = st.text(st.characters(exclude_categories=("Cc", "Cs", "Cn", "Co", "Zl", "Zp")))
SCALARS = st.none() | st.booleans() | st.integers(-(2**64), 2**64) | st.floats(allow_nan=False, allow_infinity=False)


@given(
    st.recursive(
        SCALARS | TEXTS,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
        max_leaves=10,
    )
)
def test_json_files_are_read(value: Any) -> None:
    assert read(json.dumps({"key": value}, ensure_ascii=False)) == {"key": value}


# Hyperparameters


def test_constant_hyperparameters_are_their_values() -> None:
    config = {
        "hyperparameters": {
            "lr": 0.1,
            "layers": [1, 2],
            "width": {"type": "const", "val": 64},
            "optimizer": {"name": "adam", "betas": {"type": "const", "val": [0.9, 0.99]}},
            "type": "named type",
        }
    }
    assert hyperparameters(config) == {
        "lr": 0.1,
        "layers": [1, 2],
        "width": 64,
        "optimizer": {"name": "adam", "betas": [0.9, 0.99]},
        "type": "named type",
    }


@pytest.mark.parametrize("config", [{}, {"hyperparameters": None}, {"hyperparameters": {}}])
def test_a_configuration_without_hyperparameters_has_none(config: dict[str, Any]) -> None:
    assert hyperparameters(config) == {}


def test_changing_a_hyperparameter_does_not_change_the_configuration() -> None:
    config = {"hyperparameters": {"layers": [1]}}
    hyperparameters(config)["layers"].append(2)
    assert config == {"hyperparameters": {"layers": [1]}}


@pytest.mark.parametrize("kind", ["int", "double", "log", "categorical"])
def test_a_searched_hyperparameter_is_not_a_constant(kind: str) -> None:
    config = parse_config(f"hyperparameters:\n  net:\n    lr: {{type: {kind}}}", "experiment.yaml")
    with pytest.raises(ConfigError) as caught:
        hyperparameters(config)
    assert str(caught.value) == (
        f"experiment.yaml:3:5: hyperparameters.net.lr: type {kind!r} needs a search; a single run needs a value, such "
        "as 'lr: 1'"
    )


def test_an_unknown_type_suggests_the_nearest() -> None:
    config = parse_config("hyperparameters: {lr: {type: lgo}}", "experiment.yaml")
    with pytest.raises(UnknownNameError) as caught:
        hyperparameters(config)
    assert str(caught.value) == (
        "unknown type of hyperparameter (experiment.yaml:1:19: hyperparameters.lr) 'lgo': did you mean 'log'? "
        "(known: categorical, const, double, int, log)"
    )


@pytest.mark.parametrize(
    ("section", "sentence"),
    [
        ([1], "hyperparameters: expected 'name: value' lines, got a list"),
        ({"lr": {"type": "const"}}, "hyperparameters.lr: expected the keys 'type' and 'val' of a constant, got 'type'"),
        (
            {"lr": {"type": "const", "val": 1, "count": 2}},
            "hyperparameters.lr: expected the keys 'type' and 'val' of a constant, got 'type', 'val', 'count'",
        ),
    ],
)
def test_a_malformed_hyperparameter_is_named(section: object, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        hyperparameters({"hyperparameters": section})
    assert str(caught.value) == sentence


@pytest.mark.parametrize(
    ("searcher", "length"),
    [
        ({"max_length": {"records": 20}}, Records(20)),
        ({"max_length": 3}, Batches(3)),
        ({"time_metric": "epochs", "max_time": 2}, Epochs(2)),
        ({"max_length": {"batches": 5}, "time_metric": "epochs", "max_time": 2}, Batches(5)),
        ({"time_metric": "hours", "max_time": 2}, None),
        ({"time_metric": "epochs"}, None),
        ({}, None),
        (None, None),
    ],
)
def test_the_length_of_a_trial_is_read_from_its_searcher(searcher: object, length: TrainUnit | None) -> None:
    assert trial_length({"searcher": searcher}) == length


def test_a_length_without_a_unit_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"searcher\.max_length: expected a unit such as Epochs\(3\)"):
        trial_length({"searcher": {"max_length": "long"}})


def test_a_value_without_a_file_is_located_by_its_name() -> None:
    assert locate({"a": {"b": [1]}}, "a", "b", 0) == "a.b.0"


def test_configurations_are_read_without_torch() -> None:
    script = "import sys, dovetail.config; assert not {'torch', 'numpy'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-B", "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_file_can_include_others_of_its_folder(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "a.yml").write_text("x: 1\ny: !include b.yml\n", encoding="utf-8")
    (tmp_path / "parts" / "b.yml").write_text("- 2\n", encoding="utf-8")
    main = tmp_path / "main.yml"
    main.write_text("k: !include parts/a.yml\nm: 3\n", encoding="utf-8")
    config = load_config(main, includes=True)
    assert config == {"k": {"x": 1, "y": [2]}, "m": 3}
    places = [config.where(*keys) for keys in (("k", "x"), ("k", "y", 0), ("k",), ("m",))]
    parts = tmp_path / "parts"
    assert places == [f"{parts / 'a.yml'}:1:1", f"{parts / 'b.yml'}:1:3", f"{main}:1:1", f"{main}:2:1"]
    with pytest.raises(ConfigError, match=r"main\.yml:1:4: expected a plain value, got the tag '!include'"):
        load_config(main)


@pytest.mark.parametrize(
    ("wanted", "sentence"),
    [
        ("/etc/hostname", "expected a file below the folder of this file, got '/etc/hostname'"),
        ("../other.yml", "expected a file below the folder of this file, got '../other.yml'"),
        ("[a.yml]", "expected a file below the folder of this file, got 'nothing'"),
        ("link.yml", "'link.yml' leads out of the folder of the configuration"),
        ("pipe", "there is no file 'pipe'"),
        ("missing.yml", "there is no file 'missing.yml'"),
        ("main.yml", "'main.yml' includes itself"),
    ],
)
def test_a_path_outside_the_folder_cannot_be_included(tmp_path: Path, wanted: str, sentence: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "other.yml").write_text("x: 1\n", encoding="utf-8")
    (folder / "link.yml").symlink_to(tmp_path / "other.yml")
    os.mkfifo(folder / "pipe")
    (folder / "main.yml").write_text(f"k: 1\nm: !include {wanted}\n", encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_config(folder / "main.yml", includes=True)
    assert str(caught.value) == f"{folder / 'main.yml'}:2:4: !include: {sentence}"


def test_included_files_count_toward_every_limit(tmp_path: Path) -> None:
    for number in range(12):
        (tmp_path / f"{number}.yml").write_text(f"!include {number + 1}.yml\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"8\.yml:1:1: !include: expected at most 8 files that include each other"):
        load_config(tmp_path / "0.yml", includes=True)
    (tmp_path / "wide.yml").write_text("".join(f"k{n}: 1\n" for n in range(900)), encoding="utf-8")
    (tmp_path / "all.yml").write_text("".join(f"k{n}: !include wide.yml\n" for n in range(9)), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"all\.yml:6:5: expected at most 10,000 keys and values"):
        load_config(tmp_path / "all.yml", includes=True)
    (tmp_path / "bad.yml").write_text("a: b: c\n", encoding="utf-8")
    (tmp_path / "outer.yml").write_text("k: !include bad.yml\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"bad\.yml:1:5: "):
        load_config(tmp_path / "outer.yml", includes=True)


def test_a_plato_path_raises_with_our_location() -> None:
    with pytest.raises(ConfigError, match=r"^Config\(\): settings are no global object here; write config\['epochs'\]"):
        Config().trainer.epochs  # noqa: B018
    with pytest.raises(AttributeError, match=r"^Config has no attribute 'trainer': settings are no global object"):
        parse_config("trainer: {epochs: 1}").trainer  # noqa: B018
