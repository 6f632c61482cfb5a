"""The kernel language: Python functions traced into Programs."""

from warploom.lang.elements import bf16, e4m3, e5m2, f16, f32, f64, pred, s8, s16, s32, s64, tf32, u8, u16, u32, u64
from warploom.lang.fragments import Fragment, TileReader
from warploom.lang.kernel import Kernel, KernelFunction, Launch, kernel
from warploom.lang.memory import GlobalPointer, SharedTile
from warploom.lang.parameters import Compound, Global, Strided, StridedPointer, TensorMap
from warploom.lang.values import Mutable, Traced

__all__ = [
    "Compound",
    "Fragment",
    "Global",
    "GlobalPointer",
    "Kernel",
    "KernelFunction",
    "Launch",
    "Mutable",
    "SharedTile",
    "Strided",
    "StridedPointer",
    "TensorMap",
    "TileReader",
    "Traced",
    "bf16",
    "e4m3",
    "e5m2",
    "f16",
    "f32",
    "f64",
    "kernel",
    "pred",
    "s8",
    "s16",
    "s32",
    "s64",
    "tf32",
    "u8",
    "u16",
    "u32",
    "u64",
]
