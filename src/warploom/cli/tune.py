"""``warploom tune``: search the fastest configuration for a class of problems, and show what is known."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from warploom.cli.errors import explains_errors, fail
from warploom.cli.options import KernelFile, TakesFiles, grouped, parse_settings
from warploom.cli.output import note, progress_bar, write_json

if TYPE_CHECKING:
    from warploom.tune.operation import TunableOperation
    from warploom.tune.tuner import Outcome

app = typer.Typer(help="Find the fastest configuration for this GPU and keep it.", no_args_is_help=True, cls=TakesFiles)

_TOKENS = 16384
_WIDTH = 2048

Json = Annotated[bool, typer.Option("--json", help="The same as JSON on standard output.")]


@dataclass(frozen=True)
class SearchOptions:
    """The options of a search that every ``warploom tune`` command takes."""

    budget: Annotated[
        float | None, typer.Option(metavar="SECONDS", min=1, help="Stop after this time with the best so far.")
    ] = None
    again: Annotated[bool, typer.Option("--again", help="Search although the class has been tuned.")] = False
    gpu: Annotated[int, typer.Option("--gpu", metavar="N", min=0, help="Which GPU.")] = 0
    json: Json = False


@dataclass(frozen=True)
class TunedAttention:
    """A problem of attention, for several lengths."""

    head_dim: Annotated[int, typer.Option(metavar="N", help="Elements per head: a multiple of 8 up to 256.")] = 128
    seq: Annotated[str, typer.Option(metavar="SEQ,…", help="Lengths of queries and keys.")] = "4096"
    causal: Annotated[bool, typer.Option("--causal", help="Each query sees the keys up to its own.")] = False
    window: Annotated[int | None, typer.Option(metavar="N", min=0, help="Keys seen before a query's own.")] = None
    softcap: Annotated[float | None, typer.Option(metavar="C", help="C·tanh(s/C) on the scores.")] = None
    dtype: Annotated[str, typer.Option(metavar="bf16|f16", help="Element type.")] = "bf16"
    batch: Annotated[int | None, typer.Option(metavar="N", min=1, help="Default: 16384 tokens in all.")] = None
    heads: Annotated[int | None, typer.Option(metavar="N", min=1, help="Default: 2048 / head_dim.")] = None
    kv_heads: Annotated[int | None, typer.Option(metavar="N", min=1, help="Heads of K and V; default: as many.")] = None


@dataclass(frozen=True)
class ProductOptions:
    """A matrix product."""

    m: Annotated[int, typer.Argument(metavar="M", min=1, help="Rows of A and C.")]
    n: Annotated[int, typer.Argument(metavar="N", min=1, help="Columns of B and C.")]
    k: Annotated[int, typer.Argument(metavar="K", min=1, help="Columns of A, rows of B.")]
    b: Annotated[
        str, typer.Option(metavar="kn|nk", help="How B is stored; nk: a layer's weights, passed transposed.")
    ] = "kn"
    dtype: Annotated[str, typer.Option(metavar="f16|bf16", help="Element type.")] = "f16"
    accumulate: Annotated[str, typer.Option(metavar="f32|f16", help="Type of the sums; f16 for f16 inputs.")] = "f32"
    out_dtype: Annotated[str | None, typer.Option(metavar="TYPE", help="f16, bf16 or f32; default the inputs'.")] = None
    batch: Annotated[int, typer.Option(metavar="N", min=1, help="Products at once.")] = 1


@app.command("attention")
@explains_errors
@grouped
def tune_attention(wanted: TunedAttention, search: SearchOptions) -> None:
    """Find the fastest configurations of attention.

    They are searched, checked and timed on the GPU; attention() takes what won by itself.

    \b
    Examples:
      warploom tune attention --head-dim 128 --seq 1024,4096 --causal
      warploom tune attention --head-dim 64 --seq 8192 --heads 32 --kv-heads 8 --budget 60
    """
    from warploom.cli.options import sequence_lengths
    from warploom.core.dtypes import dtype_of
    from warploom.kernels.attention.problem import AttentionProblem, Even
    from warploom.tune.attention import ATTENTION

    heads = wanted.heads or max(1, _WIDTH // wanted.head_dim)
    kv_heads = wanted.kv_heads or heads
    if heads % kv_heads:
        raise typer.BadParameter(f"--heads {heads} is no multiple of --kv-heads {kv_heads}")
    try:
        kind = dtype_of(wanted.dtype)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    options: dict[str, Any] = {"window": (wanted.window, 0 if wanted.causal else None), "softcap": wanted.softcap}
    problems = [
        AttentionProblem(
            wanted.batch or max(1, _TOKENS // n), heads, kv_heads, Even(n, n), wanted.head_dim, kind, **options
        )
        for n in sequence_lengths(wanted.seq)
    ]
    _tune(ATTENTION, problems, search)


@app.command("gemm")
@explains_errors
@grouped
def tune_gemm(wanted: ProductOptions, search: SearchOptions) -> None:
    """Find the fastest configuration of a matrix product.

    It is searched, checked and timed on the GPU; matmul() takes what won by itself.

    \b
    Examples:
      warploom tune gemm 4096 4096 4096
      warploom tune gemm 16 6144 4096 --b nk --dtype bf16 --budget 60
    """
    from warploom.core.dtypes import bf16, dtype_of, f16, f32
    from warploom.kernels.matmul.problem import contiguous_problem
    from warploom.tune.matmul import MATMUL

    w = wanted
    if w.b not in ("kn", "nk"):
        raise typer.BadParameter(f"--b is kn or nk, not {w.b!r}")
    try:
        kind, sums, out = dtype_of(w.dtype), dtype_of(w.accumulate), dtype_of(w.out_dtype or w.dtype)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if kind not in (f16, bf16) or out not in (f16, bf16, f32) or sums not in ((f16, f32) if kind is f16 else (f32,)):
        raise typer.BadParameter(
            f"{kind} with sums in {sums} to {out}: --dtype is f16 or bf16, --accumulate f32 (or f16 for f16), "
            "--out-dtype f16, bf16 or f32"
        )
    problem = contiguous_problem(w.m, w.n, w.k, kind, sums, out_dtype=out, b_rows=w.b == "kn", batch=w.batch)
    _tune(MATMUL, [problem], search)


@app.command("file")
@explains_errors
def tune_file(
    target: KernelFile,
    try_: Annotated[
        list[str] | None,
        typer.Option("--try", metavar="NAME=VALUE,…", help="Values of a trace-time parameter; all combinations run."),
    ] = None,
    rounds: Annotated[int, typer.Option(min=3, help="Samples of every configuration.")] = 15,
    json: Json = False,
) -> None:
    """Check and time configurations of a kernel of yours on the GPU. The word ``file`` may be left out.

    Trace-time parameters are the kernel's keyword-only ones; its example may take those that its launch depends on.
    Without --try the values are those that the kernel declares, @kernel(…, tune={"tile": (64, 128)}), and launches on
    this GPU take the fastest from then on.

    \b
    Examples:
      warploom tune my_kernels.py:row_max
      warploom tune my_kernels.py:row_max --try tile=64,128 --try stages=2,3
    """
    from warploom.checking.kernel_file import one_kernel
    from warploom.measure.kernel_file import tune_kernel

    values = {name: text.split(",") for name, text in parse_settings(try_).items()}
    found = tune_kernel(one_kernel(target), values, rounds)
    if json:
        write_json({"timed": [one.json() for one in found.timed], "dropped": dict(found.dropped)}, "-")
    else:
        for one in found.timed:
            typer.echo(one.text())
        for name, reason in found.dropped.items():
            note(f"{name}: not timed: {reason}")
    if not found.timed:
        raise typer.Exit(1)


def _tune(operation: TunableOperation[Any, Any], problems: list[Any], search: SearchOptions) -> None:
    """Tune, and show the outcomes: exit code 1 where a problem has no configuration."""
    from warploom.tune.tuner import Tuner, gpu_for_tuning

    where = gpu_for_tuning(search.gpu)
    with progress_bar() as report:
        outcomes = Tuner(operation, where, search.budget, report=report).tune_all(problems, again=search.again)
    if search.json:
        write_json([_outcome_json(outcome) for outcome in outcomes], "-")
    else:
        _show_outcomes(outcomes)
    if reason := next((outcome.not_kept for outcome in outcomes if outcome.not_kept), ""):
        fail(f"the configurations above are not kept: {reason}. Make room and give the same command again")
    if any(outcome.found is None for outcome in outcomes):
        raise typer.Exit(1)


@app.command("show")
@explains_errors
def show(
    gpu: Annotated[str | None, typer.Option(help="Only configurations for the GPU of this name.")] = None,
    json: Json = False,
) -> None:
    """The tuned configurations that were found on this machine.

    \b
    Example:
      warploom tune show --gpu "NVIDIA H200"
    """
    from warploom.ops.tuned import kept

    found = [x for x in kept() if gpu in (None, x.gpu)]
    if json:
        write_json([asdict(x) | {"used": x.current} for x in found], "-")
        return
    if not found:
        note("nothing has been tuned: every call takes its default. Tune with: warploom tune --help")
    for title, used in (("tuned configurations", True), ("of other versions, which no call uses,", False)):
        of_kind = [x for x in found if x.current == used]
        for name in dict.fromkeys(x.gpu for x in of_kind):
            typer.echo(f"{title} for {name}")
            for x in of_kind:
                if x.gpu == name:
                    typer.echo(f"  {x.size_class}\n    {x}\n    {x.config}")


def _show_outcomes(outcomes: list[Outcome]) -> None:
    """Print the outcome of each problem, and the reasons for dropped candidates."""
    for outcome in outcomes:
        typer.echo(outcome.size_class)
        if outcome.found is None:
            typer.echo("  nothing found" + ("" if outcome.dropped else ": the budget was spent"))
        else:
            remark = "known" if outcome.known else f"{outcome.found.timed} configurations timed"
            remark += "" if outcome.complete else ", cut short by the budget"
            typer.echo(f"  {outcome.found}; {remark}\n  {outcome.found.config}")
        for reason, count in outcome.dropped.most_common(6):
            note(f"  {count} not timed: {reason}")


def _outcome_json(outcome: Outcome) -> dict[str, Any]:
    found = None if outcome.found is None else asdict(outcome.found)
    return asdict(outcome) | {"found": found, "dropped": dict(outcome.dropped)}
