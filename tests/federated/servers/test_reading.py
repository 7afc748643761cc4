"""Configuration files of federations."""

from __future__ import annotations

import contextlib
import inspect
import math
import random
from pathlib import Path
from typing import Any

import pytest
import yaml

from dovetail.checks import ConfigErrors
from dovetail.errors import ConfigError
from dovetail.federated.algorithms.registry import algorithms
from dovetail.federated.config import FederatedConfig
from dovetail.federated.postprocess.registry import postprocessors
from dovetail.federated.robust import aggregators
from dovetail.federated.servers.building import federation
from dovetail.federated.servers.reading import read_federated

PLATO = """\
clients:
    type: simple
    total_clients: 100
    per_round: 10
    do_test: true
    outbound_processors: [{norm_clip: {max_norm: 1.0}}, model_compress]
server:
    synchronous: false
    minimum_clients_aggregated: 3
data:
    datasource: digits
    sampler: noniid
    concentration: 0.5
trainer:
    type: basic
    rounds: 5
    epochs: 2
    batch_size: 32
    optimizer: SGD
algorithm:
    type: fedavg
parameters:
    optimizer:
        lr: 1e-2
        momentum: 0.9
results:
    types: round, accuracy, elapsed_time
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "plato.yml"
    path.write_text(text)
    return path


def test_sections_of_plato_become_one_settings_object(tmp_path: Path) -> None:
    config = read_federated(written(tmp_path, PLATO))
    assert (config.clients.total_clients, config.clients.per_round, config.clients.do_test) == (100, 10, True)
    assert config.clients.outbound_processors == ({"norm_clip": {"max_norm": 1.0}}, "model_compress")
    assert (config.server.synchronous, config.server.minimum_clients_aggregated) == (False, 3)
    assert (config.data.sampler, dict(config.data.options)) == ("noniid", {"concentration": 0.5})
    assert config.parameters.optimizer == {"lr": 0.01, "momentum": 0.9}
    assert config.results.types == ("round", "accuracy", "elapsed_time")


def test_an_empty_configuration_has_all_defaults() -> None:
    assert read_federated({}) == FederatedConfig()


def test_all_mistakes_of_a_file_are_reported_at_once_with_their_places(tmp_path: Path) -> None:
    text = PLATO.replace("per_round", "per_rond").replace("rounds: 5", "rounds: many").replace("fedavg", "fedavgg")
    with pytest.raises(ConfigErrors) as caught:
        read_federated(written(tmp_path, text.replace("trainer:", "trainers:", 1)))
    found = [problem.removeprefix(f"{tmp_path}/") for problem in caught.value.problems]
    assert [problem.split(" (known")[0] for problem in found] == [
        "plato.yml:4:5: clients.per_rond: unknown key: did you mean 'per_round'?",
        "plato.yml:14:1: trainers: unknown key: did you mean 'trainer'?",
        "plato.yml:21:5: algorithm.type: unknown algorithm 'fedavgg': did you mean 'fedavg'?",
    ]


@pytest.mark.parametrize("key", ["inbound_processors", "outbound_processors"])
def test_an_unknown_postprocessor_is_an_error(key: str) -> None:
    with pytest.raises(ConfigErrors, match=rf"^clients\.{key}: unknown postprocessor 'qsdg': did you mean 'qsgd'\?"):
        read_federated({"clients": {key: ["zstd", {"qsdg": {}}]}})


def test_more_clients_per_round_than_clients_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigErrors, match=r"plato.yml:4:5: clients.per_round: expected at most total_clients, which is"
    ):
        read_federated(written(tmp_path, PLATO), ["clients.total_clients=5"])


def test_command_line_settings_override_the_file(tmp_path: Path) -> None:
    config = read_federated(written(tmp_path, PLATO), ["trainer.rounds=7", "data.options={min_samples: 2}"])
    assert config.trainer.rounds == 7
    assert dict(config.data.options) == {"min_samples": 2, "concentration": 0.5}


def test_an_invalid_command_line_setting_is_quoted(tmp_path: Path) -> None:
    with pytest.raises(ConfigErrors, match=r"^trainer.rounds=x: expected a whole number of at least 1"):
        read_federated(written(tmp_path, PLATO), ["trainer.rounds=x"])


def test_socket_settings_of_plato_give_one_warning(tmp_path: Path) -> None:
    text = PLATO.replace("server:", "server:\n    address: 127.0.0.1\n    port: 8000") + "general:\n    base_path: .\n"
    with pytest.warns(UserWarning, match=r"are ignored: server.address, server.port, general$"):
        read_federated(written(tmp_path, text))


def test_a_missing_file_raises_a_one_sentence_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none.yml: cannot be read: No such file"):
        read_federated(tmp_path / "none.yml")


def test_random_invalid_files_raise_only_configuration_errors(tmp_path: Path) -> None:
    rng = random.Random(0)
    lines = PLATO.splitlines()
    accepted = 0
    for _ in range(300):
        mutated = list(lines)
        place = rng.randrange(len(mutated))
        word = rng.choice(["{", "- x", "key: [", "total_clients: -3", "epochs: {a: 1}", "types: 3", ": :", "type: 1.5"])
        mutated[place] = rng.choice([word, mutated[place].replace(":", "", 1), mutated[place] + word])
        with contextlib.suppress(ConfigError):
            read_federated(written(tmp_path, "\n".join(mutated)))
            accepted += 1
    assert accepted < 100


@pytest.mark.parametrize("key", [(s, k) for s, v in yaml.safe_load(PLATO).items() for k in v])
def test_every_misspelt_key_is_reported_with_its_line(key: tuple[str, str], tmp_path: Path) -> None:
    section, name = key
    before, heading, after = PLATO.partition(f"{section}:\n")
    text = before + heading + after.replace(f"    {name}:", f"    {name}x:", 1)
    with pytest.raises(ConfigErrors) as caught:
        read_federated(written(tmp_path, text))
    line = next(number for number, it in enumerate(text.splitlines(), 1) if it.startswith(f"    {name}x:"))
    assert any(f"plato.yml:{line}:5: " in problem and f"{name}x" in problem for problem in caught.value.problems)


def test_the_model_name_chooses_the_model_without_a_type() -> None:
    assert read_federated({"trainer": {"model_name": "LeNet5"}}).trainer.model_type == "lenet5"
    assert read_federated({"trainer": {"model_name": "mlp_large"}}).trainer.model_type == "mlp"
    assert read_federated({"trainer": {"model_name": "LeNet5", "model_type": "mlp"}}).trainer.model_type == "mlp"


def test_an_unknown_model_name_raises_with_the_known_models() -> None:
    sentence = (
        r"^trainer\.model_name: it is only a label, and the default model is trained: unknown model 'lenet-5': "
        r"did you mean 'lenet5'\? \(known: cnn, .*\); give model_type for another model$"
    )
    with pytest.warns(UserWarning, match=sentence):
        assert read_federated({"trainer": {"model_name": "lenet-5"}}).trainer.model_name == "lenet-5"


WRONG = {
    "server:\n  aggregator:\n    krum: {num_attackers: x}": (
        "3:12: server.aggregator.krum.num_attackers: expected a whole number, got 'x'"
    ),
    "clients:\n  outbound_processors: [qsgd, {top_k: {ratio: '0.1'}}]": (
        "2:40: clients.outbound_processors.1.top_k.ratio: expected a number, got '0.1'"
    ),
    "clients:\n  inbound_processors: {qsgd: {levels: true}}": (
        "2:31: clients.inbound_processors.qsgd.levels: expected a whole number, got True"
    ),
    "clients:\n  outbound_processors: [{top_k: {ratio: 5}}]": (
        "2:34: clients.outbound_processors.0.top_k.ratio: expected a number above 0 and at most 1, got 5.0"
    ),
    "clients: {outbound_processors: norm_clip}": (
        "1:11: clients.outbound_processors: postprocessor 'norm_clip' needs max_norm"
    ),
    "server: {aggregator: {geometric_median: {max_iterations: 2147483648}}}": (
        "1:42: server.aggregator.geometric_median.max_iterations: expected a whole number from 1 to 100000, got"
    ),
    "algorithm: {type: fedprox, mu: x}": "1:28: algorithm.mu: expected a number, got 'x'",
    "algorithm: {type: fedprox, options: {mu: -1}}": "1:38: algorithm.options.mu: expected a number that is at least 0",
    "algorithm: {type: fedbabu, finetune: hed}": "1:28: algorithm.finetune: expected one of head, all (did you mean",
    "algorithm: {type: [fedprox, {fedadam: {tau: x}}]}": "1:40: algorithm.type.1.fedadam.tau: expected a number, got",
    "algorithm: {type: [fedprox, fedadam], mu: -1}": "1:39: algorithm.mu: expected a number that is at least 0",
    "algorithm: {type: fedasync}\nserver: {mixing_hyperparameter: 7}": (
        "2:10: server.mixing_hyperparameter: expected a number above 0 and at most 1, got 7.0"
    ),
    "algorithm: {type: fedper, local_layer_names: [1]}": (
        "1:27: algorithm.local_layer_names: expected text or a list with text as every item or null, got [1]"
    ),
    "clients: {speed_simulation: true, simulation_distribution: {distribution: pareto, alpha: -1}}": (
        "1:35: clients.simulation_distribution: a <= 0, got {'distribution': 'pareto', 'alpha': -1}"
    ),
    "server: {uplink_bandwidth: 0}": "1:10: server.uplink_bandwidth: expected a number above 0, got 0.0",
    "trainer: {model_type: mlp}\nparameters: {model: {hidden: [x]}}": (
        "2:22: parameters.model.hidden: expected a whole number as item 1, got ['x']"
    ),
    "data: {sampler: noniid, concentration: x}": "1:25: data.concentration: expected a number, got 'x'",
}


@pytest.mark.parametrize("text", WRONG)
def test_an_invalid_argument_of_a_component_is_one_sentence_with_its_place(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigErrors) as caught:
        read_federated(written(tmp_path, text))
    (problem,) = caught.value.problems
    assert problem.removeprefix(f"{tmp_path}/plato.yml:").startswith(WRONG[text])


VALUES: list[Any] = ["x", "0.1", True, None, -1, 2.5, 1e308, math.inf, math.nan, 2**60, 10**400, [], ["x"], {"a": 1}]
PIECES = {
    "postprocessor": (postprocessors, lambda name, given: {"clients": {"outbound_processors": [{name: given}]}}),
    "aggregator": (aggregators, lambda name, given: {"server": {"aggregator": {name: given}}}),
    "algorithm": (algorithms, lambda name, given: {"algorithm": {"type": name, **given}}),
}


@pytest.mark.parametrize("kind", PIECES)
def test_no_value_of_a_component_option_raises_another_error(kind: str) -> None:
    registry, config = PIECES[kind]
    for name in registry.names():  # type: ignore[attr-defined]  # a table of either kind
        for option in inspect.signature(registry.get(name)).parameters:  # type: ignore[attr-defined]
            for value in VALUES:
                with contextlib.suppress(ConfigError):
                    federation(read_federated(config(name, {option: value})))
