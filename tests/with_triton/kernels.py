# type: ignore (the words of another language, in Python's syntax)
"""Triton kernels that make the compiler use what it has: masks, reductions, pipelines, tensor cores, locks."""
# ruff: noqa: N803

import triton
import triton.language as tl


@triton.jit
def add(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    tl.store(out + at, tl.load(x + at, inside) + tl.load(y + at, inside), inside)


@triton.jit
def softmax(x, out, rows, columns, stride, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """A persistent program: each takes every so many rows, and loads ahead."""
    column = tl.arange(0, BLOCK)
    inside = column < columns
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0), num_stages=STAGES):
        values = tl.load(x + row * stride + column, inside, other=-float("inf"))
        powers = tl.exp(values - tl.max(values, 0))
        tl.store(out + row * stride + column, powers / tl.sum(powers, 0), inside)


@triton.jit
def matmul(
    a, b, c, m, n, k, stride_a, stride_b, stride_c, TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr
):
    """Row-major A (m, k) times row-major B (k, n); rows and columns beyond the end wrap, and are not stored."""
    row = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)
    column = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)
    step = tl.arange(0, TILE_K)
    a_at = a + (row % m)[:, None] * stride_a + step[None, :]
    b_at = b + step[:, None] * stride_b + (column % n)[None, :]
    total = tl.zeros((TILE_M, TILE_N), tl.float32)
    for first in range(0, k, TILE_K):
        a_tile = tl.load(a_at, step[None, :] < k - first, other=0.0)
        b_tile = tl.load(b_at, step[:, None] < k - first, other=0.0)
        total = tl.dot(a_tile, b_tile, total)
        a_at += TILE_K
        b_at += TILE_K * stride_b
    inside = (row < m)[:, None] & (column < n)[None, :]
    tl.store(c + row[:, None] * stride_c + column[None, :], total.to(c.dtype.element_ty), inside)


@triton.jit
def layer_norm(x, weight, bias, out, mean_out, rstd_out, columns, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    x += row * columns
    out += row * columns
    total = tl.zeros((BLOCK,), tl.float32)
    squares = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, columns, BLOCK):
        column = first + tl.arange(0, BLOCK)
        total += tl.load(x + column, column < columns, other=0.0).to(tl.float32)
    mean = tl.sum(total, 0) / columns
    for first in range(0, columns, BLOCK):
        column = first + tl.arange(0, BLOCK)
        values = tl.load(x + column, column < columns, other=0.0).to(tl.float32)
        away = tl.where(column < columns, values - mean, 0.0)
        squares += away * away
    rstd = 1 / tl.sqrt(tl.sum(squares, 0) / columns + eps)
    tl.store(mean_out + row, mean)
    tl.store(rstd_out + row, rstd)
    for first in range(0, columns, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = column < columns
        values = tl.load(x + column, inside, other=0.0).to(tl.float32)
        scaled = (values - mean) * rstd * tl.load(weight + column, inside) + tl.load(bias + column, inside)
        tl.store(out + column, scaled, inside)


@triton.jit
def row_sums_under_locks(x, sums, locks, columns, GROUPS: tl.constexpr, BLOCK: tl.constexpr):
    """Rows of one group are added up by whoever has the group's lock: the way of a layer norm's weight gradients."""
    row = tl.program_id(0)
    group = row % GROUPS
    column = tl.arange(0, BLOCK)
    inside = column < columns
    values = tl.load(x + row * columns + column, inside, other=0.0)
    while tl.atomic_cas(locks + group, 0, 1) == 1:
        pass
    at = sums + group * columns + column
    tl.store(at, tl.load(at, inside) + values, inside)
    tl.debug_barrier()
    tl.atomic_xchg(locks + group, 0)


@triton.jit
def _blocks(
    total,
    peak,
    out,
    q,
    k,
    v,
    scale,
    first,
    last,
    row,
    stride,
    MASKED: tl.constexpr,
    TILE_N: tl.constexpr,
    HEAD: tl.constexpr,
):
    """Online softmax over blocks of keys."""
    along = tl.arange(0, HEAD)
    for start in range(first, last, TILE_N):
        key = start + tl.arange(0, TILE_N)
        scores = tl.dot(q, tl.load(k + key[None, :] * stride + along[:, None])) * scale
        if MASKED:
            scores = tl.where(row[:, None] >= key[None, :], scores, -float("inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        powers = tl.math.exp2(scores - new_peak[:, None])
        shrink = tl.math.exp2(peak - new_peak)
        total = total * shrink + tl.sum(powers, 1)
        values = tl.load(v + key[:, None] * stride + along[None, :])
        out = tl.dot(powers.to(values.dtype), values, out * shrink[:, None])
        peak = new_peak
    return total, peak, out


@triton.jit
def attention(
    q,
    k,
    v,
    out,
    lse,
    scale,
    length,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    HEAD: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """One head per program of the second axis, (heads, length, HEAD); ``scale`` includes log2(e)."""
    block, head = tl.program_id(0), tl.program_id(1)
    base = head.to(tl.int64) * length * HEAD
    row = block * TILE_M + tl.arange(0, TILE_M)
    place = base + row[:, None] * HEAD + tl.arange(0, HEAD)[None, :]
    query = tl.load(q + place)
    peak = tl.full((TILE_M,), -float("inf"), tl.float32)
    total = tl.zeros((TILE_M,), tl.float32)
    sums = tl.zeros((TILE_M, HEAD), tl.float32)
    whole = block * TILE_M if CAUSAL else length
    total, peak, sums = _blocks(
        total, peak, sums, query, k + base, v + base, scale, 0, whole, row, HEAD, False, TILE_N, HEAD
    )
    if CAUSAL:
        total, peak, sums = _blocks(
            total, peak, sums, query, k + base, v + base, scale, whole, whole + TILE_M, row, HEAD, True, TILE_N, HEAD
        )
    tl.store(out + place, (sums / total[:, None]).to(out.dtype.element_ty))
    tl.store(lse + head * length + row, peak + tl.math.log2(total))


@triton.jit
def row_sums_without_locks(x, sums, locks, columns, GROUPS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    rest = sums + row % GROUPS * columns + column
    tl.store(rest, tl.load(rest, inside) + tl.load(x + row * columns + column, inside, other=0.0), inside)


@triton.jit
def matmul_by_descriptors(a, b, c, k, TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr):
    """A (m, k) times the transpose of B (n, k), by way of the TMA."""
    row, column = tl.program_id(0) * TILE_M, tl.program_id(1) * TILE_N
    total = tl.zeros((TILE_M, TILE_N), tl.float32)
    for step in range(0, k, TILE_K):
        total = tl.dot(a.load([row, step]), b.load([column, step]).T, total)
    c.store([row, column], total.to(tl.float16))


@triton.jit
def matmul_with_own_descriptors(
    a, b, c, m, n, k, TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, SPECIALISED: tl.constexpr
):
    """The same with tensor maps that the kernel makes itself."""
    a_map = tl.make_tensor_descriptor(a, [m, k], [k, 1], [TILE_M, TILE_K])
    b_map = tl.make_tensor_descriptor(b, [n, k], [k, 1], [TILE_N, TILE_K])
    c_map = tl.make_tensor_descriptor(c, [m, n], [n, 1], [TILE_M, TILE_N])
    row, column = tl.program_id(0) * TILE_M, tl.program_id(1) * TILE_N
    total = tl.zeros((TILE_M, TILE_N), tl.float32)
    for step in tl.range(0, k, TILE_K, warp_specialize=SPECIALISED):
        total = tl.dot(a_map.load([row, step]), b_map.load([column, step]).T, total)
    c_map.store([row, column], total.to(tl.float16))


@triton.jit
def halve(x, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(x + at, tl.load(x + at, mask=at < n) / 2, mask=at < n)


@triton.jit
def halve_and_spread_the_first(x, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    first = tl.load(x)
    tl.store(x + at, tl.load(x + at) / 2)
    tl.store(out + at, tl.zeros([BLOCK], tl.float32) + first)


@triton.jit
def doubled(x, out, WAIT: tl.constexpr):
    at = tl.arange(0, 64)
    if WAIT:
        # Triton 3.4 has a gdc_wait that does not compile.
        tl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    tl.store(out + at, 2 * tl.load(x + at))
