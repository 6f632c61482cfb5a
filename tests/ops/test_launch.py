"""``warploom.launch``: kernels of a user's own on arrays of any framework, on the emulator and on a GPU."""

# pyright: reportInvalidTypeForm=false
from __future__ import annotations

import importlib.util

import numpy as np
import pytest

import warploom
from warploom.core.errors import ConfigError, EmulationError, EmulationWarning, ProblemError
from warploom.lang import Global, Kernel, Strided, TensorMap, f32, kernel, u32
from warploom.layout.tensor_map import TensorMapSpec


@pytest.fixture(autouse=True)
def emulated_but_for_gpu(request):
    """What is not marked for a GPU runs on the emulator, on any machine."""
    if request.node.get_closest_marker("gpu") is None:
        request.getfixturevalue("emulated")


@kernel(threads=64)
def axpy(k: Kernel, x: Global[f32], y: Global[f32], factor: f32, n: u32, *, plus: float = 0.0) -> None:
    """y = factor · x + y + plus."""
    i = k.cta_x * 64 + k.thread
    with k.when(i < n):
        a, b = x.load(i), y.load(i)
        y.store(k.fma(a, factor, b) + plus, i)


@kernel(threads=32)
def sums(k: Kernel, x: Strided[f32, 2], y: Strided[f32, 2], cols: u32) -> None:
    """y += x, a row by each CTA."""
    with k.loop(cols, start=k.lane, step=32) as col:
        at = y.at(k.cta_x, col)
        at.store(at.load() + x.at(k.cta_x, col).load())


@pytest.mark.parametrize("by_name", [False, True])
def test_the_strides_of_an_array_come_with_it(by_name):
    torch = pytest.importorskip("torch")
    x, y = torch.arange(5 * 40.0).reshape(40, 5).t(), np.ones((10, 40), np.float32)[::2]
    warploom.launch(sums, 5, {"y": y, "x": x, "cols": 40} if by_name else [x, y, 40])
    assert (y == x.numpy() + 1).all()


def test_an_array_of_other_dimensions_than_the_kernels_is_refused():
    x, y = np.zeros(40, np.float32), np.zeros((5, 40), np.float32)
    with pytest.raises(ProblemError, match="argument x has 1 dimensions; the kernel takes 2, or 3 whose last"):
        warploom.launch(sums, 5, [x, y, 40])
    with pytest.raises(ProblemError, match=r"sums takes 3 arguments \(x, y, cols\), not 2"):
        warploom.launch(sums, 5, [x, y])
    with pytest.raises(ProblemError, match="argument y: int is not an array"):
        warploom.launch(sums, 5, [y, 40, y])


@kernel(threads=64)
def reverse(k: Kernel, x: Global[f32], y: Global[f32], *, barrier: bool = True) -> None:
    tile = k.shared(f32, 64)
    tile.store(x.load(k.thread), 0, k.thread)
    if barrier:
        k.syncthreads()
    y.store(tile.load(0, 63 - k.thread), k.thread)


BOX = (32, 8)


@kernel(threads=64, requires="sm_90")
def box_of(k: Kernel, matrix: TensorMap, out: Global[f32], row: u32, col: u32) -> None:
    """The 8 × 32 elements from (row, col) on."""
    tile = k.shared(f32, (8, 32))
    full = k.mbarriers(1, "full")
    with k.when(k.thread == 0):
        full.init(1)
        k.mbarrier_fence()
    k.syncthreads()
    with k.when(k.thread == 0):
        full.expect(tile.layout.bytes)
        k.tma_load(tile, matrix, (col, row), full)
    full.wait(0)
    for r in range(0, 8, 2):
        line, column = r + k.thread // 32, k.thread % 32
        out.store(tile.load(line, column), line * 32 + column)


def arrays(n: int = 100):
    rng = np.random.default_rng(3)
    return rng.standard_normal(n).astype(np.float32), rng.standard_normal(n).astype(np.float32)


def test_arguments_by_position_and_by_name():
    x, y = arrays()
    expected = (2.5 * x.astype(np.float64) + y).astype(np.float32)
    by_name = {"n": 90, "x": x, "factor": np.float32(2.5), "y": y.copy()}
    warploom.launch(axpy, 2, [x, y, 2.5, 90])
    assert (y[:90] == expected[:90]).all()
    assert (y[90:] != expected[90:]).all()
    warploom.launch(axpy, (2, 1), by_name)
    assert (by_name["y"] == y).all()


def test_the_configuration_is_traced_once(monkeypatch):
    traced = []
    trace = axpy.trace
    monkeypatch.setattr(axpy, "trace", lambda **settings: traced.append(settings) or trace(**settings))
    for plus in (11.0, 12.0, 11.0):
        y = np.zeros(64, np.float32)
        warploom.launch(axpy, 1, [y, y, 0.0, 64], plus=plus)  # in place: x and y may be the same array
        assert (y == plus).all()
    assert traced == [{"plus": 11.0}, {"plus": 12.0}]


STEP = 1.0


@kernel(threads=32)
def stepped(k: Kernel, x: Global[f32]) -> None:
    x.store(x.load(k.lane) + STEP, k.lane)


def test_a_launch_sees_a_global_as_it_is_now(monkeypatch):
    x, traced, trace = np.zeros(32, np.float32), [], stepped.trace
    monkeypatch.setattr(stepped, "trace", lambda: traced.append(STEP) or trace())
    for step in (1.0, 2.0, 2.0, 1.0):
        monkeypatch.setitem(stepped.function.__globals__, "STEP", step)
        warploom.launch(stepped, 1, [x])
    assert (x == 6).all()
    assert traced == [1.0, 2.0]


def test_it_says_that_it_emulates_and_raises_for_a_defect():
    x, y = arrays(64)
    with pytest.warns(EmulationWarning, match="no GPU: reverse runs on the emulator"):
        warploom.launch(reverse, 1, [x, y])
    assert (y == x[::-1]).all()
    with pytest.raises(EmulationError, match="reverse has defects:\nrace"):
        warploom.launch(reverse, 1, [x, y], barrier=False)


def test_torch_tensors_are_changed_in_place():
    torch = pytest.importorskip("torch")
    x, y = (torch.from_numpy(a) for a in arrays(64))
    warploom.launch(reverse, 1, [x, y])
    assert (y == x.flip(0)).all()


def test_torch_compile_breaks_the_graph_at_a_launch():
    torch = pytest.importorskip("torch")

    def doubled_back(x):
        y = torch.empty_like(x)
        warploom.launch(reverse, 1, [x * 2, y])
        return y + 1

    (x,) = (torch.from_numpy(a) for a in arrays(64)[:1])
    torch._dynamo.reset()
    found = torch.compile(doubled_back, backend="aot_eager")(x)
    assert (found == 2 * x.flip(0) + 1).all()
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"declares what it writes.*outputs=.*or compile without fullgraph=True"):
        torch.compile(doubled_back, backend="aot_eager", fullgraph=True)(x)


def the_box(matrix, row, col):
    """What :func:`box_of` gives: zeros beyond the edges."""
    padded = np.zeros((matrix.shape[0] + 8, matrix.shape[1] + 32), np.float32)
    padded[: matrix.shape[0], : matrix.shape[1]] = matrix
    return padded[row : row + 8, col : col + 32]


def test_tensor_maps_are_pairs():
    matrix = np.arange(20 * 48, dtype=np.float32).reshape(20, 48)
    spec = TensorMapSpec(f32, (48, 20), (4 * 48,), BOX)
    out = np.full((8, 32), np.nan, np.float32)
    warploom.launch(box_of, 1, [(matrix, spec), out, 15, 20])
    assert (out == the_box(matrix, 15, 20)).all()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (lambda x: [x, x, 1.0], "takes 4 arguments"),
        (lambda x: {"x": x, "y": x, "factor": 1.0, "m": 64}, r"missing arguments \['n'\], unknown arguments \['m'\]"),
        (lambda x: {"x": x, "y": x, "factor": 1.0}, r"^[^,]*: missing arguments \['n'\]$"),
        (lambda x: [x, x.astype(np.float16), 1.0, 64], "elements of type f16; the kernel's are f32"),
        (lambda x: [x, frozen(x), 1.0, 64], "y, which is read-only"),
        (lambda x: [x, 3, 1.0, 64], "int is not an array"),
        (lambda x: [x.astype(np.complex64), x, 1.0, 64], "x has elements of type complex64; the kernel's are f32"),
        (lambda x: [x.astype(np.int32), x, 1.0, 64], "x has elements of type s32; the kernel's are f32: pass unsigned"),
        (lambda x: [x, x, 1.0, 3.5], r"n must be an integer \(u32\), not 3.5"),
        (lambda x: [x, x, 1.0, -1], "n = -1 does not fit u32: it holds 0 to 4294967295"),
        (lambda x: [x, x, 1.0, 2**32], "n = 4294967296 does not fit u32: it holds 0 to 4294967295"),
        (lambda x: [x, x, 1.0, np.zeros(2, np.int64)], "one number, not an array of shape"),
        (lambda x: [x, x, "1", 64], r"factor must be a number \(f32\), not '1'"),
        (lambda x: [x, x, 1e300, 64], r"factor = 1e\+300 does not fit f32"),
        (lambda x: [x, x, 10**400, 64], "does not fit f32"),
        (lambda x: [x, x, 1j, 64], "must be a number"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments, words):
    with pytest.raises(ProblemError, match=words):
        warploom.launch(axpy, 1, arguments(np.zeros(64, np.float32)))


@pytest.mark.parametrize("grid", [2.0, "2", None, 0, (1, 2.0), (1, 1, 1, 1), (), -1])
def test_a_grid_is_integers(grid):
    x = np.zeros(64, np.float32)
    with pytest.raises(ProblemError, match="one to three positive counts of CTAs, as integers"):
        warploom.launch(axpy, grid, [x, x, 1.0, 64])


@pytest.mark.parametrize("grid", [(1, 70000, 1), (1, 1, 65536), 2**31])
def test_a_grid_that_no_gpu_takes_is_refused_on_the_emulator_too(grid):
    x = np.zeros(64, np.float32)
    with pytest.raises(ConfigError, match="larger than any GPU takes"):
        warploom.launch(axpy, grid, [x, x, 1.0, 64])


@pytest.mark.parametrize("grid", [np.int64(2), np.array(2), (np.uint8(2), True), [2], np.array([2, 1])])
def test_integers_of_any_kind_are_a_grid(grid):
    x, y = arrays()
    expected = (2.5 * x.astype(np.float64) + y).astype(np.float32)
    warploom.launch(axpy, grid, [x, y, np.array([2.5]), np.int64(100)])
    assert (y == expected).all()


def test_unsigned_integers_are_bits_of_any_type():
    x, _ = arrays(64)
    found = np.zeros(64, np.uint32)
    warploom.launch(reverse, 1, [x.view(np.uint32), found])
    assert (found.view(np.float32) == x[::-1]).all()


def test_a_strided_array_is_the_address_of_its_first_element():
    """A kernel that does not step as the view does reads what lies between its elements."""
    x, y = arrays(256)
    whole = np.arange(120, dtype=np.float32).reshape(20, 6)
    warploom.launch(sums, 5, [whole[::2, 1:], whole[1::2, 1:], 5])
    warploom.launch(reverse, 1, [x[1:], y])
    assert (y[:64] == x[64:0:-1]).all()
    with pytest.raises(EmulationError, match="x reaches between its elements"):
        warploom.launch(reverse, 1, [x[1::2], y])


def frozen(x):
    y = x.copy()
    y.flags.writeable = False
    return y


def test_what_is_no_kernel_says_what_is():
    x = np.zeros(64, np.float32)
    with pytest.raises(ProblemError, match=r"decorated with @warploom\.lang\.kernel"):
        warploom.launch(lambda k: None, 1, [x])  # pyright: ignore[reportArgumentType]
    with pytest.raises(ProblemError, match="traced already"):
        warploom.launch(axpy.trace(), 1, [x, x, 1.0, 64], plus=1.0)
    with pytest.raises(ProblemError, match="TensorMapSpec"):
        warploom.launch(box_of, 1, [x, x, 0, 0])


@pytest.mark.gpu
def test_torch_tensors_on_the_gpu_are_used_on_their_stream():
    torch = pytest.importorskip("torch")
    x, y = (torch.from_numpy(a).cuda() for a in arrays(100_000))
    expected = (2.5 * x.double() + y.double()).float()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        warploom.launch(axpy, 1563, [x, y, 2.5, 100_000])
        again = y * 1
    stream.synchronize()
    assert (again == expected).all()
    with pytest.raises(ProblemError, match="one device"):
        warploom.launch(axpy, 1, [x, y.cpu(), 2.5, 64])


@pytest.mark.gpu
def test_cpu_arrays_travel_to_the_gpu_and_back():
    whole = np.arange(256, dtype=np.float32)
    expected = whole.copy()
    expected[32:96] += 1
    warploom.launch(axpy, 1, [whole[:64], whole[32:96], 0.0, 64], plus=1.0)  # arrays that overlap
    assert (whole == expected).all()
    rows = np.zeros((64, 3), np.float32)
    warploom.launch(reverse, 1, [whole[96:160], rows[:, 1]])  # a pointer to its first element; strides are the kernel's
    assert (rows.reshape(-1)[1:65] == whole[96:160][::-1]).all()
    assert not rows.reshape(-1)[65:].any()


@pytest.mark.gpu
def test_tensor_maps_on_the_gpu():
    torch = pytest.importorskip("torch")
    if torch.cuda.get_device_capability() < (9, 0):
        with pytest.raises(ConfigError, match="needs sm_90"):
            warploom.launch(box_of, 1, [])
        return
    matrix = np.arange(20 * 48, dtype=np.float32).reshape(20, 48)
    spec = TensorMapSpec(f32, (48, 20), (4 * 48,), BOX)
    out = np.full((8, 32), np.nan, np.float32)
    on_gpu = torch.full((8, 32), float("nan"), device="cuda")
    warploom.launch(box_of, 1, [(matrix, spec), out, 15, 20])
    warploom.launch(box_of, 1, [(torch.from_numpy(matrix).cuda(), spec), on_gpu, 15, 20])
    for found in (out, on_gpu.cpu().numpy()):
        assert (found == the_box(matrix, 15, 20)).all()


@pytest.mark.gpu
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")
def test_launches_are_captured_in_graphs():
    import torch

    x, y = torch.arange(64.0, device="cuda"), torch.zeros(64, device="cuda")
    warploom.launch(reverse, 1, [x, y])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        warploom.launch(reverse, 1, [x, y])
    x += 100
    graph.replay()
    assert (y == x.flip(0)).all()
