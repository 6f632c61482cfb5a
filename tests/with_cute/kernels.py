# type: ignore (the words of another language, in Python's syntax)
"""CuTe DSL kernels; compiled for sm_90a without a GPU."""

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_ptr
from cutlass.memory import SmemAllocator


@cute.kernel
def reverse(x: cute.Tensor, y: cute.Tensor, meets: cutlass.Constexpr):
    t, _, _ = cute.arch.thread_idx()
    tile = SmemAllocator().allocate_tensor(cutlass.Float32, cute.make_layout(128))
    tile[t] = x[t]
    if cutlass.const_expr(meets):
        cute.arch.sync_threads()
    y[t] = tile[127 - t]


@cute.jit
def launch(x: cute.Pointer, y: cute.Pointer, meets: cutlass.Constexpr):
    layout = cute.make_layout(128)
    reverse(cute.make_tensor(x, layout), cute.make_tensor(y, layout), meets).launch(grid=[1, 1, 1], block=[128, 1, 1])


def ptx_of_reverse(meets: bool) -> str:
    """The PTX of a CTA that reverses 128 numbers, with its barrier or without."""
    pointer = make_ptr(cutlass.Float32, 16, cute.AddressSpace.gmem, assumed_align=16)
    return cute.compile(launch, pointer, pointer, meets).__ptx__
