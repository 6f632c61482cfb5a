"""Several launches in one run, with what orders them: streams, events, programmatic dependent launch."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from warploom.checking.foreign import RUNNER, CheckedPtx, PreparedLaunch, check_cuda, check_ptx, check_triton
from warploom.core.errors import ProblemError
from warploom.ops.launch import emulator_launch

if TYPE_CHECKING:
    from warploom.emulate import Finding
    from warploom.emulate.order.launches import QueuedLaunch
    from warploom.ir.program import Program


Order: TypeAlias = tuple[Hashable, bool, Sequence[int]]
"""The stream of a launch, whether it is programmatic, and the launches that it comes after."""


class LaunchSequence:
    """Launches that are queued in a ``with`` block and run at its end, one after the other, on one global memory.

    Each queues behind the launches of its ``stream`` (anything that can be a key), and begins when they are over. With
    ``programmatic=True`` (``cudaLaunchAttributeProgrammaticStreamSerialization``) it may begin while the one before it
    runs, which it waits for by ``griddepcontrol.wait``. Streams run beside each other, also the default stream 0: list
    in ``after`` the numbers of launches whose events the stream waits for. What nothing orders, and is not only read,
    is a race between the kernels.

    Arrays are changed in place when the block ends, and so are variables of a module, which launches of one source
    share. ``launches`` has the findings of each launch then.
    """

    def __init__(self, seed: int | None = None) -> None:
        self.seed, self.launches = seed, tuple[CheckedPtx, ...]()
        self._queued: list[QueuedLaunch] = []
        self._variables: dict[Hashable, dict[str, Any]] = {}

    def __enter__(self) -> LaunchSequence:
        return self

    def __exit__(self, failed: object, *_: object) -> None:
        if failed is None and self._queued:
            from warploom.emulate.launch.machine import emulate_launches

            runs = emulate_launches(self._queued, seed=self.seed)
            self.launches = tuple(CheckedPtx(of.program, run) for of, run in zip(self._queued, runs, strict=True))

    def launch(
        self,
        kernel: Any,
        grid: Any,
        arguments: Sequence[Any] | Mapping[str, Any],
        *,
        stream: Hashable = 0,
        programmatic: bool = False,
        after: Sequence[int] = (),
        **configuration: Any,
    ) -> int:
        """Queue a kernel of :mod:`warploom.lang`, as ``warploom.launch``, or of Triton, as ``warploom.check_triton``.

        Returns the number of the launch.
        """
        order = stream, programmatic or bool(configuration.get("launch_pdl")), after
        if hasattr(kernel, "fn"):  # Triton's functions and what is around them
            return self.queue(order, check_triton, kernel, grid, arguments, **configuration)
        return self._queue(*emulator_launch(kernel, grid, arguments, configuration), order)

    def launch_cuda(
        self, *given: Any, stream: Hashable = 0, programmatic: bool = False, after: Sequence[int] = (), **named: Any
    ) -> int:
        """Queue a kernel in CUDA C++; it takes what ``warploom.check_cuda`` takes. Returns the launch's number."""
        return self.queue((stream, programmatic, after), check_cuda, *given, **named)

    def launch_ptx(
        self, *given: Any, stream: Hashable = 0, programmatic: bool = False, after: Sequence[int] = (), **named: Any
    ) -> int:
        """Queue a kernel in PTX; it takes what ``warploom.check_ptx`` takes. Returns the launch's number."""
        return self.queue((stream, programmatic, after), check_ptx, *given, **named)

    def queue(self, order: Order, check: Callable[..., Any], *given: Any, **named: Any) -> int:
        """Queue what ``check`` would run, with the variables that other launches of its source have."""

        def take(launch: PreparedLaunch) -> int:
            if launch.seed is not None:
                raise ProblemError("the launches of a sequence run in one order: warploom.sequence(seed=…)")
            known = self._variables.setdefault(launch.source, {})
            variables = [known.setdefault(name, array) for name, array in launch.variables.items()]
            return self._queue(launch.program, launch.grid, [*launch.arguments, *variables], order)

        runner = RUNNER.set(take)
        try:
            return check(*given, **named)
        finally:
            RUNNER.reset(runner)

    def _queue(self, program: Program, grid: tuple[int, int, int], arguments: Any, order: Order) -> int:
        from warploom.emulate.order.launches import QueuedLaunch

        (stream, programmatic, after), number = order, len(self._queued)
        if any(not 0 <= event < number for event in after):
            raise ProblemError(f"after has numbers of earlier launches, as launch() returns them, not {list(after)}")
        self._queued.append(QueuedLaunch(program, grid, arguments, stream, programmatic, tuple(after)))
        return number

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The findings of all launches, one launch after the other."""
        return tuple(finding for launch in self.launches for finding in launch.findings)

    def raise_if_found(self) -> LaunchSequence:
        """Raise EmulationError with the findings of the first launch that has an error; else return self."""
        for launch in self.launches:
            launch.raise_if_found()
        return self


def sequence(seed: int | None = None) -> LaunchSequence:
    """Check several launches in a row: ``with warploom.sequence() as s: s.launch(…); s.launch(…, programmatic=True)``.

    With ``seed`` the warps run in an adversarial order. See :class:`LaunchSequence`.
    """
    return LaunchSequence(seed)
