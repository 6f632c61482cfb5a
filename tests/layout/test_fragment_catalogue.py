from __future__ import annotations

import numpy as np
import pytest
from layout_cases import Traced

from warploom.core.errors import LayoutError
from warploom.layout import (
    FRAGMENTS,
    FragmentLayout,
    LinearMap,
    ldmatrix_fragment,
    mma_fragment,
    wgmma_accumulator,
    wgmma_operand,
    wmma_accumulator,
)
from warploom_lab.discover.transcribed import PTX_FORMULAS


@pytest.mark.parametrize("name", FRAGMENTS)
def test_catalogue_is_what_the_ptx_isa_says(name: str) -> None:
    layout = FRAGMENTS[name]
    assert layout.name == name
    rows, cols = layout.element_coordinates()
    assert rows.shape == (layout.threads, layout.elements_per_thread)
    for thread in range(layout.threads):
        for element in range(layout.elements_per_thread):
            found = int(rows[thread, element]), int(cols[thread, element])
            assert found == PTX_FORMULAS[name](thread, element), (thread, element)


def test_every_transcribed_fragment_is_in_the_catalogue() -> None:
    assert set(PTX_FORMULAS) == set(FRAGMENTS)


def test_series_formulas_of_the_gemm_fragments() -> None:
    # The HGEMM series' get_row and get_col, with its own shifts.
    a, b, c = (FRAGMENTS[f"mma.m16n8k16.{operand}.b16"] for operand in "ABC")
    for lane in range(32):
        for i in range(8):
            assert a.coordinates(lane, i) == ((lane >> 2) + 8 * ((i >> 1) & 1), (lane & 3) * 2 + (i & 1) + 8 * (i >> 2))
        for i in range(4):
            assert b.coordinates(lane, i) == ((lane & 3) * 2 + (i & 1) + 8 * (i >> 1), lane >> 2)
            assert c.coordinates(lane, i) == ((lane >> 2) + 8 * (i >> 1), (lane & 3) * 2 + (i & 1))


def test_two_accumulators_side_by_side_are_the_wmma_accumulator() -> None:
    pair = mma_fragment("m16n8k16", "C").tile(1, 2)
    assert pair.map == wmma_accumulator().map
    assert pair.map == LinearMap(
        {"register": [(0, 1), (8, 0), (0, 8)], "lane": [(0, 2), (0, 4), (1, 0), (2, 0), (4, 0)]}, {"row": 16, "col": 16}
    )


@pytest.mark.parametrize("order", ["row", "col"])
@pytest.mark.parametrize("tiles", [(1, 1), (2, 3), (4, 2), (1, 22)])
def test_matrix_to_registers_and_back(tiles: tuple[int, int], order: str) -> None:
    layout = mma_fragment("m16n8k16", "C").tile(*tiles, order="row" if order == "row" else "col")
    rows, cols = layout.shape
    matrix = np.arange(rows * cols)
    registers = matrix[layout.gather_index()]
    assert registers.shape == (32, 4 * tiles[0] * tiles[1])
    assert (registers.reshape(-1)[layout.owner_index()] == matrix).all()
    for i in range(tiles[0]):
        for j in range(tiles[1]):
            atom = registers[:, layout.atom_elements(i, j)]
            block = matrix.reshape(rows, cols)[16 * i : 16 * i + 16, 8 * j : 8 * j + 8]
            assert (atom == block.reshape(-1)[mma_fragment("m16n8k16", "C").gather_index()]).all()


def test_tiles_that_are_powers_of_two_have_one_map() -> None:
    layout = mma_fragment("m16n8k16", "A").tile(2, 4)
    rows, cols = layout.element_coordinates()
    at = layout.map.apply(lane=np.arange(32)[:, None], register=np.arange(64)[None, :])
    assert (at["row"] == rows).all()
    assert (at["col"] == cols).all()
    with pytest.raises(LayoutError, match="work by atom"):
        _ = mma_fragment("m16n8k16", "A").tile(1, 3).map


def test_transposing_twice_gives_the_map_back() -> None:
    layout = mma_fragment("m16n8k16", "B").tile(2, 4)
    turned = layout.transposed()
    rows, cols = layout.element_coordinates()
    turned_rows, turned_cols = turned.element_coordinates()
    assert (rows == turned_cols).all()
    assert (cols == turned_rows).all()
    assert turned.shape == (32, 32)
    assert turned.transposed().map == layout.map


def test_sizes() -> None:
    layout = mma_fragment("m16n8k16", "A").tile(2, 1)
    assert (layout.shape, layout.elements_per_thread, layout.registers) == ((32, 16), 16, 8)
    assert layout.atom_registers(1, 0) == slice(4, 8)
    assert mma_fragment("m16n8k16", "C", 16).registers == 2
    assert mma_fragment("m16n8k16", "D").registers == 4
    big = wgmma_accumulator(176)
    assert (big.shape, big.threads, big.registers) == ((64, 176), 128, 88)
    assert wgmma_operand().registers == 4
    assert "64×176" in str(big)


def test_replicated_elements_take_the_lowest_thread() -> None:
    atom = LinearMap({"register": [(1, 0)], "lane": [(0, 0), (0, 1), (0, 2), (0, 4), (0, 0)]}, {"row": 2, "col": 8})
    layout = FragmentLayout("replicated", atom, 32)
    owner = layout.owner_index()
    assert owner.max() < 2 * 16  # lanes 16 to 31 repeat lanes 0 to 15
    matrix = np.arange(16)
    assert (matrix[layout.gather_index()].reshape(-1)[owner] == matrix).all()
    short = LinearMap({"register": [], "lane": [(0, 1)] * 5}, {"row": 1, "col": 4})
    with pytest.raises(LayoutError, match="held by no thread"):
        FragmentLayout("short", short, 32).owner_index()


def test_coordinates_of_traced_lanes() -> None:
    layout = mma_fragment("m16n8k16", "C").tile(2, 2)
    row, col = layout.coordinates(Traced("lane"), 13)
    assert (str(row), str(col)) == ("((lane >> 2) + 16)", "((((lane & 3) << 1) + 1) + 8)")
    row, col = layout.coordinates(Traced("lane"), 0)
    assert (str(row), str(col)) == ("(lane >> 2)", "((lane & 3) << 1)")


def test_unknown_fragments_are_refused() -> None:
    with pytest.raises(LayoutError, match="no fragment for operand A of mma m16n8k16 with 32-bit"):
        mma_fragment("m16n8k16", "A", 32)
    with pytest.raises(LayoutError, match="not 12"):
        wgmma_accumulator(12)
    with pytest.raises(LayoutError, match="not 3"):
        ldmatrix_fragment(3)
    with pytest.raises(LayoutError, match=r"outside 0\.\.3"):
        mma_fragment("m16n8k16", "C").coordinates(0, 4)
    with pytest.raises(LayoutError, match="no atom"):
        mma_fragment("m16n8k16", "C").atom_elements(1, 0)


# ---------------------------------------------------------------- against an independent catalogue

TENSOR_LAYOUTS_ATOMS = [
    ("SM80_16x8x8_F16F16F16F16_TN", "m16n8k8", 16, 16),
    ("SM80_16x8x16_F16F16F16F16_TN", "m16n8k16", 16, 16),
    ("SM80_16x8x8_F32BF16BF16F32_TN", "m16n8k8", 16, 32),
    ("SM80_16x8x16_F32F16F16F32_TN", "m16n8k16", 16, 32),
    ("SM80_16x8x16_F32BF16BF16F32_TN", "m16n8k16", 16, 32),
    ("SM80_16x8x4_F32TF32TF32F32_TN", "m16n8k4", 32, 32),
    ("SM80_16x8x8_F32TF32TF32F32_TN", "m16n8k8", 32, 32),
]


@pytest.mark.parametrize(("atom", "shape", "bits", "accumulator_bits"), TENSOR_LAYOUTS_ATOMS)
def test_catalogue_agrees_with_tensor_layouts(atom: str, shape: str, bits: int, accumulator_bits: int) -> None:
    pytest.importorskip("tensor_layouts")
    from tensor_layouts import atoms_nv

    theirs = getattr(atoms_nv, atom)
    m, n, k = theirs.shape_mnk
    # Its layouts take (thread, value) to a column-major offset, of A in (m, k), of B in (n, k), of C in (m, n).
    operands = [("A", theirs.a_layout, m, (m, k), bits), ("C", theirs.c_layout, m, (m, n), accumulator_bits)]
    for operand, layout, leading, size, width in operands:
        ours = mma_fragment(shape, operand, width)
        assert ours.shape == size
        for lane in range(32):
            for element in range(ours.elements_per_thread):
                offset = layout(lane, element)
                assert ours.coordinates(lane, element) == (offset % leading, offset // leading)
    ours = mma_fragment(shape, "B", bits)
    assert ours.shape == (k, n)
    for lane in range(32):
        for element in range(ours.elements_per_thread):
            offset = theirs.b_layout(lane, element)
            assert ours.coordinates(lane, element) == (offset // n, offset % n)


@pytest.mark.parametrize("n", [8, 64, 128])
def test_wgmma_accumulator_agrees_with_tensor_layouts(n: int) -> None:
    pytest.importorskip("tensor_layouts")
    from tensor_layouts import atoms_nv

    theirs = getattr(atoms_nv, f"SM90_64x{n}x16_F16F16F16_SS")
    rows, cols = wgmma_accumulator(n).element_coordinates()
    for thread in range(128):
        for element in range(n // 2):
            offset = theirs.c_layout(thread, element)
            assert (int(rows[thread, element]), int(cols[thread, element])) == (offset % 64, offset // 64)
