"""A winner to keep and to find again."""

from dataclasses import replace

from warploom.core.dtypes import bf16
from warploom.kernels.attention.problem import AttentionProblem
from warploom.winners.classes import attention_class
from warploom.winners.store import Winner, package_version

GPU = "NVIDIA Test 9000"


def problem(q_len=4096, *, batch=4, head_dim=128, dtype=bf16, causal=False):
    window = (None, 0) if causal else (None, None)
    return AttentionProblem(batch, 16, 16, q_len, q_len, head_dim, dtype, window)


def winner(of=None, config="one", **changes):
    made = Winner(
        GPU,
        package_version(),
        attention_class(of or problem()),
        config,
        1e-3,
        0.9e-3,
        1.1e-3,
        9,
        1.25,
        40,
        "2026-01-01",
    )
    return replace(made, **changes)
