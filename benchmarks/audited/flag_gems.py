"""FlagGems: PyTorch's operators in Triton."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import torch
from torch.nn import functional

from .trial import Result, case

_FLAG_GEMS = ("flag_gems==5.0.2", "sqlalchemy", "typing_extensions", "triton==3.8.0")


def _op(module: str) -> Any:
    import os

    os.environ["GEMS_VENDOR"] = "nvidia"
    return import_module(f"flag_gems.ops.{module}")


@case(_FLAG_GEMS, "128 × 384 × 512 bf16, stream-K on 4 CTAs", gpu=True)
def flag_gems_stream_k() -> Iterator[Result]:
    a, b, c = torch.randn(128, 512).bfloat16(), torch.randn(512, 384).bfloat16(), torch.empty(128, 384).bfloat16()
    _op("mm_streamk").streamk_mm(a, b, c, 128, 384, 512, sm_count=4)
    yield c, a.double() @ b.double(), 1e-2


@case(_FLAG_GEMS, "3 × 5 × 700 classes f32, mean", gpu=True)
def flag_gems_nll_loss_nd() -> Iterator[Result]:
    x, target = torch.randn(3, 10, 700).log_softmax(1), torch.randint(0, 10, (3, 700))
    yield _op("nll_loss_nd").nll_loss_nd_forward(x, target)[0], functional.nll_loss(x.double(), target), 1e-5


@case(_FLAG_GEMS, "300 × 10 classes f32, mean", gpu=True)
def flag_gems_nll_loss() -> Iterator[Result]:
    x, target = torch.randn(300, 10).log_softmax(1), torch.randint(0, 10, (300,))
    yield _op("nllloss").nll_loss_forward(x, target)[0], functional.nll_loss(x.double(), target), 1e-5


@case(_FLAG_GEMS, "5000 of f32, a third taken", gpu=True)
def flag_gems_masked_select() -> Iterator[Result]:
    x, mask = torch.randn(5003), torch.rand(5003) < 0.3
    yield _op("masked_select").masked_select(x, mask), x[mask], 0


@case(_FLAG_GEMS, "2 × 3000 s32", gpu=True)
def flag_gems_sort() -> Iterator[Result]:
    x = torch.randint(-(2**31), 2**31 - 1, (2, 3000), dtype=torch.int32)
    values, indices = _op("sort").radix_sort(x, 4)
    yield values, x.sort(-1).values, 0
    yield x.gather(1, indices), x.sort(-1).values, 0


@case(_FLAG_GEMS, "5 × 999 f32", gpu=True)
def flag_gems_softmax() -> Iterator[Result]:
    x = torch.randn(5, 999)
    yield _op("softmax").softmax(x, -1), x.double().softmax(-1), 1e-5


@case(_FLAG_GEMS, "3000 f32", gpu=True)
def flag_gems_cumsum() -> Iterator[Result]:
    x = torch.randn(2, 3001)
    yield _op("cumsum").cumsum(x, 1), x.double().cumsum(1), 1e-4


@case(_FLAG_GEMS, "3 × 700 f32, k 9", gpu=True)
def flag_gems_topk() -> Iterator[Result]:
    x = torch.randn(3, 700)
    yield _op("topk").topk(x, 9)[0], x.topk(9).values, 0


@case(_FLAG_GEMS, "5000 f32", gpu=True)
def flag_gems_max() -> Iterator[Result]:
    x = torch.randn(5003)
    yield _op("max").max(x), x.max(), 0
    yield _op("sum").sum(x), x.double().sum(), 1e-4
    yield _op("argmax").argmax(x), x.argmax(), 0


@case(_FLAG_GEMS, "5 × 300 f32", gpu=True)
def flag_gems_layer_norm() -> Iterator[Result]:
    x, w, b = torch.randn(5, 300), torch.randn(300), torch.randn(300)
    yield (
        _op("layernorm").layer_norm(x, (300,), w, b)[0],
        functional.layer_norm(x.double(), (300,), w.double(), b.double()),
        1e-5,
    )


@case(_FLAG_GEMS, "70 × 90 × 110 f16", gpu=True)
def flag_gems_addmm() -> Iterator[Result]:
    c, a, b = torch.randn(70, 110).half(), torch.randn(70, 90).half(), torch.randn(90, 110).half()
    yield _op("addmm").addmm(c, a, b), c.double() + a.double() @ b.double(), 5e-3


@case(_FLAG_GEMS, "300 × 10, indices alike", gpu=True)
def flag_gems_index_add() -> Iterator[Result]:
    x, index, source = torch.randn(20, 33), torch.randint(0, 20, (50,)), torch.randn(50, 33)
    yield _op("index_add").index_add(x, 0, index, source), x.double().index_add(0, index, source.double()), 1e-5


@case(_FLAG_GEMS, "1000 f32, a third not zero", gpu=True)
def flag_gems_nonzero() -> Iterator[Result]:
    x = (torch.rand(1003) < 0.3).float()
    yield _op("nonzero").nonzero(x), x.nonzero(), 0
