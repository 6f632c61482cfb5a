"""Shared-memory banks: the wavefronts an access takes, counted from its addresses or predicted from its map.

The model: 32 banks of 4 bytes. A warp's access is served in *phases* of lanes that together ask for at most 128 bytes:
all 32 lanes for accesses of up to 4 bytes each, 16 lanes for 8 bytes, 8 lanes for 16 bytes (and for each 8×8 matrix of
``ldmatrix``). Within a phase a bank delivers one 32-bit word per wavefront to any number of lanes, so a phase takes as
many wavefronts as the most different words any bank is asked for.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from warploom.core.errors import LayoutError
from warploom.layout.gf2 import rank
from warploom.layout.linear import LinearMap
from warploom.layout.swizzle import BANK_CYCLE_BYTES

_WORD_BYTES = 4


def phase_lanes(bytes_per_lane: int) -> int:
    """Return the lanes that one phase serves: 32 up to 4 bytes, 16 for 8, 8 for 16; LayoutError for other sizes."""
    if bytes_per_lane not in (1, 2, 4, 8, 16):
        raise LayoutError(f"a lane accesses 1, 2, 4, 8 or 16 bytes of shared memory, not {bytes_per_lane}")
    return BANK_CYCLE_BYTES // max(_WORD_BYTES, bytes_per_lane)


def _phases(values: NDArray[Any], lanes: int, fill: Any) -> NDArray[Any]:
    """``values [..., L]`` as ``[accesses, phases, lanes]``, padded with ``fill`` to whole phases."""
    total = values.shape[-1]
    flat = values.reshape(-1, total)
    missing = -total % lanes
    if missing:
        flat = np.concatenate([flat, np.full((flat.shape[0], missing), fill, dtype=flat.dtype)], axis=1)
    return flat.reshape(flat.shape[0], flat.shape[1] // lanes, lanes)


def wavefronts(
    addresses: NDArray[Any], bytes_per_lane: int, active: NDArray[np.bool_] | None = None
) -> NDArray[np.int64]:
    """Wavefronts executed by each access: byte addresses [..., lanes] → int64 [...].

    ``bytes_per_lane`` is 1, 2, 4, 8 or 16 and addresses are aligned to it; ``active`` [..., lanes] marks the lanes that
    take part (all by default). ``ldmatrix.x<count>`` is an access of 16 bytes by 8·count lanes. A phase without active
    lanes takes none.
    """
    lanes = phase_lanes(bytes_per_lane)
    unit_bytes = max(_WORD_BYTES, bytes_per_lane)
    # Aligned accesses of 8 or 16 bytes occupy neighbouring banks together, so a unit of that size acts as one bank.
    units = addresses >> (unit_bytes.bit_length() - 1)
    if units.dtype.kind != "i":
        units = units.astype(np.int64)  # -1 marks lanes that take no part
    if active is not None:
        units = np.where(active, units, -1)
    grouped = np.sort(_phases(units, lanes, -1), axis=-1)
    first = np.empty(grouped.shape, dtype=np.bool_)
    first[..., 0] = grouped[..., 0] >= 0
    np.not_equal(grouped[..., 1:], grouped[..., :-1], out=first[..., 1:])
    accesses, phases, _ = grouped.shape
    phase_number = np.arange(accesses * phases, dtype=np.int64).reshape(accesses, phases, 1)
    banks = ((grouped & (lanes - 1)) + phase_number * lanes)[first]
    counts = np.bincount(banks, minlength=accesses * phases * lanes).reshape(accesses, phases, lanes)
    total: NDArray[np.int64] = counts.max(axis=-1).sum(axis=-1)
    return total.reshape(addresses.shape[:-1])


def ideal_wavefronts(
    addresses: NDArray[Any], bytes_per_lane: int, active: NDArray[np.bool_] | None = None
) -> NDArray[np.int64]:
    """Wavefronts of the same accesses without conflicts, int64 [...]: the phases that have an active lane."""
    lanes = phase_lanes(bytes_per_lane)
    if active is None:
        phases = -(-addresses.shape[-1] // lanes)
        return np.full(addresses.shape[:-1], phases, dtype=np.int64)
    taking_part = _phases(np.broadcast_to(active, addresses.shape), lanes, False)
    total: NDArray[np.int64] = taking_part.any(axis=-1).sum(axis=-1)
    return total.reshape(addresses.shape[:-1])


def predicted_wavefronts(lanes: LinearMap, bytes_per_lane: int) -> int:
    """Wavefronts of a full access through the linear map ``lane → byte``, from ranks alone.

    The lanes of a phase reach 2^r units, r the rank of their basis vectors, spread evenly over 2^s banks, s the rank of
    the bits that select the bank; each bank then serves 2^(r-s). XOR by the bits of other lanes changes no rank.
    Raises LayoutError if a lane's byte is not aligned to the access.
    """
    count = phase_lanes(bytes_per_lane)
    vectors = [vector[0] for vector in lanes.project("byte").bases("lane")]
    if any(vector % bytes_per_lane for vector in vectors):
        raise LayoutError(f"the map is not aligned to accesses of {bytes_per_lane} bytes")
    unit_bits = max(_WORD_BYTES, bytes_per_lane).bit_length() - 1
    within = [vector >> unit_bits for vector in vectors[: count.bit_length() - 1]]
    degree = 1 << (rank(within) - rank(unit & (count - 1) for unit in within))
    return degree * max(1, lanes.in_size("lane") // count)


def predicted_conflicts(lanes: LinearMap, bytes_per_lane: int) -> int:
    """Wavefronts beyond the conflict-free number, predicted from ranks (see :func:`predicted_wavefronts`)."""
    phases = max(1, lanes.in_size("lane") // phase_lanes(bytes_per_lane))
    return predicted_wavefronts(lanes, bytes_per_lane) - phases
