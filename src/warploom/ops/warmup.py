"""Compiling ahead of the calls: side by side in the process that will call, or into a pack for other machines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

from warploom.core.errors import ProblemError, UnsupportedDeviceError, WarploomError, shown
from warploom.kernels.source import KernelSource
from warploom.ops.backends import Processor, built_together, compile_together, origin, planned_for
from warploom.ops.steps import Launches

if TYPE_CHECKING:
    from warploom.cuda.store import CompiledKernel

Plans = Iterable[Launches | Iterable[Any]]


def warmup(*plans: Any) -> None:
    """Compile the kernels of plans side by side, so that the first calls like those planned need not.

    ``plans`` are what ``plan``, ``plan_matmul`` and the others return, on arrays that lie as those of the calls.
    Kernels that the disk cache or a pack (``$WARPLOOM_PACK``) has are not compiled. Raises UnsupportedDeviceError
    without a GPU::

        warploom.warmup(warploom.plan(q, k, v, causal=True), *warploom.plan_linear_cross_entropy(x, w))
    """
    on = Processor.of(("cpu", 0))
    if on.gpu is None:
        raise UnsupportedDeviceError(
            "there is no GPU to compile for: warploom pack compiles for others (warploom pack FILE.py --for sm_90a)"
        )
    built_together(_sources(plans), on.target.name)


def compile_meanwhile(plan: Launches, device: int) -> None:
    """Compile the kernels of a plan for a GPU in another thread; who asks for one of them meanwhile waits for it."""

    def compile_all() -> None:
        with suppress(WarploomError, RuntimeError):  # it is raised where the kernels are asked for, if they are
            compile_together(plan.calls, device)

    Thread(target=compile_all, name="warploom-meanwhile").start()


@dataclass(frozen=True)
class WrittenPack:
    """A pack that was written: the names of its kernels, its size, and the names of kernels that no pack can hold."""

    kernels: tuple[str, ...]
    bytes: int
    left_out: tuple[str, ...]


def pack(path: Path, plans: Callable[[], Plans], archs: Sequence[str]) -> WrittenPack:
    """Compile the kernels of plans for architectures, and write them to one file.

    ``plans`` is called for each, and makes the plans of a GPU of that architecture. No GPU is needed, but NVRTC is.
    Kernels with functions that only this process knows are left out. Raises ConfigError for an unknown architecture,
    OSError where the file cannot be written, and what planning and compiling raise.
    """
    from warploom.cuda.pack import write_pack

    found: dict[tuple[str, str], tuple[str, CompiledKernel, Any]] = {}
    left_out = list[str]()
    for arch in archs:
        with planned_for(arch) as on:
            sources = _sources(plans())
        origins = {source: origin(source) for source in sources}
        left_out += [f"{source.name} for {on.target.name}" for source, key in origins.items() if key is None]
        wanted = [source for source, key in origins.items() if key is not None]
        for source, (kernel, signature) in built_together(wanted, on.target.name).items():
            key = origins[source]
            assert key is not None
            found[key, kernel.arch] = key, kernel, asdict(signature)
    if not found:
        raise ProblemError("there is nothing to pack: plans() returns no plan of a kernel that a pack can hold")
    size = write_pack(path, found.values())
    return WrittenPack(tuple(f"{x[1].name} for {x[1].arch}" for x in found.values()), size, tuple(left_out))


def _sources(plans: Plans) -> dict[KernelSource, None]:
    """The kernels of plans, each once. Raises ProblemError for what is no plan."""
    found = dict[KernelSource, None]()
    for plan in plans:
        if isinstance(plan, Launches):
            found |= dict.fromkeys(call.source for call in plan.calls)
        elif isinstance(plan, tuple | list):
            found |= _sources(plan)
        else:
            raise ProblemError(f"a plan is what warploom.plan and its like return, not {shown(plan)}")
    return found
