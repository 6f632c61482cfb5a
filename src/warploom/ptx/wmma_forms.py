"""``wmma``: fragments of matrices, loaded, multiplied and stored by a warp.

Source: PTX ISA, "Warp Level Matrix Multiply-Accumulate Instructions".
"""

from __future__ import annotations

from typing import Literal, cast

from warploom.core.dtypes import DTYPES, DType, u32
from warploom.core.errors import LayoutError
from warploom.isa.effects import Space
from warploom.isa.wmma import WmmaLoad, WmmaMma, WmmaStore
from warploom.layout.wmma import WMMA_SHAPES, StorageOrder
from warploom.ptx.builder import Builder, form
from warploom.ptx.forms import Form
from warploom.ptx.syntax import Operand, Vector


@form("wmma")
def wmma(b: Builder, f: Form) -> None:
    """``wmma.{load, mma, store}``."""
    kind, shape = f.which("load", "mma", "store"), f.which(*WMMA_SHAPES)
    f.need("sync", "aligned")
    try:
        {"load": _load, "mma": _multiply, "store": _store}[kind](b, f, shape)
    except LayoutError as error:
        raise f.refusal(str(error)) from None


def _order(f: Form) -> StorageOrder:
    return cast("StorageOrder", f.which("row", "col"))


def _type(f: Form, name: str) -> DType:
    if name not in DTYPES:
        raise f.refusal(f"the type .{name} is not supported")
    return DTYPES[name]


def _space(b: Builder, f: Form) -> Space:
    space = f.one_of("shared", "shared::cta", "global").removesuffix("::cta")
    if not space and b.windows:
        raise f.refusal("a generic address is not supported here")
    return cast("Space", space or "global")


def _items(f: Form, operand: Operand) -> tuple[Operand, ...]:
    if not isinstance(operand, Vector):
        raise f.refusal()
    return operand.items


def _load(b: Builder, f: Form, shape: str) -> None:
    which, order, space = f.which("a", "b", "c").upper(), _order(f), _space(b, f)
    target, address, stride = f.operands(3)
    base, offset, within = b.address(address, space)
    load = WmmaLoad(cast("Literal['A', 'B', 'C']", which), shape, _type(f, f.type()), order, space, offset)
    b.set_all(_items(f, target), load, (base, b.read(stride, u32)), within)


def _store(b: Builder, f: Form, shape: str) -> None:
    order, space = _order(f), _space(b, f)
    f.need("d")
    address, source, stride = f.operands(3)
    base, offset, within = b.address(address, space)
    store = WmmaStore(shape, _type(f, f.type()), order, space, offset)
    items, types = _items(f, source), store.operand_types[2:]
    if len(items) != len(types):
        raise f.refusal("its registers are not as many as its shape has")
    values = list(map(b.read, items, types))
    b.emit(store, (base, b.read(stride, u32), *values), within=within)


def _multiply(b: Builder, f: Form, shape: str) -> None:
    orders = [m for m in f.instruction.modifiers if m in ("row", "col")]
    f.drop("row", "col")
    types = f.types()
    accumulators, inputs = (types, ["f16"]) if len(types) == 2 else (types[::3], types[1:3])
    if len(orders) != 2 or len(types) not in (2, 4) or len({*accumulators}) > 1 or len({*inputs}) > 1:
        raise f.refusal("D and C of one type, A and B of one type are supported")
    product = WmmaMma(shape, _type(f, inputs[0]), _type(f, types[0]), *cast("list[StorageOrder]", orders))
    target, *sources = (_items(f, x) for x in f.operands(4))
    given = [x for items in sources for x in items]
    if len(given) != len(product.operand_types):
        raise f.refusal("its registers are not as many as its shape has")
    b.set_all(target, product, [b.read(x, t) for x, t in zip(given, product.operand_types, strict=True)])
