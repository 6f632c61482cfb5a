"""Launching on a GPU: streams, devices, graphs, and large shared memory."""

import threading

import pytest

from warploom.core.dtypes import f32, f64, s32, u32
from warploom.core.errors import ConfigError
from warploom.cuda import device
from warploom.cuda.compile import compile_source
from warploom.cuda.launch import ConfiguredLaunch, LoadedKernel, Repeated, load, queue_on, scalar, synchronize
from warploom.cuda.tensor_maps import encode
from warploom.interop.arrays import current_stream
from warploom.layout.tensor_map import TensorMapSpec

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")

SCALE = """
extern "C" __global__ void __launch_bounds__(128) scale(float* out, const float* in, float factor, int n) {
  extern __shared__ float staged[];
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  staged[threadIdx.x] = i < n ? in[i] : 0.0f;
  __syncthreads();
  if (i < n) out[i] = staged[threadIdx.x] * factor;
}
"""
COPY_TILE = """
struct __align__(64) TensorMap { char bytes[128]; };
extern "C" __global__ void __launch_bounds__(32) copy_tile(float* out, const __grid_constant__ TensorMap map) {
  __shared__ __align__(128) float tile[8 * 16];
  __shared__ __align__(8) unsigned long long arrived;
  unsigned bar = (unsigned)__cvta_generic_to_shared(&arrived), dst = (unsigned)__cvta_generic_to_shared(tile);
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(bar) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 512;" :: "r"(bar) : "memory");
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%2, %3}], [%4];"
                 :: "r"(dst), "l"(&map), "r"(16), "r"(8), "r"(bar) : "memory");
  }
  __syncwarp();
  asm volatile("{.reg .pred p; L: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], 0; @!p bra L;}"
               :: "r"(bar) : "memory");
  for (int i = threadIdx.x; i < 128; i += 32) out[i] = tile[i];
}
"""


@pytest.fixture
def kernel() -> LoadedKernel:
    index = torch.cuda.current_device()
    return load(compile_source(SCALE, "scale", arch=device.target_of(index).name), index)


def run(kernel: LoadedKernel, source, factor: float, shared: int = 512):
    out = torch.zeros_like(source)
    launch = kernel.configure(-(-source.numel() // 128), 128, shared_bytes=shared)
    arguments = (out.data_ptr(), source.data_ptr(), scalar(f32, factor), scalar(s32, source.numel()))
    launch.queue(current_stream("torch", kernel.device), launch.pack(arguments))
    return out


def test_shared_memory_up_to_the_targets_limit(kernel):
    source = torch.randn(1000, device="cuda")
    most = kernel.target.shared_per_block
    torch.testing.assert_close(run(kernel, source, 2.0, shared=most), source * 2)
    torch.testing.assert_close(run(kernel, source, 2.0, shared=512), source * 2)
    with pytest.raises(ConfigError, match="shared memory"):
        run(kernel, source, 2.0, shared=most + 1)


def test_the_callers_stream_is_used(kernel):
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        source = torch.randn(1 << 20, device="cuda")
        torch.cuda._sleep(200_000_000)  # 0.1 s: other processes may hold up this one
        source.fill_(5.0)
        out = run(kernel, source, 2.0)
        assert not stream.query(), "the launch must not wait for the stream"
    stream.synchronize()
    assert torch.equal(out, torch.full_like(out, 10.0))
    synchronize(stream.cuda_stream, kernel.device)


def test_packed_launches(kernel):
    """On the caller's streams, in a graph, and in a thread that has no context: each with its own arguments."""
    sources, outs = torch.randn(4, 1000, device="cuda"), torch.zeros(4, 1000, device="cuda")
    call = kernel.configure(8, 128, shared_bytes=512)
    sets = [
        call.pack((out.data_ptr(), source.data_ptr(), scalar(f32, 2.0 + i), scalar(s32, 1000)))
        for i, (out, source) in enumerate(zip(outs, sources, strict=True))
    ]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    call.queue(current_stream("torch", kernel.device), sets[0])
    with torch.cuda.stream(side):
        call.queue(current_stream("torch", kernel.device), sets[1])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call.queue(current_stream("torch", kernel.device), sets[2])
    torch.cuda.synchronize()
    assert not outs[2].any()
    sources[2] += 1
    graph.replay()
    thread = threading.Thread(target=lambda: call.queue(0, sets[3]))
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    torch.testing.assert_close(outs, sources * torch.arange(2.0, 6.0, device="cuda")[:, None])
    with pytest.raises(RuntimeError, match="refused"):
        ConfiguredLaunch(kernel, ((1, 1, 1), (1025, 1, 1)), 512, overlaps=False, at_once=False).queue(0, sets[0])
    with pytest.raises(RuntimeError, match="refused"):
        kernel.configure(1 << 20, 128, shared_bytes=512, at_once=True).queue(0, sets[0])


def test_repeated_launches_are_a_graph_that_threads_and_captures_may_ask_for(kernel):
    source = torch.zeros(1000, device="cuda")
    call = kernel.configure(8, 128, shared_bytes=512)
    packed = call.pack((source.data_ptr(), source.data_ptr(), scalar(f32, 2.0), scalar(s32, 1000)))

    def on(stream, memory):
        assert memory == 8
        return [call.queueable(stream, packed)] * 3

    made = list[Repeated]()
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        handle = int(stream.cuda_stream)
        made.append(repeated := Repeated(on, handle, lambda _: (8, None)))
        queue = queue_on(kernel.device)
        for graph in (False, True, True):
            source.fill_(1.0)
            torch.cuda.synchronize()
            for _ in range(10):
                queue((repeated.queue, None))
            torch.cuda.synchronize()
            assert (source == 2.0**30).all()
            assert graph is (repeated._graph is not None) or not graph
        thread = threading.Thread(target=queue, args=((repeated.queue, None),))
        thread.start()
        thread.join()
        torch.cuda.synchronize()
        assert (source == 2.0**33).all()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured, stream=stream):
        for _ in range(2):
            queue((made[1].queue, None))
    source.fill_(1.0)
    captured.replay()
    torch.cuda.synchronize()
    assert (source == 2.0**6).all()
    made.clear()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_device_than_the_current_one():
    compiled = compile_source(SCALE, "scale", arch=device.target_of(1).name)
    source = torch.randn(100, device="cuda:1")
    torch.cuda.set_device(0)
    out = run(load(compiled, 1), source, 2.0)
    assert torch.cuda.current_device() == 0
    torch.testing.assert_close(out, source * 2)


def test_code_for_another_architecture(kernel):
    other = "sm_120a" if kernel.target.name != "sm_120a" else "sm_100a"
    with pytest.raises(ConfigError, match="cannot run"):
        load(compile_source(SCALE, "scale", arch=other), kernel.device)


def test_a_kernel_is_loaded_once(kernel):
    assert load(kernel.compiled, kernel.device) is kernel


def test_a_tensor_map_is_an_argument():
    index = torch.cuda.current_device()
    if not device.target_of(index).has_tma:
        pytest.skip("needs bulk tensor copies")
    source = torch.randn(32, 64, device="cuda")
    out = torch.zeros(8, 16, device="cuda")
    tensor_map = encode(source.data_ptr(), TensorMapSpec(f32, (64, 32), (256,), (16, 8)), index)
    kernel = load(compile_source(COPY_TILE, "copy_tile", arch=device.target_of(index).name), index)
    launch = kernel.configure(1, 32)
    launch.queue(current_stream("torch", index), launch.pack((out.data_ptr(), tensor_map)))
    torch.testing.assert_close(out, source[8:16, 16:32])


def test_unsigned_scalars_arrive():
    index = torch.cuda.current_device()
    source = 'extern "C" __global__ void put(unsigned long long* out, unsigned x, double y) { out[0] = x; out[1] = y; }'
    kernel = load(compile_source(source, "put", arch=device.target_of(index).name), index)
    out = torch.zeros(2, dtype=torch.int64, device="cuda")
    arguments = (out.data_ptr(), scalar(u32, 2**32 - 1), scalar(f64, 7.0))
    launch = kernel.configure(1, 1)
    launch.queue(current_stream("torch", index), launch.pack(arguments))
    assert out.tolist() == [2**32 - 1, 7]
