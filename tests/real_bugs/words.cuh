// What the miniatures share. `product` is one of 64x16 by 16x8 halves, which `after_product` waits for.
#define T int(threadIdx.x)
#if REPAIRED
#define REPAIR(...) __VA_ARGS__
#define FAULT(...)
#else
#define REPAIR(...)
#define FAULT(...) __VA_ARGS__
#endif
typedef unsigned long long Barrier;
__device__ unsigned at(const void* p) { return __cvta_generic_to_shared(p); }
__device__ void copy(void* to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(at(to)), "l"(from) : "memory");
}
#define COMMIT asm volatile("cp.async.commit_group;" ::: "memory")
#define PENDING(n) asm volatile("cp.async.wait_group %0;" :: "n"(n) : "memory")
__device__ void sync(int barrier, int threads) {
    asm volatile("bar.sync %0, %1;" :: "r"(barrier), "r"(threads) : "memory");
}
__device__ void release(int* p) { asm volatile("red.release.gpu.global.add.s32 [%0], 1;" :: "l"(p) : "memory"); }
__device__ int acquired(int* p) {
    int v;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
#if __CUDA_ARCH__ >= 900
__device__ void init(Barrier* b, int n) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" :: "r"(at(b)), "r"(n) : "memory");
}
__device__ void invalidate(Barrier* b) { asm volatile("mbarrier.inval.shared.b64 [%0];" :: "r"(at(b)) : "memory"); }
__device__ void published() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ void fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ void arrive(Barrier* b) {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" :: "r"(at(b)) : "memory");
}
__device__ void wait(Barrier* b, int parity) {
    asm volatile(
        "{ .reg .pred p; again: mbarrier.try_wait.parity.shared.b64 p, [%0], %1; @!p bra again; }"
        :: "r"(at(b)), "r"(parity) : "memory");
}
__device__ bool complete(Barrier* b, int parity) {
    int v;
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.s32 %0, 1, 0, p; }"
        : "=r"(v) : "r"(at(b)), "r"(parity) : "memory");
    return v;
}
__device__ void load(void* to, const void* from, int bytes, Barrier* b) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" :: "r"(at(b)), "r"(bytes) : "memory");
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
        :: "r"(at(to)), "l"(from), "r"(bytes), "r"(at(b)) : "memory");
}
__device__ void store(void* to, const void* from, int bytes) {
    asm volatile(
        "cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2; cp.async.bulk.commit_group;"
        :: "l"(to), "r"(at(from)), "r"(bytes) : "memory");
}
#define STORING(n) asm volatile("cp.async.bulk.wait_group %0;" :: "n"(n) : "memory")
__device__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");
}
__device__ int of_first_cta(int* p) {
    int v;
    asm volatile(
        "{ .reg .b32 a; mapa.shared::cluster.u32 a, %1, 0; ld.shared::cluster.s32 %0, [a]; }"
        : "=r"(v) : "r"(at(p)) : "memory");
    return v;
}
#define FIELD(name, bits, type, value) asm volatile( \
    "tensormap.replace.tile." name ".shared::cta.b1024." bits " [%0], %1;" :: "r"(at(map)), type(value) : "memory")
#define INDEXED(name, bits, value) asm volatile( \
    "tensormap.replace.tile." name ".shared::cta.b1024." bits " [%0], 0, %1;" :: "r"(at(map)), "r"(value) : "memory")
__device__ void describe(int* map, const int* from, int n) {
    FIELD("global_address", "b64", "l", from);
    FIELD("rank", "b32", "n", 0);
    INDEXED("box_dim", "b32", n);
    INDEXED("global_dim", "b32", n);
    INDEXED("element_stride", "b32", 1);
    FIELD("elemtype", "b32", "n", 3);
    FIELD("interleave_layout", "b32", "n", 0);
    FIELD("swizzle_mode", "b32", "n", 0);
    FIELD("fill_mode", "b32", "n", 0);
}
__device__ void publish(int* to, int* map) {
    asm volatile(
        "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%0], [%1], 128;"
        "fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" :: "l"(to), "r"(at(map)) : "memory");
}
__device__ void load_by_map(void* to, int* map, int bytes, Barrier* b) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" :: "r"(at(b)), "r"(bytes) : "memory");
    asm volatile(
        "cp.async.bulk.tensor.1d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2}], [%3];"
        :: "r"(at(to)), "l"(map), "r"(0), "r"(at(b)) : "memory");
}
__device__ void product(float (&c)[4], unsigned (&a)[4], const void* b) {
    unsigned long long tile = at(b) >> 4 | 8ull << 16 | 8ull << 32;
    asm volatile(
        "wgmma.fence.sync.aligned;"
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0, %1, %2, %3}, {%4, %5, %6, %7}, %8, 1, 1, 1, 0;"
        "wgmma.commit_group.sync.aligned;"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(tile) : "memory");
}
__device__ void after_product() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }
#endif
