// The narrow MLA kernel's shared memory: what lies where, the ring of chunks, which keys a program owns.

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
