"""Whole-step compilation: forward, backward, clipping and the optimizer's update in one graph.

The graph is traced once per form of a batch, with tensors that hold no data, compiled by Inductor, and called without
Dynamo in between. It reads and writes the same parameters, buffers and optimizer state as eager training, so the two
can alternate at any step.
"""

from dovetail.trainers.whole_step.comparing import SHARP
from dovetail.trainers.whole_step.effects import variable_spaces
from dovetail.trainers.whole_step.gradients import GradientBuffers
from dovetail.trainers.whole_step.graph import Outputs
from dovetail.trainers.whole_step.known import UnknownError, read_by
from dovetail.trainers.whole_step.limits import CannotCompileError, attribute_spaces
from dovetail.trainers.whole_step.step import WholeStep
from dovetail.trainers.whole_step.tracing import Backend, check_compiler
from dovetail.trainers.whole_step.updates import UpdateStep

__all__ = [
    "SHARP",
    "Backend",
    "CannotCompileError",
    "GradientBuffers",
    "Outputs",
    "UnknownError",
    "UpdateStep",
    "WholeStep",
    "attribute_spaces",
    "check_compiler",
    "read_by",
    "variable_spaces",
]
