"""The reference kernel under our counters: PyTorch's flash backend, which is FlashAttention-2 for ``mma.sync``.

``profile_h200.py --only reference`` reads it, from the project's root.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from warploom.bench.counters import Profile
from warploom.bench.peers import sdpa, torch_module
from warploom.bench.profile import profile_launches
from warploom.bench.samples import Samples
from warploom.inspect.purpose import count_groups, count_opcodes, is_tensor
from warploom.inspect.sass import Listing

KERNELS = "flash_fwd"
"""What its kernels' names have in common; those that draw the inputs are not watched."""
HEAD_DIM = 128


@dataclass(frozen=True)
class FlashLaunch:
    """One launch of the reference: full attention on random inputs."""

    seq: int
    batch: int
    heads: int
    dtype: str = "bf16"

    @property
    def config(self) -> None:
        """It has none that we know."""

    @property
    def program(self) -> None:
        """Its cubin is PyTorch's: ncu's own listing stands in."""

    def run(self) -> None:
        """Launch it once."""
        torch = torch_module()
        torch.manual_seed(0)
        kind = {"bf16": torch.bfloat16, "f16": torch.float16}[self.dtype]
        shape = self.batch, self.seq, self.heads, HEAD_DIM
        q, k, v = (torch.randn(shape, device="cuda").to(kind).transpose(1, 2) for _ in range(3))
        sdpa("torch_flash")(q, k, v)
        torch.cuda.synchronize()


def profile_reference(launches: Sequence[FlashLaunch], seconds: float = 120.0) -> list[Profile]:
    """Counters and samples of each launch; raises what :func:`profile_launches` does."""
    return profile_launches(launches, seconds=seconds, kernels=KERNELS, module="benchmarks.profile_reference")


def sass(samples: Samples) -> dict[str, Any]:
    """What ncu lists of a kernel, counted as ``ladder_static.py`` counts a cubin.

    The main loop is what runs as often as the product that runs most often. ``registers`` is one more than the highest
    that the code names.
    """
    listed = [spot for spot in samples.spots if spot.instruction.mnemonic != "NOP"]
    code = [spot.instruction for spot in listed]
    often = max((spot.executed for spot in listed if is_tensor(spot.instruction)), default=0)
    loop = [spot.instruction for spot in listed if often and spot.executed == often]
    return {
        "registers": Listing("", "", tuple(code)).highest_register,
        "instructions": len(code), "groups": count_groups(code), "counts": count_opcodes(code),
        "loop_instructions": len(loop), "loop_groups": count_groups(loop), "loop_counts": count_opcodes(loop),
        "ldsm_to_hmma": None,
    }  # fmt: skip
