// gpu_model: how long the launches of a plan would take at least on a GPU.
#include "harness/gpu_model.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace headrace::harness {
namespace {

constexpr double reserved_shared = 1024;  // of a block: CUDA C++ Programming Guide, shared memory, 8.x and 9.0
constexpr int registers = 65536, most_threads = 2048, most_blocks = 32;  // of a multiprocessor, ibid.
constexpr double tensor_cores = 4;                                       // of a multiprocessor, ibid.
constexpr double bytes_of_cycle = 128;  // that a multiprocessor's load/store units move: 32 banks of 4 bytes
constexpr double schedulers = 4;        // of a multiprocessor, each could issue an instruction in a cycle, ibid.
// What one did issue of the kernels whose instructions were measured, with the one to four warps that their registers
// leave it, most of which wait for what came before or for instructions to arrive: 0.30 to 0.49 on an H200
// (docs/performance.md).
constexpr double issued_of_cycle = 0.41;

// Sources. Shared memory: CUDA C++ Programming Guide. Multiprocessors, clock and peaks (dense): NVIDIA's papers on H100
// and A100, the H200's data sheet. Of the H200 bandwidth and matrix_flop are measured figures: 4.3 of 4.8 TB/s, 790 of
// 989 TFLOP/s; those of the others are their peaks times the same shares. mma.sync reaches 62 % of the peak on Hopper
// (Luo et al., arXiv 2402.13499: 62.9 %); on Ampere it is the only way to the tensor cores. L2: microbenchmarks of an
// H100 (Chips and Cheese) and of an A100. Latencies of shared memory, L2 and device memory: Luo et al., with four
// cycles for the multiply-add behind the load of a tile. Barrier and launch: rounded; they hardly matter.
constexpr double T = 1e12;
constexpr GpuLimits hopper{90, 227 << 10}, ampere{80, 163 << 10};
const std::vector<Gpu> all = {
    {"h200", "NVIDIA H200", 132, 1.83e9, 228 << 10, hopper, 4.3 * T, 5.5 * T, 790 * T, 0.62 * 989 * T, 66.9 * T,
     33.5 * T, 66.9 * T, 33, 263, 480, 30, 1.5e-6},
    {"h100", "NVIDIA H100 SXM", 132, 1.83e9, 228 << 10, hopper, 3.0 * T, 5.5 * T, 790 * T, 0.62 * 989 * T, 66.9 * T,
     33.5 * T, 66.9 * T, 33, 263, 480, 30, 1.5e-6},
    {"a100", "NVIDIA A100 SXM 80 GB", 108, 1.41e9, 164 << 10, ampere, 1.83 * T, 4.0 * T, 249 * T, 249 * T, 19.5 * T,
     9.7 * T, 19.5 * T, 33, 262, 466, 30, 1.5e-6},
};

double up(double count, double size) { return std::ceil(count / size); }

// That pass a multiprocessor's load/store units: right operands of products that four warps do together once for all of
// them, as none of these could reach its peak otherwise (of m64n64k16, 32 cycles, they are 2 KiB; four times as many
// would take 64).
double moved_by_tiles(const KernelWork& work, const Gpu& gpu) {
    const bool groups = gpu.limits.capability == 90;
    return work.tile_bytes - (groups ? 0.75 * work.group_bytes : 0);
}

// That schedulers take for a block's instructions: as measured, at least one each for what is counted: products (of
// doubles m8n8k4), multiply-adds, accesses of 16 bytes a lane.
double cycles_of_issue(const KernelWork& work, bool in_double) {
    constexpr double flop_of_fma = 64, most_bytes = 512;
    const double flop_of_product = in_double ? 512 : 4096;
    return std::max(work.issued / issued_of_cycle, work.tensor_flop / flop_of_product + work.fma_flop / flop_of_fma +
                                                       work.tile_bytes / most_bytes);
}

}  // namespace

const std::vector<Gpu>& gpus() { return all; }

const Gpu* find_gpu(const std::string& name) {
    if (name.empty()) return &all.front();
    const auto found = std::find_if(all.begin(), all.end(), [&](const Gpu& gpu) { return name == gpu.name; });
    return found == all.end() ? nullptr : &*found;
}

int blocks_at_once(const LaunchPlan& launch, const Gpu& gpu) {
    const double by_shared =
        static_cast<double>(gpu.shared) / (static_cast<double>(launch.shared_bytes) + reserved_shared);
    const int by_registers = registers / std::max(1, (launch.registers + 7) / 8 * 8 * launch.threads);
    return std::min({static_cast<int>(by_shared), by_registers, most_threads / launch.threads, most_blocks});
}

LaunchTime model(const LaunchPlan& launch, const Gpu& gpu, const CallBytes& bytes) {
    LaunchTime time;
    time.at_once = blocks_at_once(launch, gpu);
    const double processors = gpu.multiprocessors, idle = static_cast<double>(launch.idle_blocks),
                 blocks = static_cast<double>(launch.blocks) - idle;
    time.waves = time.at_once == 0 ? 0 : up(blocks, processors * time.at_once);
    const bool in_double = launch.arithmetic == DType::f64;
    const double fma_flop = in_double ? gpu.f64_flop : gpu.f32_flop,
                 tensor_flop = in_double ? gpu.f64_tensor_flop : gpu.tensor_flop;
    const double tile_bytes = bytes_of_cycle * gpu.clock * processors;

    // A block waits for what it loads and at its barriers, and shares the multiprocessor with others. A warp's products
    // go to one of the multiprocessor's tensor cores, one after another, its instructions to one of the schedulers,
    // which have as many warps as each other, or one more.
    const double warps = launch.threads / 32.0, tensor_core = tensor_flop / processors / tensor_cores;
    const auto beside_of = [&](double of_wave) { return std::min<double>(time.at_once, up(of_wave, processors)); };
    const auto waits = [&](const KernelWork& work) -> std::vector<Floor> {
        return {{"products", work.tensor_flop / warps / tensor_core},
                {"tiles", work.tile_waits * gpu.tile_latency / gpu.clock},
                {"spilled", work.spill_waits * gpu.l2_latency / gpu.clock},
                {"tensors", work.memory_waits * gpu.memory_latency / gpu.clock},
                {"barriers", work.barriers * gpu.barrier / gpu.clock}};
    };
    const auto units = [&](const KernelWork& work, double beside) {
        const double issued = up(beside * warps, schedulers) * cycles_of_issue(work, in_double) / warps / gpu.clock,
                     shared = std::max({work.tensor_flop / tensor_flop, work.fma_flop / fma_flop,
                                        moved_by_tiles(work, gpu) / tile_bytes});
        return std::max(processors * beside * shared, issued);
    };
    const auto seconds_of = [&](const KernelWork& work, double beside) {
        double waited = 0;
        for (const Floor& wait : waits(work)) waited += wait.seconds;
        return std::max(waited, units(work, beside));
    };
    const auto wave = [&](double beside) {
        return seconds_of(launch.block, beside) + static_cast<double>(launch.steps) * seconds_of(launch.step, beside);
    };
    time.waits = waits(launch.step);
    time.units = units(launch.step, beside_of(blocks));
    time.step = seconds_of(launch.step, beside_of(blocks));
    const double before = std::max(0.0, time.waves - 1);
    double chain = before * wave(time.at_once) + wave(beside_of(blocks - before * processors * time.at_once));
    // Blocks without a chunk wait for the ends of sequences.
    if (idle > 0) chain += up(idle, processors * time.at_once) * gpu.memory_latency / gpu.clock;

    const KernelWork total = launch.total();
    const double moved = total.input_bytes + total.output_bytes + total.saved_bytes + total.spill_bytes;
    time.device_bytes = std::min(total.input_bytes, bytes.inputs) + std::min(total.output_bytes, bytes.outputs) +
                        total.saved_bytes - total.again_bytes;
    time.floors = {{"memory", time.device_bytes / gpu.bandwidth},
                   {"L2", moved / gpu.l2_bandwidth},
                   {"tensor cores", total.tensor_flop / tensor_flop},
                   {"multiply-adds", total.fma_flop / fma_flop},
                   {"tiles", moved_by_tiles(total, gpu) / tile_bytes},
                   {"issue", cycles_of_issue(total, in_double) / schedulers / gpu.clock / processors},
                   {"chain", chain}};
    time.limit = *std::max_element(time.floors.begin(), time.floors.end(),
                                   [](const Floor& a, const Floor& b) { return a.seconds < b.seconds; });
    time.seconds = time.limit.seconds + gpu.launch;
    return time;
}

}  // namespace headrace::harness
