"""Transformers' models with ``attn_implementation="warploom"`` beside ``sdpa``: logits, tokens and tokens per second.

    PYTHONPATH=src python benchmarks/transformers_h200.py [--dry-run] [--out FOLDER]

Llama, Qwen3 and Gemma 2 (soft cap and sliding window; beside ``eager``, since ``sdpa`` has no soft cap) with random
weights and a few layers of the sizes of real ones; ``flash_attention_2`` too where it is installed. Needs transformers.
Checked first, against the same model in float32: the logits of a prompt and of steps from the cache, whose error may be
at most twice that of the baseline in bf16, and the greedy token of each step wherever float32's two best logits are
further apart than four times the baseline's error. Then prefill and generation are timed in turns. Writes
transformers.json to the folder (by default ``$OUT``, else out); about a minute on an H200. Exit code 1 if something is
wrong. ``--dry-run`` does the same at a small size on the CPU's emulator.
"""

from __future__ import annotations

import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from scripts import kept

import warploom.transformers
from warploom.core.errors import EmulationWarning
from warploom_lab.bench.cells import parser_of

CHECKED_STEPS = 8
Tensor = torch.Tensor


@dataclass(frozen=True)
class Size:
    """Tokens of the checked prompt, and what is timed."""

    batch: int
    checked: int
    prompt: int
    prefill: int
    new: int
    rounds: int


FULL = Size(batch=4, checked=2048, prompt=2048, prefill=8192, new=48, rounds=3)
DRY = Size(batch=1, checked=20, prompt=12, prefill=24, new=2, rounds=1)


def configurations(dry: bool) -> dict[str, tuple[Any, str]]:
    """By name: a configuration, and the implementation it is compared with."""
    small: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "vocab_size": 64,
        "max_position_embeddings": 64,
    }
    llama = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
    qwen = {"hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 16, "num_key_value_heads": 8}
    gemma = {"hidden_size": 2304, "intermediate_size": 9216, "num_attention_heads": 8, "num_key_value_heads": 4}
    common: dict[str, Any] = {"num_hidden_layers": 4, "vocab_size": 32000, "max_position_embeddings": 16384}

    def of(given: dict[str, Any], head_dim: int) -> dict[str, Any]:
        return small if dry else {**common, **given, "head_dim": head_dim}

    window = 8 if dry else 1024
    return {
        "llama": (transformers.LlamaConfig(**of(llama, 128)), "sdpa"),
        "qwen3": (transformers.Qwen3Config(**of(qwen, 128)), "sdpa"),
        "gemma2": (transformers.Gemma2Config(**of(gemma, 256), sliding_window=window), "eager"),
    }


def logits(model: Any, implementation: str, tokens: Tensor, steps: int) -> Tensor:
    """Of the last positions: the prompt's end by prefill, then ``steps`` tokens one by one from the cache."""
    model.set_attn_implementation(implementation)
    prompt = tokens.shape[1] - steps
    with torch.no_grad():
        found = model(tokens[:, :prompt], use_cache=True)
        rows, cache = [found.logits[:, -64:].float()], found.past_key_values
        for i in range(prompt, tokens.shape[1]):
            found = model(tokens[:, i : i + 1], past_key_values=cache, use_cache=True)
            rows.append(found.logits.float())
    return torch.cat(rows, 1)


def of_type(model: Any, dtype: torch.dtype) -> Any:
    """The model with parameters of a type. Its buffers stay: in 16 bits the rotary frequencies turn by other angles."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def checked(model: Any, names: list[str], baseline: str, size: Size) -> dict[str, Any]:
    """Errors of each implementation in bf16 against the baseline in float32, and how many greedy tokens differ."""
    device = next(model.parameters()).device
    seed = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, model.config.vocab_size, (1, size.checked + CHECKED_STEPS), generator=seed).to(device)
    exact = logits(of_type(model, torch.float32), baseline, tokens, CHECKED_STEPS)
    of_type(model, torch.bfloat16)
    best, second = exact.topk(2, -1).values.unbind(-1)
    found = {name: logits(model, name, tokens, CHECKED_STEPS) for name in names}
    errors = {name: (x - exact).abs().max().item() for name, x in found.items()}
    clear = best - second > 4 * errors[baseline]
    differ = {name: int((x.argmax(-1) != exact.argmax(-1))[clear].sum()) for name, x in found.items()}
    return {"error": errors, "clear": int(clear.sum()), "of": clear.numel(), "tokens_differ": differ}


def seconds(call: Callable[[], Any]) -> float:
    """Of one call."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    began = time.perf_counter()
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began


def timed(model: Any, names: list[str], size: Size) -> dict[str, dict[str, float]]:
    """Tokens per second of prefill and of generation, by implementation: medians of rounds in turns."""
    device = next(model.parameters()).device
    long = torch.randint(3, model.config.vocab_size, (1, size.prefill), device=device)
    prompts = torch.randint(3, model.config.vocab_size, (size.batch, size.prompt), device=device)
    mask = torch.ones_like(prompts)

    def prefill() -> None:
        with torch.no_grad():
            model(long, logits_to_keep=1)

    def generate() -> None:
        model.generate(
            prompts,
            attention_mask=mask,
            max_new_tokens=size.new,
            min_new_tokens=size.new,
            do_sample=False,
            pad_token_id=0,
        )

    samples: dict[str, dict[str, list[float]]] = {name: {"prefill": [], "generate": []} for name in names}
    for turn in range(size.rounds + 1):
        for name in names:
            model.set_attn_implementation(name)
            rates = size.prefill / seconds(prefill), size.batch * size.new / seconds(generate)
            if turn or size.rounds == 1:  # the first round compiles and warms up
                for kind, rate in zip(("prefill", "generate"), rates, strict=True):
                    samples[name][kind].append(rate)
    return {name: {kind: statistics.median(rates) for kind, rates in of.items()} for name, of in samples.items()}


def implementations(baseline: str) -> list[str]:
    """The baseline, ours, and FlashAttention-2 where it is."""
    found = [baseline, warploom.transformers.NAME]
    flash = torch.cuda.is_available() and transformers.utils.import_utils.is_flash_attn_2_available()
    return [*found, "flash_attention_2"] if flash else found


def wrong(row: dict[str, Any]) -> list[str]:
    """What is wrong in a row, as lines."""
    ours, bound = row["error"][warploom.transformers.NAME], 2 * row["error"][row["baseline"]]
    said = [] if ours <= bound else [f"{row['model']}: logits are off by {ours:.3g}, allowed {bound:.3g}"]
    differ = row["tokens_differ"][warploom.transformers.NAME]
    said += [] if row["clear"] else [f"{row['model']}: no greedy token is clear, so none was compared"]
    return [*said, f"{row['model']}: {differ} greedy tokens differ"] if differ else said


def main() -> int:
    """Check, time, write, print."""
    parser = parser_of(__doc__)
    parser.add_argument("--dry-run", action="store_true")
    given = parser.parse_args()
    warnings.simplefilter("ignore", EmulationWarning)
    warploom.transformers.register()
    device, size, start = ("cpu", DRY, time.monotonic()) if given.dry_run else ("cuda", FULL, time.monotonic())

    def row(name: str, config: Any, baseline: str) -> dict[str, Any]:
        torch.manual_seed(0)
        with torch.device(device):
            model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=baseline).eval()
        names = implementations(baseline)
        found = {"model": name, "baseline": baseline, **checked(model, names, baseline, size)}
        return found | {"tokens_per_second": timed(model, names, size)}

    rows, file = (row(name, *of) for name, of in configurations(given.dry_run).items()), given.out / "transformers.json"
    found = kept(rows, file, transformers=transformers.__version__)
    failures = [line for row in found["rows"] for line in wrong(row)]
    print(*failures, f"{time.monotonic() - start:.0f} s, {file}", sep="\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
