// roles: 384 threads, at least 1 CTA per SM, sm_90a
// Shared memory, 4096 bytes:
extern __shared__ __align__(1024) unsigned char shared_memory[];
struct __align__(64) TensorMap { unsigned long long words[16]; };

extern "C" __global__ void __launch_bounds__(384, 1)
roles(
    const __grid_constant__ TensorMap source
) {
  const unsigned long long source_address = (unsigned long long)&source;
  const unsigned warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0);
  // dots.py:10
  const unsigned base = (unsigned)__cvta_generic_to_shared(shared_memory);
  // roles.py:5
  if (warp < 4u) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    // dots.py:10
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
        :: "r"(base), "l"(source_address), "r"(base), "r"(-8), "r"(0)
        : "memory");
  } else {
    // roles.py:7
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    unsigned total;
    // dots.py:10
    total = 0xffffffffu;
    total = total - 1u;
  }
}
