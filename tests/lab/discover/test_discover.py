"""Tracers on the emulator: what they see, what they would see of any other map, and what they say of a difference."""

# pyright: reportInvalidTypeForm=false

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from tests.project import load
from warploom.core.dtypes import DTYPES
from warploom.core.errors import LayoutError
from warploom.core.targets import target
from warploom.emulate import emulate
from warploom.isa.matrix import wmma_mma
from warploom.lang import Global, Kernel, bf16, f32, kernel
from warploom.layout import wmma as wmma_maps_module
from warploom.layout.gf2 import rank
from warploom.layout.wmma import WMMA_ACCUMULATORS, WMMA_SHAPES, operand_shape, wmma_elements, wmma_name
from warploom_lab.discover import fragments as discover_module
from warploom_lab.discover.fragments import catalogued, discover, emulator_runner, trace_fragment, wmma_maps
from warploom_lab.discover.tracers import tracers, wmma_products
from warploom_lab.discover.transcribed import PTX_FORMULAS, WMMA_FORMULAS


def test_every_fragment_is_seen_where_the_isa_says():
    found = list(discover("emulator"))
    assert {d.name for d in found} == {t.name for t in tracers() if not t.name.startswith("wgmma")}
    assert {d.verdict for d in found} == {"agrees"}
    for d in found:
        assert d.fit.is_linear, d.name
        assert d.expected is not None
        assert d.expected.name in {**PTX_FORMULAS, **WMMA_FORMULAS}, d.name


def _random_map(shape: tuple[int, int], elements: int, seed: str) -> dict[str, object]:
    """Any linear map onto the whole matrix; f16 operands hold it more than once."""
    draw = random.Random(seed)
    row_bits, col_bits = (s.bit_length() - 1 for s in shape)
    bits = (elements - 1).bit_length() + 5
    while True:
        packed = [draw.randrange(1 << (row_bits + col_bits)) for _ in range(bits)]
        if rank(packed) == row_bits + col_bits:
            break
    vectors = [[p & (shape[0] - 1), p >> row_bits] for p in packed]
    return {"shape": list(shape), "register": vectors[:-5], "lane": vectors[-5:]}


@contextmanager
def catalogued_as(fragments: dict[str, object]) -> Iterator[None]:
    """wmma with other maps."""
    with pytest.MonkeyPatch.context() as patch:
        for where in (wmma_maps_module, discover_module):
            patch.setattr(where, "discovered", lambda: {"gpu": "none", "fragments": fragments})
        wmma_maps_module.wmma_fragment.cache_clear()
        yield
    wmma_maps_module.wmma_fragment.cache_clear()


@pytest.mark.parametrize("name", wmma_maps_module.discovered()["fragments"])
def test_swapped_lane_bases_of_wmma_are_told_without_a_gpu(name):
    """The catalogue is the emulator's wmma as well: something else has to object."""
    known = wmma_maps_module.discovered()["fragments"]
    lane = [*known[name]["lane"]]
    lane[0], lane[2] = lane[2], lane[0]
    with catalogued_as({**known, name: {**known[name], "lane": lane}}):
        seen = {d.name: d for d in discover("emulator", name)}
    for found in seen.values():
        assert found.verdict == "differs"
        assert found.difference is not None
        assert (found.difference.lane, found.difference.register) == (1, 0)
        assert "mma.sync" in str(found.difference)
    assert name in seen


@pytest.fixture
def planted():
    """Maps for all of wmma that no hardware has."""
    fragments: dict[str, object] = {}
    for shape, types in WMMA_SHAPES.items():
        for t in types:
            for operand in "AB":
                for order in ("row", "col"):
                    dtype = DTYPES[t]
                    name = wmma_name(shape, operand, dtype, order)
                    size = operand_shape(shape, operand)
                    fragments[name] = _random_map(size, wmma_elements(shape, operand, dtype), name)
            for c in WMMA_ACCUMULATORS[t]:
                name = wmma_name(shape, "C", DTYPES[c], "row")
                fragments[name] = _random_map(operand_shape(shape, "C"), wmma_elements(shape, "C", DTYPES[c]), name)
    with catalogued_as(fragments):
        yield fragments


def test_tracing_recovers_any_map_of_wmma(planted):
    found = {d.name: d for d in discover("emulator", "wmma")}
    assert set(planted) <= set(found)
    assert {d.verdict for d in found.values()} == {"differs"}, "of what hardware has"
    for name, entry in planted.items():
        row = found[name].as_row()
        assert (row["register"], row["lane"]) == (entry["register"], entry["lane"])
    again = wmma_maps(list(found.values()), "none")["fragments"]
    assert again.keys() == planted.keys()
    assert all(again[name]["lane"] == planted[name]["lane"] for name in planted)


@kernel(threads=32)
def wmma_product(k: Kernel, a: Global[bf16], b: Global[bf16], out: Global[f32]) -> None:
    """out = a · bᵀ of 16×16 matrices, through shared memory."""
    tile = k.shared(f32, (16, 16), name="tile")
    fa = k.wmma_load("A", a, 16)
    fb = k.wmma_load("B", b, 16, order="col")
    k.wmma_store(tile, 16, k.wmma_mma(fa, fb, [0.0] * 8))
    k.syncwarp()
    row, half = k.lane >> 1, (k.lane & 1) * 8
    for part in (0, 4):
        out.store(tile.load(row, half + part, 4), row * 16 + half + part)


def test_what_wmma_multiplies_does_not_depend_on_its_maps(planted):
    """The emulator's wmma is a matrix product whatever the fragments are; memory in, memory out."""
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-4, 5, (16, 16)).astype(bf16.numpy) for _ in range(2))
    out = np.zeros((16, 16), np.float32)
    done = emulate(wmma_product.trace(), 1, [a, b, out])
    assert done.findings == ()
    assert (out == a.astype(np.float32) @ b.astype(np.float32).T).all()


def test_products_by_wmma_are_right_against_float64():
    products = load("wmma_products")
    found = products.errors(emulator_runner())
    assert len(found) == len(list(wmma_products()))
    assert max(found.values()) <= 1


@pytest.mark.parametrize(("shape", "inputs", "sums"), [("m16n16k16", "bf16", "f32"), ("m32n8k16", "s8", "s32")])
def test_a_wrong_product_by_wmma_is_told(shape, inputs, sums):
    honest, products = emulator_runner(), load("wmma_products")

    def off(program, source, out):
        honest(program, source, out)
        out[3, 0] ^= 1 << 15  # of one element of one product, the sixteenth bit

    assert products.error(off, wmma_mma(shape, DTYPES[inputs], DTYPES[sums])) > 1


def test_a_fragment_no_gpu_has_traced_is_an_error_that_says_so(monkeypatch):
    monkeypatch.setattr(wmma_maps_module, "discovered", lambda: {"gpu": "", "fragments": {}})
    wmma_maps_module.wmma_fragment.cache_clear()
    with pytest.raises(LayoutError, match="warploom discover --on gpu"):
        wmma_maps_module.wmma_fragment("m16n16k16", "A", DTYPES["bf16"], "row")
    wmma_maps_module.wmma_fragment.cache_clear()


def test_a_gpu_that_differs_is_named_by_lane_and_register():
    """A GPU whose mma exchanges registers 0 and 2 of its accumulator."""
    honest = emulator_runner()

    def exchanged(program, source, out):
        honest(program, source, out)
        out[..., [0, 2]] = out[..., [2, 0]]

    tracer = next(t for t in tracers() if t.name == "mma.m16n8k16.D.bf16.f32")
    found = trace_fragment(tracer, exchanged)
    assert found.verdict == "differs"
    assert found.difference is not None
    assert (found.difference.lane, found.difference.register) == (0, 0)
    assert "lane 0, register 0 holds (8, 0), the catalogue says (0, 0)" in found.as_row()["difference"]
    assert not found.fit.is_linear  # it is affine: register 0 does not hold (0, 0)


def test_a_gpu_that_is_not_linear_is_reported_with_its_table():
    honest = emulator_runner()

    def crossed(program, source, out):
        honest(program, source, out)
        out[:, [5, 6]] = out[:, [6, 5]]

    tracer = next(t for t in tracers() if t.name == "mma.m16n8k16.D.bf16.f32")
    row = trace_fragment(tracer, crossed).as_row()
    assert not row["linear"]
    assert "lane 5" in row["reason"]
    assert row["cols"][5] == [4, 5, 4, 5]


def test_each_traced_fragment_has_a_name_of_its_own():
    names = [t.name for t in tracers()]
    assert len(names) == len(set(names))
    assert all(catalogued(n) is not None for n in names if not n.startswith("wmma"))


def test_unknown_names_are_refused():
    with pytest.raises(LayoutError, match="no fragment has 'mmx'"):
        list(discover("emulator", "mmx"))


def test_a_gpu_traces_what_its_architecture_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discover_module, "gpu_runner", lambda: None)
    monkeypatch.setattr(discover_module, "trace_fragment", lambda tracer, _run: tracer)
    for name in ("sm_80", "sm_90a"):
        monkeypatch.setattr("warploom.ops.backends.gpu_target", lambda _device, name=name: target(name))
        kinds = {tracer.name.partition(".")[0] for tracer in discover("gpu")}
        assert ("mma" in kinds, "wgmma" in kinds) == (True, name == "sm_90a")
