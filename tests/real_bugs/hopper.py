"""Bugs of the TMA, of mbarriers, of products by wgmma and of clusters: kernels for sm_90a."""

from __future__ import annotations

import numpy as np

from tests.real_bugs.base import Miniature, T, X

HOPPER = [
    Miniature(
        "NVIDIA/cudnn-frontend#784",
        "epilogue: a tile is stored by the TMA after a barrier alone; what threads wrote may not be visible to it",
        "proxy",
        """
    __shared__ __align__(128) int tile[128];
    tile[T] = x[T];                                                //!
    REPAIR(fence();)
    sync(1, 128);
    if (T == 0) { store(y, tile, 512); STORING(0); }""",
        T,
    ),
    Miniature(
        "MoonshotAI/FlashKDA#25",
        "without a first state, zeros go to the TMA unfenced where a sequence is empty: the loop has the only fence",
        "proxy",
        """
    __shared__ __align__(128) int state[128];
    state[T] = 0;                                                  //!
    for (int i = 0; i < x[0]; i++) { state[T] += x[T]; fence(); }
    REPAIR(fence();)
    __syncthreads();
    if (T == 0) { store(y, state, 512); STORING(0); }""",
        0 * T,
    ),
    Miniature(
        "MoonshotAI/FlashKDA#24",
        "mbarriers are not fenced after their initialisation, before the TMA completes on them",
        "mbarrier",
        """
    __shared__ __align__(128) int tile[128];
    __shared__ Barrier full;
    if (T == 0) { init(&full, 1); REPAIR(published();) }
    __syncthreads();
    if (T == 0) load(tile, x, 512, &full);                         //!
    wait(&full, 0);
    y[T] = tile[T];""",
        T,
    ),
    Miniature(
        "NVIDIA/TensorRT-LLM#15338",
        "the wait in a pipeline's loop keeps asking the barrier of the first stage",
        "in_flight race",
        """
    __shared__ __align__(128) int stage[2][128];
    __shared__ Barrier full[2];
    if (T == 0) { init(&full[0], 1); init(&full[1], 1); published(); }
    __syncthreads();
    if (T == 0) for (int i = 0; i < 2; i++) load(stage[i], x + 128 * i, 512, &full[i]);
    int sum = 0;
    for (int i = 0; i < 2; i++) {
        wait(&full[REPAIR(i) FAULT(0)], 0);
        sum += stage[i][T];                                        //!
    }
    y[T] = sum;""",
        2 * T + 128,
    ),
    Miniature(
        "flashinfer-ai/flashinfer#3630",
        "if a try of the next stage's barrier fails, the loop that tries again asks the barrier of the first stage",
        "in_flight race",
        """
    __shared__ __align__(128) int stage[2][128];
    __shared__ Barrier full[2];
    if (T == 0) { init(&full[0], 1); init(&full[1], 1); published(); }
    __syncthreads();
    if (T == 32) for (int i = 0; i < 2; i++) load(stage[i], x + 128 * i, 512, &full[i]);
    int sum = 0;
    if (T < 32) {
        bool ready = complete(&full[0], 0);
        for (int i = 0; i < 2; i++) {
            while (!ready) ready = complete(&full[REPAIR(i) FAULT(0)], 0);
            if (i == 0) ready = complete(&full[1], 0);
            for (int j = 0; j < 4; j++) sum += stage[i][32 * j + T];   //!
        }
        y[T] = sum;
    }""",
        8 * T[:32] + 896,
        block=64,
        seeds=(None,),
    ),
    Miniature(
        "tile-ai/tilelang#3087",
        "generated code: the parity of a ring is asked of a barrier that flips in every step, and has passed already",
        "race in_flight mbarrier",
        """
    __shared__ __align__(128) int tile[128];
    __shared__ Barrier full, read;
    if (T == 0) { init(&full, 1); init(&read, 128); published(); }
    __syncthreads();
    int sum = 0;
    for (int i = 0; i < 3; i++) {
        if (T == 0) {
            if (i > 0) wait(&read, REPAIR((i - 1) % 2) FAULT(0));  //!
            load(tile, x + 128 * i, 512, &full);                   //!
        }
        wait(&full, i % 2);
        sum += tile[T];                                            //!
        fence();
        arrive(&read);
    }
    y[T] = sum;""",
        3 * T + 384,
    ),
    Miniature(
        "NVIDIA/cudnn-frontend#426",
        "all lanes of the loading warp store, one arrives: the barrier passes on that lane's stores alone",
        "race",
        """
    __shared__ int weight[32];
    __shared__ Barrier loaded;
    if (T == 0) init(&loaded, REPAIR(32) FAULT(1));
    __syncthreads();
    if (T < 32) {
        weight[T] = x[T];                                          //!
        if (REPAIR(true) FAULT(T == 0)) arrive(&loaded);
    } else {
        wait(&loaded, 0);
        y[T - 32] = weight[T % 32];                                //!
    }""",
        np.tile(T[:32], 3),
    ),
    Miniature(
        "NVIDIA/cudnn-frontend#993",
        "masks: each lane reads another word, one lane of the warp releases the slot, and the TMA refills it",
        "race",
        """
    __shared__ __align__(128) int mask[128];
    __shared__ Barrier full, empty;
    if (T == 0) { init(&full, 1); init(&empty, REPAIR(128) FAULT(4)); published(); }
    __syncthreads();
    int sum = 0;
    for (int i = 0; i < 2; i++) {
        if (T == 0) {
            if (i > 0) wait(&empty, 0);
            load(mask, x + 128 * i, 512, &full);                   //!
        }
        wait(&full, i);
        sum += mask[T];                                            //!
        fence();
        if (REPAIR(true) FAULT(T % 32 == 0)) arrive(&empty);
    }
    y[T] = sum;""",
        2 * T + 128,
    ),
    Miniature(
        "NVIDIA/TransformerEngine#2695",
        "a stage that threads have read is refilled by the TMA without a fence between the proxies",
        "proxy",
        """
    __shared__ __align__(128) int stage[128];
    __shared__ Barrier full;
    if (T == 0) { init(&full, 1); published(); }
    __syncthreads();
    int sum = 0;
    for (int i = 0; i < 2; i++) {
        if (T == 0) load(stage, x + 128 * i, 512, &full);          //!
        wait(&full, i);
        sum += stage[T];                                           //!
        REPAIR(fence();)
        __syncthreads();
    }
    y[T] = sum;""",
        2 * T + 128,
    ),
    Miniature(
        "deepseek-ai/DeepEP#642",
        "a warp reads a slot in shared memory, releases it by an mbarrier, and the TMA's load is not fenced from that",
        "proxy",
        """
    __shared__ __align__(128) int slot[32];
    __shared__ Barrier full, empty;
    if (T == 0) { init(&full, 1); init(&empty, 32); published(); }
    __syncthreads();
    int sum = 0;
    for (int i = 0; i < 2; i++) {
        if (T == 32) {
            if (i > 0) { wait(&empty, 0); REPAIR(fence();) }
            load(slot, x + 32 * i, 128, &full);                    //!
        }
        if (T < 32) {
            wait(&full, i);
            sum += slot[T];                                        //!
            REPAIR(fence();)
            arrive(&empty);
        }
    }
    if (T < 32) y[T] = sum;""",
        2 * T[:32] + 32,
        block=64,
    ),
    Miniature(
        "triton-lang/triton#3858",
        "generated code: an mbarrier's memory is used again without mbarrier.inval",
        "mbarrier",
        """
    __shared__ Barrier word;
    for (int i = 0; i < 2; i++) {
        if (T == 0) init(&word, 128);                              //!
        __syncthreads();
        arrive(&word);
        wait(&word, 0);
        __syncthreads();
        REPAIR(if (T == 0) invalidate(&word);)
        __syncthreads();
    }
    y[T] = x[T];""",
        T,
    ),
    Miniature(
        "tile-ai/tilelang#2634",
        "generated code: a product reads a tile from shared memory that threads wrote, with no fence of the proxies",
        "proxy",
        """
    __shared__ __align__(128) unsigned short b[128];
    b[T] = 0x3c00;                                                 //!
    REPAIR(fence();)
    __syncthreads();
    float c[4] = {0, 0, 0, 0};
    unsigned a[4] = {0x3c003c00u, 0x3c003c00u, 0x3c003c00u, 0x3c003c00u};
    product(c, a, b);
    after_product();
    y[T] = c[0];""",
        np.full(128, 16),
    ),
    Miniature(
        "tile-ai/tilelang#2613",
        "generated code: a loop's tile for products is filled again while the other warpgroup's product reads it",
        "race",
        """
    __shared__ __align__(128) unsigned short b[128];
    float c[4] = {0, 0, 0, 0};
    unsigned a[4] = {0x3c003c00u, 0x3c003c00u, 0x3c003c00u, 0x3c003c00u};
    for (int i = 0; i < 2; i++) {
        if (T < 128) b[T] = 0x3c00 + 0x400 * i;                    //!
        fence();
        __syncthreads();
            product(c, a, b);
        after_product();
        REPAIR(__syncthreads();)
    }
    y[T] = c[0];""",
        np.full(256, 48),
        block=256,
    ),
    Miniature(
        "deepseek-ai/DeepEP#657",
        "a stage is loaded again after a wait that leaves one store in flight, which is the store of this stage",
        "race in_flight",
        """
    __shared__ __align__(128) int stage[128];
    __shared__ Barrier full;
    if (T == 0) {
        init(&full, 1);
        published();
        for (int i = 0; i < 2; i++) {
            load(stage, x + 128 * i, 512, &full);                  //!
            wait(&full, i);
            store(y + 128 * i, stage, 512);                        //!
            STORING(REPAIR(0) FAULT(1));
        }
        STORING(0);
    }""",
        X[:256],
        block=32,
    ),
    Miniature(
        "triton-lang/triton#10035",
        "generated rings: the leading warp frees a slot while its other warps still wait for the slot's last phase",
        "mbarrier deadlock",
        """
    __shared__ Barrier ready, empty;
    if (T == 0) { init(&ready, 1); init(&empty, 1); }
    __syncthreads();
    if (T < 32) {
        for (int i = 0; i < 4; i++) {
            wait(&empty, (i + 1) % 2);
            REPAIR(__syncwarp();)
            if (T == 0) arrive(&ready);                            //!
        }
    } else {
        for (int i = 0; i < 4; i++) {
            wait(&ready, i % 2);                                   //!
            REPAIR(sync(1, 64);)
            if (T == 32) arrive(&empty);                           //!
        }
    }
    y[T] = x[T];""",
        T[:96],
        block=96,
    ),
    Miniature(
        "triton-lang/triton#10656",
        "generated code for clusters: a CTA ends while another reads its shared memory",
        "race lifetime cluster",
        """
    __shared__ int first;
    if (T == 0) first = x[9];                                      //!
    cluster_sync();
    y[128 * blockIdx.x + T] = of_first_cta(&first);                //!
    REPAIR(cluster_sync();)""",
        np.full(256, 9),
        grid=2,
        cluster=2,
    ),
    Miniature(
        "deepseek-ai/DeepGEMM#343",
        "grouped products: a tensor map is rewritten for the next group while loads by it are in flight",
        "race in_flight proxy",
        """
    __shared__ __align__(128) int map[32], tile[2][128];
    __shared__ Barrier full[2];
    map[T] = 0;
    if (T == 0) { init(&full[0], 1); init(&full[1], 1); published(); }
    __syncwarp();
    for (int i = 0; i < 2; i++) {
        if (T == 0) describe(map, x + 128 * i, 128);
        __syncwarp();
        publish(z, map);                                           //!
        if (T == 0) load_by_map(tile[i], z, 512, &full[i]);        //!
        REPAIR(wait(&full[i], 0);)
        __syncwarp();
    }
    for (int i = 0; i < 2; i++) wait(&full[i], 0);
    y[T] = tile[0][T] + tile[1][T];""",
        2 * T[:32] + 128,
        block=32,
    ),
    Miniature(
        "NVIDIA/cccl#5456",
        "merge sort: a kernel that may start early reads what the kernel before it writes, and waits for it later",
        "race",
        """
    int first = x[T];                                              //!
    asm volatile("griddepcontrol.wait;" ::: "memory");
    REPAIR(first = *(volatile const int*)&x[T];)
    y[T] = first;""",
        2 * T,
        before="x[T] *= 2;",
    ),
    Miniature(
        "flashinfer-ai/flashinfer#2708",
        "products that may start early are compiled without the flag that makes their wait more than an empty function",
        "race",
        """
    REPAIR(asm volatile("griddepcontrol.wait;" ::: "memory");)
    y[T] = x[127 - T];                                             //!
    asm volatile("griddepcontrol.launch_dependents;");""",
        127 - T,
        before='asm volatile("griddepcontrol.launch_dependents;"); x[T] = T;',
    ),
    Miniature(
        "flashinfer-ai/flashinfer#5081",
        "a fused all-reduce takes each thread's first row before it waits for the launch that writes it",
        "race",
        """
    FAULT(int row = x[T];)                                         //!
    asm volatile("griddepcontrol.wait;" ::: "memory");
    REPAIR(int row = x[T];)
    int sum = row;
    for (int i = 1; i < 4; i++) sum += x[128 * i + T];
    y[T] = sum;""",
        4 * T + 6,
        before="for (int i = 0; i < 4; i++) x[128 * i + T] = T + i;",
    ),
]
