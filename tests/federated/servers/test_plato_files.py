"""Keys of plato's files: those with a counterpart are read, the others are named once."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

from dovetail.checks import ConfigErrors
from dovetail.errors import ConfigError
from dovetail.federated.algorithms.fedasync import FedAsync
from dovetail.federated.algorithms.fedper import FedPer
from dovetail.federated.algorithms.fedprox import FedProx
from dovetail.federated.config import FederatedConfig
from dovetail.federated.data.partition import Partition
from dovetail.federated.data.shrinking import shrunk
from dovetail.federated.selection import AFLSelection, OortSelection
from dovetail.federated.servers.building import federation
from dovetail.federated.servers.plato_files import NOT_SUPPORTED
from dovetail.federated.servers.reading import read_federated
from dovetail.federated.servers.results import rows_of
from dovetail.federated.servers.schema import SECTIONS

SMALL: dict[str, Any] = {"clients": {"total_clients": 4, "per_round": 2}, "trainer": {"rounds": 1}}


def read(values: dict[str, Any]) -> tuple[FederatedConfig, list[str]]:
    """Return the configuration, and the warnings of reading it."""
    with warnings.catch_warnings(record=True) as reported:
        warnings.simplefilter("always")
        config = read_federated(values)
    return config, [str(it.message) for it in reported]


def server_of(values: dict[str, Any]) -> Any:
    config, _ = read(values)
    return federation(config)[0]


def test_included_files_are_read_and_their_errors_have_places(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "digits.yml").write_text("datasource: digits\nsampler: iid\n", encoding="utf-8")
    file = tmp_path / "config.yml"
    file.write_text("data:\n    # the data\n    !include parts/digits.yml\ntrainer:\n    rounds: 3\n", encoding="utf-8")
    config = read_federated(file)
    assert (config.data.sampler, config.trainer.rounds) == ("iid", 3)
    (tmp_path / "parts" / "digits.yml").write_text("datasource: digits\nsampler: idi\n", encoding="utf-8")
    with pytest.raises(ConfigErrors, match=r"parts/digits\.yml:2:1: data\.sampler: unknown .*did you mean 'iid'"):
        read_federated(file)


def test_the_keys_of_fedasync_choose_fedasync() -> None:
    weighting = {"type": "Hinge", "a": 10, "b": 4}
    keys = {"synchronous": False, "mixing_hyperparameter": 0.5, "adaptive_mixing": True}
    values = {"server": {**keys, "staleness_weighting_function": weighting}, "algorithm": {"type": "fedavg"}}
    config, reported = read(values)
    assert config.algorithm.type == "fedasync"
    assert reported == [
        "as in plato's program for this file: server.mixing_hyperparameter chooses the algorithm fedasync"
    ]
    algorithm = federation(config)[0].algorithm
    assert isinstance(algorithm, FedAsync)
    assert algorithm.mixing(staleness=5) == 0.5 / 11


def test_the_constant_of_the_proximal_term_chooses_fedprox() -> None:
    server = server_of({"clients": {"proximal_term_penalty_constant": 0.5}})
    assert isinstance(server.algorithm, FedProx)
    assert server.algorithm.mu == 0.5


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"epsilon": 1.0, "magnitude": 0.0}, "fedatt"),
        ({"alpha_coef": 0.01}, "feddyn"),
        ({"a": 0.1, "mu": 0.001}, "fedmos"),
        ({"adaptive_alpha": True, "alpha": 0.2}, "apfl"),
        ({"ditto_lambda": 0.1}, "ditto"),
    ],
)
def test_the_keys_of_one_algorithm_choose_this_algorithm(options: dict[str, Any], name: str) -> None:
    config, reported = read({"algorithm": {"type": "fedavg", **options}})
    assert config.algorithm.type == name
    assert reported == [f"as in plato's program for this file: algorithm.{_first(name)} chooses the algorithm {name}"]
    federation(config)


def _first(name: str) -> str:
    keys = {"fedatt": "magnitude", "feddyn": "alpha_coef", "fedmos": "a", "apfl": "adaptive_alpha"}
    return keys.get(name, "ditto_lambda")


def test_the_keys_of_oort_and_of_afl_choose_the_selection() -> None:
    keys = {"desired_duration": 50, "exploration_factor": 0.8, "step_window": 2, "penalty": 3, "blacklist_num": 7}
    oort = server_of({"server": {**keys, "random_seed": 5}}).selection
    assert vars(oort) == vars(
        OortSelection(5, exploration=0.8, step_window=2, penalty=3.0, pacer_step=50.0, blacklist_rounds=7)
    )
    afl = server_of({"algorithm": {"alpha1": 0.5, "alpha2": 0.02, "alpha3": 0.2}}).selection
    assert vars(afl) == vars(AFLSelection(1, alpha1=0.5, alpha2=0.02, alpha3=0.2))


def test_a_selection_accepts_arguments() -> None:
    server = server_of({"server": {"selection": {"afl": {"alpha3": 0.3}}}})
    assert vars(server.selection) == vars(AFLSelection(1, alpha3=0.3))
    with pytest.raises(ConfigErrors, match=r"server\.selection\.afl\.alpha3: expected a share from 0 to 1, got 3"):
        read_federated({"server": {"selection": {"afl": {"alpha3": 3.0}}}})


def test_personalized_files_keep_layers_at_clients() -> None:
    algorithm = {"type": "fedavg_personalized", "local_layer_names": ["3"], "global_layer_names": ["1"]}
    values = {**SMALL, "algorithm": {**algorithm, "personalization": {"participating_client_ratio": 0.5, "epochs": 2}}}
    server = server_of({**values, "data": {"testset_sampler": "iid"}})
    assert isinstance(server.algorithm, FedPer)
    records = server.run()
    assert set(records[0].selected) == {1, 2} == set(server.pool)
    assert sorted(server.personalized.metrics) == [1, 2, 3, 4]


def test_personalization_methods_only_in_plato_are_named() -> None:
    values = {"algorithm": {"type": "fedavg_personalized", "personalization": {"epochs": 1, "model_name": "mlp"}}}
    config, reported = read(values)
    assert (config.algorithm.type, dict(config.algorithm.personalization)) == ("fedavg", {"epochs": 1})
    assert reported == ["keys of plato that are not supported have no effect: algorithm.personalization.model_name"]


def test_edge_servers_do_not_restrict_the_clients_of_a_round() -> None:
    personalization = {"participating_client_ratio": 0.5}
    config, _ = read({"algorithm": {"cross_silo": True, "personalization": personalization}})
    with pytest.raises(ConfigError, match="participating_client_ratio: edge servers select their clients"):
        federation(config)


def test_test_partitions_of_clients_have_a_configured_size() -> None:
    data = server_of({**SMALL, "data": {"testset_sampler": "iid", "test_partition_size": 30}})
    data.run()
    assert [len(data.datasource.test_data(it)[0]) for it in (1, 2, 3, 4)] == [30] * 4
    reported = read({"data": {"test_partition_size": 30}})[1]
    assert reported == [
        "keys of plato that are not supported have no effect: data.test_partition_size (without testset_sampler)"
    ]


def test_a_distribution_of_partition_sizes_shrinks_partitions() -> None:
    distribution = {"distribution": "uniform", "low": 0.4, "high": 0.9}
    server = server_of({**SMALL, "data": {"partition_size": 100, "partition_distribution": distribution}})
    server.run()
    sizes = [server.datasource.num_samples(client_id) for client_id in (1, 2, 3, 4)]
    assert all(40 <= size <= 90 for size in sizes)
    assert len(set(sizes)) > 1
    whole = Partition.from_lists([range(10)])
    assert shrunk(whole, {"distribution": "normal", "mean": 5.0, "high": 0.1}).sizes.tolist() == [10]
    uniform = {"distribution": "uniform", "low": 0.1}
    for wrong in ({"distribution": "zipf"}, uniform, {**uniform, "high": "x"}, {**uniform, "high": 0.0}):
        with pytest.raises(ConfigError, match="partition_distribution"):
            shrunk(whole, wrong)
        with pytest.raises(ConfigErrors, match=r"^data\.partition_distribution: "):
            read_federated({"data": {"partition_distribution": wrong}})
    with pytest.raises(ConfigErrors, match=r"^data\.test_partition_size: expected a whole number .*, got 'x'"):
        read_federated({"data": {"testset_sampler": "iid", "test_partition_size": "x"}})


def test_inverse_processors_are_part_of_their_counterparts() -> None:
    pytest.importorskip("zstandard")
    clients = {"outbound_processors": ["model_quantize", "model_compress"], "inbound_processors": ["model_decompress"]}
    server = {
        "inbound_processors": ["model_decompress", "model_dequantize"],
        "outbound_processors": ["model_compress", "unstructured_pruning"],
    }
    config, reported = read({"clients": clients, "server": server})
    assert config.clients.outbound_processors == ("model_quantize", "model_compress")
    assert config.clients.inbound_processors == ("model_compress",)
    assert reported == [
        "keys of plato that are not supported have no effect: server.outbound_processors: unstructured_pruning"
    ]
    others, _ = read({"clients": {"outbound_processors": ["model_quantize_qsgd", "compress"]}})
    assert others.clients.outbound_processors == ("model_quantize_qsgd", "compress")
    with pytest.raises(ConfigErrors, match="unknown postprocessor 'model_encrypt'"):
        read_federated({"clients": {"outbound_processors": ["model_encrypt"]}})


def test_keys_without_a_counterpart_are_named_in_one_warning() -> None:
    values = {
        "clients": {"attack_type": "LIE", "attacker_ids": [1]},
        "trainer": {"num_classes": 10},
        "algorithm": {"type": "fedavg", "attack_method": "DLG", "threshold": 0.1},
        "parameters": {"limitation": {"activated": True}},
        "results": {"types": "round, accuracy, comm_time, round_time", "plot": "round"},
    }
    config, reported = read(values)
    named = "results.types: comm_time, clients.attack_type, clients.attacker_ids, trainer.num_classes"
    more = "parameters.limitation, results.plot, algorithm.attack_method, algorithm.threshold"
    assert reported == [f"keys of plato that are not supported have no effect: {named}, {more}"]
    assert config.results.types == ("round", "accuracy", "round_time")


def test_a_key_of_another_supported_algorithm_is_still_an_error() -> None:
    with pytest.raises(ConfigErrors, match=r"algorithm\.mu: unknown key"):
        read_federated({"algorithm": {"type": "fedavg", "mu": 0.1}})


def test_an_unknown_key_is_still_an_error() -> None:
    for section, key, nearest in (("server", "sychronous", "synchronous"), ("results", "results_path", "result_path")):
        with pytest.raises(ConfigErrors, match=rf"{section}\.{key}: unknown key: did you mean '{nearest}'"):
            read_federated({section: {key: 1}})


def test_no_key_is_both_supported_and_unsupported() -> None:
    for section, keys in NOT_SUPPORTED.items():
        assert not keys & SECTIONS[section].keys(), section


def test_plato_result_columns_are_derived_from_ours() -> None:
    server = server_of({**SMALL, "trainer": {"rounds": 2}})
    records = server.run()
    rows = rows_of(records, ("round_time", "comm_overhead"))
    assert rows[0]["round_time"] + rows[1]["round_time"] == pytest.approx(records[-1].elapsed_time)
    assert rows[1]["comm_overhead"] == sum(it.bytes_down + it.bytes_up for it in records) / 2**20


def test_a_private_trainer_spends_the_epsilon_of_the_file_at_every_client() -> None:
    pytest.importorskip("opacus")
    spent: dict[int, tuple[float, float]] = {}
    trainer = {"type": "diff_privacy", "epochs": 1, "batch_size": 32, "rounds": 1}
    private = {"dp_epsilon": 5.0, "dp_delta": 1e-5, "dp_max_grad_norm": 0.5, "max_physical_batch_size": 128}
    data = {"sampler": "sample_quantity_noniid"}
    values = {"clients": {"total_clients": 3, "per_round": 3}, "data": data, "trainer": {**trainer, **private}}
    config, reported = read(values)
    assert reported == ["keys of plato that are not supported have no effect: trainer.max_physical_batch_size"]
    server, client = federation(config)
    server.prepare(client)
    worker: Any = server.worker

    def customize_report(report: Any) -> Any:
        trained = worker.trainer
        spent[report.client_id] = trained.epsilon, trained.noise_multiplier
        assert trained.max_grad_norm == 0.5
        return report

    worker.customize_report, worker._customizes = customize_report, True
    server.run()
    assert sorted(spent) == [1, 2, 3]
    assert all(4.5 < epsilon <= 5.0 for epsilon, _ in spent.values())
    # Clients differ in their number of samples, so that each needs noise of another size.
    assert len({noise for _, noise in spent.values()}) == 3


def test_settings_of_privacy_without_an_epsilon_are_named() -> None:
    config, _ = read({**SMALL, "trainer": {"rounds": 1, "dp_delta": 1e-5}})
    server, client = federation(config)
    with pytest.warns(UserWarning, match=r"trainer\.dp_delta: needs dp_epsilon"):
        server.run(client)
