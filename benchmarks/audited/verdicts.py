"""What each finding of the audit is, judged by a reader of the kernel and its PTX."""

from __future__ import annotations

from typing import Any

Verdict = tuple[str, str]
TRUE, ON_PAPER, BENIGN, ALARM = "true", "true on paper", "benign", "false alarm"
_ROUNDING = (
    BENIGN,
    "the compiler contracts a product into the first step of a butterfly sum, so that lanes store sums that differ in "
    "the last bit ([triton 7264](https://github.com/triton-lang/triton/issues/7264))",
)
_REPEATED = BENIGN, "the block is smaller than the CTA: warps load again what others overwrite, and use none of it"


def _page(name: str, why: str) -> Verdict:
    return TRUE, f"{why} ([page](audit/{name}.md))"


_RESET = (
    ON_PAPER,
    "the last CTA has released, and not acquired, before it clears what others have read; on GPUs the stores wait for "
    "the branch",
)
VERDICTS: dict[tuple[str, str], Verdict] = {
    **{(case, ""): _ROUNDING for case in ("liger_rms_norm_block", "liger_group_norm", "liger_attention_residual")},
    **{(case, ""): _REPEATED for case in ("liger_rope", "liger_llama4_rope", "liger_linear_cross_entropy")},
    ("flag_gems_masked_select", ""): _REPEATED,
    ("flag_gems_stream_k", ""): _page(
        "flag-gems-stream-k", "a lock says that other warps have stored, and they may not"
    ),
    ("flag_gems_nll_loss", ""): (
        ON_PAPER,
        "a counter that other CTAs update, and the sums that it announces, are read by plain loads, without acquire",
    ),
    ("flag_gems_sort", ""): (
        ON_PAPER,
        "words that peers wait for by volatile loads are written by plain stores; on GPUs a word is written whole",
    ),
    ("sglang_hc_mix", ""): _page("sglang-hc-mix", "a CTA meets the others before its warps have stored"),
    ("sglang_ep_scatter", ""): (
        TRUE,
        "a word is read that another warp stores, with no barrier between "
        "([known](https://github.com/sgl-project/sglang/pull/39780))",
    ),
    ("fla_chunk_delta_rule", ""): _ROUNDING,
    ("vllm_top_k_top_p", ""): _page("vllm-top-k-top-p", "a buffer is searched by warps while others still fill it"),
    ("vllm_logit_bias", ""): _page(
        "vllm-logit-bias", "a token in two lists is written and read by threads without order"
    ),
    ("flashinfer_mask_logits", ""): _RESET,
    ("flashinfer_top_k_deterministic", ""): _RESET,
    ("flashinfer_mask_logits_all", ""): _page(
        "flashinfer-mask-logits", "a count is cleared while another CTA reads it"
    ),
    ("flashinfer_renorm_all", ""): _page("flashinfer-renorm", "a sum is cleared while another CTA reads it"),
    ("flashinfer_top_k_pages", ""): _page("flashinfer-top-k-pages", "thread 0 announces what its CTA has not written"),
}
"""(case, kind of finding, or "" for all) to what they are, and why."""
WRONG: dict[str, Verdict] = {
    "sglang_fast_topk_alike": (
        TRUE,
        "more scores in a bin than its buffer holds are dropped "
        "([known](https://github.com/sgl-project/sglang/issues/36807))",
    ),
}
"""Cases whose result is not the reference's, and why."""


def judged(row: dict[str, Any]) -> dict[str, Any]:
    """The row of a case with what its findings, or its wrong results, are."""
    for finding in (finding for kernel in row["kernels"] for finding in kernel["findings"]):
        found = VERDICTS.get((row["case"], finding["kind"])) or VERDICTS.get((row["case"], ""))
        finding["verdict"], finding["why"] = found or ("not judged", "")
    row.pop("wrong", None)
    if row.get("error", 0) > 1:
        row["wrong"] = ": ".join(WRONG.get(row["case"], ("not judged", "")))
    return row
