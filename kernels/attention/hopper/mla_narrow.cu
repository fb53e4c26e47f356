// One split of tree verify attention on Hopper for MLA with few packed rows: operands swapped, keys in front.
//
// The tile, the partial results and the splits are those of `split_attention`. Packed rows (tree rows times heads) are
// the *columns* of both products, so a tile pays for COLUMNS of them, any multiple of 8, and not for 64 or 128:
//
//     S^T [64 keys, COLUMNS]  = K [64, 576] Q^T        O^T [512, COLUMNS] += V^T [512, 64] P^T
//
// with V the first 512 columns of K. Per block of 64 keys and 72 columns the tensor cores work 36 + 32 products of 36
// clocks, 2450 in all; the products read 290 KiB of shared memory and the loads write 72 KiB, 2900 clocks; bringing
// those takes a multiprocessor's share of HBM 4200 to 4800. So one tile a multiprocessor is bound by memory if loads
// never stop; two tiles, which read the same keys through L2, by shared memory if products never stop. What follows:
//
//   * Four warpgroups. Two hold the output, 256 value columns each (2 COLUMNS registers a thread); one makes logits and
//     weights, so that `k q` of a block runs beside `p v` of the block before; a thread of the fourth loads.
//   * The block is nine chunks of 64 columns, each with a place and two barriers of its own in a ring. Beside Q and P
//     17 chunks fit: the 8 of a block's value and the 9 of the next block. Chunk by chunk, what `p v` frees is loaded again while
//     `k q` waits for the next block's first chunk.
//   * A column's reference `m` moves only when a logit exceeds it by more than 2^8. The check is one reduction over
//     the warpgroup; maxima are found, and the output is rescaled, in the blocks that need it.
//
// Compiled with COLUMNS; PIECES, the tensor loads that make up 64 keys, each of one page; HALF_TYPE; and KEYS_AHEAD, how
// many chunks of the next block's `k q` are issued before this block's P is given out. With 0 a chunk is freed as early
// as may be; with more the softmax of the next block begins earlier and runs beside `p v`. `cuda_source.py` puts the
// files together: instructions, products, `mla_narrow_ring.cuh`, `mla_narrow_keys.cuh`, and this one.

// Load Q and then the split's blocks, chunk after chunk, as fast as the ring empties.
DEVICE void load(
    const Shared& shared, const TensorMap* query_map, const TensorMap* key_map, const int* table_row) {
    Control& control = *shared.control;
    const Work& work = control.work;
    const int blocks = work.blocks, query_row = work.request * work.packed_rows + work.first_row;
    constexpr int piece_keys = BLOCK / PIECES;
    const int last_piece = (work.end - 1) / piece_keys * piece_keys;
    int start = work.first_block * BLOCK;
    int slots[PIECES];
#pragma unroll
    for (int piece = 0; piece < PIECES; piece++) {
        slots[piece] = table_row[min(start + piece * piece_keys, last_piece)];
    }
    barrier_expect(&control.query_ready, CHUNKS * COLUMN_BYTES);
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; chunk++) {
        load_box(shared.query + chunk * COLUMN_BYTES, query_map, chunk * 64, query_row, &control.query_ready);
    }
    Place place;
    for (int i = 0; i < blocks; i++) {
        start += BLOCK;
        int next_slots[PIECES];
#pragma unroll
        for (int piece = 0; piece < PIECES; piece++) {
            next_slots[piece] = table_row[min(start + piece * piece_keys, last_piece)];
        }
#pragma unroll
        for (int position = 0; position < CHUNKS; position++) {
            const int slot = place.slot_of(position);
            char* target = shared.ring + slot * CHUNK_BYTES;
            barrier_wait(&control.empty[slot], (place.round_of(position) & 1) ^ 1);
            barrier_expect(&control.full[slot], CHUNK_BYTES);
#pragma unroll
            for (int piece = 0; piece < PIECES; piece++) {
                load_box(target + piece * piece_keys * 128, key_map, chunk_at(position) * 64, slots[piece],
                         &control.full[slot]);
            }
        }
        place.next_block();
#pragma unroll
        for (int piece = 0; piece < PIECES; piece++) slots[piece] = next_slots[piece];
    }
}

// A value warpgroup: every other chunk of 64 of the output's value columns.
DEVICE void attend_values(const Shared& shared, float* partial, int group, int thread) {
    Control& control = *shared.control;
    const Work& work = control.work;
    const int blocks = work.blocks;
    const int lane = thread % 32, warp = thread / 32;
    const u32 ring = address_of(shared.ring);
    const u64 weights = matrix_at(address_of(shared.weights));
    float output[4][LOGIT_COUNT];
#pragma unroll
    for (int part = 0; part < 4; part++) {
#pragma unroll
        for (int j = 0; j < LOGIT_COUNT; j++) output[part][j] = 0.0f;
    }
    Place place;
    int left = work.end - work.first_block * BLOCK;  // positions that there are from this block on
    for (int i = 0; i < blocks; i++) {
        barrier_wait(&control.weights_ready, i & 1);
        if (*static_cast<volatile int*>(&control.rescale)) {
#pragma unroll
            for (int j = 0; j < COLUMN_COUNT; j++) {
                const float factor = control.factor[j / 2 * 8 + lane % 4 * 2 + j % 2];
#pragma unroll
                for (int part = 0; part < 4; part++) {
                    output[part][j / 2 * 4 + j % 2] *= factor;
                    output[part][j / 2 * 4 + j % 2 + 2] *= factor;
                }
            }
        }
#pragma unroll
        for (int part = 0; part < 4; part++) {
            const int position = position_of(group, part);
            barrier_wait(&control.full[place.slot_of(position)], place.round_of(position) & 1);
        }
        if (left < BLOCK) {
            // A weight of 0 times a NaN in a slot that nobody wrote would be NaN.
            for (int part = 0; part < 4; part++) {
                u32* chunk = reinterpret_cast<u32*>(
                    shared.ring + place.slot_of(position_of(group, part)) * CHUNK_BYTES);
                for (int word = left * 32 + thread; word < BLOCK * 32; word += 128) chunk[word] = 0;
            }
            fence_async();
            sync_warpgroup(group);
        }
        products_begin();
#pragma unroll
        for (int part = 0; part < 4; part++) {
            const u64 values = matrix_at(ring + place.slot_of(position_of(group, part)) * CHUNK_BYTES);
#pragma unroll
            for (int step = 0; step < 4; step++) {  // 16 keys: as many rows of the chunk, 32 bytes of P's
                multiply_values(output[part], values + step * (16 * 128 >> 4), weights + step * 2, true);
            }
            products_commit();
        }
        // Each chunk's place is free as soon as its own products are through.
        products_wait<3>();
        if (lane == 0) barrier_arrive(&control.empty[place.slot_of(position_of(group, 0))]);
        products_wait<2>();
        if (lane == 0) barrier_arrive(&control.empty[place.slot_of(position_of(group, 1))]);
        products_wait<1>();
        if (lane == 0) barrier_arrive(&control.empty[place.slot_of(position_of(group, 2))]);
        products_wait<0>();
#pragma unroll
        for (int part = 0; part < 4; part++) hold(output[part]);
        if (lane == 0) barrier_arrive(&control.empty[place.slot_of(position_of(group, 3))]);
        if (lane == 0) barrier_arrive(&control.weights_free);
        place.next_block();
        left -= BLOCK;
    }
    barrier_wait(&control.weights_ready, blocks & 1);
#pragma unroll
    for (int j = 0; j < COLUMN_COUNT; j++) {
        const int column = j / 2 * 8 + lane % 4 * 2 + j % 2;
        if (work.first_row + column >= work.packed_rows) continue;
        const float factor = control.factor[column];
        float* row = partial + static_cast<long long>(work.first_partial + column) * VALUE_DIM + warp * 16 + lane / 4;
#pragma unroll
        for (int part = 0; part < 4; part++) {
            float* eight = row + value_chunk(group, part) * 64;
            eight[0] = output[part][j / 2 * 4 + j % 2] * factor;
            eight[8] = output[part][j / 2 * 4 + j % 2 + 2] * factor;
        }
    }
}

// Arguments as `split_attention`; `query_map` [tokens * heads, 576] and `key_map` [slots, 576] bring 64 columns of
// COLUMNS and of 64 / PIECES rows. `wide` says whether request ids (bit 0) and lengths (bit 1) are 64-bit integers.
extern "C" __global__ void __launch_bounds__(512, 1) split_attention_narrow(
    const __grid_constant__ TensorMap query_map, const __grid_constant__ TensorMap key_map, const int* slot_table,
    const void* request_ids, const void* prefix_lens, const u64* tree_mask, float* partial, float* partial_lse,
    long long table_stride, int wide, int batch, int rows, int group, int mask_words, int tiles, int max_splits,
    float log2_scale) {
    Shared shared;
    shared.query = shared_memory();
    shared.weights = shared.query + CHUNKS * COLUMN_BYTES;
    shared.ring = shared.weights + COLUMN_BYTES;
    shared.control = reinterpret_cast<Control*>(shared.ring + STAGES * CHUNK_BYTES);
    Work& work = shared.control->work;
    if (threadIdx.x == LOAD_GROUP * 128) {
        prefetch_map(&query_map);
        prefetch_map(&key_map);
    }
    if (threadIdx.x < 32) {
        const int split = blockIdx.x / tiles;
        find_split(work, prefix_lens, wide & 2, split, batch, rows, max_splits, threadIdx.x);
        if (threadIdx.x == 0 && work.blocks > 0) {
            work.prefix = static_cast<int>(integer_at(prefix_lens, wide & 2, work.request));
            work.end = work.prefix + rows;
            work.first_row = blockIdx.x % tiles * COLUMNS;
            work.packed_rows = rows * group;
            work.first_partial = split * work.packed_rows + work.first_row;
            set_barriers(*shared.control);
        }
    }
    sync_block();
    if (work.blocks == 0) return;

    // Of one value in a warp, which the compiler must know: products may not stand behind a branch that parts threads.
    const int warpgroup = shuffle_from(static_cast<int>(threadIdx.x / 128), 0), thread = threadIdx.x % 128;
    if (warpgroup == LOAD_GROUP) {
        leave_registers<LOAD_REGISTERS>();
        if (thread == 0) {
            load(shared, &query_map, &key_map, slot_table + integer_at(request_ids, wide & 1, work.request) * table_stride);
        }
    } else if (warpgroup == KEY_GROUP) {
        leave_registers<KEY_REGISTERS>();
        const u64* request_masks = tree_mask + static_cast<long long>(work.request) * rows * mask_words;
        attend_keys(shared, request_masks, mask_words, group, log2_scale, partial_lse, thread);
    } else {
        take_registers<VALUE_REGISTERS>();
        attend_values(shared, partial, warpgroup, thread);
    }
}
