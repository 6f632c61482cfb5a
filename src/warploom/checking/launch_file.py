"""How to run a kernel that is a file of PTX or CUDA C++, as JSON: grid, block, arguments, what is expected."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from warploom.checking.foreign import check_cuda, check_ptx
from warploom.checking.kernel_file import Checked, ExampleResult, compared
from warploom.core.dtypes import dtype_of
from warploom.core.errors import ProblemError
from warploom.layout.tensor_map import TensorMapSpec

SUFFIXES = (".ptx", ".cu")
"""The files that :func:`check_file` takes."""
_KEYS = {"kernel", "grid", "block", "cluster", "shared_bytes", "arguments", "target"}
_ARRAY_KEYS = {"name", "file", "dtype", "shape", "fill", "expect", "tolerance", "tensor_map"}


@dataclass(frozen=True)
class LaunchFile:
    """A launch: ``expected`` are (name, position, array, tolerance) of arguments that the kernel writes.

    ``target`` is the architecture that CUDA C++ is compiled for.
    """

    kernel: str | None
    grid: Sequence[int]
    block: Sequence[int]
    shared_bytes: int
    arguments: list[Any]
    names: list[str] | None
    expected: list[tuple[str, int, Any, float]]
    target: str = "sm_80"
    cluster: Sequence[int] | None = None


def launch_beside(file: Path) -> Path:
    """The file that says how kernels of CUDA C++ or PTX are launched: NAME.launch.json beside NAME.cu."""
    return file.with_suffix(".launch.json")


def read_launches(path: Path) -> list[dict[str, Any]]:
    """The launches of a JSON file: an object is one, a list has several. Raises ProblemError for what is neither."""
    try:
        found: Any = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ProblemError(f"{path}: {_reason(error)}") from error
    except ValueError as error:
        raise ProblemError(f"{path} is no launch in JSON: {error}") from error
    launches: list[Any] = found if isinstance(found, list) and found else [found]
    if not all(isinstance(launch, dict) for launch in launches):
        raise ProblemError(f"{path}: a launch is an object with {', '.join(sorted(_KEYS))}; several are a list of them")
    return launches


def launch_of(launch: dict[str, Any], path: Path, seed: int | None = None) -> LaunchFile:
    """The launch that an object of a JSON file describes; ``seed`` draws other random arrays.

    Raises ProblemError for what is no launch. ``{"grid": [4], "block": [128], "arguments": [...], "shared_bytes": 0,
    "kernel": "name"}``; the last two may be missing, though CUDA C++ needs the kernel's name; ``"cluster"`` and
    ``"target"`` may be there. An argument is a
    number, a list of a structure's members, or an array as an object: ``{"file": "x.npy"}``, or ``{"dtype": "f32",
    "shape": [64, 64], "fill": "random"}``, with ``fill`` one of ``random``, ``arange``, ``nan`` or a number.
    ``expect`` is the file of what it should hold afterwards, within ``tolerance``; ``"tensor_map": {"box": [64, 32],
    "swizzle_bytes": 128}`` passes a tensor map of it, boxes innermost first. Files are sought beside the launch's.
    """
    unknown, missing = sorted(set(launch) - _KEYS), [k for k in ("grid", "block", "arguments") if k not in launch]
    kinds = (("unknown", unknown), ("missing", missing))
    if wrong := [f"{kind} keys {keys}" for kind, keys in kinds if keys]:
        raise ProblemError(f"{path}: {', '.join(wrong)}")
    rng = np.random.default_rng(seed or 0)
    given: Any = launch["arguments"]
    if not isinstance(given, list):
        raise ProblemError(f"{path}: arguments are a list, not {given!r}")
    given = cast("list[Any]", given)
    arguments = [_argument(x, i, path, rng) for i, x in enumerate(given)]
    names = [
        str(x.get("name", f"argument {i}")) if isinstance(x, dict) else f"argument {i}" for i, x in enumerate(given)
    ]
    expected = [
        (names[i], i, _load(path, x["expect"]), float(x.get("tolerance", 0.0)))
        for i, x in enumerate(given)
        if isinstance(x, dict) and "expect" in x
    ]
    sizes = {key: value if isinstance(value, list) else [value] for key, value in launch.items()}
    own = names if any(isinstance(x, dict) and "name" in x for x in given) else None
    return LaunchFile(
        launch.get("kernel"),
        sizes["grid"],
        sizes["block"],
        launch.get("shared_bytes", 0),
        arguments,
        own,
        expected,
        str(launch.get("target", "sm_80")),
        sizes.get("cluster"),
    )


def _argument(given: Any, position: int, path: Path, rng: np.random.Generator) -> Any:
    if isinstance(given, int | float):
        return given
    if isinstance(given, list):
        return [_argument(member, position, path, rng) for member in cast("list[Any]", given)]
    if not isinstance(given, dict):
        raise ProblemError(f"{path}: argument {position} is a number, a list or an object, not {given!r}")
    array = cast("dict[str, Any]", given)
    unknown = sorted(set(array) - _ARRAY_KEYS)
    if unknown:
        raise ProblemError(f"{path}: argument {position} has unknown keys {unknown}; known are {sorted(_ARRAY_KEYS)}")
    if "file" not in array and not ("dtype" in array and "shape" in array):
        raise ProblemError(f"{path}: argument {position} needs a file, or dtype and shape")
    try:
        if "file" in array:
            made = _load(path, array["file"])
        else:
            dtype, shape = dtype_of(array["dtype"]).numpy, tuple(map(int, array["shape"]))
            made = _filled(array.get("fill", "random"), dtype, shape, rng)
        return (made, _tensor_map(made, **array["tensor_map"])) if "tensor_map" in array else made
    except (ValueError, TypeError, MemoryError) as error:
        raise ProblemError(f"{path}: argument {position}: {error}") from error


def _tensor_map(array: Any, box: list[int], swizzle_bytes: int = 0) -> TensorMapSpec:
    """The map of a whole array, ``box`` innermost first."""
    return TensorMapSpec(
        dtype_of(array.dtype.name), array.shape[::-1], array.strides[-2::-1], tuple(box), swizzle_bytes
    )


def _filled(fill: Any, dtype: np.dtype[Any], shape: tuple[int, ...], rng: np.random.Generator) -> Any:
    if fill == "random":
        if dtype.kind in "iu":
            return rng.integers(0, 100, shape).astype(dtype)
        return rng.standard_normal(shape).astype(dtype)
    if fill == "arange":
        return np.arange(int(np.prod(shape))).reshape(shape).astype(dtype)
    if fill == "nan" and dtype.kind in "iu":
        raise ValueError(f"{dtype} has no NaN: fill it with a number")
    try:
        value = float(fill)
    except (TypeError, ValueError):
        raise ValueError(f"fill is random, arange, nan or a number, not {fill!r}") from None
    return np.full(shape, value).astype(dtype)


def _load(path: Path, name: str) -> Any:
    try:
        return np.load(path.parent / name)
    except OSError as error:
        raise ProblemError(f"{path}: {path.parent / name}: {_reason(error)}") from error
    except ValueError as error:
        raise ProblemError(f"{path}: {name} is no array of NumPy's: {error}") from error


def _reason(error: OSError) -> str:
    return "no such file" if isinstance(error, FileNotFoundError) else str(error.strerror or error)


def check_launch(path: Path, launch_file: Path, number: int, seed: int | None = None) -> Checked:
    """Run a kernel of a file as a launch of a JSON file says, with all checks, and compare what is expected."""
    launch = launch_of(read_launches(launch_file)[number], launch_file, seed)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ProblemError(f"there is no file {path}: {error}") from error
    except UnicodeDecodeError as error:
        raise ProblemError(f"{path} is no text: {error}") from error
    if path.suffix == ".cu":
        if launch.kernel is None:
            raise ProblemError(f'{launch_file} must name the kernel of {path}: add "kernel"')
        found = check_cuda(
            text,
            launch.kernel,
            launch.grid,
            launch.block,
            launch.arguments,
            target=launch.target,
            shared_bytes=launch.shared_bytes,
            cluster=launch.cluster,
            file=str(path),
            seed=seed,
        )
    else:
        found = check_ptx(
            text,
            launch.grid,
            launch.block,
            launch.arguments,
            kernel=launch.kernel,
            shared_bytes=launch.shared_bytes,
            cluster=launch.cluster,
            names=launch.names,
            file=str(path),
            seed=seed,
        )
    results: list[ExampleResult] = [
        compared(name, given[0] if isinstance(given := launch.arguments[position], tuple) else given, wanted, tolerance)
        for name, position, wanted, tolerance in launch.expected
    ]
    return Checked(found.program.name, found.program, found.emulation, tuple(results))
