"""Bugs of threads, of copies by cp.async, and of CTAs that meet in global memory: kernels for sm_80."""

from __future__ import annotations

import numpy as np

from tests.real_bugs.base import Miniature, T

BARRIERS = [
    Miniature(
        "flashinfer-ai/flashinfer#3529",
        "top-k: counts are cleared for the next round while slower warps read those of this one",
        "race",
        """
    __shared__ int counts[32];
    int rest = 1000;
    for (int round = 0; round < 2; round++) {
        if (T < 32) counts[T] = 0;                                 //!
        __syncthreads();
        atomicAdd(&counts[x[T] & 31], 1);
        __syncthreads();
        rest -= counts[round];                                     //!
        REPAIR(__syncthreads());
    }
    y[T] = rest;""",
        np.full(128, 992),
    ),
    Miniature(
        "flashinfer-ai/flashinfer#3624",
        "sampling: the storage of a block's reduction is used again in the next step of the loop",
        "race",
        """
    __shared__ int part[4];
    int best = 0;
    for (int i = 0; i < 3; i++) {
        int of_warp = __reduce_max_sync(~0u, x[128 * i + T]);
        if (T % 32 == 0) part[T / 32] = of_warp;                   //!
        __syncthreads();
        if (T == 0) for (int w = 0; w < 4; w++) best = max(best, part[w]);  //!
        REPAIR(__syncthreads());
    }
    if (T == 0) y[0] = best;""",
        np.array([383]),
    ),
    Miniature(
        "flashinfer-ai/flashinfer#3439",
        "state-space scan: each warp copies a quarter of the state and waits for its lanes; then all read all of it",
        "in_flight race",
        """
    __shared__ __align__(16) int state[512];
    copy(&state[4 * T], &x[4 * T]);                                //!
    COMMIT;
    PENDING(0);
    FAULT(__syncwarp());
    REPAIR(__syncthreads());
    y[T] = state[T] + state[511 - T];                              //!""",
        np.full(128, 511),
    ),
    Miniature(
        "ggml-org/llama.cpp#13438",
        "flash attention: maxima of the warps are combined before all warps have written theirs",
        "race",
        """
    __shared__ int most[4];
    int mine = __reduce_max_sync(~0u, x[T]);
    if (T % 32 == 0) most[T / 32] = mine;                          //!
    REPAIR(__syncthreads());
    y[T] = max(max(most[0], most[1]), max(most[2], most[3]));      //!""",
        np.full(128, 127),
    ),
    Miniature(
        "ggml-org/llama.cpp#13469",
        "flash attention: a barrier that only some warps come to; from there on warps meet at different ones",
        "race deadlock divergence",
        """
    __shared__ int tile[128];
    tile[T] = x[T];                                                //!
    FAULT(if (T < 64)) __syncthreads();                            //!
    int seen = tile[127 - T];                                      //!
    __syncthreads();                                               //!
    tile[T] = seen;                                                //!
    __syncthreads();                                               //!
    y[T] = tile[127 - T];                                          //!""",
        T,
    ),
    Miniature(
        "ggml-org/llama.cpp#13742",
        "flash attention: a mask decides for every warp whether to go on, and the next one is written over it",
        "race",
        """
    __shared__ int mask[128];
    int kept = 0;
    for (int i = 0; i < 3; i++) {
        mask[T] = i != 1;                                          //!
        __syncthreads();
        bool skip = true;
        for (int j = 0; j < 128; j += 32) skip &= mask[j + T % 32] == 0;  //!
        REPAIR(__syncthreads());
        if (__all_sync(~0u, skip)) continue;
        kept += x[T];
        __syncthreads();
    }
    y[T] = kept;""",
        2 * T,
    ),
    Miniature(
        "ggml-org/llama.cpp#24360",
        "state-space scan: inputs of the next step are loaded over those that slower warps still read",
        "race",
        """
    __shared__ int b[32];
    int sum = 0;
    for (int i = 0; i < 3; i++) {
        if (T < 32) b[T] = x[32 * i + T];                          //!
        __syncthreads();
        for (int j = 0; j < 32; j++) sum += b[j];                  //!
        REPAIR(__syncthreads());
    }
    y[T] = sum;""",
        np.full(128, 95 * 48),
    ),
    Miniature(
        "ggml-org/llama.cpp#5853",
        "softmax: the warps' sums go where other warps still read the warps' maxima",
        "race",
        """
    __shared__ int part[4];
    int v = x[T], most = __reduce_max_sync(~0u, v);
    if (T % 32 == 0) part[T / 32] = most;
    __syncthreads();
    most = __reduce_max_sync(~0u, part[T % 4]);                    //!
    REPAIR(__syncthreads());
    int sum = __reduce_add_sync(~0u, most - v);
    if (T % 32 == 0) part[T / 32] = sum;                           //!
    __syncthreads();
    y[T] = part[0] + part[1] + part[2] + part[3];""",
        np.full(128, 8128),
    ),
    Miniature(
        "ggml-org/llama.cpp#13294",
        "grouped matmul: a tile's table of columns is written while warps write the last tile's results by it",
        "race",
        """
    __shared__ int column[64];
    for (int tile = 0; tile < 2; tile++) {
        if (T < 64) column[T] = 64 * tile + (T ^ 1);               //!
        __syncthreads();
        if (T >= 64) y[column[T - 64]] = x[64 * tile + T - 64];    //!
        REPAIR(__syncthreads());
    }""",
        T ^ 1,
    ),
    Miniature(
        "ggml-org/llama.cpp#28358",
        "flash attention: lanes without data store their padding over the scales that other lanes store",
        "race",
        """
    __shared__ int quants[16 + 2];
    int* scales = quants + 16;
    if (REPAIR(T < 16) FAULT(true)) quants[T < 18 ? T : 0] = T < 16 ? x[T] : 0;  //!
    if (T % 8 == 0 && T < 16) scales[T / 8] = x[T] + 1;            //!
    __syncwarp();
    y[T] = T < 18 ? quants[T] : 0;""",
        np.array([*range(16), 1, 9]),
        block=32,
    ),
    Miniature(
        "pytorch/pytorch#162995",
        "reductions along y and along x take their temporaries from the same shared memory, one after the other",
        "race",
        """
    __shared__ int s[128];
    int tx = T % 64, ty = T / 64, v = x[T];
    s[T] = v;
    __syncthreads();
    if (ty == 0) v += s[T + 64];                                   //!
    REPAIR(__syncthreads());
    s[ty * 64 + tx] = v;                                           //!
    __syncthreads();
    for (int n = 32; n > 0; n /= 2) {
        if (tx < n) s[ty * 64 + tx] += s[ty * 64 + tx + n];
        __syncthreads();
    }
    if (T == 0) y[0] = s[0];""",
        np.array([8128]),
    ),
    Miniature(
        "pytorch/pytorch#5250",
        "a loss' gradient: a barrier before a reduction in a loop was taken away as needless",
        "race",
        """
    __shared__ int sums[128];
    int total = 0;
    for (int i = 0; i < 2; i++) {
        REPAIR(__syncthreads());
        sums[T] = x[T] + i;                                        //!
        __syncthreads();
        if (T == 0) for (int j = 0; j < 128; j++) total += sums[j];  //!
    }
    if (T == 0) y[0] = total;""",
        np.array([2 * 8128 + 128]),
    ),
    Miniature(
        "sgl-project/sglang#37663",
        "experts' blocks: every thread searches prefix sums that other threads may not have written",
        "race uninitialised",
        """
    __shared__ int prefix[128];
    prefix[T] = 4 * x[T];                                          //!
    REPAIR(__syncthreads());
    int low = 0, high = 127;
    while (low < high) {
        int middle = (low + high + 1) / 2;
        if (prefix[middle] <= 2 * T) low = middle;                 //!
        else high = middle - 1;
    }
    y[T] = low;""",
        T // 2,
    ),
    Miniature(
        "vllm-project/vllm#13140",
        "experts' blocks: counters are set to zero by some threads and counted up by others at once",
        "race uninitialised",
        """
    __shared__ int counts[32];
    if (T >= 96) counts[T - 96] = 0;                               //!
    REPAIR(__syncthreads());
    atomicAdd(&counts[x[T] & 31], 1);                              //!
    __syncthreads();
    if (T < 32) y[T] = counts[T];""",
        np.full(32, 4),
    ),
    Miniature(
        "NVIDIA/cccl#399",
        "run-length encoding: elements are scattered into memory from which slower warps read sums of the scan",
        "race",
        """
    __shared__ int storage[128];
    int sum = __reduce_add_sync(~0u, x[T] & 1), before = 0;
    if (T % 32 == 0) storage[T / 32] = sum;
    __syncthreads();
    for (int w = 0; w < T / 32; w++) before += storage[w];         //!
    REPAIR(__syncthreads());
    storage[127 - T] = x[T] + before;                              //!
    __syncthreads();
    y[T] = storage[T];""",
        (T + T // 32 * 16)[::-1],
    ),
    Miniature(
        "tile-ai/tilelang#1257",
        "generated code: no barrier between an atomic addition to shared memory and the read of a neighbour's sum",
        "race",
        """
    __shared__ int s[128];
    s[T ^ 32] = 0;
    __syncthreads();
    atomicAdd(&s[T], x[T]);                                        //!
    REPAIR(__syncthreads());
    y[T] = s[T ^ 32];                                              //!""",
        T ^ 32,
    ),
    Miniature(
        "tile-ai/tilelang#2556",
        "generated code: the barrier of 48 threads out of 64 is dropped, as 48 is no whole number of warps",
        "race uninitialised",
        """
    __shared__ int s[64];
    REPAIR(s[T] = x[T]; __syncthreads();)
    if (T < 48) {
        FAULT(s[T] = x[T];)                                        //!
        y[T] = s[47 - T];                                          //!
    }""",
        T[47::-1],
        block=64,
    ),
    Miniature(
        "tile-ai/tilelang#2612",
        "generated code: a loop's barrier inside of a branch is moved out before the branch",
        "race uninitialised",
        """
    __shared__ int s[128];
    int seen = 0;
    FAULT(__syncthreads();)
    REPAIR(for (int i = 0; i < 2; i++) { __syncthreads(); if (T % 4 == 0) s[T] = x[T] + i; __syncthreads();)
    REPAIR(    if (T % 4 == 0) seen += s[124 - T]; })
    FAULT(if (T % 4 == 0) for (int i = 0; i < 2; i++) {)
    FAULT(    s[T] = x[T] + i;)                                    //!
    FAULT(    seen += s[124 - T]; })                               //!
    y[T] = T % 4 == 0 ? seen : T;                                  //!""",
        np.where(T % 4, T, 2 * (124 - T) + 1),
    ),
    Miniature(
        "fla-org/flash-linear-attention#890",
        "gated linear attention: every thread adds to one number in shared memory, without an atomic",
        "race",
        """
    __shared__ int sum;
    if (T == 0) sum = 0;
    __syncthreads();
    FAULT(sum = sum + x[7];)                                       //!
    REPAIR(if (T == 0) sum = sum + x[7];)
    __syncthreads();
    y[T] = sum;""",
        np.full(128, 7),
    ),
    Miniature(
        "NVIDIA/TensorRT-LLM#18339",
        "top-k: one thread rewrites bounds that slower warps still read, and which decide who comes to a barrier",
        "race",
        """
    __shared__ int low, high;
    if (T == 0) low = high = x[5];
    __syncthreads();
    bool narrow = low == high;                                     //!
    REPAIR(__syncthreads());
    if (narrow) {
        if (T == 0) { low -= 1; high += 1; }                       //!
        __syncthreads();
    }
    y[T] = high - low;""",
        np.full(128, 2),
    ),
    Miniature(
        "NVIDIA/Fuser#678",
        "generated reductions: idle threads reset the result before the thread that works has stored it",
        "race",
        """
    __shared__ int result;
    for (int i = 0; i < 2; i++) {
        if (T == 127) result = 0;                                  //!
        __syncthreads();
        atomicAdd(&result, x[T] + i);
        __syncthreads();
        if (T == 0) y[i] = result;                                 //!
        REPAIR(__syncthreads());
    }""",
        np.array([8128, 8256]),
    ),
    Miniature(
        "deepseek-ai/FlashMLA#57",
        "a named barrier counts 256 threads in code that 128 of them run",
        "deadlock",
        """
    if (T < 128) {
        __shared__ int s[128];
        s[T] = x[T];
        sync(1, REPAIR(128) FAULT(256));                           //!
        y[T] = s[127 - T];
    }""",
        T[::-1],
        block=256,
    ),
    Miniature(
        "kokkos/kokkos#6630",
        "a warp's reduction: a lane changes a number that other lanes read, without __syncwarp",
        "race",
        """
    __shared__ int s[32];
    s[T] = x[T];
    __syncwarp();
    if (T < 16) s[T] += s[T + 16];                                 //!
    REPAIR(__syncwarp();)
    y[T] = s[15 - T % 16];                                         //!""",
        np.tile(2 * T[15::-1] + 16, 2),
        block=32,
    ),
    Miniature(
        "csarofeen/pytorch#2457",
        "generated pipelines: the newest copies are committed after the wait, which therefore waits for nothing",
        "in_flight race",
        """
    __shared__ __align__(16) int stage[3][512];
    int sum = 0;
    for (int i = 0; i < 2; i++) { copy(&stage[i][4 * T], &x[512 * i + 4 * T]); COMMIT; }
    PENDING(1);
    __syncthreads();
    for (int i = 0; i < 4; i++) {
        if (i < 2) copy(&stage[(i + 2) % 3][4 * T], &x[512 * (i + 2) + 4 * T]);  //!
        REPAIR(COMMIT;)
        sum += stage[i % 3][T];                                    //!
        PENDING(1);
        FAULT(COMMIT;)
        __syncthreads();
    }
    y[T] = sum;""",
        4 * T + 3072,
    ),
    Miniature(
        "xlite-dev/LeetCUDA#419",
        "softmax: all lanes of a warp read the warps' sums, of which there are eight",
        "bounds",
        """
    __shared__ int sums[8];
    int v = __reduce_add_sync(~0u, x[T]);
    if (T % 32 == 0) sums[T / 32] = v;
    __syncthreads();
    v = REPAIR(T % 32 >= 8 ? 0 :) sums[T % 32];                    //!
    v = __reduce_add_sync(~0u, T % 32 < 8 ? v : 0);
    y[T] = v;""",
        np.full(256, 255 * 128),
        block=256,
    ),
    Miniature(
        "kokkos/kokkos#1958",
        "reductions of half a warp: the mask of the lanes that meet is computed for the other half",
        "member_mask",
        """
    int lane = T % 32, v = x[T];
    unsigned mask = 0xffffu << REPAIR(lane / 16) FAULT(lane % 2) * 16;
    for (int n = 8; n > 0; n /= 2) v += __shfl_down_sync(mask, v, n, 16);  //!
    if (lane % 16 == 0) y[T / 16] = v;""",
        256 * np.arange(8) + 120,
    ),
]
GRIDS = [
    Miniature(
        "flashinfer-ai/flashinfer#5251",
        "top-k: thread 0 announces that its CTA has counted before the CTA's other threads have",
        "race",
        """
    atomicAdd(&z[T & 7], 1);                                       //!
    REPAIR(__syncthreads());
    if (T == 0) {
        release(&z[64]);
        while (acquired(&z[64]) < 2) {}
    }
    __syncthreads();
    y[128 * blockIdx.x + T] = z[T & 7];                            //!""",
        np.full(256, 32),
        grid=2,
    ),
    Miniature(
        "pytorch/pytorch#128455",
        "reductions of two stages: the last block reads the others' sums without a fence after its atomic",
        "race",
        """
    __shared__ bool last;
    z[128 * blockIdx.x + T] = x[T];                                //!
    __threadfence();
    __syncthreads();
    if (T == 0) last = atomicAdd(&z[400], 1) == 1;
    __syncthreads();
    if (last) {
        REPAIR(__threadfence();)
        y[T] = z[T] + z[128 + T];                                  //!
    }""",
        2 * T,
        grid=2,
    ),
    Miniature(
        "PaddlePaddle/Paddle#32596",
        "segments' means: __syncthreads stands where all CTAs of the grid should meet",
        "race",
        """
    atomicAdd(&z[T], x[T] + blockIdx.x);                           //!
    __syncthreads();
    REPAIR(if (T == 0) { release(&z[256]); while (acquired(&z[256]) < 2) {} } __syncthreads();)
    y[128 * blockIdx.x + T] = z[T];                                //!""",
        np.tile(2 * T + 1, 2),
        grid=2,
    ),
]
