"""Attention on a cache: which kernels run it, and their launches. Few queries take those of :mod:`.decode`.

Many queries of a sequence are cut into tiles, each with all of its keys, and take the kernel of packed sequences.
"""

from __future__ import annotations

from dataclasses import replace

from warploom.core.arguments import fields, strides
from warploom.core.targets import Target
from warploom.kernels.attention.choice import candidates_sm90, narrowed, rounds, spared_keys
from warploom.kernels.attention.decode import Decode, DecodeOperands, DecodeProblem, decode_configuration
from warploom.kernels.attention.forward_sm90 import ForwardSm90
from warploom.kernels.attention.packed import ListedTiles, PackedOperands, PackedProblem
from warploom.kernels.attention.packed import violations as packed_violations
from warploom.kernels.attention.problem import Operands
from warploom.kernels.settings import violated
from warploom.kernels.source import KernelCall, KernelSource
from warploom.tile.order import divisors, heads_at_once, heads_together, page_table
from warploom.tile.panels import box_rows

PagedConfig = Decode | ForwardSm90
KINDS = (Decode, ForwardSm90)


def choose_paged(
    problem: DecodeProblem, operands: DecodeOperands, target: Target, multiprocessors: int
) -> tuple[PagedConfig, str]:
    """The configuration for a problem when nobody asks for another, and why: never by what lengths say."""
    p, batch = problem, max(1, problem.batch)
    queries = max(1, p.q_len // batch if p.packed else p.q_len)
    if target.has_wgmma and not _unlisted(p, operands):
        packed, planes = _as_packed(p, operands), batch * p.heads
        takes = [c for c in candidates_sm90(packed.typical) if not packed_violations(c, packed, target)]
        for wide in takes[:1]:
            tiled = narrowed(wide, planes, queries, multiprocessors)
            turns = rounds(tiled, planes, queries, multiprocessors)
            rows = planes * queries / multiprocessors
            if spared_keys(tiled, rows, p.capacity, turns * p.capacity) < 0:  # both have two launches
                return tiled, f"{queries} queries of each sequence: tiles of {tiled.tile_m}"
    return decode_configuration(problem, target), "by head_dim and rows"


def violations(config: PagedConfig, problem: DecodeProblem, operands: DecodeOperands) -> list[str]:
    """The constraints that a problem on such arrays violates; empty if the kernels take it."""
    if config.shares_keys is True:
        return config.violations(problem)
    return _unlisted(problem, operands) or packed_violations(config, _as_packed(problem, operands))


def paged_calls(
    config: PagedConfig, problem: DecodeProblem, operands: DecodeOperands, multiprocessors: int
) -> tuple[KernelCall, KernelCall]:
    """The launches of a configuration on arrays with these strides."""
    if config.shares_keys is True:
        return config.calls(problem, operands, multiprocessors)
    return _listing(config, problem, operands, multiprocessors), _tiled(config, problem, operands, multiprocessors)


def _unlisted(p: DecodeProblem, operands: DecodeOperands) -> list[str]:
    """What stands against tiles: a tensor map reaches sequences and pages that are whole rows apart."""
    o = operands
    even = all(outer % row == 0 for outer, _, row in (o.q, o.k, o.v, o.out) if row) and 0 not in (o.q[2], o.k[2])
    return violated(
        [
            (not p.fp8, "an fp8 cache takes attention_decode"),
            (p.split is None, "fixed_split takes attention_decode"),
            (
                even and o.k[0] * o.v[2] == o.v[0] * o.k[2] and (p.packed or o.q[0] * o.out[2] == o.out[0] * o.q[2]),
                "k_cache and v_cache (or q and out) lie differently, or not in whole rows",
            ),
        ]
    )


def _pitches(p: DecodeProblem, operands: DecodeOperands) -> tuple[int, int]:
    """Rows from one sequence of Q to the next, and from one page, or one sequence, of a cache."""
    q, k = operands.q, operands.k
    return (0 if p.packed else q[0] // q[2]), k[0] // k[2]


def _as_packed(p: DecodeProblem, operands: DecodeOperands) -> PackedProblem:
    """The same as packed sequences: all rows that there are."""
    q_pitch, k_pitch = _pitches(p, operands)
    total_q = p.q_len if p.packed else (p.batch - 1) * q_pitch + p.q_len
    total_k = (p.pages - 1) * k_pitch + p.page_size if p.page_size else (p.batch - 1) * k_pitch + p.capacity
    return PackedProblem(p.batch, p.heads, p.kv_heads, total_q, total_k, p.head_dim, p.dtype, **p.asked)


def _tiles(config: ForwardSm90, p: DecodeProblem) -> ListedTiles:
    return ListedTiles(p.batch, p.heads, p.q_len if p.packed else p.batch * p.q_len, p.q_len, config.tile_m)


def _listing(config: ForwardSm90, p: DecodeProblem, operands: DecodeOperands, multiprocessors: int) -> KernelCall:
    """The launch that lists the tiles of all sequences."""
    tile_m, by_row = config.tile_m, _as_packed(p, operands).features.by_row
    source = KernelSource.of(
        "warploom.kernels.attention.device.paged:list_paged_tiles",
        f"list_paged_tiles_{tile_m}",
        tile_m=tile_m,
        by_row=by_row,
        packed=p.packed,
    )
    q_pitch, k_pitch = _pitches(p, operands)
    keys = min(p.pages * p.page_size, p.batch * p.capacity) if p.page_size else p.batch * p.capacity
    row_bytes, tiles = 2 * p.head_dim * p.dtype.bytes // p.group, _tiles(config, p)
    least = heads_at_once(tiles.rows // tile_m, multiprocessors) if by_row else 1
    together = heads_together(keys, row_bytes, p.heads, least)
    scalars = {
        "packed_queries_total": p.q_len,
        **fields("queries", pitch=q_pitch, most=p.q_len),
        **fields("keys", pitch=1 if p.page_size else k_pitch, most=p.capacity),
    }
    arrays = *(["starts"] if p.packed else ()), "lengths", "tiles"
    return tiles.call(source, scalars, arrays, together)


def _tiled(config: ForwardSm90, p: DecodeProblem, operands: DecodeOperands, multiprocessors: int) -> KernelCall:
    """The launch that works on the list."""
    packed, (q_pitch, k_pitch) = _as_packed(p, operands), _pitches(p, operands)
    lying = {name: getattr(operands, name)[:0:-1] for name in Operands.names}
    _, alike = config.calls_packed(packed, PackedOperands(lying), multiprocessors)
    source = KernelSource.of(
        "warploom.kernels.attention.device.paged:attention_paged_sm90",
        f"attention_paged_{config.tile_m}x{config.tile_n}x{config.head_dim}",
        config=config.giving(p.lse),
        features=packed.features,
        page_size=p.page_size,
        packed=p.packed,
    )
    maps = alike.maps
    if p.page_size:
        rows = box_rows(p.page_size, config.tile_n)
        keys, values = (replace(x, box=(rows, *x.box[1:])) for x in maps[1:3])
        maps = maps[0], keys, values, maps[3]
    table = page_table(operands.table, p.table_pages, p.pages)
    scalars = {**table, "page_pitch": k_pitch, **strides(lse=operands.lse), **divisors(spacing=max(1, q_pitch))}
    grid = config.grid(_tiles(config, p).most * p.heads, multiprocessors)
    return replace(
        alike,
        source=source,
        grid=grid,
        scalars=scalars,
        maps=maps,
        arrays=(*alike.arrays, *(["table"] if p.page_size else ())),
    )
