"""Names of other libraries, with the equivalent name or advice for an error message."""

from __future__ import annotations

from collections.abc import Mapping

_PRECISION = "for lower precision wrap the trainer, AMPTrainer(Trainer(…), precision='bf16')"
_LOADER = "give fit a DataLoader that has it"
_LAYERS = "to train in several processes wrap the trainer, DDPTrainer(Trainer(…), num_processes=2)"
_UPDATES = "give fit a length, max_length=Updates(…)"
_EPOCHS = "give fit a length, max_length=Epochs(…)"
_TENSORBOARD = "give the trainer a callback, callbacks=[Tracker(TensorBoardLogger(folder))]"
_VALIDATION = "give fit a period, validation_period=Epochs(n) or Batches(n)"
_CHECKPOINTS = "give fit a period, checkpoint_period=Epochs(n) or Batches(n)"
_OF_TRAINER = "it is an option of the trainer, Trainer(…, {}=…)"

# Keywords of constructors: the name of our option, or advice. `UnknownNameError` shows them.
OPTIONS: Mapping[str, str] = {
    "lr": "learning_rate",
    "loss": "criterion",
    "loss_fn": "criterion",
    "loss_func": "criterion",
    "optim": "optimizer",
    "opt_func": "optimizer",
    "epochs": "num_epochs",
    "max_epochs": "num_epochs",
    "num_train_epochs": "num_epochs",
    "max_steps": _UPDATES,
    "bs": "batch_size",
    "train_batch_size": "batch_size",
    "per_device_train_batch_size": "batch_size",
    "eval_batch_size": "val_batch_size",
    "per_device_eval_batch_size": "val_batch_size",
    "eval_dataset": "val_dataset",
    "validation_data": "val_dataset",
    "data_collator": "collate_fn",
    "pin_memory": _LOADER,
    "persistent_workers": _LOADER,
    "prefetch_factor": _LOADER,
    "dataloader_pin_memory": _LOADER,
    "dataloader_num_workers": "num_workers",
    "dataloader_drop_last": "drop_last",
    "compute_metrics": "metrics",
    "max_grad_norm": "gradient_clip",
    "clip_grad_norm": "gradient_clip",
    "gradient_clip_val": "gradient_clip",
    "global_clipnorm": "gradient_clip",
    "grad_clip": "gradient_clip",
    "accumulate_grad_batches": "accumulation_steps",
    "gradient_accumulation_steps": "accumulation_steps",
    "precision": _PRECISION,
    "mixed_precision": _PRECISION,
    "amp": _PRECISION,
    "use_amp": _PRECISION,
    "bf16": _PRECISION,
    "fp16": _PRECISION,
    "accelerator": "device",
    "devices": _LAYERS,
    "num_processes": _LAYERS,
    "strategy": _LAYERS,
    "torch_compile": "to compile wrap the trainer, CompiledTrainer(Trainer(…))",
    "logger": "give it as a callback, callbacks=[Tracker(…)]",
    "tb_writer": _TENSORBOARD,
    "report_to": "give it as a callback, callbacks=[Tracker(…)]",
    "log_every_n_steps": "print_every",
    "logging_steps": "print_every",
    "enable_progress_bar": "verbose",
    "output_dir": "checkpoint_dir",
    "default_root_dir": "checkpoint_dir",
    "save_steps": "save_every",
    "save_total_limit": "keep_last",
    "save_top_k": "keep_best",
    "monitor": "best_metric",
    "metric_for_best_model": "best_metric",
    "patience": "give it to a callback, callbacks=[EarlyStopping(patience=…)]",
    "resume_from_checkpoint": "give it to fit, resume='auto' or resume=path",
    "ckpt_path": "give it to fit, resume='auto' or resume=path",
    "random_state": "seed",
    "max_train_steps": _UPDATES,
    **dict.fromkeys(("limit_test_batches", "limit_predict_batches"), "give evaluate or predict fewer samples"),
    "sync_batchnorm": "give it to the layer, DDPTrainer(trainer, sync_batchnorm=True)",
    "check_val_every_n_epoch": _VALIDATION,
    "val_check_interval": _VALIDATION,
    "eval_strategy": _VALIDATION,
    "evaluation_strategy": _VALIDATION,
    "eval_steps": _VALIDATION,
    "save_strategy": _CHECKPOINTS,
    "every_n_epochs": _CHECKPOINTS,
    "every_n_train_steps": _CHECKPOINTS,
    "fast_dev_run": "try a run without effects, fit(dry_run=True)",
    "num_sanity_val_steps": "try a run without effects, fit(dry_run=True)",
    "load_best_model_at_end": "give a callback, callbacks=[EarlyStopping(restore_best=True)]",
    "lr_scheduler_type": "lr_scheduler",
    "warmup_steps": "warmup",
    "warmup_ratio": "warmup",
    "label_smoothing_factor": "give the loss, criterion=CrossEntropyLoss(label_smoothing=…)",
    "gradient_clip_algorithm": "give a callback, callbacks=[GradientClipping(max_value=…)]",
    "profiler": "give a callback, callbacks=[Profiler(folder)], or wrap the trainer, TimedTrainer(Trainer(…))",
    "num_nodes": "start the script with torchrun, and wrap the trainer, DDPTrainer(Trainer(…))",
    "detect_anomaly": "write torch.autograd.set_detect_anomaly(True) before fit",
    "deterministic": "write torch.use_deterministic_algorithms(True) before fit; seed=… fixes the random numbers",
    "benchmark": "write torch.backends.cudnn.benchmark = True before fit",
    "auto_lr_find": "write find_learning_rate(trainer)",
    "auto_scale_batch_size": "write find_batch_size(trainer)",
    "gradient_checkpointing": "call the model's own method, such as model.gradient_checkpointing_enable()",
    "logging_dir": _TENSORBOARD,
}

# Names of the classes in `dovetail.compat` that the trainer does not have.
_COMPAT: Mapping[str, str] = {
    "lernomatic.Trainer": "cur_epoch best_acc loss_history val_loss_history acc_history cur_loss cur_acc train_loader "
    "val_loader test_loader set_learning_rate set_train_dataset set_val_dataset set_test_dataset save_history "
    "load_history load_model_checkpoint get_cur_loss get_cur_acc get_val_loss_history get_acc_history "
    "get_learning_rate get_momentum set_momentum get_model set_batch_size set_num_epochs start_epoch loss_iter "
    "val_loss_iter acc_iter iter_per_epoch test_epoch get_model_params get_trainer_params set_trainer_params "
    "set_lr_scheduler get_mtm_scheduler set_mtm_scheduler get_num_epochs get_cur_epoch get_cur_epoch_loss "
    "get_cur_val_loss",
    "zae_engine.Trainer": "run toggle inference metric_on_epoch_end check_better apply_weights get_loss_history "
    "progress_checker log_train log_test train_metrics test_metrics loss_buffer weight_buffer mode scheduler logging "
    "log_reset print_log loader valid_loader valid_batch_size n_data n_valid_data",
    "plato.Trainer": "train_run_start train_run_end train_epoch_start train_epoch_end train_step_start train_step_end "
    "perform_forward_and_backward_passes process_outputs train_model test_model test set_client_id client_id "
    "run_history current_epoch current_round sampler callback_handler zeros",
    "plato.ComposableTrainer": "obtain_model_update obtain_model_at_time update_payload loss_strategy "
    "optimizer_strategy training_step_strategy lr_scheduler_strategy model_update_strategy data_loader_strategy "
    "testing_strategy",
}

# Names that are not attributes of a trainer, with the alternative.
ATTRIBUTES: Mapping[str, str] = {
    **{name: f"it is a name of dovetail.compat.{kind}" for kind, names in _COMPAT.items() for name in names.split()},
    "set_tb_writer": _TENSORBOARD,
    "tb_writer": _TENSORBOARD,
    **dict.fromkeys(("freeze_to", "unfreeze_to"), "write parameter.requires_grad_(False) for parameters of the model"),
    **dict.fromkeys(
        ("apply_lr_schedule", "apply_mtm_schedule"),
        "write self.scheduler_step('update'), once after self.context.step()",
    ),
    "run_batch": "write trainer.run(1, [batch]), or trainer.inference([batch]) for outputs alone",
    "run_epoch": "write trainer.run(1, loader)",
    **dict.fromkeys(("log", "log_dict"), "return it from the step, {'loss': loss, name: value}"),
    "manual_backward": "write self.context.backward(loss)",
    "optimizers": "read trainer.context.optimizers",
    "lr_schedulers": "read trainer.context.schedulers",
    "global_step": "read trainer.context.progress.updates",
    "callback_metrics": "read trainer.history.get_latest_metric(name)",
    "logged_metrics": "read trainer.history.get_latest_metric(name)",
    "should_stop": "write trainer.context.stop(reason)",
    "validate": "write trainer.evaluate(data)",
    "save_pretrained": "write trainer.save_model(path)",
    "web_logger": "write trainer.tracker.log({name: value}); trainer.tracker.loggers has the loggers",
    "callbacks": "write trainer.context.callbacks",
    "register": "write trainer.context.run.register(name, object)",
    "set_option": "write trainer.options.name = value",
    "reset": "write dovetail.trainers.reuse.reset(trainer)",
    "configure": "write dovetail.trainers.reuse.configure(trainer, config)",
    "equip": "write dovetail.trainers.reuse.equip(trainer, loss=…)",
}

# Methods of a LightningModule, which this library never calls.
_FOREIGN_METHODS: Mapping[str, str] = {
    "training_step": "override train_step(self, batch)",
    "validation_step": "override test_step(self, batch), or leave it out",
    "configure_optimizers": "override get_optimizer(self, model) and get_lr_scheduler(self, config, optimizer)",
    "train_dataloader": "give the loader to fit, or override get_train_loader",
    "val_dataloader": "give the loader to fit, or override get_test_loader",
}

_HOOK = "derive from dovetail.compat.{}.Trainer, or give a callback"

# Methods that a subclass for another library overrides; only the class of that library in `dovetail.compat` calls them.
HOOKS: Mapping[str, str] = {
    **{
        name: _HOOK.format("plato")
        for name in (
            "train_run_start",
            "train_run_end",
            "train_epoch_start",
            "train_epoch_end",
            "train_step_start",
            "train_step_end",
            "perform_forward_and_backward_passes",
            "process_outputs",
            "train_model",
        )
    },
    **_FOREIGN_METHODS,
    **{name: _HOOK.format("zae_engine") for name in ("metric_on_epoch_end", "check_better")},
    # Methods of a LightningModule.
    "training_step": "override train_step(batch), which returns a dict with the loss",
    "validation_step": "override test_step(batch), which returns a dict of metrics",
    "configure_optimizers": "override get_optimizer(model), or give the trainer optimizer=… and lr_scheduler=…",
    **dict.fromkeys(("train_dataloader", "val_dataloader"), "give fit the data, fit(train_data, val_data)"),
    "test_dataloader": "give evaluate the data",
    "predict_dataloader": "give predict the data",
    **{
        name: f"give the trainer a callback with {hook}"
        for name, hook in (
            ("on_train_batch_start", "on_step_start"),
            ("on_train_batch_end", "on_step_end"),
            ("on_train_epoch_start", "on_epoch_start"),
            ("on_train_epoch_end", "on_epoch_end"),
            ("on_validation_epoch_end", "on_validation_end"),
            ("training_epoch_end", "on_epoch_end"),
            ("validation_epoch_end", "on_validation_end"),
        )
    },
}

# Methods that a decorator for PyMarlin overrides, and that this library never calls.
DECORATOR_HOOKS: Mapping[str, str] = {
    "train_dl": "override train_epoch, or a verb of one batch such as train_step",
    "validate_dl": "override val_epoch or test_step",
    "process_global_step": "override clip_gradients or optimizer_step",
    "_forward_backward": "override train_step or backward",
}

# Keywords of `fit`.
FIT: Mapping[str, str] = {
    "epochs": _EPOCHS,
    "n_epochs": _EPOCHS,
    "num_epochs": _EPOCHS,
    "max_epochs": _EPOCHS,
    "max_steps": _UPDATES,
    "x": "train_data",
    "train_loader": "train_data",
    "train_dataloader": "train_data",
    "train_dataloaders": "train_data",
    "train_dataset": "train_data",
    "y": "give a pair, fit((x, y))",
    "labels": "give a pair, fit((x, y))",
    "validation_data": "val_data",
    "valid_data": "val_data",
    "val_loader": "val_data",
    "valid_loader": "val_data",
    "val_dataloaders": "val_data",
    "val_dataset": "val_data",
    "eval_dataset": "val_data",
    "validation_split": "split the data, and give the one part as val_data",
    "validation_freq": "validation_period",
    "check_val_every_n_epoch": "validation_period",
    "val_check_interval": "validation_period",
    "fast_dev_run": "dry_run",
    "datamodule": "give its loaders as train_data and val_data",
    "dataloaders": "train_data",
    "steps_per_epoch": _OF_TRAINER.format("limit_train_batches"),
    "validation_steps": _OF_TRAINER.format("limit_val_batches"),
    "class_weight": "give the loss, criterion=CrossEntropyLoss(weight=…)",
    "ckpt_path": "resume",
    "resume_from_checkpoint": "resume",
    "checkpoint": "resume",
    **{
        name: _OF_TRAINER.format(name)
        for name in (
            "batch_size",
            "callbacks",
            "learning_rate",
            "limit_train_batches",
            "limit_val_batches",
            "max_time",
            "optimizer",
            "overfit_batches",
            "seed",
            "shuffle",
            "verbose",
        )
    },
    "lr": _OF_TRAINER.format("learning_rate"),
}

# Names of losses, mostly Keras'.
LOSSES: Mapping[str, str] = {
    "categorical_crossentropy": "CrossEntropyLoss",
    "sparse_categorical_crossentropy": "CrossEntropyLoss",
    "cross_entropy": "CrossEntropyLoss",
    "binary_crossentropy": "BCEWithLogitsLoss",
    "mean_squared_error": "MSELoss",
    "mse": "MSELoss",
    "mean_absolute_error": "L1Loss",
    "mae": "L1Loss",
    "huber": "HuberLoss",
    "kl_divergence": "KLDivLoss",
    "kld": "KLDivLoss",
    "cosine_similarity": "CosineEmbeddingLoss",
    "poisson": "PoissonNLLLoss",
}

# Names of precisions in Lightning, Accelerate and Keras.
PRECISIONS: Mapping[str, str] = {
    "bf16-mixed": "bf16",
    "bfloat16": "bf16",
    "16-mixed": "fp16",
    "16": "fp16",
    "float16": "fp16",
    "half": "fp16",
    "mixed_float16": "fp16",
    "mixed_bfloat16": "bf16",
    "no": "fp32",
    "32": "fp32",
    "32-true": "fp32",
    "float32": "fp32",
}

# Values of `resume` that are no paths.
CHECKPOINTS: Mapping[str, str] = {
    **dict.fromkeys(("last", "latest", "newest"), "resume='auto' continues from the newest one"),
    "best": "the best one is named best_<checkpoint_name>",
}

# A step of an optimizer is called an update here, for any number of batches.
INTERVALS: Mapping[str, str] = {"step": "update", "steps": "update", "iteration": "update"}


def did_you_mean(given: object, names: Mapping[str, str]) -> str:
    """Return the hint of an error message if another library accepts the value; an empty string otherwise.

    Example:
        >>> did_you_mean("bf16-mixed", PRECISIONS)
        "; did you mean 'bf16'?"
    """
    meant = names.get(str(given).lower())
    return "" if meant is None else f"; did you mean {meant!r}?"
