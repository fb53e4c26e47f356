// A block of a kernel on the CPU: its threads, shared memory, barriers, and what runs behind the threads.
//
// A block's 512 threads are fibers of one thread of the CPU, which change where one waits. What the hardware runs
// behind the threads (tensor loads, products) runs here either at once or as late as it may, as `late` says: a result
// or an operand that is used too early, or overwritten too early, comes out wrong in one of the two. Written from the
// PTX manual's words on swizzles, matrix descriptors and fragments, not from the kernel.

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <random>
#include <utility>
#include <vector>

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using std::min;

#define DEVICE inline
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)

struct alignas(64) TensorMap {
    u64 words[16];
};

namespace model {

constexpr int THREADS = 512, SHARED_BYTES = 232448, STACK_BYTES = 192 << 10;
constexpr u32 SHARED_BASE = 1024;  // where a block's own shared memory begins, behind the system's

alignas(1024) char shared[SHARED_BYTES];

struct Map {
    const char* base;
    u64 rows, row_bytes, columns, box_rows;
};

struct Barrier {
    int expected, pending;
    long bytes;  // that are still to come
    u64 phase;
};

struct Meeting {  // of threads that wait for one another
    int arrived = 0;
    u64 generation = 0;
    bool any = false, result = false;
};

struct Exchange {  // of a warp's values
    int arrived = 0;
    u64 generation = 0;
    u32 values[2][32][5];
};

struct Product {
    float* sums;
    u64 left, right;
    bool accumulate, across;
    int columns;
};

struct Fiber {
    ucontext_t entry;
    jmp_buf place;  // where it waits; changing by jumps costs no system call
    bool begun = false;
    std::function<bool()> waits_for;
    std::vector<char> stack = std::vector<char>(STACK_BYTES);
    bool done = false;
    std::deque<std::vector<Product>> groups;  // of products, committed; the last is open
    std::vector<std::function<void()>> stores;  // that the asynchronous units do not see yet
};

bool late;
std::mt19937 random;
std::map<u64*, Barrier> barriers;
Meeting meetings[17];
Exchange exchanges[THREADS / 32];
std::vector<Fiber> fibers(THREADS);
std::vector<std::function<void()>> loads;
ucontext_t scheduler_entry;
jmp_buf scheduler;
int current;
bool went_wrong;  // a load from nowhere, or to where it cannot go
bool moved;  // something has happened that a waiting thread may wait for
std::function<void()> body;
void set_thread();  // to the current one

template <typename Condition>
void wait_until(Condition condition) {
    if (!condition()) {
        Fiber& fiber = fibers[current];
        fiber.waits_for = condition;
        if (!_setjmp(fiber.place)) _longjmp(scheduler, 1);
        fiber.waits_for = nullptr;
    }
    moved = true;
}

float float_at(u32 address) {
    // 128-byte swizzle: bits 4 to 6 of an address are exchanged with those of its row among eight.
    const u32 place = (address ^ (address >> 3 & 0x70)) - SHARED_BASE;
    if (place + 2 > SHARED_BYTES) std::abort();
    u32 bits = 0;
    std::memcpy(reinterpret_cast<char*>(&bits) + 2, shared + place, 2);
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

struct Matrix {
    u32 start, leading, stride;
    explicit Matrix(u64 descriptor)
        : start((descriptor & 0x3fff) << 4),
          leading((descriptor >> 16 & 0x3fff) << 4),
          stride((descriptor >> 32 & 0x3fff) << 4) {
        if (descriptor >> 62 != 1 || (descriptor >> 49 & 7) != 0) std::abort();
    }
    // Rows of 128 bytes along the summed axis; eight rows make a group.
    float along(int row, int k) const { return float_at(start + row / 8 * stride + row % 8 * 128 + k * 2); }
    // Rows of 128 bytes across it: 64 rows of the matrix, the next 64 `leading` on, eight summed ones a group.
    float across(int row, int k) const {
        return float_at(start + row / 64 * leading + row % 64 * 2 + k / 8 * stride + k % 8 * 128);
    }
};

void run(const Product& product) {
    const int thread = current % 128, lane = thread % 32, warp = thread / 32;
    const Matrix left(product.left), right(product.right);
    float a[2][16];
    for (int half = 0; half < 2; half++) {
        const int row = warp * 16 + lane / 4 + half * 8;
        for (int k = 0; k < 16; k++) a[half][k] = product.across ? left.across(row, k) : left.along(row, k);
    }
    for (int group = 0; group < product.columns / 8; group++) {
        for (int of_pair = 0; of_pair < 2; of_pair++) {
            const int column = group * 8 + lane % 4 * 2 + of_pair;
            float sums[2] = {0.0f, 0.0f};
            for (int k = 0; k < 16; k++) {
                const float b = right.along(column, k);
                sums[0] += a[0][k] * b;
                sums[1] += a[1][k] * b;
            }
            for (int half = 0; half < 2; half++) {
                float& sum = product.sums[group * 4 + half * 2 + of_pair];
                sum = product.accumulate ? sum + sums[half] : sums[half];
            }
        }
    }
}

void end_phase_if_complete(Barrier& barrier) {
    if (barrier.pending == 0 && barrier.bytes == 0) {
        barrier.phase++;
        barrier.pending = barrier.expected;
        moved = true;
    }
}

bool meet(Meeting& meeting, int threads, bool mine) {
    const u64 generation = meeting.generation;
    meeting.any |= mine;
    if (++meeting.arrived == threads) {
        meeting.result = meeting.any;
        meeting.any = false;
        meeting.arrived = 0;
        meeting.generation++;
        moved = true;
    }
    wait_until([&] { return meeting.generation != generation; });
    return meeting.result;
}

// What every lane of the warp gives here.
const u32 (*exchange(std::initializer_list<u32> mine))[5] {
    Exchange& warp = exchanges[current / 32];
    const u64 generation = warp.generation;
    std::copy(mine.begin(), mine.end(), warp.values[generation % 2][current % 32]);
    if (++warp.arrived == 32) {
        warp.arrived = 0;
        warp.generation++;
        moved = true;
    }
    wait_until([&] { return warp.generation != generation; });
    return warp.values[generation % 2];
}

void enter() {
    body();
    fibers[current].done = true;
    _longjmp(scheduler, 1);
}

// Go on with the current thread until it waits.
void go_on() {
    Fiber& fiber = fibers[current];
    if (fiber.waits_for && !fiber.waits_for()) return;
    set_thread();
    if (_setjmp(scheduler)) return;
    if (fiber.begun) _longjmp(fiber.place, 1);
    fiber.begun = true;
    swapcontext(&scheduler_entry, &fiber.entry);
}

// Run a block; false where its threads wait for one another for ever, or leave something behind.
bool run_block() {
    std::memset(shared, 0xff, SHARED_BYTES);  // NaN
    went_wrong = false;
    barriers.clear();
    loads.clear();
    for (Meeting& meeting : meetings) meeting = Meeting();
    for (Exchange& warp : exchanges) warp.arrived = 0;
    for (Fiber& fiber : fibers) {
        fiber.done = fiber.begun = false;
        fiber.waits_for = nullptr;
        fiber.groups.assign(1, {});
        fiber.stores.clear();
        getcontext(&fiber.entry);
        fiber.entry.uc_stack.ss_sp = fiber.stack.data();
        fiber.entry.uc_stack.ss_size = fiber.stack.size();
        fiber.entry.uc_link = nullptr;
        makecontext(&fiber.entry, enter, 0);
    }
    std::vector<int> order(THREADS / 32);
    for (size_t i = 0; i < order.size(); i++) order[i] = i;
    for (int left = THREADS; left > 0;) {
        moved = false;
        std::shuffle(order.begin(), order.end(), random);  // of warps
        for (int warp : order) {
            for (current = warp * 32; current < warp * 32 + 32; current++) {
                if (fibers[current].done) continue;
                go_on();
                if (fibers[current].done) left--, moved = true;
            }
        }
        if (!loads.empty() && (!moved || random() % 3 == 0)) {
            const size_t which = random() % loads.size();
            auto load = loads[which];
            loads.erase(loads.begin() + which);
            load();
            moved = true;
        }
        if (!moved) return false;
    }
    if (!loads.empty() || went_wrong) return false;
    for (Fiber& fiber : fibers) {
        if (fiber.groups.size() != 1 || !fiber.groups.back().empty() || !fiber.stores.empty()) return false;
    }
    return true;
}

}  // namespace model
