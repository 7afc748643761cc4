"""Translation of plato's configuration files: keys with other names here, and keys without a counterpart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dovetail.data.models import models

# Keys that plato or one of its programs reads, and that have no counterpart here. Keys that protect clients are not
# among them: a run without that protection is an error.
_NOT_SUPPORTED = {
    "clients": "accuracy_threshold adaptive attack_type attacker_ids clients_requesting_deletion "
    "data_deletion_round deleted_data_ratio delta1 delta2 delta3 do_data_tranform_logging "
    "do_final_personalization exact_retrain iteration lambada_value only_personalization "
    "pers_learning_interval pruning_amount pruning_method pruning_target simulation update_threshold",
    "server": "access_key clusters comm_simulation detector_type do_clustered_test do_optimized_clustering "
    "edge_do_test edge_downlink_bandwidth edge_uplink_bandwidth exploration_decaying_factor "
    "exploration_factor mia_eval mia_eval_round min_explore_factor minimum_edges_aggregated "
    "network_to_sync s3_bucket secret_key similarity_weight staleness_factor staleness_penalty_factor "
    "staleness_weight use_https window_size",
    "data": "anchor_classes base_coco_images_path celeba_img_size celeba_targets classes concurrent_download "
    "condition consistent_clients consistent_clients_size data_params dataname dataset_config dataset_name "
    "download_annotation_url download_splits_base_url download_test_url download_train_url download_urls "
    "download_val_url downloader image_size input_height input_width institution_class_ids "
    "multi_modal_configs num_classes num_test_examples num_train_examples num_workers partition_size "
    "reload_data split_config split_name test_partition_size test_path tiny_data tiny_data_number "
    "train_path val_dataset_name",
    "trainer": "batch_log_interval deviceID do_maintain_per_state encoder_name epoch_log_interval "
    "epoch_model_log_interval global_submodules_prefix gradient_accumulation_steps "
    "gradient_checkpointing input_dim learning_rate local_epochs lr lr_sequential_milestones "
    "max_physical_batch_size mem_usage meta_learning_rate mixed_precision momentum n_groups n_prototypes "
    "num_classes om_path pers_batch_size pers_epoch_log_interval pers_epoch_model_log_interval "
    "pers_epochs pers_optimizer personalized_model_name prediction_hidden_dim prediction_out_dim "
    "pretrained_model projection_hidden_dim projection_out_dim repeats reset_interval smog_beta "
    "smog_temperature target_accuracy_std target_perplexity_std weight_decay",
    "algorithm": "a adaptive_alpha adaptive_divergence_scale alpha alpha_coef attack_method attack_round "
    "automatic_entropy_tuning auxiliary_loss_criterions auxiliary_loss_criterions_param base "
    "batch_size beta bias_multiplier boxed class_multiplier clip compute_scale_before_round "
    "concept_name cost_fn cost_weights cut_layer data_transforms default_divergence_scale defense "
    "deterministic discrete_action_space ditto_lambda divergence_scale_tau dummy_eval "
    "encoder_layer_names epsilon feat_multiplier feat_threshold fishing gamma generation "
    "global_layer_names global_learning_rate grad_idx hidden_size high_momentum inflation_level "
    "init_data init_params initial_sync_frequency initializer_token learning_rate local_epochs "
    "local_layer_names log_interval losses_weight low_momentum lr_decay magnitude map_path "
    "match_weights max_action max_episode max_local_epochs min_action mode model_name "
    "moving_average_alpha mu n_features n_shots noise_base noise_clip noise_random_seed num_iters "
    "pattern payload_type personalization_epochs perturb_slices_num phi policy_freq policy_noise "
    "pretrained pretrained_iter prune_base prune_pct Q random_freezing random_seed rec_lr rec_optim "
    "recurrent_actor replay_seed replay_size reset_param_weights rl_episodes scale share_gradients "
    "shrink_level signed slices_num sparsity stability_threshold start_steps steps_per_episode "
    "target_class target_cls target_cls_idx target_eval tau test_step theta threshold tight_threshold "
    "total_variation train_local_first trials update_iteration use_updates victim_client what_to_teach",
    "parameters": "alpha_coef architect attack client_model distillation grid_size huggingface_token hypernet "
    "limitation lora lr_scheduler pers_optimizer personalization simulate supernet",
    "results": "cols plot rows",
}
NOT_SUPPORTED: dict[str, frozenset[str]] = {name: frozenset(keys.split()) for name, keys in _NOT_SUPPORTED.items()}

# Names of plato's processors that undo another one, which is part of that one here.
_UNDOING = {"model_decompress", "model_dequantize", "model_dequantize_qsgd", "decompress", "model_deepcopy", "base"}
_PROCESSORS_ONLY_THERE = {
    *("feature_dequantize", "feature_gaussian", "feature_laplace", "feature_quantize", "feature_unbatch"),
    *("inbound_feature_tensors", "outbound_feature_ndarrays", "structured_pruning", "unstructured_pruning"),
}
_COLUMNS_ONLY_THERE = {
    *("comm_time", "processing_time", "edge_agg_num", "local_epoch_num", "personalization_accuracy"),
    *("clusters_accuracy", "server_overhead", "model_size", "clients_accuracy_max", "clients_accuracy_min"),
}
_PERSONALIZATION_ONLY_THERE = {
    *("batch_size", "learning_rate", "loss_criterion", "lr_scheduler"),
    *("model", "model_name", "model_type", "optimizer", "pretrained_dataset"),
}
# The algorithms that plato's programs choose, and the keys that no other program has.
_BY_THEIR_KEYS = {
    "apfl": ("adaptive_alpha",),
    "ditto": ("ditto_lambda",),
    "fedatt": ("magnitude",),
    "feddyn": ("alpha_coef",),
    "fedmos": ("a", "mu"),
}
# Selections that plato's programs choose, and their keys: the section, and what each is here.
_OORT = {
    "exploration_factor": "exploration",
    "step_window": "step_window",
    "penalty": "penalty",
    "desired_duration": "pacer_step",
    "cut_off": "cutoff",
    "blacklist_num": "blacklist_rounds",
}
_AFL = {"alpha1": "alpha1", "alpha2": "alpha2", "alpha3": "alpha3"}


def translate(config: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Write the keys of plato that have a counterpart as ours, in place.

    In plato, a program chooses the algorithm or the selection, and its file has their keys under `type: fedavg`. The
    keys that only one of them has choose it here.

    Returns:
        Keys without a counterpart, and what keys have chosen: two lists for messages.

    Example:
        >>> config = {"clients": {"proximal_term_penalty_constant": 1}, "algorithm": {"type": "fedavg"}}
        >>> translate(config)
        ([], ['clients.proximal_term_penalty_constant chooses the algorithm fedprox'])
        >>> config["algorithm"]
        {'type': 'fedprox', 'mu': 1}
    """
    names = ("clients", "server", "data", "trainer", "algorithm", "parameters", "results")
    # A section of another type is a mistake, which the reader reports.
    sections = {name: config[name] for name in names if isinstance(config.get(name), dict)}
    lost: list[str] = []
    chosen: list[str] = []
    _model(sections)
    _privacy(sections)
    _personalization(sections, lost)
    _algorithm(config, sections, chosen)
    _selection(config, sections, chosen)
    # After `_algorithm` and `_selection`, which may replace the section `server` of `config`.
    _processors(config, sections, lost)
    _columns(sections, lost)
    if "test_partition_size" in (data := sections.get("data", {})) and "testset_sampler" not in data:
        del data["test_partition_size"]
        lost.append("data.test_partition_size (without testset_sampler)")
    return lost, chosen


def _model(sections: Mapping[str, dict[str, Any]]) -> None:
    """Choose the model as plato does without a `model_type`: by `model_name`, up to its first underscore."""
    trainer = sections.get("trainer", {})
    name = trainer.get("model_name")
    arguments = sections.get("parameters", {}).get("model")
    # The models of this library call this argument `classes`.
    if isinstance(arguments, dict) and "num_classes" in arguments:
        arguments["classes"] = arguments.pop("num_classes")
    if trainer.get("model_type") is not None or not isinstance(name, str):
        return
    for candidate in (name.lower(), name.lower().partition("_")[0]):
        if candidate in models.names():
            trainer["model_type"] = candidate
            return


def _privacy(sections: Mapping[str, dict[str, Any]]) -> None:
    trainer = sections.get("trainer", {})
    if trainer.get("type") == "diff_privacy":
        trainer["type"] = "composable"
        # The defaults of plato.
        trainer.setdefault("dp_epsilon", 10.0)
        trainer.setdefault("dp_delta", 1e-5)


def _personalization(sections: Mapping[str, dict[str, Any]], lost: list[str]) -> None:
    algorithm, server = sections.get("algorithm", {}), sections.get("server", {})
    is_personalized = "fedavg_personalized" in (algorithm.get("type"), server.get("type"))
    if server.get("type") in ("fedavg_personalized", "fedavg_cross_silo"):
        server["type"] = "fedavg"
    own = algorithm.get("personalization")
    if isinstance(own, dict):
        for key in [key for key in own if key in _PERSONALIZATION_ONLY_THERE]:
            del own[key]
            lost.append(f"algorithm.personalization.{key}")
    if is_personalized:
        algorithm.setdefault("personalization", {"participating_client_ratio": 1.0})
        has_layers = "local_layer_names" in algorithm or "global_layer_names" in algorithm
        if algorithm.get("type") in (None, "fedavg_personalized"):
            algorithm["type"] = "fedper" if has_layers else "fedavg"


def _algorithm(config: dict[str, Any], sections: Mapping[str, dict[str, Any]], chosen: list[str]) -> None:
    """Choose an algorithm by the keys that only it has, if the file names none or FedAvg."""
    algorithm, clients, server = (sections.get(name, {}) for name in ("algorithm", "clients", "server"))
    # A file that names another algorithm is taken literally.
    if algorithm.get("type", "fedavg") != "fedavg":
        return
    for name, keys in _BY_THEIR_KEYS.items():
        if all(key in algorithm for key in keys):
            algorithm["type"] = name
            if "alpha_coef" in keys:
                algorithm["alpha"] = algorithm.pop("alpha_coef")
            chosen.append(f"algorithm.{keys[0]} chooses the algorithm {name}")
            return
    if "proximal_term_penalty_constant" in clients:
        mu = clients.pop("proximal_term_penalty_constant")
        config["algorithm"] = algorithm | {"type": "fedprox", "mu": mu}
        chosen.append("clients.proximal_term_penalty_constant chooses the algorithm fedprox")
    elif "mixing_hyperparameter" in server:
        config["algorithm"] = algorithm | {"type": "fedasync"}
        weighting = server.get("staleness_weighting_function")
        if isinstance(weighting, dict) and isinstance(weighting.get("type"), str):
            weighting["type"] = weighting["type"].lower()
        chosen.append("server.mixing_hyperparameter chooses the algorithm fedasync")


def _selection(config: dict[str, Any], sections: Mapping[str, dict[str, Any]], chosen: list[str]) -> None:
    """Choose the selection Oort or AFL by its keys, if the file names no selection."""
    server, algorithm = sections.get("server", {}), sections.get("algorithm", {})
    if "selection" in server:
        return
    for name, section, keys, needed in (
        ("oort", server, _OORT, "desired_duration"),
        ("afl", algorithm, _AFL, "alpha1"),
    ):
        if needed in section:
            options = {ours: section.pop(key) for key, ours in keys.items() if key in section}
            config["server"] = server | {"selection": {name: options}}
            place = "server" if section is server else "algorithm"
            chosen.append(f"{place}.{needed} chooses the selection {name}")
            return


def _processors(config: dict[str, Any], sections: Mapping[str, dict[str, Any]], lost: list[str]) -> None:
    """Remove processors that undo another one, and move the processors of the server's payloads to our section."""
    server, clients = config.get("server"), sections.get("clients", {})
    if not isinstance(server, dict):
        server = {}
    found: dict[str, list[Any]] = {}
    for place, section in (("clients", clients), ("server", server)):
        for key in ("inbound_processors", "outbound_processors"):
            if not isinstance(section.get(key), list):
                continue
            names = section.pop(key) if place == "server" else section[key]
            only_there = [name for name in names if isinstance(name, str) and name in _PROCESSORS_ONLY_THERE]
            lost += [f"{place}.{key}: {name}" for name in only_there]
            found[f"{place}.{key}"] = [name for name in names if name not in only_there and not _undoes(name)]
    # plato undoes at the other end, so that a server receives what clients have encoded, and the other way round.
    for key, other in (("inbound_processors", "outbound_processors"), ("outbound_processors", "inbound_processors")):
        kept = [*found.get(f"clients.{key}", ()), *found.get(f"server.{other}", ())]
        if kept or f"clients.{key}" in found:
            clients[key] = kept
            config["clients"] = clients


def _undoes(name: Any) -> bool:
    return isinstance(name, str) and name in _UNDOING


def _columns(sections: Mapping[str, dict[str, Any]], lost: list[str]) -> None:
    results = sections.get("results", {})
    types = results.get("types")
    if isinstance(types, str):
        types = [name.strip() for name in types.split(",")]
    if not isinstance(types, list) or not all(isinstance(name, str) for name in types):
        return
    lost += [f"results.types: {name}" for name in types if name in _COLUMNS_ONLY_THERE]
    renamed = {"accuracy_std": "clients_accuracy_std", "clients_accuracy_mean": "clients_accuracy"}
    results["types"] = list(dict.fromkeys(renamed.get(name, name) for name in types if name not in _COLUMNS_ONLY_THERE))
