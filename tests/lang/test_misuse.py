"""What people write by mistake, and the message that puts them right."""

# pyright: reportInvalidTypeForm=false, reportOperatorIssue=false, reportArgumentType=false
# pyright: reportUnusedExpression=false

import linecache
from typing import Any

import numpy as np
import pytest

from warploom.core.errors import LayoutError, ProblemError, TraceError, VerifyError
from warploom.emulate import emulate
from warploom.lang import Global, Kernel, bf16, f16, f32, functions, kernel, u32
from warploom.lang.values import FUNCTIONS
from warploom.layout import mma_fragment
from warploom.ops.backends import compiled
from warploom.tile.product import MmaSync, Wgmma

A = mma_fragment("m16n8k16", "A")


@kernel(threads=32)
def doubled(k: Kernel, x: Global[f32], y: Global[f32]) -> None:
    y.store(x.load(k.lane + np.int64(0)) * 2.0, k.lane)


def test_numpys_integers_are_integers():
    x, y = np.arange(32, dtype=np.float32), np.zeros(32, np.float32)
    emulate(doubled.trace(), 1, [x, y]).raise_if_found()
    assert (y == 2 * x).all()


@pytest.mark.parametrize("grid", [0, (1, 0), (-1,), (1, 1, 1, 1)])
def test_a_grid_has_positive_counts(grid):
    x = np.zeros(32, np.float32)
    with pytest.raises(ProblemError, match="one to three positive counts"):
        emulate(doubled.trace(), grid, [x, x.copy()])


@kernel(threads=32)
def scaled(k: Kernel, x: Global[f32], n: u32, factor: f32) -> None:
    with k.when(k.lane < n):
        x.store(x.load(k.lane) * factor, k.lane)


FLOATS = np.zeros(32, np.float32)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([FLOATS.astype(">f4"), 32, 2.0], "x is float32 in memory, >f4; the kernel reads f32"),
        ([np.ma.array(FLOATS), 32, 2.0], "must be a NumPy array, not MaskedArray"),
        ([np.zeros(32, np.int32), 32, 2.0], "x is int32 in memory.*the kernel reads f32"),
    ],
)
def test_arguments_that_would_be_read_as_something_else(arguments, says):
    with pytest.raises(ProblemError, match=says):
        emulate(scaled.trace(), 1, arguments)


def test_half_precisions_are_not_each_other():
    @kernel(threads=32)
    def copied(k: Kernel, x: Global[bf16]) -> None:
        x.store(x.load(k.lane), k.lane)

    with pytest.raises(ProblemError, match=r"x is float16 in memory.*the kernel reads bf16"):
        emulate(copied.trace(), 1, [np.zeros(32, np.float16)])
    emulate(copied.trace(), 1, [np.zeros(32, np.uint16)]).raise_if_found()


def test_a_kernel_is_traced_before_it_runs():
    with pytest.raises(ProblemError, match=r"runs a Program.*kernel\.trace"):
        emulate(doubled, 1, [FLOATS, FLOATS.copy()])


def test_calling_a_kernel_says_what_to_do():
    with pytest.raises(
        TraceError, match=r"not called: doubled\[grid\]\(x, y, …\), or doubled\.launch\(.*doubled\.trace"
    ):
        doubled(1, 2)


def test_the_decorator_needs_its_arguments():
    with pytest.raises(TraceError, match=r"write @kernel\(threads="):
        kernel(lambda k: None)


def traces(body):
    @kernel(threads=32)
    def bad(k: Kernel, x: Global[f32]) -> None:
        body(k, x)

    return bad.trace()


def test_no_access_moves_three_elements():
    with pytest.raises(VerifyError, match="1, 2 or 4 elements"):
        traces(lambda k, x: x.load(k.lane, 3))
    with pytest.raises(VerifyError, match="1, 2 or 4 elements"):
        traces(lambda k, x: x.store([1.0, 2.0, 3.0], k.lane))
    with pytest.raises(VerifyError, match="a count known while tracing, not <u32"):
        traces(lambda k, x: x.load(0, k.lane))
    with pytest.raises(VerifyError, match="one at a time; with dtype=u32"):
        traces(lambda k, x: x.load(0, 8, dtype=bf16))


def test_shared_memory_beyond_every_gpu_is_refused():
    for col in (lambda k: 0, lambda k: k.thread):
        with pytest.raises(VerifyError, match="bytes of shared memory"):
            traces(lambda k, x, col=col: k.shared(f32, (1000, 1000)).store(1.0, 0, col(k)))


@pytest.mark.parametrize("stages", [0, -1, 1.5])
def test_a_tile_without_stages_is_refused(stages):
    with pytest.raises(TraceError, match="a number of stages, 1 or more"):
        traces(lambda k, x: k.shared(f32, 32, stages=stages))


def over_a_loop(k, x):
    for i in k.loop(4):
        x.store(1.0, i)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (lambda k, x: x[0], r"write x\.load\(i\)"),
        (lambda k, x: x.__setitem__(0, 1.0), r"x\.store\(value, i\)"),
        (lambda k, x: k.shared(f32, 4)[0], r"tile\.load\(row, col\)"),
        (lambda k, x: x.store(1.0, 0.5), "an index is an integer, not 0.5"),
        (lambda k, x: x.store(1.0, x.load(0)), r"an index is an integer, not <f32.*k\.convert"),
        (lambda k, x: x.load(None), "an index is an integer, not None"),
        (lambda k, x: x + x, "an index is an integer"),
        (over_a_loop, r"with k\.loop\(stop\) as i"),
        (lambda k, x: k.loop(-1), "its stop is -1"),
        (lambda k, x: k.loop(4, start=-1), "its start is -1"),
        (lambda k, x: k.laen, r"no 'laen'; near it: lane(?!,)"),
        (lambda k, x: x.atomic("add", 1.0), r"GlobalPointer has no 'atomic'; near it: k\.atomic"),
        (lambda k, x: k.block_idx, r"no 'block_idx'; help\(warploom\.lang\.Kernel\) shows"),
        (lambda k, x: k.cp_async(k.shared(f32, 32), x), r"a value where a SharedTile is given .*tile\.address"),
        (lambda k, x: {0: 1.0}[k.lane], "no key of a dict"),
        (lambda k, x: f"{k.lane}", "has no text while"),
        (lambda k, x: f"{k.lane:3d}", "has no text while"),
        (lambda k, x: k.when(k.lane < 4) and None, r"k\.when.* has no `with` before it"),
        (lambda k, x: k.loop(4) and None, r"k\.loop.* has no `with` before it"),
        (lambda k, x: k.loop(0, 4), r"its parameters are \(stop, \*, start=0, step=1\)"),
        (lambda k, x: k.loop(4, step=0), "its step is 0"),
        (lambda k, x: k.when("a"), "'a' is no condition"),
        (lambda k, x: k.register(np.float32, 0.0), r"as k\.register\(f32, 0\.0\), not <class 'numpy\.float32'>"),
        (lambda k, x: k.thread + 2**40, "1099511627776 does not fit u32"),
        (lambda k, x: k.thread // 0, "division by 0"),
        (lambda k, x: k.thread % 0, "division by 0"),
        (lambda k, x: k.thread // k.value(0, u32), "division by 0"),
        (lambda k, x: k.thread << 40, "a shift of u32 is by 0 to 31 bits, not by 40"),
        (lambda k, x: k.thread >> 32, "not by 32"),
        (lambda k, x: k.thread << -1, "not by -1"),
        (lambda k, x: k.shared(f32, (2, 32)).store(1.0, 3, k.lane), "2 rows and 32 columns: there is no row 3"),
        (lambda k, x: k.shared(f32, (2, 32)).store(1.0, -1, k.lane), "no row -1"),
        (lambda k, x: k.shared(f32, (2, 32)).store(1.0, k.value(2, u32), 0), "no row 2"),
        (lambda k, x: k.shared(f32, (2, 32)).load(0, 32), "there is no column 32"),
        (lambda k, x: k.shared(f32, (2, 32)).load(0, 30, 4), "no columns 30 to 33"),
        (lambda k, x: k.shared(f16, (2, 32)).load(0, 30, 2, dtype=u32), "no columns 30 to 33"),
        (lambda k, x: k.shared(f32, (2, 32)).store(1.0, 0, k.lane + 32), "no column 32 or beyond"),
        (lambda k, x: k.shared(f32, (2, 32)).address(k.warp * 2 + 2, 0), "no row 2 or beyond"),
        (lambda k, x: k.shared(f32, (2, 32), stages=2).stage(2), "2 stages; there is no stage 2"),
        (lambda k, x: k.shared(f32, (2, 32), stages=2).stage(k.value(5, u32)), "there is no stage 5"),
        (lambda k, x: k.mma([k.lane] * 2, [k.lane] * 4, [0.0] * 4), "takes 4 registers for A, got 2"),
        (lambda k, x: k.mma([k.lane] * 4, [k.lane] * 2, [0.0] * 2), "takes 4 registers for C, got 2"),
        (lambda k, x: k.value(f32, 0.0), r"as k\.value\(0\.0, f32\), not f32 and 0\.0"),
        (lambda k, x: x.load(1.5), "an index is an integer, not 1.5"),
        (lambda k, x: x.store(1e300, 0), r"1e\+300 is no number that f32 can hold"),
        (lambda k, x: k.shared(f16, (8, 32), swizzle="<5,2,5>"), "swizzle is .*, not '<5,2,5>'"),
        (lambda k, x: k.shared(f16, (8, 32), swizzle="yes"), "swizzle is .*, not 'yes'"),
        (lambda k, x: k.load_fragment(k.shared(f32, (16, 16)), A), "holds f32, .* elements of 16 bits"),
        (lambda k, x: k.reader(k.shared(f32, (16, 16)), A), "holds f32, .* elements of 16 bits"),
        (lambda k, x: k.reader(k.shared(f16, (32, 16)), A).load(k.warp * 16, 0), r"k\.reader\(tile, layout, row="),
        (lambda k, x: k.shfl_xor(k.thread, 32), "0 to 31, not 32"),
        (lambda k, x: k.shared("f32", 4), "not 'f32'"),
        (lambda k, x: k.shared(np.float32, 4), "holds a type of warploom.lang"),
        (lambda k, x: k.shared(f32, (2, 2, 2)), r"a number or \(rows, cols\), not \(2, 2, 2\)"),
        (lambda k, x: k.shared(f32, 2.5), "a number or .rows, cols., not 2.5"),
        (lambda k, x: x.store(x, 0), "a pointer to f32 is no number"),
        (lambda k, x: x.store("a", 0), "'a' is no number that f32 can hold"),
    ],
)
def test_words_of_the_wrong_kind(body, says):
    with pytest.raises(TraceError, match=says) as refused:
        traces(body)
    assert "test_misuse.py:" in str(refused.value)


def generator(k: Kernel, x: Global[f32]):
    yield 1


async def coroutine(k: Kernel, x: Global[f32]): ...


def returning(k: Kernel, x: Global[f32]):
    return x.load(k.lane) * 2.0


@pytest.mark.filterwarnings("ignore:coroutine")
@pytest.mark.parametrize("function", [generator, coroutine, returning])
def test_a_kernel_that_returns_something_is_refused(function):
    """Of a generator or coroutine nothing would have run: the Program was empty."""
    with pytest.raises(TraceError, match="a kernel returns nothing, its results are what it stores"):
        kernel(threads=32)(function).trace()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"threads": "32"}, "threads is an int or a function of the configuration, not '32'"),
        ({"threads": None}, "threads is an int"),
        ({"threads": 33}, "33 threads"),
        ({"cluster": "2"}, "one to three positive counts"),
        ({"opt_level": 9}, "opt_level is 9: ptxas knows 0 to 3"),
        ({"min_ctas": 0}, "min_ctas is 0"),
        ({"min_ctas": 100}, "100 CTAs of 32 threads do not fit an SM"),
        ({"min_ctas": 3, "threads": 1024}, "3 CTAs of 1024 threads do not fit an SM"),
    ],
)
def test_options_of_a_kernel_are_checked(options, says):
    with pytest.raises((TraceError, VerifyError), match=says):
        kernel(**{"threads": 32, **options})(lambda k: None).trace()


def test_an_old_architecture_is_one_cause():
    @kernel(threads=32, requires="sm_77")
    def old(k: Kernel, x: Global[f32]) -> None:
        x.store(x.load(k.lane), k.lane)

    with pytest.raises(VerifyError, match=r"^test_misuse\.py:\d+: [^\n]*requires 'sm_77': kernels need sm_80"):
        old.trace()


def test_an_argument_has_no_default():
    @kernel(threads=32)
    def scaled(k: Kernel, x: Global[f32], n: u32 = 3) -> None:
        x.store(0.0, n)

    with pytest.raises(TraceError, match="parameter 'n' of scaled has the default 3"):
        scaled.trace()


@kernel(threads=lambda threads, name: threads)
def named(k: Kernel, x: Global[f32], *, threads: int, name: float = 1.0) -> None:
    x.store(name, threads - 1 - k.thread)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"threads": 64, "tile": 3}, "'tile' is no trace-time parameter of named; it has threads, name"),
        ({"name": 2.0}, "named without defaults: threads"),
    ],
)
def test_a_configuration_is_the_kernels(given, says):
    with pytest.raises(TraceError, match=says):
        named.trace(**given)


def test_a_trace_time_parameter_may_have_any_name():
    x = np.zeros(64, np.float32)
    emulate(named.trace(threads=64, name=2.0), 1, [x]).raise_if_found()
    assert (x == 2.0).all()


def test_code_for_another_architecture_is_refused():
    program = kernel(threads=32, requires="sm_90a")(lambda k: None).trace()
    with pytest.raises(VerifyError, match="the kernel runs on sm_90a alone, not on sm_80"):
        compiled(program, "sm_80")


def test_infinity_is_a_number():
    x = np.zeros(32, np.float32)
    emulate(traces(lambda k, x: x.store(float("-inf"), k.lane)), 1, [x]).raise_if_found()
    assert (x == -np.inf).all()


def test_global_takes_a_type():
    with pytest.raises(TraceError, match=r"Global\[f32\]\), not 'f32'"):
        Global["f32"]


def test_pythons_max_is_pointed_at_maximum():
    with pytest.raises(TraceError, match=r"k\.maximum"):
        traces(lambda k, x: max(x.load(k.lane), 1.0))


def test_pythons_abs_works():
    program = traces(lambda k, x: x.store(abs(x.load(k.lane)), k.lane))
    x = np.linspace(-1, 1, 32, dtype=np.float32)
    expected = np.abs(x)
    emulate(program, 1, [x]).raise_if_found()
    assert (x == expected).all()


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (lambda k, x: MmaSync(k), r"MmaSync missing .*'dtype'; its parameters are \(k, dtype, \*, sums"),  # pyright: ignore[reportCallIssue]
        (lambda k, x: MmaSync(k, bf16).accumulator(24, 8, "s"), "multiples of 16 rows and 8 columns, not 24×8"),
        (lambda k, x: multiplied(k, MmaSync, (bf16, f32)), "holds f32: this product reads bf16"),
        (lambda k, x: multiplied(k, MmaSync, (f32, bf16)), "holds f32: this product reads bf16"),
        (lambda k, x: multiplied(k, MmaSync, (f16, bf16)), "holds f16: this product reads bf16"),
        (lambda k, x: multiplied(k, Wgmma, (f16, bf16)), "holds f16: this product reads bf16"),
        (lambda k, x: A.tile(0, 2), "at least 1"),
    ],
)
def test_words_of_tiles_of_the_wrong_kind(body, says):
    with pytest.raises((TraceError, LayoutError), match=rf"^test_misuse\.py:\d+: .*{says}"):
        traces(body)


def multiplied(k, words, dtypes):
    cores = words(k, bf16)
    sums = cores.accumulator(16, 16, "s") if words is MmaSync else cores.accumulator(16, "s")
    cores.product(sums, *(k.shared(dtype, (16, 16)) for dtype in dtypes))


def test_divmod_of_a_traced_value():
    def body(k, x):
        row, col = divmod(k.lane, 8)
        x.store(k.convert(row * 100 + col, f32), k.lane)

    x = np.zeros(32, np.float32)
    emulate(traces(body), 1, [x]).raise_if_found()
    assert (x == np.arange(32) // 8 * 100 + np.arange(32) % 8).all()


def bound_of(k, x):
    return k.when(x)  # no condition


def test_an_error_in_a_helper_names_the_lines_that_called_it():
    with pytest.raises(TraceError, match=r"^test_misuse\.py:\d+: .*\(called from test_misuse\.py:\d+, test_misuse"):
        traces(lambda k, x: bound_of(k, x.load(0)))


def names_a_word(k, x):
    x.store(1.0, k.lane)
    k.syncthreads  # noqa: B018


def names_a_function(k, x):
    def store():
        x.store(1.0, k.lane)

    store()
    store  # noqa: B018


def names_within(k, x):
    def wait(barrier):
        barrier.full.wait  # noqa: B018

    x.store(1.0, k.lane)


def names_and_says_nothing(k):
    (k.syncthreads)  # noqa: B018


def calls_what_names(k):
    names_and_says_nothing(k)


def over_helpers(k, x):
    for _ in range(2):
        (lambda: calls_what_names(k))()


@kernel(threads=32)
def names_alone(k: Kernel) -> None:
    k.syncthreads  # noqa: B018


@pytest.mark.parametrize(
    ("body", "name"),
    [
        (names_a_word, "k.syncthreads"),
        (lambda k, x: names_a_word(k, x), "k.syncthreads"),
        (names_a_function, "store"),
        (names_within, "barrier.full.wait"),
        (over_helpers, r"k\.syncthreads"),
    ],
)
def test_a_word_that_is_named_and_not_called_is_refused(body, name):
    with pytest.raises(TraceError, match=rf"test_misuse\.py:\d+: {name} is named here.* write {name}\(\)"):
        traces(body)


def test_a_kernel_that_says_nothing_else_is_refused():
    with pytest.raises(TraceError, match=r"k\.syncthreads is named here"):
        names_alone.trace()


def test_attributes_and_names_that_are_part_of_a_statement_are_taken():
    class State:
        def __init__(self, x):
            self.x: Any
            self.x = x

    def body(k, x):
        store, _ = State(x).x.store, k.lane
        for value in (1.0, 2.0):
            if State(x).x is x:
                store(value, k.lane)
                break
        match x:
            case _:
                store(2.0, k.lane)
        store(3.0, k.lane) if value else x
        x if value else store  # noqa: B018

    traces(body)


def test_what_many_registers_break_is_said_once():
    with pytest.raises(VerifyError, match=r"^test_misuse\.py:\d+: [^\n]*'sums0' is read before.*\(and 3 more\)"):
        traces(lambda k, x: [x.store(r, k.lane) for r in k.registers(f32, 4, name="sums")] and None)


def test_what_needs_a_newer_architecture_is_said_once():
    def hopper(k, x):
        full = k.mbarriers(1)
        with k.when(k.thread == 0):
            full.init(1)
            k.mbarrier_fence()
        k.syncwarp()
        full.arrive(when=k.thread == 0)
        full.wait(0)

    with pytest.raises(VerifyError, match=r"^test_misuse\.py:\d+: [^\n]*write @kernel\(requires=\"sm_90\"\)"):
        traces(hopper)


def test_two_numbers_are_an_index_unless_one_is_negative():
    program = traces(lambda k, x: x.store(1.0, k.select(k.lane < 4, 1, 0) * 16 + k.lane % 16))
    x = np.zeros(32, np.float32)
    emulate(program, 1, [x])
    with pytest.raises(TraceError, match="got <s32"):
        traces(lambda k, x: x.store(1.0, k.lane + k.select(k.lane < 4, 1, -1)))


def test_functions_of_arrays_are_answered_with_those_for_traced_values():
    assert all(hasattr(functions, name) for name in FUNCTIONS.values())


@kernel(threads=32)
def sums_of_bf16(k: Kernel, y: Global[f32]) -> None:
    k.accumulator(mma_fragment("m16n8k16", "C"), bf16)


@kernel(threads=32)
def half_of_b(k: Kernel, y: Global[f32]) -> None:
    k.load_fragment(k.shared(bf16, (64, 64), swizzle="auto"), mma_fragment("m16n8k16", "B"), 8, 0)


@kernel(threads=32)
def odd_columns(k: Kernel, y: Global[f32]) -> None:
    k.shared(bf16, (64, 33)).load(0, k.lane)


@pytest.mark.parametrize(
    ("wrong", "line", "says"),
    [
        (sums_of_bf16, "k.accumulator(", r"the value to begin with, not bf16: .*fragment\.packed\(bf16\)"),
        (half_of_b, "k.load_fragment(", "row 8 is within the 16 rows that one load takes.*transposed=True"),
        (odd_columns, ".load(0, k.lane)", r"a tile of 33 columns has panels of 32\+1.*a power of two of columns"),
    ],
)
def test_a_misread_argument_is_told_at_its_line(wrong, line, says):
    with pytest.raises((TraceError, LayoutError), match=says) as refused:
        wrong.trace()
    assert line in linecache.getline(__file__, refused.value.where.line)
