// Runs every program of a launch of `split_attention_narrow` on the CPU; built as a library by its test.

#include "hopper_model.h"
// The kernel, behind the model's instructions.
#include KERNEL_SOURCE

// 0, or one more than the number of the first program whose threads wait for ever.
extern "C" int run_narrow(
    const void* query, long query_rows, const void* keys, long slots, long key_bytes, const int* slot_table,
    const void* request_ids, const void* prefix_lens, const u64* tree_mask, float* partial, float* partial_lse,
    long table_stride, int wide, int batch, int rows, int group, int mask_words, int tiles, int max_splits,
    float log2_scale, int late, int seed) {
    TensorMap query_map{}, key_map{};
    const model::Map query_box{static_cast<const char*>(query), static_cast<u64>(query_rows), 576 * 2, 576, COLUMNS};
    const model::Map key_box{static_cast<const char*>(keys), static_cast<u64>(slots), static_cast<u64>(key_bytes), 576,
                             64 / PIECES};
    std::memcpy(&query_map, &query_box, sizeof query_box);
    std::memcpy(&key_map, &key_box, sizeof key_box);
    model::late = late;
    model::random.seed(seed);
    model::body = [&] {
        split_attention_narrow(query_map, key_map, slot_table, request_ids, prefix_lens, tree_mask, partial,
                               partial_lse, table_stride, wide, batch, rows, group, mask_words, tiles, max_splits,
                               log2_scale);
    };
    for (int program = 0; program < tiles * max_splits; program++) {
        blockIdx.x = program;
        if (!model::run_block()) return program + 1;
    }
    return 0;
}
