"""How to run a kernel that is a file of PTX or CUDA C++, as JSON: grid, block, arguments, what is expected."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, cast

import numpy as np

from warploom.checking.foreign import ForeignKernel, ForeignLaunch, cuda_kernel, ptx_kernel
from warploom.checking.kernel_file import Checked, ExampleResult, compared
from warploom.checking.sequence import LaunchSequence
from warploom.core.dtypes import dtype_of
from warploom.core.errors import ProblemError
from warploom.core.uninitialised import uninitialised
from warploom.cuda.signatures import kernels_in
from warploom.layout.tensor_map import TensorMapSpec

SUFFIXES = (".ptx", ".cu")
"""The files that have launches."""
_KEYS = {
    "grid": "CTAs along x, y and z: [64] or [8, 2]",
    "block": "threads of a CTA along x, y and z: [128]",
    "arguments": 'a list, or an object by name: [{"dtype": "f32", "shape": [64]}, 5]',
    "kernel": "its name, with namespace and template arguments: mine::scan<float, 128>",
    "target": "the architecture that CUDA C++ is compiled for: sm_90a",
    "options": "a list of NVRTC's options, folders beside this file: [-Iinclude, -DN=4]",
    "shared_bytes": "bytes of dynamic shared memory",
    "cluster": "CTAs of a cluster along x, y and z: [2]",
}
"""What a launch may say; it must say the first three."""
_NEEDED = ("grid", "block", "arguments")
_ROW_KEYS = {
    "sequence": "a list of launches in a row",
    "arrays": 'arrays that they share, by names that stand among arguments: {"x": {"dtype": "f32", "shape": [64]}}',
}
_ORDER = {"stream": 0, "programmatic": False, "after": ()}
"""The keys that order a launch of a sequence, with their defaults."""
_ARRAY_KEYS = {
    "name": "what findings call it",
    "file": "a file of NumPy's, beside this one: x.npy",
    "dtype": "the type of its elements: f32, or float",
    "shape": "its extents: [64, 128]",
    "fill": "random, arange, nan, uninitialised or a number",
    "expect": "a file of what it must hold afterwards: y.npy",
    "tolerance": "the largest error of an element: 1e-5",
    "tensor_map": '{"box": [64, 32], "swizzle_bytes": 128}, innermost first',
}


@dataclass(frozen=True)
class LaunchFile:
    """A launch: its foreign kernel's ``launch``, and (name, position, array, tolerance) of what it must write.

    ``values`` are its arguments by position.
    """

    launch: ForeignLaunch
    values: list[Any]
    expected: list[tuple[str, int, Any, float]]


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
        raise ProblemError(f"{path} is no JSON: {error}") from error
    launches: list[Any] = found if isinstance(found, list) and found else [found]
    if not all(isinstance(launch, dict) for launch in launches):
        raise ProblemError(f"{path}: a launch is an object with {', '.join(_NEEDED)}; several are a list of them")
    return launches


def kernel_of(path: Path, launch: dict[str, Any], launch_file: Path) -> ForeignKernel:
    """The kernel of a file that a launch of a JSON file names, compiled for it. Raises ProblemError without a name."""
    _check_keys(launch, _KEYS, f"{launch_file}: a launch")
    if missing := [key for key in _NEEDED if key not in launch]:
        told = "; ".join(f'"{key}", {_KEYS[key]}' for key in missing)
        raise ProblemError(f"{launch_file}: a launch needs {told}")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ProblemError(f"{path} is no text: {error}") from error
    kernel = launch.get("kernel")
    if path.suffix == ".ptx":
        return ptx_kernel(text, kernel, names=_names(launch["arguments"]), file=str(path))
    if kernel is None:
        there = ", ".join(kernels_in(text)) or "none is seen"
        raise ProblemError(f'{launch_file} must name the kernel of {path}: add "kernel" (there: {there})')
    options = [_beside(str(option), launch_file.parent) for option in _list(launch, "options", launch_file)]
    return cuda_kernel(text, kernel, target=str(launch.get("target", "sm_80")), options=options, file=str(path))


def _beside(option: str, folder: Path) -> str:
    return f"-I{folder / option[2:]}" if option.startswith("-I") else option


def _list(launch: dict[str, Any], key: str, file: Path) -> list[Any]:
    value = launch.get(key, [])
    if not isinstance(value, list):
        raise ProblemError(f"{file}: {key} are a list, not {value!r}")
    return cast("list[Any]", value)


def _check_keys(given: dict[str, Any], known: dict[str, str], what: str) -> None:
    """Raises ProblemError for a key that means nothing, with the one that was probably meant."""
    for key in given:
        if key not in known:
            near = get_close_matches(key, known, 1)
            meant = f'did you mean "{near[0]}": {known[near[0]]}?' if near else f"it may have {', '.join(known)}"
            raise ProblemError(f'{what} has no "{key}": {meant}')


def _names(arguments: Any) -> list[str] | None:
    """Return the parameters' names for messages, where some argument gives one; else None."""
    if not isinstance(arguments, list) or not any(isinstance(x, dict) and "name" in x for x in arguments):
        return None
    return [_name(x, i) for i, x in enumerate(cast("list[Any]", arguments))]


def _name(given: Any, position: int) -> str:
    return str(given.get("name", f"argument {position}")) if isinstance(given, dict) else f"argument {position}"


def launch_of(
    launch: dict[str, Any], path: Path, seed: int | None = None, arrays: Mapping[str, Any] | None = None
) -> LaunchFile:
    """The launch that an object of a JSON file describes; ``seed`` draws other random arrays.

    ``{"grid": [4], "block": [128], "arguments": [...]}``, and what else ``_KEYS`` tells. Arguments are a list, or an
    object by the parameters' names. An argument is a number, a list of a structure's members, or an array as an object:
    ``{"file": "x.npy"}``, or ``{"dtype": "f32", "shape": [64, 64], "fill": "random"}``, with ``fill`` one of
    ``random``, ``arange``, ``nan``, ``uninitialised`` or a number; or the name of one of ``arrays``. ``expect`` is the
    file of what it should hold afterwards, within ``tolerance``; ``"tensor_map": {"box": [64, 32], "swizzle_bytes":
    128}`` passes a tensor map of it, boxes innermost first. Files are sought beside the launch's. Raises ProblemError
    for what is no launch.
    """
    rng = np.random.default_rng(seed or 0)
    given: Any = launch["arguments"]
    if not isinstance(given, list | dict):
        raise ProblemError(f"{path}: arguments are a list, or an object by name, not {given!r}")
    by_name = cast("dict[str, Any]", given) if isinstance(given, dict) else None
    listed = list(by_name.values()) if by_name is not None else cast("list[Any]", given)
    names = list(by_name) if by_name is not None else [_name(x, i) for i, x in enumerate(listed)]
    known = arrays or {}
    values = [
        known[x] if isinstance(x, str) and x in known else _argument(x, name, path, rng)
        for x, name in zip(listed, names, strict=True)
    ]
    expected = [
        (names[i], i, _load(path, x["expect"]), float(x.get("tolerance", 0.0)))
        for i, x in enumerate(listed)
        if isinstance(x, dict) and "expect" in x
    ]
    foreign = ForeignLaunch(
        launch["grid"],
        launch["block"],
        dict(zip(names, values, strict=True)) if by_name is not None else values,
        launch.get("shared_bytes", 0),
        launch.get("cluster"),
        seed,
    )
    return LaunchFile(foreign, values, expected)


def _argument(given: Any, name: str, path: Path, rng: np.random.Generator) -> Any:
    if isinstance(given, int | float):
        return given
    if isinstance(given, list):
        return [_argument(member, name, path, rng) for member in cast("list[Any]", given)]
    if not isinstance(given, dict):
        raise ProblemError(
            f"{path}: {name} is {given!r}: a number, a list of a structure's members, or an array, such as "
            '{"dtype": "f32", "shape": [64]}'
        )
    array = cast("dict[str, Any]", given)
    _check_keys(array, _ARRAY_KEYS, f"{path}: {name}, an array,")
    if "file" not in array and not ("dtype" in array and "shape" in array):
        raise ProblemError(f"{path}: {name} needs a file, or dtype and shape")
    if "tensor_map" in array and not isinstance(array["tensor_map"], dict):
        raise ProblemError(
            f'{path}: {name}: a tensor_map is an object, such as {{"box": [64, 64], "swizzle_bytes": 128}}'
        )
    made: Any = _load(path, array["file"]) if "file" in array else None
    try:
        if made is None:
            dtype, shape = dtype_of(array["dtype"]).numpy, tuple(map(int, array["shape"]))
            made = _filled(array.get("fill", "random"), dtype, shape, rng)
        return (made, _tensor_map(made, **array["tensor_map"])) if "tensor_map" in array else made
    except (ValueError, TypeError, MemoryError) as error:
        raise ProblemError(f"{path}: {name}: {error}") from error


def _tensor_map(array: Any, box: list[int], swizzle_bytes: int = 0) -> TensorMapSpec:
    """The map of a whole array, ``box`` innermost first."""
    return TensorMapSpec(
        dtype_of(array.dtype.name), array.shape[::-1], array.strides[-2::-1], tuple(box), swizzle_bytes
    )


def _filled(fill: Any, dtype: np.dtype[Any], shape: tuple[int, ...], rng: np.random.Generator) -> Any:
    if fill == "uninitialised":
        return uninitialised(shape, dtype)
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
        raise ValueError(f"fill is random, arange, nan, uninitialised or a number, not {fill!r}") from None
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


def check_launch(kernel: ForeignKernel, launch: dict[str, Any], path: Path, seed: int | None = None) -> Checked:
    """Run a kernel as a launch of a JSON file says, with all checks, and compare what is expected."""
    said = launch_of(launch, path, seed)
    found = kernel.run(said.launch)
    return Checked(found.program.name, found.program, found.emulation, _results(said))


def _results(said: LaunchFile) -> tuple[ExampleResult, ...]:
    """Compare the arrays of a launch with what its file expects of them."""
    return tuple(
        compared(name, given[0] if isinstance(given := said.values[position], tuple) else given, wanted, tolerance)
        for name, position, wanted, tolerance in said.expected
    )


def launches_in_row(given: dict[str, Any], path: Path) -> list[dict[str, Any]]:
    """The launches of an object of a JSON file that has a sequence of them; none of one that has none."""
    if "sequence" not in given:
        return []
    _check_keys(given, _ROW_KEYS, f"{path}: launches in a row")
    launches = _list(given, "sequence", path)
    if not launches or not all(isinstance(launch, dict) for launch in launches):
        raise ProblemError(f"{path}: a sequence is a list of launches, which are objects with {', '.join(_NEEDED)}")
    return launches


def in_row(kernel: dict[str, Any]) -> dict[str, Any]:
    """A launch without what orders it in a sequence."""
    return {key: value for key, value in kernel.items() if key not in _ORDER}


def check_sequence(
    kernels: Sequence[ForeignKernel], given: dict[str, Any], path: Path, seed: int | None = None
) -> Checked:
    """Run kernels one after the other, each by a launch of a sequence; the arrays of ``arrays`` are common to all."""
    shared = given.get("arrays", {})
    if not isinstance(shared, dict):
        raise ProblemError(f"{path}: arrays are an object by name, not {shared!r}")
    common = launch_of({"grid": 1, "block": 1, "arguments": shared}, path, seed)
    arrays = dict(zip(cast("dict[str, Any]", shared), common.values, strict=True))
    said = [common]
    with LaunchSequence(seed) as row:
        for number, (kernel, launch) in enumerate(zip(kernels, launches_in_row(given, path), strict=True)):
            said.append(launch_of(launch, path, (seed or 0) + number, arrays))
            order = {key: launch.get(key, usual) for key, usual in _ORDER.items()}
            row.queue(tuple(order.values()), kernel.run, replace(said[-1].launch, seed=None))
    last, names = row.launches[-1], ", ".join(launch.program.name for launch in row.launches)
    printed = "".join(launch.printed for launch in row.launches)
    emulation = replace(last.emulation, findings=row.findings, printed=printed)
    return Checked(names, last.program, emulation, tuple(result for one in said for result in _results(one)))
