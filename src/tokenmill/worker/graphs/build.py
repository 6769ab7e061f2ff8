"""Which steps of a runner on a CPU are recorded."""

from __future__ import annotations

from tokenmill.config.engine_config import EngineConfig
from tokenmill.layers.kernels import uses_native_kernels
from tokenmill.worker.graphs.cpu import record
from tokenmill.worker.graphs.decode import record_decode_steps
from tokenmill.worker.graphs.forward import checked
from tokenmill.worker.model_runner import ModelRunner


def record_steps(
    config: EngineConfig, runner: ModelRunner, *, with_decode_steps: bool = True
) -> None:
    """Have the forward pass recorded, unless that is off or the kernels are torch's; and, with
    `with_decode_steps`, the steps in which every request only decodes, as a whole.
    """
    if config.graphs == "off" or not uses_native_kernels(config.model.dtype):
        return
    runner.capture(checked(record) if config.graphs == "check" else record)
    if with_decode_steps:
        runner.capture_decode_steps(record_decode_steps)
