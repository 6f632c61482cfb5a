"""The GPU that candidates are timed on."""

from __future__ import annotations

from warploom.bench.peers import torch_module
from warploom.bench.timing import EventClock
from warploom.core.errors import UnsupportedDeviceError
from warploom.ops.backends import gpu_name, gpu_target
from warploom.tune.tuner import Gpu


def gpu_for_tuning(index: int = 0) -> Gpu:
    """GPU ``index`` with a clock on PyTorch's current stream there, made current.

    Raises UnsupportedDeviceError without a driver, such a GPU, or PyTorch (which holds the inputs).
    """
    from warploom.cuda.device import require_driver

    require_driver()
    torch = torch_module()
    if index >= torch.cuda.device_count():
        raise UnsupportedDeviceError(f"there is no GPU {index}: PyTorch sees {torch.cuda.device_count()}")
    goal = gpu_target(index)
    torch.cuda.set_device(index)
    torch.cuda.init()
    return Gpu(index, gpu_name(index), goal, EventClock(int(torch.cuda.current_stream(index).cuda_stream)))
