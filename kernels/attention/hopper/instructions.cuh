// Hopper's instructions as functions, one asm statement each: barriers, tensor loads, wgmma, stmatrix.
//
// A kernel written over these names runs on a CPU too, where tests put a model of the instructions in their place.
// The products themselves depend on the number of columns and are generated (`cuda_source.py`).

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

struct alignas(64) TensorMap {
    u64 words[16];
};

#define DEVICE __device__ __forceinline__
extern __shared__ __align__(1024) char dynamic_shared[];

DEVICE char* shared_memory() { return dynamic_shared; }

DEVICE u32 address_of(const void* place) { return static_cast<u32>(__cvta_generic_to_shared(place)); }

// Barriers in shared memory, which threads and tensor loads arrive at.

DEVICE void barrier_init(u64* barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address_of(barrier)), "r"(arrivals) : "memory");
}

DEVICE void barriers_are_initialized() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

DEVICE void barrier_arrive(u64* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address_of(barrier)) : "memory");
}

// Arrive, and say how many bytes tensor loads will bring before the phase is over.
DEVICE void barrier_expect(u64* barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address_of(barrier)), "r"(bytes)
                 : "memory");
}

// Wait until the phase of this parity is over; the one before the first counts as over.
DEVICE void barrier_wait(u64* barrier, u32 parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "WAIT:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra DONE;\n"
        "bra WAIT;\n"
        "DONE:\n"
        "}\n" ::"r"(address_of(barrier)),
        "r"(parity)
        : "memory");
}

// Start loading the map's box at a column and row; its bytes count at the barrier.
DEVICE void load_box(void* target, const TensorMap* map, int column, int row, u64* barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::
            "r"(address_of(target)),
        "l"(map), "r"(address_of(barrier)), "r"(column), "r"(row)
        : "memory");
}

DEVICE void prefetch_map(const TensorMap* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }

// What this thread has written to shared memory is seen by the tensor cores and by tensor loads.
DEVICE void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Threads that wait for one another, by the number of their warpgroup; barrier 0 is the whole block's.

DEVICE void sync_block() { __syncthreads(); }

DEVICE void sync_warpgroup(int warpgroup) { asm volatile("bar.sync %0, 128;" ::"r"(warpgroup + 1) : "memory"); }

DEVICE bool any_of_warpgroup(int warpgroup, bool mine) {
    u32 any;
    asm volatile(
        "{\n"
        ".reg .pred mine, any;\n"
        "setp.ne.u32 mine, %2, 0;\n"
        "bar.red.or.pred any, %1, 128, mine;\n"
        "selp.u32 %0, 1, 0, any;\n"
        "}\n"
        : "=r"(any)
        : "r"(warpgroup + 1), "r"(static_cast<u32>(mine))
        : "memory");
    return any != 0;
}

DEVICE float shuffle_xor(float value, int lanes) { return __shfl_xor_sync(0xffffffffu, value, lanes); }
DEVICE int shuffle_xor(int value, int lanes) { return __shfl_xor_sync(0xffffffffu, value, lanes); }
DEVICE int shuffle_up(int value, int lanes) { return __shfl_up_sync(0xffffffffu, value, lanes); }
DEVICE int shuffle_from(int value, int lane) { return __shfl_sync(0xffffffffu, value, lane); }

// Registers of a thread, from here on; all threads of a warpgroup say the same.

template <int COUNT>
DEVICE void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

template <int COUNT>
DEVICE void leave_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// Products of the tensor cores run behind the thread that issues them.

DEVICE void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int PENDING>
DEVICE void products_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Keeps the compiler from moving what uses an accumulator across a wait for it.
template <int COUNT>
DEVICE void hold(float (&accumulator)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) asm volatile("" : "+f"(accumulator[i])::"memory");
}

DEVICE float exp2_of(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

DEVICE float log2_of(float x) {
    float y;
    asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

DEVICE u32 pack_halves(float low, float high) {
    u32 both;
    asm("cvt.rn." HALF_TYPE "x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

// Store 8 x 8 tiles of 16-bit numbers, of which lane l holds row l / 4, columns 2 (l % 4) and the next, transposed:
// the address of lane 8 t + r is where column r of tile t goes.
DEVICE void store_transposed(u32 address, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a),
                 "r"(b), "r"(c), "r"(d)
                 : "memory");
}

DEVICE void store_transposed(u32 address, u32 a, u32 b) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(address), "r"(a), "r"(b)
                 : "memory");
}
