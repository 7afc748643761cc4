"""Callbacks, which observe training and may stop it."""

from __future__ import annotations

from dovetail.callbacks.base import Callback, Callbacks, Report
from dovetail.callbacks.early_stopping import EarlyStopping, ImprovementWindow, StopWhen
from dovetail.callbacks.ema import EMA
from dovetail.callbacks.gradient_clipping import GradientClipping
from dovetail.callbacks.handler import CallbackHandler
from dovetail.callbacks.lambda_callback import LambdaCallback
from dovetail.callbacks.log_file import CSVLogger, JSONLLogger
from dovetail.callbacks.lr_monitor import LRMonitor
from dovetail.callbacks.monitor import Monitor
from dovetail.callbacks.non_finite import NonFiniteLoss
from dovetail.callbacks.plateau import ReduceOnPlateau
from dovetail.callbacks.profiler import Profiler
from dovetail.callbacks.progress import ProgressDisplay
from dovetail.callbacks.swa import SWA
from dovetail.callbacks.timing import MaxTime, Timer
from dovetail.callbacks.trainer import PlatoAdapter, TrainerCallback
from dovetail.history import Mode, mode_of

__all__ = [
    "EMA",
    "SWA",
    "CSVLogger",
    "Callback",
    "CallbackHandler",
    "Callbacks",
    "EarlyStopping",
    "GradientClipping",
    "ImprovementWindow",
    "JSONLLogger",
    "LRMonitor",
    "LambdaCallback",
    "MaxTime",
    "Mode",
    "Monitor",
    "NonFiniteLoss",
    "PlatoAdapter",
    "Profiler",
    "ProgressDisplay",
    "ReduceOnPlateau",
    "Report",
    "StopWhen",
    "Timer",
    "TrainerCallback",
    "mode_of",
]
