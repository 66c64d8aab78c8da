// What cluster.cu needs of a GPU: PTX for Hopper and later. NVRTC compiles it without CUDA's headers.

#define DEVICE __device__ __forceinline__
#define UNROLL _Pragma("unroll")
#define KERNEL extern "C" __global__ __launch_bounds__(256, 1)
#define CONSTANT extern "C" __device__ const

struct bf16 { unsigned short bits; };

DEVICE int thread() { return threadIdx.x; }
DEVICE int warp() { return threadIdx.x / 32; }
DEVICE int lane() { return threadIdx.x % 32; }
DEVICE int cluster_index() { int i; asm("mov.u32 %0, %%clusterid.x;" : "=r"(i)); return i; }
DEVICE int block_rank() { int i; asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(i)); return i; }
DEVICE void *shared_memory() { extern __shared__ uint4 arena[]; return arena; }

DEVICE void sync_warp() { __syncwarp(); }
DEVICE void sync_block() { __syncthreads(); }
DEVICE void sync_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;\n"
               "barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
DEVICE float shuffle(float x, int from) { return __shfl_sync(~0u, x, from); }
DEVICE float shuffle_xor(float x, int mask) { return __shfl_xor_sync(~0u, x, mask); }

DEVICE float exponential(float x) { return __expf(x); }
DEVICE float divide(float a, float b) { return __fdividef(a, b); }
DEVICE float to_float(bf16 x) { return __uint_as_float((unsigned)x.bits << 16); }
DEVICE bf16 to_bf16(float x) {
  bf16 y;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
}
DEVICE unsigned pair_bits(bf16 low, bf16 high) { return low.bits | (unsigned)high.bits << 16; }

// sums (16 x 8) += a (16 x 16) b (16 x 8), fragments of mma.m16n8k16.
DEVICE void multiply(float (&sums)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
               "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

DEVICE unsigned shared_address(const void *p) { return (unsigned)__cvta_generic_to_shared(p); }

// A barrier in shared memory whose phase ends when the expected bytes have arrived.
struct Barrier {
  unsigned long long state;

  DEVICE void initialise() {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(this)) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  DEVICE void expect(unsigned bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(this)),
                 "r"(bytes) : "memory");
  }
  // Waits for the end of a phase; phases have the parities 0, 1, 0, ...
  DEVICE void wait(int parity) {
    asm volatile("{\n"
                 ".reg .pred done;\n"
                 "again:\n"
                 "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra again;\n"
                 "}" ::"r"(shared_address(this)), "r"(parity) : "memory");
  }
};

DEVICE unsigned in_block(unsigned address, int rank) {
  unsigned mapped;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
  return mapped;
}

// Write a value to the same place in the shared memory of another block, counted by its barrier.
DEVICE void send_bytes(uint4 *to, int rank, uint4 value, Barrier &barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, "
               "[%5];" ::"r"(in_block(shared_address(to), rank)), "r"(value.x), "r"(value.y),
               "r"(value.z), "r"(value.w), "r"(in_block(shared_address(&barrier), rank)) : "memory");
}
DEVICE void send_bytes(float2 *to, int rank, float2 value, Barrier &barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::
               "r"(in_block(shared_address(to), rank)), "f"(value.x), "f"(value.y),
               "r"(in_block(shared_address(&barrier), rank)) : "memory");
}
