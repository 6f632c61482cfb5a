from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from layout_cases import Traced, bijections, linear_maps

from warploom.core.errors import LayoutError
from warploom.layout import LinearMap

A = LinearMap(
    {"register": [(0, 1), (8, 0), (0, 8)], "lane": [(0, 2), (0, 4), (1, 0), (2, 0), (4, 0)]}, {"row": 16, "col": 16}
)


def all_inputs(layout: LinearMap):
    sizes = [range(layout.in_size(dim)) for dim in layout.in_dims]
    for values in itertools.product(*sizes):
        yield dict(zip(layout.in_dims, values, strict=True))


@given(linear_maps())
def test_apply_is_the_xor_of_basis_vectors(layout: LinearMap) -> None:
    for inputs in all_inputs(layout):
        expected = [0] * len(layout.outs)
        for dim, value in inputs.items():
            for bit, vector in enumerate(layout.bases(dim)):
                if value >> bit & 1:
                    expected = [have ^ part for have, part in zip(expected, vector, strict=True)]
        assert list(layout.apply(**inputs).values()) == expected


@given(linear_maps())
def test_arrays_and_traced_values_agree_with_integers(layout: LinearMap) -> None:
    register = np.arange(layout.in_size("register"), dtype=np.uint8)[:, None]
    lane = np.arange(layout.in_size("lane"))[None, :]
    arrays = layout.apply(register=register, lane=lane)
    traced = layout.apply(register=Traced("r"), lane=Traced("t"))
    half = layout.apply(register=layout.in_size("register") - 1, lane=Traced("t"))
    for r, t in itertools.product(range(layout.in_size("register")), range(layout.in_size("lane"))):
        for out, value in layout.apply(register=r, lane=t).items():
            assert isinstance(value, int)
            assert arrays[out].shape == (register.size, lane.size)
            assert arrays[out][r, t] == value
            formula = traced[out]
            assert value == (formula.at(r=r, t=t) if isinstance(formula, Traced) else formula)
            if r == register.size - 1:
                formula = half[out]
                assert value == (formula.at(t=t) if isinstance(formula, Traced) else formula)


def test_traced_formulas_are_minimal() -> None:
    found = A.apply(lane=Traced("lane"), register=0)
    assert str(found["row"]) == "(lane >> 2)"
    assert str(found["col"]) == "((lane & 3) << 1)"
    # Constants on bits of their own are added last, so that an address can take them as its immediate.
    assert str(A.apply(lane=Traced("lane"), register=7)["col"]) == "(((lane & 3) << 1) + 9)"
    address = LinearMap({"lane": [(1, 0), (2, 0), (4, 0), (8, 0), (0, 8)]}, {"row": 16, "col": 16})
    assert {k: str(v) for k, v in address.apply(lane=Traced("lane")).items()} == {
        "row": "(lane & 15)",
        "col": "((lane & 16) >> 1)",
    }
    whole = LinearMap({"lane": [(16,), (32,)]}, {"byte": 64})
    assert str(whole.apply(lane=Traced("x"))["byte"]) == "(x << 4)"
    overlapping = LinearMap({"lane": [(3,), (2,)]}, {"byte": 4})
    assert str(overlapping.apply(lane=Traced("x"))["byte"]) == "(x ^ ((x & 1) << 1))"
    assert LinearMap({"lane": [(0,)]}, {"byte": 4}).apply(lane=Traced("x")) == {"byte": 0}


@given(bijections())
def test_inverse_of_a_bijection_is_two_sided(layout: LinearMap) -> None:
    assert layout.is_surjective
    back = layout.invert()
    assert layout.compose(back) == LinearMap.identity(dict(layout.outs))
    assert back.compose(layout) == LinearMap.identity({dim: layout.in_size(dim) for dim in layout.in_dims})


@given(linear_maps())
def test_inverse_of_a_surjection_is_a_section(layout: LinearMap) -> None:
    if layout.is_surjective:
        assert layout.compose(layout.invert()) == LinearMap.identity(dict(layout.outs))
    else:
        with pytest.raises(LayoutError, match="cannot invert"):
            layout.invert()


@given(linear_maps())
def test_rank_counts_the_image(layout: LinearMap) -> None:
    image = {tuple(layout.apply(**inputs).values()) for inputs in all_inputs(layout)}
    assert len(image) == 1 << layout.rank
    assert layout.matrix().shape == (layout.out_bits, sum(layout.in_bits(d) for d in layout.in_dims))


@given(linear_maps(), st.data())
def test_compose_is_application_in_turn(inner: LinearMap, data: st.DataObject) -> None:
    size = {dim: size.bit_length() - 1 for dim, size in inner.outs}
    bases = {dim: [(data.draw(st.integers(0, 63)),) for _ in range(bits)] for dim, bits in size.items()}
    outer = LinearMap(bases, {"byte": 64})
    both = outer.compose(inner)
    for inputs in all_inputs(inner):
        assert both.apply(**inputs) == outer.apply(**inner.apply(**inputs))
    identity = LinearMap.identity(dict(inner.outs))
    assert identity.compose(inner) == inner


@given(linear_maps(), linear_maps(), linear_maps())
def test_product_is_associative_and_tiles(a: LinearMap, b: LinearMap, c: LinearMap) -> None:
    assert a.product(b).product(c) == a.product(b.product(c))
    ab = a.product(b)
    register, lane = np.ix_(np.arange(ab.in_size("register")), np.arange(ab.in_size("lane")))
    inputs = {"register": register, "lane": lane}
    inner = a.apply(**{dim: value & (a.in_size(dim) - 1) for dim, value in inputs.items()})
    outer = b.apply(**{dim: value >> a.in_bits(dim) for dim, value in inputs.items()})
    found = ab.apply(**inputs)
    for out in inner:
        assert (found[out] == inner[out] + a.out_size(out) * outer[out]).all()


def test_equality_and_hash_do_not_depend_on_the_order_of_dimensions() -> None:
    flipped = LinearMap({dim: [v[::-1] for v in vectors] for dim, vectors in reversed(A.ins)}, {"col": 16, "row": 16})
    assert flipped == A
    assert hash(flipped) == hash(A)
    assert A.project("row") != A
    assert A != "A"
    assert eval(repr(A), {"LinearMap": LinearMap}) == A
    assert "register → (0, 1) (8, 0) (0, 8)" in str(A)


@pytest.mark.parametrize(
    ("bases", "outs", "message"),
    [
        ({"lane": [(0, 1)]}, {"row": 12, "col": 2}, "power of two"),
        ({"lane": [(0, 2)]}, {"row": 2, "col": 2}, "outside 0..1"),
        ({"lane": [(0,)]}, {"row": 2, "col": 2}, "coordinates"),
    ],
)
def test_wrong_maps_are_refused(bases: dict[str, list[tuple[int, ...]]], outs: dict[str, int], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        LinearMap(bases, outs)


def test_wrong_inputs_are_refused() -> None:
    with pytest.raises(LayoutError, match="lane=32"):
        A.apply(lane=32)
    with pytest.raises(LayoutError, match="no input 'thread'"):
        A.apply(thread=0)
    with pytest.raises(LayoutError, match="takes integers"):
        A.apply(lane=np.zeros(3))
    with pytest.raises(LayoutError, match="cannot compose"):
        A.compose(A)
    with pytest.raises(LayoutError, match="no output"):
        A.out_mask("byte")
    with pytest.raises(LayoutError, match="one name"):
        A.rename({"row": "col"})
