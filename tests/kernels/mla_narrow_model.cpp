// Runs every program of a launch of `split_attention_narrow` on the CPU; built as a library by its test.
//
// The library takes the place of CUDA's driver: it makes tensor maps, of the model's kind, and launches.

#include "hopper_model.h"
// The kernel, behind the model's instructions.
#include "mla_narrow_ring.cuh"
#include "mla_narrow_keys.cuh"
#include "mla_narrow.cu"

static int stuck;

// How the next launches run.
extern "C" void set_model(int late, int seed) {
    model::late = late;
    model::random.seed(seed);
    stuck = 0;
}

// One more than the number of the first program whose threads have waited for ever; 0 where none has.
extern "C" int stuck_program() { return stuck; }

extern "C" int cuTensorMapEncodeTiled(
    TensorMap* map, int type, u32 rank, const char* base, const u64* sizes, const u64* strides, const u32* box,
    const u32* steps, int interleave, int swizzle, int promotion, int fill) {
    const bool is_bf16 = type == 9, swizzles_128 = swizzle == 3;
    if (!is_bf16 || !swizzles_128 || rank != 2 || box[0] != 64 || interleave || fill) return 1;
    if (steps[0] != 1 || steps[1] != 1) return 1;
    if (reinterpret_cast<u64>(map) % 64 || reinterpret_cast<u64>(base) % 16 || strides[0] % 16 || box[1] > 256) return 1;
    const model::Map content{base, sizes[1], strides[0], sizes[0], box[1]};
    std::memcpy(map, &content, sizeof content);
    return 0;
}

extern "C" int cuModuleLoadData(void**, const void*) { return 0; }
extern "C" int cuModuleGetFunction(void**, void*, const char* name) {
    return std::strcmp(name, "split_attention_narrow") != 0;
}
extern "C" int cuFuncSetAttribute(void*, int attribute, int value) {
    return attribute != 8 || value != model::SHARED_BYTES;
}
extern "C" int cuGetErrorString(int, const char** text) {
    *text = "the model refuses it";
    return 0;
}

template <typename Argument>
const Argument& argument(void** arguments, int index) {
    return *static_cast<const Argument*>(arguments[index]);
}

extern "C" int cuLaunchKernel(
    void*, u32 programs, u32, u32, u32 threads, u32, u32, u32 shared_bytes, void*, void** arguments, void**) {
    if (threads != model::THREADS || shared_bytes != model::SHARED_BYTES) return 1;
    model::body = [arguments] {
        const auto number = [arguments](int index) { return argument<int>(arguments, index); };
        split_attention_narrow(
            argument<TensorMap>(arguments, 0), argument<TensorMap>(arguments, 1),
            argument<const int*>(arguments, 2), argument<const void*>(arguments, 3),
            argument<const void*>(arguments, 4), argument<const u64*>(arguments, 5), argument<float*>(arguments, 6),
            argument<float*>(arguments, 7), argument<long long>(arguments, 8), number(9), number(10), number(11),
            number(12), number(13), number(14), number(15), argument<float>(arguments, 16));
    };
    for (u32 program = 0; program < programs; program++) {
        blockIdx.x = program;
        if (model::run_block()) continue;
        stuck = program + 1;
        return 1;
    }
    return 0;
}
