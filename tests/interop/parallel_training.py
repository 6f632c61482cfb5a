"""Two processes that train a small model together, as a user would: ``python parallel_training.py FOLDER``.

Ends with an error where gradients are not those of one process. The second is forked when the first has imported and
traced everything, which takes most of the time: on CPUs alone, in one thread.
"""

from __future__ import annotations

import os
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import warploom
from warploom.core.errors import EmulationWarning

RANKS, LENGTH, WIDTH, WORDS = 2, 8, 16, 24


class Model(nn.Module):
    """Attention, a product with a bias, and the loss."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, generator=generator).bfloat16())

        self.qkv, self.bias, self.words = parameter(3 * WIDTH, WIDTH), parameter(3 * WIDTH), parameter(WORDS, WIDTH)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """The mean loss of a batch."""
        q, k, v = warploom.matmul(x, self.qkv.mT, bias=self.bias).unflatten(2, (3, 1, WIDTH)).unbind(2)
        y = warploom.attention(q, k, v, causal=True)
        return warploom.linear_cross_entropy(y.flatten(0, 2), self.words, target.flatten(), reduction="mean")


def batches() -> tuple[torch.Tensor, torch.Tensor]:
    """A batch of one for each rank."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(RANKS, LENGTH, WIDTH, generator=generator).bfloat16()
    return x, torch.randint(WORDS, (RANKS, LENGTH), generator=generator)


def assert_near(model: nn.Module, expected: dict[str, torch.Tensor], times: float) -> None:
    """The gradients are ``times`` the expected ones within what bf16 sums in another order allow."""
    for name, parameter in model.named_parameters():
        found: Any = parameter.grad
        assert found is not None, name
        whole = found.full_tensor() if hasattr(found, "full_tensor") else found
        wanted = times * expected[name.removeprefix("module.")].float()
        off = float((whole.float() - wanted).abs().max() / wanted.abs().max())
        assert off < 2**-6, (name, off)


def train(rank: int, folder: Path, expected: dict[str, torch.Tensor]) -> None:
    """Both ways, of which the first adds up two backward passes before the ranks exchange gradients."""
    x, target = batches()
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    own = x[rank : rank + 1], target[rank : rank + 1]
    replicated = DistributedDataParallel(Model())
    for last in (False, True):
        with nullcontext() if last else replicated.no_sync():
            replicated(*own).backward()
    assert_near(replicated, expected, 1.0)

    sharded: Any = fully_shard(Model(), mesh=init_device_mesh("cpu", (RANKS,)))
    sharded(*own).backward()
    assert_near(sharded, expected, 0.5)
    distributed.destroy_process_group()


def main() -> None:
    """One process that adds up the gradients of both batches, then two."""
    warnings.simplefilter("ignore", EmulationWarning)
    torch.set_num_threads(1)
    single = Model()
    for x, target in zip(*batches(), strict=True):
        single(x[None], target[None]).backward()
    expected = {name: p.grad for name, p in single.named_parameters() if p.grad is not None}
    assert len(expected) == 3
    second = os.fork()
    train(0 if second else 1, Path(sys.argv[1]), expected)
    if second:
        assert os.waitpid(second, 0)[1] == 0, "the second process failed"


if __name__ == "__main__":
    main()
