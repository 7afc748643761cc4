"""Every call that the guide for users of Determined lists under "Runs unchanged" is made here."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, SequentialSampler, TensorDataset
from trials import make_data

import dovetail as det
from dovetail import core, pytorch
from dovetail.info import VARIABLE, TrialInfo, write_info

GUIDE = Path(__file__).parent.parent.parent / "docs" / "migration" / "determined.md"
HPARAMS = {"global_batch_size": 8, "lr": 0.1}
Context = pytorch.PyTorchTrialContext


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(VARIABLE, raising=False)


class Trial(pytorch.PyTorchTrial):
    """A trial as Determined's users write it; tests add what they are about."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.model = context.wrap_model(nn.Linear(6, 3).double())
        optimizer = torch.optim.SGD(self.model.parameters(), lr=context.get_hparam("lr"))
        self.optimizer = context.wrap_optimizer(optimizer)
        self.num_trained = 0

    def build_training_data_loader(self) -> Any:
        return pytorch.DataLoader(make_data(32), batch_size=self.context.get_per_slot_batch_size(), shuffle=True)

    def build_validation_data_loader(self) -> Any:
        return pytorch.DataLoader(make_data(16), batch_size=self.context.get_per_slot_batch_size())

    def loss(self, batch: Any) -> Any:
        return nn.functional.cross_entropy(self.model(batch[0]), batch[1])

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        self.num_trained += 1
        loss = self.loss(batch)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch: Any) -> dict[str, Any]:
        return {"loss": self.loss(batch)}


def fit(kind: type[Trial] = Trial, length: Any = None, **settings: Any) -> Any:
    with pytorch.init(hparams=HPARAMS) as context:
        trial = kind(context)
        pytorch.Trainer(trial, context).fit(max_length=length or pytorch.Batch(2), **settings)
    return trial


# ------------------------------------------------------------------ one check for every row, by its first name


def check_log_format() -> None:
    assert "message" in det.LOG_FORMAT
    assert issubclass(det.InvalidHP, Exception)
    assert det.TrialContext is pytorch.PyTorchTrialContext
    assert isinstance(TrialInfo(trial_id=1), det.ClusterInfo)
    assert isinstance(TrialInfo(trial_id=1), det.TrialInfo)


def check_get_cluster_info() -> None:
    info = det.get_cluster_info()
    assert info is not None
    assert (info.trial.hparams, info.trial.trial_id, info.trial.trial_seed, info.trial.experiment_id) == ({}, 4, 9, 2)
    assert (info.latest_checkpoint, info.user_data) == ("ck", {"url": "x"})
    assert (info.slot_ids, info.container_slot_counts) == ([0, 1], [2])
    assert (info.container_addrs, info.container_rank, info.task_type) == (["127.0.0.1"], 0, "TRIAL")


def check_init() -> None:
    settings: dict[str, Any] = {"aggregation_frequency": 2, "enable_tensorboard_logging": False}
    with pytorch.init(
        hparams=HPARAMS, exp_conf={"data": {"a": 1}}, distributed=core.DistributedContext(), **settings
    ) as context:
        assert context.get_data_config() == {"a": 1}
        assert not context.get_enable_tensorboard_logging()


def check_pytorch_trial() -> None:
    class Full(Trial):
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            output = super().train_batch(batch, epoch_idx, batch_idx)
            return {"loss": output["loss"].reshape(1)}

        def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:  # type: ignore[override]  # as there
            return {"last": batch_idx}

        def evaluation_reducer(self) -> Any:
            return {"last": pytorch.Reducer.MAX}

        def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
            return {}

        def get_batch_length(self, batch: Any) -> int:
            return len(batch[1])

    class Whole(Trial):
        evaluate_batch: Any = pytorch.PyTorchTrial.evaluate_batch

        def evaluate_full_dataset(self, data_loader: Any) -> dict[str, Any]:
            return {"number": len(list(data_loader))}

    for kind, expected in ((Full, {"last": 1}), (Whole, {"number": 2})):
        with pytorch.init(hparams=HPARAMS) as context:
            trainer = pytorch.Trainer(kind(context), context)
            assert trainer.fit(max_length=pytorch.Batch(1), checkpoint_policy="none") == expected
    assert {"build_training_data_loader", "build_validation_data_loader", "evaluate_full_dataset"} <= set(dir(Trial))


def check_trainer() -> None:
    with pytorch.init(hparams=HPARAMS) as context:
        trial = Trial(context)
        trainer = pytorch.Trainer(trial, context)
        trainer.fit(
            checkpoint_period=pytorch.Batch(2),
            validation_period=pytorch.Batch(2),
            max_length=pytorch.Epoch(1),
            reporting_period=pytorch.Batch(1),
            checkpoint_policy="all",
            latest_checkpoint=None,
            step_zero_validation=True,
            test_mode=True,
            profiling_enabled=False,
        )
    assert trial.num_trained == 1


def check_batch() -> None:
    assert fit(length=pytorch.Batch(3)).num_trained == 3
    assert fit(length=pytorch.Epoch(1)).num_trained == 4


def check_wrap_model() -> None:
    class Scaled(Trial):
        def __init__(self, context: Context) -> None:
            self.scaler = context.wrap_scaler(torch.amp.GradScaler("cpu", enabled=False))
            super().__init__(context)
            context.wrap_optimizer(self.optimizer, 1, fp16_compression=False, average_aggregated_gradients=True)
            scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)
            context.wrap_lr_scheduler(scheduler, pytorch.LRScheduler.StepMode.STEP_EVERY_EPOCH, frequency=1)
            assert context.wrap_model(self.model) is self.model

    with pytorch.init(hparams=HPARAMS) as context:
        Scaled(context)
    assert (len(context.models), len(context.optimizers), len(context.lr_schedulers)) == (1, 1, 1)


def check_backward() -> None:
    class Manual(Trial):
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
            loss = self.loss(batch)
            self.context.backward(loss, gradient=None, retain_graph=True, create_graph=False)
            norms: list[float] = []

            def clip(parameters: Any) -> None:
                norms.append(float(nn.utils.clip_grad_norm_(parameters, 0.01)))

            self.context.step_optimizer(self.optimizer, clip_grads=clip, auto_zero_grads=True, scaler=None)
            assert len(norms) == 1
            return {"loss": loss}

    fit(Manual)


def check_experimental() -> None:
    class Experimental(Trial):
        def __init__(self, context: Context) -> None:
            context.experimental.use_amp()
            context.experimental.disable_auto_to_device()
            context.experimental.disable_dataset_reproducibility_checks()
            super().__init__(context)
            self.model.float()

        def build_training_data_loader(self) -> Any:
            x, y = make_data(32).tensors
            return torch.utils.data.DataLoader(TensorDataset(x.float(), y), batch_size=8)

        def build_validation_data_loader(self) -> Any:
            return self.build_training_data_loader()

    assert fit(Experimental).num_trained == 2


def check_get_hparam() -> None:
    with pytorch.init(hparams=HPARAMS, exp_conf={"data": {"a": 1}}) as context:
        assert (context.get_hparam("lr"), context.get_hparams()) == (0.1, HPARAMS)
        assert (context.get_experiment_config(), context.get_data_config()) == ({"data": {"a": 1}}, {"a": 1})
        assert (context.get_global_batch_size(), context.get_per_slot_batch_size()) == (8, 8)
        assert (context.get_trial_seed(), context.get_trial_id(), context.get_experiment_id()) == (0, 0, 0)


def check_is_epoch_start() -> None:
    seen = []

    class Asking(Trial):
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
            context = self.context
            assert (context.current_train_epoch(), context.current_train_batch()) == (epoch_idx, batch_idx)
            assert context.get_initial_batch() == 0
            seen.append((context.is_epoch_start(), context.is_epoch_end()))
            return super().train_batch(batch, epoch_idx, batch_idx)

    fit(Asking, pytorch.Epoch(1))
    assert seen == [(True, False), (False, False), (False, False), (False, True)]


def check_set_stop_requested() -> None:
    class Stopping(Trial):
        def __init__(self, context: Context) -> None:
            super().__init__(context)
            context.set_stop_requested(True)
            assert context.get_stop_requested()

    assert fit(Stopping, pytorch.Epoch(1)).num_trained == 1


def check_get_tensorboard_path() -> None:
    pytest.importorskip("tensorboard")

    class Writing(Trial):
        def __init__(self, context: Context) -> None:
            super().__init__(context)
            context.set_enable_tensorboard_logging(False)
            assert not context.get_enable_tensorboard_logging()
            context.set_profiler(activities=[torch.profiler.ProfilerActivity.CPU])

        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
            self.context.get_tensorboard_writer().add_scalar("mine", 1.0, batch_idx)
            return super().train_batch(batch, epoch_idx, batch_idx)

    path = fit(Writing).context.get_tensorboard_path()
    assert any("events" in file.name for file in path.iterdir())
    assert any("trace" in file.name for file in path.iterdir())


def check_torch_writer() -> None:
    pytest.importorskip("tensorboard")
    from dovetail.tensorboard.metric_writers.pytorch import TorchWriter

    with pytest.warns(FutureWarning, match="get_tensorboard_writer"):
        writer = TorchWriter()
    writer.add_scalar("mine", 0.5, 1)
    writer.writer.add_scalar("mine", 0.5, 2)
    writer.flush()
    writer.reset()


def check_device() -> None:
    data: pytorch.TorchData = {"x": np.zeros((3, 2)), "y": [torch.ones(3)]}
    with pytorch.init(hparams=HPARAMS) as context:
        moved = context.to_device(data)
        assert moved["x"].device == context.device
    assert pytorch.data_length(pytorch.to_device(data, torch.device("cpu"), warned_types=set())) == 3


def check_data_loader() -> None:
    loader = pytorch.DataLoader(TensorDataset(torch.arange(4)), batch_size=1, drop_last=True, num_workers=0)
    share = loader.get_data_loader(repeat=False, skip=1, num_replicas=2, rank=1)
    assert [batch[0].item() for batch in share] == [3]


def check_samplers() -> None:
    samplers, source = pytorch.samplers, SequentialSampler(range(5))
    batches = BatchSampler(source, 2, drop_last=False)
    repeated: Iterator[Any] = iter(samplers.RepeatSampler(source))
    assert [next(repeated) for _ in range(7)] == [0, 1, 2, 3, 4, 0, 1]
    repeated = iter(samplers.RepeatBatchSampler(batches))
    assert [next(repeated) for _ in range(4)] == [[0, 1], [2, 3], [4], [0, 1]]
    assert list(samplers.DistributedSampler(source, num_workers=2, rank=1)) == [1, 3]
    assert list(samplers.DistributedBatchSampler(batches, num_workers=2, rank=0)) == [[0, 1], [4]]
    assert list(samplers.SkipSampler(source, skip=3)) == [3, 4]
    assert list(samplers.SkipBatchSampler(batches, skip=2)) == [[4]]


def check_pytorch_callback() -> None:
    hooks = [
        *("on_trial_startup", "on_training_start", "on_training_epoch_start", "on_training_epoch_end"),
        *("on_training_workload_end", "on_validation_start", "on_validation_epoch_start", "on_validation_epoch_end"),
        *("on_validation_end", "on_checkpoint_load_start", "on_checkpoint_save_start", "on_checkpoint_write_end"),
        *("on_checkpoint_upload_end", "on_trial_shutdown"),
    ]
    log: dict[str, Any] = {}

    def recording(name: str) -> Any:
        return lambda self, *args: log.update({name: args})

    def state_dict(self: Any) -> dict[str, Any]:
        return {"calls": len(log)}

    methods = {name: recording(name) for name in (*hooks, "load_state_dict")}
    every = type("Every", (pytorch.PyTorchCallback,), {**methods, "state_dict": state_dict})

    class Watched(Trial):
        def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
            return {"every": every()}

    fit(Watched, pytorch.Epoch(1))
    (uuid,) = log["on_checkpoint_upload_end"]
    fit(Watched, pytorch.Epoch(2), latest_checkpoint=uuid)
    assert log["on_trial_startup"] == (4, uuid)
    assert log.keys() == {*hooks, "load_state_dict"}
    assert set(hooks) == {name for name in vars(pytorch.PyTorchCallback) if name.startswith("on_")}


def check_step_mode() -> None:
    mode = pytorch.LRScheduler.StepMode
    modes = [mode.STEP_EVERY_EPOCH, mode.STEP_EVERY_BATCH, mode.MANUAL_STEP, mode.STEP_EVERY_OPTIMIZER_STEP]
    rates = []
    for each in modes:

        class Scheduled(Trial):
            step_mode = each

            def __init__(self, context: Context) -> None:
                super().__init__(context)
                scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.5)
                context.wrap_lr_scheduler(scheduler, self.step_mode)

        rates.append(fit(Scheduled, pytorch.Epoch(1)).optimizer.param_groups[0]["lr"])
    assert rates == [0.05, 0.1 / 16, 0.1, 0.1 / 16]


def check_metric_reducer() -> None:
    class Sum(pytorch.MetricReducer):
        def __init__(self) -> None:
            self.reset()

        def reset(self) -> None:
            self.total = 0

        def update(self, value: int) -> None:
            self.total += value

        def per_slot_reduce(self) -> int:
            return self.total

        def cross_slot_reduce(self, per_slot_metrics: list[int]) -> int:
            return sum(per_slot_metrics)

    class Reduced(Trial):
        def __init__(self, context: Context) -> None:
            super().__init__(context)
            self.total: Any = context.wrap_reducer(Sum(), name="total", for_training=False, for_validation=True)
            self.largest: Any = context.wrap_reducer(max, name="largest", for_training=False)

        def evaluate_batch(self, batch: Any) -> dict[str, Any]:
            self.total.update(len(batch[0]))
            self.largest.update(len(batch[0]))
            return dict.fromkeys(("avg", "sum", "max", "min"), float(len(batch[0])))

        def evaluation_reducer(self) -> Any:
            reducer = pytorch.Reducer
            return {"avg": reducer.AVG, "sum": reducer.SUM, "max": reducer.MAX, "min": reducer.MIN}

    with pytorch.init(hparams=HPARAMS) as context:
        trainer = pytorch.Trainer(Reduced(context), context)
        metrics = trainer.fit(max_length=pytorch.Batch(1), checkpoint_policy="none")
    assert metrics == {"avg": 8.0, "sum": 16.0, "max": 8.0, "min": 8.0, "total": 16, "largest": 8}


def check_core_init() -> None:
    context = core.init(
        distributed=None,
        checkpoint_storage="here",
        preempt_mode=core.PreemptMode.ChiefOnly,
        tensorboard_mode=core.TensorboardMode.MANUAL,
    )
    context.start()
    context.alert(title="slow", description="one batch took 90 s", level="warn")
    context.close()
    assert "slow" in Path("here", core.METRICS).read_text()


def check_checkpoint() -> None:
    with core.init() as context:
        checkpoint = context.checkpoint
        with checkpoint.store_path({"steps_completed": 1}, shard=False) as (path, storage_id):
            (path / "file").write_text("x")
        mode = core.DownloadMode.NoSharedDownload
        checkpoint.download(storage_id, "copy", download_mode=mode, selector=lambda name: name == "file")
        again = checkpoint.upload(ckpt_dir="copy", metadata={"steps_completed": 2}, shard=False, selector=None)
        with checkpoint.restore_path(again, core.DownloadMode.LocalWorkersShareDownload) as path:
            assert (path / "file").read_text() == "x"
        assert checkpoint.get_metadata(again) == {"steps_completed": 2}
        checkpoint.delete(again)


def check_train() -> None:
    with core.init() as context:
        train = context.train
        train.report_training_metrics(steps_completed=1, metrics={"loss": 1.0}, batch_metrics=[{"loss": 1.0}])
        train.report_validation_metrics(steps_completed=1, metrics={"loss": 1.0})
        train.report_metrics(group="mine", steps_completed=1, metrics={"loss": 1.0})
        train.report_progress(0.5)
        train.set_status("resting")
        train.report_early_exit(core.EarlyExitReason.INVALID_HP)
        assert train.set_metadata({"a": 1}) == train.get_metadata() == {"a": 1}
        assert train.get_tensorboard_path().is_dir()
        train.upload_tensorboard_files()
    assert len(core.read_metrics(Path("checkpoints", core.METRICS))) == 7


def check_preempt() -> None:
    with core.init(preempt_mode=core.PreemptMode.WorkersAskMaster) as context:
        assert not context.preempt.should_preempt(auto_ack=False)
        context.preempt.acknowledge_preemption_signal()


def check_distributed_context() -> None:
    ranks: dict[str, Any] = {"rank": 0, "size": 1, "local_rank": 0, "local_size": 1, "cross_rank": 0, "cross_size": 1}
    options: dict[str, Any] = {"chief_ip": "127.0.0.1", "pub_port": 12360, "port_offset": 1, "force_tcp": True}
    context = core.DistributedContext(**ranks, **options)
    assert context.gather(1) == context.allgather(1) == context.gather_local(1) == context.allgather_local(1) == [1]
    assert context.broadcast(1) == context.broadcast_local(1) == 1
    places = (context.get_rank(), context.get_size(), context.get_local_rank(), context.get_num_agents())
    assert places == (0, 1, 0, 1)
    # A launcher sets these.
    with pytest.MonkeyPatch.context() as environment:
        for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}.items():
            environment.setenv(name, value)
        assert core.DistributedContext.from_torch_distributed(chief_ip="127.0.0.1").rank == 1


def check_torch_batch_process() -> None:
    from dovetail.pytorch import experimental

    found: list[Any] = []

    class Processor(experimental.TorchBatchProcessor):
        def __init__(self, context: experimental.TorchBatchProcessorContext) -> None:
            self.context = context
            self.model = context.prepare_model_for_inference(nn.Linear(2, 1))
            self.total: Any = context.wrap_reducer(sum, name="total")

        def process_batch(self, batch: Any, batch_idx: int) -> None:
            context = self.context
            assert self.model(context.to_device(batch[0])).device == context.device
            self.total.update(len(batch[0]))
            context.report_metrics("mine", batch_idx, {"samples": len(batch[0])})
            with context.upload_path() as path:
                (path / "file").write_text("x")
            found.append((context.get_distributed_rank(), context.get_distributed_size(), context.get_hparams()))
            assert context.get_tensorboard_path().is_dir()

        def on_checkpoint_start(self) -> None:
            found.append("on_checkpoint_start")

        def on_finish(self) -> None:
            found.append("on_finish")

    experimental.torch_batch_process(
        Processor,
        dataset=TensorDataset(torch.ones(4, 2)),
        batch_size=2,
        max_batches=1,
        checkpoint_interval=1,
        dataloader_kwargs={"num_workers": 0},
        distributed_context=None,
    )
    assert found == [(0, 1, {}), "on_checkpoint_start", "on_finish"]


CHECKS: dict[str, Callable[[], None]] = {
    "det.LOG_FORMAT": check_log_format,
    "det.get_cluster_info()": check_get_cluster_info,
    "pytorch.init": check_init,
    "PyTorchTrial": check_pytorch_trial,
    "pytorch.Trainer": check_trainer,
    "pytorch.Batch": check_batch,
    "context.wrap_model": check_wrap_model,
    "context.backward": check_backward,
    "context.experimental.use_amp()": check_experimental,
    "context.get_hparam": check_get_hparam,
    "context.is_epoch_start": check_is_epoch_start,
    "context.set_stop_requested": check_set_stop_requested,
    "context.get_tensorboard_path": check_get_tensorboard_path,
    "determined.tensorboard.metric_writers.pytorch.TorchWriter": check_torch_writer,
    "context.device": check_device,
    "pytorch.DataLoader": check_data_loader,
    "samplers": check_samplers,
    "PyTorchCallback": check_pytorch_callback,
    "LRScheduler.StepMode": check_step_mode,
    "MetricReducer": check_metric_reducer,
    "core.init": check_core_init,
    "checkpoint.store_path": check_checkpoint,
    "train.report_training_metrics": check_train,
    "preempt.should_preempt": check_preempt,
    "core.DistributedContext": check_distributed_context,
    "pytorch.experimental.torch_batch_process": check_torch_batch_process,
}
LAUNCHED = {"det.get_cluster_info()", "pytorch.experimental.torch_batch_process"}


def rows() -> dict[str, list[str]]:
    """Return the names of every row about trials and scripts, by the first one of the row."""
    _, _, text = GUIDE.read_text(encoding="utf-8").partition("## Runs unchanged\n")
    _, _, table = text.partition("\n### Experiment")[0].partition("| trials and scripts |")
    cells = [line.split("|")[1] for line in table.splitlines()[2:] if line.startswith("|")]
    spans = [re.findall(r"`([^`]+)`", cell) for cell in cells]
    return {found[0].replace("()", "\0").partition("(")[0].replace("\0", "()"): found for found in spans}


def test_every_row_of_the_names_table_has_a_check() -> None:
    assert list(rows()) == list(CHECKS)


@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")
@pytest.mark.parametrize("row", CHECKS)
def test_every_name_listed_as_unchanged_works(row: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = inspect.getsource(CHECKS[row]) + inspect.getsource(Trial)
    words = {word for span in rows()[row] for word in re.findall(r"[a-zA-Z_]{3,}", span)}
    not_called = {word for word in words - {"determined", "context", "with", "cls"} if word not in source}
    assert not_called == set()
    if row in LAUNCHED:
        fields: dict[str, Any] = {"trial_seed": 9, "experiment_id": 2, "slots": 2, "directory": str(tmp_path / "t")}
        fields |= {"latest_checkpoint": "ck", "user_data": {"url": "x"}}
        write_info(tmp_path / "info.json", TrialInfo(trial_id=4, **fields))
        monkeypatch.setenv(VARIABLE, str(tmp_path / "info.json"))
    CHECKS[row]()
