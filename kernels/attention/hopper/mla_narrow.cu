// One split of tree verify attention on Hopper for MLA with few packed rows: operands swapped, keys in front.
//
// The tile, the partial results and the splits are those of `split_attention`. Packed rows (tree rows times heads) are
// the *columns* of both products, so a tile pays for COLUMNS of them, any multiple of 8, and not for 64 or 128:
//
//     S^T [64 keys, COLUMNS]  = K [64, 576] Q^T        O^T [512, COLUMNS] += V^T [512, 64] P^T
//
// with V the first 512 columns of K. Per block of 64 keys and 72 columns the tensor cores work 36 + 32 products of 36
// clocks, 2450 in all; bringing the block's 72 KiB takes a multiprocessor's share of HBM 4200 to 4800 clocks; the
// products read 290 KiB of shared memory, 2310 clocks. So one tile a multiprocessor is bound by memory if loads never
// stop, and two tiles that read the same keys through L2 by the tensor cores if those never stop. What follows:
//
//   * Four warpgroups. Two hold the output, 256 value columns each (2 COLUMNS registers a thread); one makes logits and
//     weights, so that `k q` of a block runs beside `p v` of the block before; a thread of the fourth loads.
//   * The block is nine chunks of 64 columns, each with a place and two barriers of its own in a ring. Beside Q and P
//     17 chunks fit: the 9 of a block and 8 of the next. Chunk by chunk, what `p v` frees is loaded again while
//     `k q` waits for the next block's first chunk.
//   * A column's reference `m` moves only when a logit exceeds it by more than 2^8. The check is one reduction over
//     the warpgroup; maxima are found, and the output is rescaled, in the blocks that need it.
//
// Compiled with: COLUMNS, PIECES (tensor loads that make up 64 keys, each of one page), HALF_TYPE, and KEYS_AHEAD: how
// many chunks of the next block's `k q` are issued before this block's P is given out. With 0 a chunk is freed
// as early as may be; with more the softmax of the next block begins earlier and runs beside `p v`. The file is read behind `instructions.cuh` and the generated `multiply_keys` and `multiply_values`.

constexpr int BLOCK = 64;         // keys
constexpr int CHUNKS = 9;         // of a block, 64 columns each; eight are the value, the last is the rotary part
constexpr int VALUE_DIM = 512;
constexpr int CHUNK_BYTES = BLOCK * 128;
constexpr int COLUMN_BYTES = COLUMNS * 128;  // of 64 numbers for every column: a chunk of Q, or P
constexpr int CONTROL_BYTES = 1024;
constexpr int MOST_SHARED = 232448;
constexpr int STAGES = (MOST_SHARED - CONTROL_BYTES - (CHUNKS + 1) * COLUMN_BYTES) / CHUNK_BYTES;
static_assert(COLUMNS % 8 == 0, "products have columns in eights");
static_assert(STAGES >= 2 * CHUNKS - 1, "the ring must hold a block's values and the next block");
static_assert(0 <= KEYS_AHEAD && KEYS_AHEAD <= CHUNKS, "chunks of one block");

constexpr int LOGIT_COUNT = COLUMNS / 2;  // accumulators a thread has of a 64-row product
constexpr int COLUMN_COUNT = COLUMNS / 4;  // different columns among them
constexpr float NOTHING_SEEN = -1e30f;
constexpr float SLACK = 8.0f;  // how far, in base 2, a logit may exceed its column's reference

constexpr int KEY_GROUP = 2, LOAD_GROUP = 3;  // warpgroups; 0 and 1 hold the output
constexpr int VALUE_REGISTERS = 176, KEY_REGISTERS = 128, LOAD_REGISTERS = 32;

// What a program is to do; in shared memory, because registers are short.
struct Work {
    int request, first_block, blocks;
    int prefix, end;    // positions: of the tree's first row, and behind its last
    int first_row;      // of this tile, among the packed rows of its request
    int packed_rows;    // of the request
    int first_partial;  // row of the partial results
};

struct Control {
    Work work;
    u64 full[STAGES];       // a chunk has come
    u64 empty[STAGES];      // its readers are through with it
    u64 query_ready;
    u64 weights_ready;      // P, `factor` and `rescale` are written
    u64 weights_free;       // and read
    float factor[COLUMNS];  // what the output so far is multiplied by; at the end one over the denominator
    int rescale;            // whether it is
};
static_assert(sizeof(Control) <= CONTROL_BYTES, "barriers and factors have their room");

struct Shared {
    char* query;    // [9][COLUMNS][64], rows of 128 bytes, swizzled as the tensor loads write them
    char* weights;  // [COLUMNS][64 keys], likewise; scratch of the key warpgroup while no product reads it
    char* ring;     // [STAGES][64 keys][64]
    Control* control;
};

// Where chunks of a block are in the ring, and how often it has been filled before.
struct Place {
    int slot = 0;
    u32 round = 0;

    DEVICE int slot_of(int chunk) const { return slot + chunk >= STAGES ? slot + chunk - STAGES : slot + chunk; }
    DEVICE u32 round_of(int chunk) const { return slot + chunk >= STAGES ? round + 1 : round; }
    DEVICE void next_block() {
        round = round_of(CHUNKS);
        slot = slot_of(CHUNKS);
    }
};

DEVICE void set_barriers(Control& control) {
    for (int slot = 0; slot < STAGES; slot++) {
        barrier_init(&control.full[slot], 1);
        barrier_init(&control.empty[slot], 4);  // the warps of the warpgroup that reads a chunk last
    }
    barrier_init(&control.query_ready, 1);
    barrier_init(&control.weights_ready, 128);
    barrier_init(&control.weights_free, 8);
    barriers_are_initialized();
}

// The order of a block's chunks in the ring: the rotary part, which is done with first, then the value's, of which
// the two value warpgroups take turns.
DEVICE int chunk_at(int position) { return (position + CHUNKS - 1) % CHUNKS; }
DEVICE int value_chunk(int group, int part) { return 2 * part + group; }
DEVICE int position_of(int group, int part) { return 1 + value_chunk(group, part); }

// A matrix in shared memory for wgmma: rows of 128 swizzled bytes, 1024 from one group of eight to the next. Read with
// the row's 64 numbers as the summed axis, or across it, where both strides are that of eight summed rows.
DEVICE u64 matrix_at(u32 address) {
    constexpr u64 eight_rows = 1024 >> 4, swizzle_128 = 1;
    return ((address >> 4) & 0x3fff) | eight_rows << 16 | eight_rows << 32 | swizzle_128 << 62;
}

DEVICE long long integer_at(const void* numbers, int wide, int index) {
    return wide ? static_cast<const long long*>(numbers)[index] : static_cast<const int*>(numbers)[index];
}

// `split_plan`, by one warp: which request a split belongs to, and its run of key blocks.
DEVICE void find_split(
    Work& work, const void* prefix_lens, int wide, int split, int batch, int rows, int max_splits, int lane) {
    int all_blocks = 0;
    for (int i = lane; i < batch; i += 32) {
        all_blocks += (static_cast<int>(integer_at(prefix_lens, wide, i)) + rows + BLOCK - 1) / BLOCK;
    }
    for (int step = 16; step > 0; step /= 2) all_blocks += shuffle_xor(all_blocks, step);
    const int most = max_splits - batch + 1;
    const int share = (all_blocks + most - 1) / most;
    int before = 0;  // splits of the requests before these 32
    for (int base = 0; base < batch; base += 32) {
        const int i = base + lane;
        const int blocks =
            i < batch ? (static_cast<int>(integer_at(prefix_lens, wide, i)) + rows + BLOCK - 1) / BLOCK : 0;
        const int splits = (blocks + share - 1) / share;
        int end = splits;
        for (int step = 1; step < 32; step *= 2) {
            const int below = shuffle_up(end, step);
            if (lane >= step) end += below;
        }
        end += before;
        // The lanes whose requests end at or before this split: as many as there are requests in front of its own.
        int owner = end <= split ? 1 : 0;
        for (int step = 16; step > 0; step /= 2) owner += shuffle_xor(owner, step);
        if (owner < 32 && base + owner < batch) {
            const int local = split - shuffle_from(end - splits, owner);
            const int of_request = shuffle_from(splits, owner);
            const int request_blocks = shuffle_from(blocks, owner);
            const int first = static_cast<int>(static_cast<long long>(request_blocks) * local / of_request);
            const int last = static_cast<int>(static_cast<long long>(request_blocks) * (local + 1) / of_request);
            if (lane == 0) {
                work.request = base + owner;
                work.first_block = first;
                work.blocks = last - first;
            }
            return;
        }
        before = shuffle_from(end, 31);
    }
    if (lane == 0) work.blocks = 0;
}

// 64 bits of a row's mask from block row `offset` on. Negative rows are positions of the prefix, and set.
DEVICE u64 mask_window(const u64* words, int count, int offset) {
    const int word = offset >> 6, shift = offset & 63;
    const u64 low = word < 0 ? ~0ull : word < count ? words[word] : 0;
    const u64 high = word + 1 < 0 ? ~0ull : word + 1 < count ? words[word + 1] : 0;
    return low >> shift | (high << (63 - shift)) << 1;
}

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

// Hide from each column what its row must not see of the positions `start .. start + 63`.
DEVICE void mask_logits(
    float (&logits)[LOGIT_COUNT], const Shared& shared, int start, const u64* request_masks, int mask_words, int group,
    int thread) {
    const Work& work = shared.control->work;
    u64* windows = reinterpret_cast<u64*>(shared.weights);
    if (thread < COLUMNS) {
        const int packed = work.first_row + thread;
        const int left = work.end - start;  // positions that there are
        u64 window = left < BLOCK ? (1ull << left) - 1 : ~0ull;
        if (mask_words > 0) {
            const int row = min(packed, work.packed_rows - 1) / group;
            window = mask_window(request_masks + static_cast<long long>(row) * mask_words, mask_words,
                                 start - work.prefix);
        }
        windows[thread] = window;
    }
    sync_warpgroup(KEY_GROUP);
    const int lane = thread % 32, key = thread / 32 * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < COLUMN_COUNT; i++) {
        const u64 window = windows[i / 2 * 8 + lane % 4 * 2 + i % 2];
        float& upper = logits[i / 2 * 4 + i % 2];
        float& lower = logits[i / 2 * 4 + i % 2 + 2];
        if (!(window >> key & 1)) upper = -INFINITY;
        if (!(window >> (key + 8) & 1)) lower = -INFINITY;
    }
    sync_warpgroup(KEY_GROUP);
}

// Combine a number of each column over the lanes that hold other keys of it, then over the four warps.
template <typename Combine>
DEVICE void over_keys(float (&values)[COLUMN_COUNT], float* scratch, int thread, Combine combine) {
    const int lane = thread % 32, warp = thread / 32;
#pragma unroll
    for (int i = 0; i < COLUMN_COUNT; i++) {
        float value = values[i];
        value = combine(value, shuffle_xor(value, 4));
        value = combine(value, shuffle_xor(value, 8));
        value = combine(value, shuffle_xor(value, 16));
        if (lane < 4) scratch[warp * COLUMNS + i / 2 * 8 + lane * 2 + i % 2] = value;
    }
    sync_warpgroup(KEY_GROUP);
#pragma unroll
    for (int i = 0; i < COLUMN_COUNT; i++) {
        const float* column = scratch + i / 2 * 8 + lane % 4 * 2 + i % 2;
        values[i] = combine(combine(column[0], column[COLUMNS]), combine(column[2 * COLUMNS], column[3 * COLUMNS]));
    }
    sync_warpgroup(KEY_GROUP);
}

// Move every column's reference up to its highest logit of this block, if that is higher.
DEVICE void raise_references(
    const float (&logits)[LOGIT_COUNT], float (&references)[COLUMN_COUNT], float (&sums)[COLUMN_COUNT],
    const Shared& shared, float log2_scale, int thread) {
    float highest[COLUMN_COUNT];
#pragma unroll
    for (int i = 0; i < COLUMN_COUNT; i++) {
        highest[i] = fmaxf(logits[i / 2 * 4 + i % 2], logits[i / 2 * 4 + i % 2 + 2]);
    }
    over_keys(highest, reinterpret_cast<float*>(shared.weights), thread,
              [](float a, float b) { return fmaxf(a, b); });
#pragma unroll
    for (int i = 0; i < COLUMN_COUNT; i++) {
        const float reference = fmaxf(references[i], highest[i] * log2_scale);
        const float factor = exp2_of(references[i] - reference);
        references[i] = reference;
        sums[i] *= factor;
        if (thread < 4) shared.control->factor[i / 2 * 8 + thread * 2 + i % 2] = factor;
    }
}

// Write P [COLUMNS, 64 keys] from weights [64 keys, COLUMNS].
DEVICE void store_weights(const float (&weights)[LOGIT_COUNT], const Shared& shared, int thread) {
    const int lane = thread % 32, warp = thread / 32;
    // Of the tiles stored at once, the first and third are this warp's first eight keys, the others its second.
    const int half = lane / 8 % 2, column = lane % 8;
    const u32 place = address_of(shared.weights) + column * 128 + (((warp * 2 + half) ^ column) << 4);
#pragma unroll
    for (int tile = 0; tile + 1 < COLUMNS / 8; tile += 2) {
        const float* w = weights + tile * 4;
        store_transposed(place + (tile + lane / 16) * 1024, pack_halves(w[0], w[1]), pack_halves(w[2], w[3]),
                         pack_halves(w[4], w[5]), pack_halves(w[6], w[7]));
    }
    if (COLUMNS / 8 % 2) {
        const float* w = weights + LOGIT_COUNT - 4;
        store_transposed(place + (COLUMNS / 8 - 1) * 1024, pack_halves(w[0], w[1]), pack_halves(w[2], w[3]));
    }
}

// The key warpgroup: logits, their maxima, weights, denominators.
DEVICE void attend_keys(
    const Shared& shared, const u64* request_masks, int mask_words, int group, float log2_scale, float* partial_lse,
    int thread) {
    Control& control = *shared.control;
    const Work& work = control.work;
    const int lane = thread % 32;
    const u32 ring = address_of(shared.ring), query = address_of(shared.query);
    float references[COLUMN_COUNT], sums[COLUMN_COUNT], logits[LOGIT_COUNT];
#pragma unroll
    for (int i = 0; i < COLUMN_COUNT; i++) references[i] = NOTHING_SEEN, sums[i] = 0.0f;
    barrier_wait(&control.query_ready, 0);
    Place place;
    const int blocks = work.blocks, prefix = work.prefix;
    int start = work.first_block * BLOCK;
    for (int i = 0; i < blocks; i++) {
#pragma unroll
        for (int position = 0; position < CHUNKS; position++) {
            const int slot = place.slot_of(position);
            if (position == KEYS_AHEAD && i > 0) barrier_arrive(&control.weights_ready);
            barrier_wait(&control.full[slot], place.round_of(position) & 1);
            products_begin();
            const u64 keys = matrix_at(ring + slot * CHUNK_BYTES);
            const u64 queries = matrix_at(query + chunk_at(position) * COLUMN_BYTES);
#pragma unroll
            for (int step = 0; step < 4; step++) {  // 16 of the 64 numbers of a row, 32 bytes
                multiply_keys(logits, keys + step * 2, queries + step * 2, position + step > 0);
            }
            products_commit();
        }
        if (KEYS_AHEAD == CHUNKS && i > 0) barrier_arrive(&control.weights_ready);
        products_wait<0>();
        hold(logits);
        if (lane == 0) barrier_arrive(&control.empty[place.slot_of(0)]);
        // The block before this one must be through before P is written, or used as scratch.
        barrier_wait(&control.weights_free, (i & 1) ^ 1);
        if (start + BLOCK > prefix) {
            mask_logits(logits, shared, start, request_masks, mask_words, group, thread);
        }
        bool exceeded = false;
#pragma unroll
        for (int j = 0; j < LOGIT_COUNT; j++) {
            exceeded |= logits[j] * log2_scale - references[j / 4 * 2 + j % 2] > SLACK;
        }
        const bool rescale = any_of_warpgroup(KEY_GROUP, exceeded);
        if (rescale) raise_references(logits, references, sums, shared, log2_scale, thread);
        if (thread == 0) control.rescale = rescale;
#pragma unroll
        for (int j = 0; j < LOGIT_COUNT; j++) {
            logits[j] = exp2_of(logits[j] * log2_scale - references[j / 4 * 2 + j % 2]);
            sums[j / 4 * 2 + j % 2] += logits[j];
        }
        store_weights(logits, shared, thread);
        fence_async();
        place.next_block();
        start += BLOCK;
    }
    barrier_arrive(&control.weights_ready);
    barrier_wait(&control.weights_free, (blocks & 1) ^ 1);
    over_keys(sums, reinterpret_cast<float*>(shared.weights), thread, [](float a, float b) { return a + b; });
    if (thread < 4) {
#pragma unroll
        for (int i = 0; i < COLUMN_COUNT; i++) {
            const int column = i / 2 * 8 + thread * 2 + i % 2;
            const float sum = fmaxf(sums[i], 1e-30f);
            control.factor[column] = 1.0f / sum;
            if (work.first_row + column < work.packed_rows) {
                partial_lse[work.first_partial + column] = references[i] + log2_of(sum);
            }
        }
    }
    barrier_arrive(&control.weights_ready);
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
