// The narrow MLA kernel's key warpgroup: logits of a block, their mask, references, weights and denominators.

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
