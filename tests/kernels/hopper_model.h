// A model on the CPU of the Hopper instructions in `instructions.cuh`, to run a kernel's own source without a GPU.

#include "hopper_block.h"

static struct {
    unsigned x;
} threadIdx, blockIdx;
void model::set_thread() { threadIdx.x = current; }

DEVICE char* shared_memory() { return model::shared; }

DEVICE u32 address_of(const void* place) {
    return static_cast<u32>(static_cast<const char*>(place) - model::shared) + model::SHARED_BASE;
}

DEVICE void barrier_init(u64* barrier, u32 arrivals) {
    model::barriers[barrier] = {static_cast<int>(arrivals), static_cast<int>(arrivals), 0, 0};
}

DEVICE void barriers_are_initialized() {}

DEVICE void barrier_expect(u64* barrier, u32 bytes) {
    model::Barrier& state = model::barriers.at(barrier);
    state.bytes += bytes;
    if (state.pending-- == 0) std::abort();
    model::end_phase_if_complete(state);
}

// Whoever waits for this goes on before the thread that says it does.
DEVICE void barrier_arrive(u64* barrier) {
    barrier_expect(barrier, 0);
    if (!model::late) return;
    model::moved = true;
    bool others_went_on = false;
    model::wait_until([&] { return std::exchange(others_went_on, true); });
}

DEVICE void barrier_wait(u64* barrier, u32 parity) {
    model::Barrier& state = model::barriers.at(barrier);
    model::wait_until([&] { return (state.phase & 1) != parity; });
}

DEVICE void load_box(void* target, const TensorMap* map, int column, int row, u64* barrier) {
    model::Map box;
    std::memcpy(&box, map, sizeof box);
    auto load = [=] {
        const u32 address = address_of(target);
        if (address % 1024 || row < 0 || row >= static_cast<long>(box.rows)) model::went_wrong = true;
        for (u64 i = 0; i < box.box_rows; i++) {
            for (int j = 0; j < 64; j++) {
                const u32 place = address + i * 128 + j * 2;
                u16 value = 0;
                if (row + i < box.rows && column + j < static_cast<int>(box.columns)) {
                    std::memcpy(&value, box.base + (row + i) * box.row_bytes + (column + j) * 2, 2);
                }
                std::memcpy(model::shared + (place ^ (place >> 3 & 0x70)) - model::SHARED_BASE, &value, 2);
            }
        }
        model::Barrier& state = model::barriers.at(barrier);
        state.bytes -= box.box_rows * 128;
        model::end_phase_if_complete(state);
    };
    if (model::late) {
        model::loads.push_back(load);
    } else {
        load();
    }
}

DEVICE void prefetch_map(const TensorMap*) {}

DEVICE void fence_async() {
    for (auto& store : model::fibers[model::current].stores) store();
    model::fibers[model::current].stores.clear();
}

DEVICE void sync_block() { model::meet(model::meetings[0], model::THREADS, false); }
DEVICE void sync_warpgroup(int warpgroup) { model::meet(model::meetings[warpgroup + 1], 128, false); }
DEVICE bool any_of_warpgroup(int warpgroup, bool mine) {
    return model::meet(model::meetings[warpgroup + 1], 128, mine);
}

DEVICE int shuffle_from(int value, int lane) { return model::exchange({static_cast<u32>(value)})[lane][0]; }
DEVICE int shuffle_xor(int value, int lanes) {
    const int lane = model::current % 32 ^ lanes;
    return model::exchange({static_cast<u32>(value)})[lane][0];
}
DEVICE int shuffle_up(int value, int lanes) {
    const int lane = model::current % 32;
    const auto values = model::exchange({static_cast<u32>(value)});
    return values[lane < lanes ? lane : lane - lanes][0];
}
DEVICE float shuffle_xor(float value, int lanes) {
    u32 bits;
    std::memcpy(&bits, &value, 4);
    const u32 other = shuffle_xor(static_cast<int>(bits), lanes);
    std::memcpy(&value, &other, 4);
    return value;
}

template <int COUNT>
DEVICE void take_registers() {}
template <int COUNT>
DEVICE void leave_registers() {}

DEVICE void products_begin() {}

DEVICE void products_commit() { model::fibers[model::current].groups.emplace_back(); }

template <int PENDING>
DEVICE void products_wait() {
    auto& groups = model::fibers[model::current].groups;
    while (static_cast<int>(groups.size()) - 1 > PENDING) {
        for (const model::Product& product : groups.front()) model::run(product);
        groups.pop_front();
    }
}

template <int COUNT>
DEVICE void hold(float (&)[COUNT]) {}

template <int COUNT>
DEVICE void multiply(float (&sums)[COUNT], u64 left, u64 right, bool accumulate, bool across) {
    const model::Product product{sums, left, right, accumulate, across, COUNT * 2};
    if (model::late) {
        model::fibers[model::current].groups.back().push_back(product);
    } else {
        model::run(product);
    }
}
template <int COUNT>
DEVICE void multiply_keys(float (&sums)[COUNT], u64 left, u64 right, bool accumulate) {
    multiply(sums, left, right, accumulate, false);
}
template <int COUNT>
DEVICE void multiply_values(float (&sums)[COUNT], u64 left, u64 right, bool accumulate) {
    multiply(sums, left, right, accumulate, true);
}

DEVICE float exp2_of(float x) { return std::exp2(x); }
DEVICE float log2_of(float x) { return std::log2(x); }

DEVICE u32 pack_halves(float low, float high) {
    auto half = [](float value) -> u32 {
        u32 bits;
        std::memcpy(&bits, &value, 4);
        return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    };
    return half(low) | half(high) << 16;
}

namespace model {

void store_transposed(u32 address, std::initializer_list<u32> mine, int tiles) {
    const int lane = current % 32;
    const auto values = exchange(mine);
    if (lane >= tiles * 8) return;
    u16 row[8];
    for (int i = 0; i < 8; i++) row[i] = values[i * 4 + lane % 8 / 2][lane / 8] >> lane % 2 * 16;
    if (address % 16 || address < SHARED_BASE || address + 16 > SHARED_BASE + SHARED_BYTES) std::abort();
    std::vector<u16> kept(row, row + 8);
    fibers[current].stores.push_back([=] { std::memcpy(shared + address - SHARED_BASE, kept.data(), 16); });
}

}  // namespace model

DEVICE void store_transposed(u32 address, u32 a, u32 b, u32 c, u32 d) {
    model::store_transposed(address, {a, b, c, d}, 4);
}
DEVICE void store_transposed(u32 address, u32 a, u32 b) { model::store_transposed(address, {a, b}, 2); }
