// BlockRun: starts the warps of a block and gives them turns until all have ended.
#include <algorithm>
#include <cstring>
#include <new>

#include "machine/block_run.hpp"

namespace headrace::ptx {
namespace {

// After so many statements the others get a turn even in an ordered run: a thread may wait for another in a loop.
constexpr std::uint64_t share = 1u << 16;

std::uint32_t threads_of(const Launch& launch) { return launch.block[0] * launch.block[1] * launch.block[2]; }
int warps_of(const Launch& launch) { return static_cast<int>((threads_of(launch) + lanes - 1) / lanes); }

std::size_t file_bytes(const Code& code) { return static_cast<std::size_t>(std::max(code.slots, 1)) * slot_bytes; }

}  // namespace

void BlockRun::Release::operator()(std::byte* bytes) const { ::operator delete(bytes, std::align_val_t{64}); }

BlockRun::BlockRun(const Module& module, const Code& code, const Launch& launch, const Settings& settings,
                   DeviceMemory& memory, Executions* counts)
    : module_(module),
      code_(code),
      launch_(launch),
      settings_(settings),
      shared_(launch.function->shared_bytes + launch.dynamic_shared_bytes, warps_of(launch), settings.races),
      warps_(static_cast<std::size_t>(warps_of(launch))),
      registers_(static_cast<std::byte*>(::operator new(file_bytes(code) * warps_.size(), std::align_val_t{64}))),
      counts_(counts) {
    std::memset(registers_.get(), 0, file_bytes(code) * warps_.size());
    std::copy(launch.grid.begin(), launch.grid.end(), block_.grid);
    std::copy(launch.block.begin(), launch.block.end(), block_.threads);
    block_.settings = &settings_;
    block_.memory = &memory;
    block_.shared = &shared_;
    block_.parameters = &launch.parameters;
    block_.local_bytes = launch.function->local_bytes;
    block_.local.resize(block_.local_bytes * threads_of(launch));
    block_.local_written.resize(block_.local.size());
    block_.launch_bound = launch.function->max_threads * launch.function->least_blocks;
}

void BlockRun::start(std::uint32_t number) {
    running_ = nullptr;
    block_.number = number;
    block_.index[0] = number % launch_.grid[0];
    block_.index[1] = number / launch_.grid[0] % launch_.grid[1];
    block_.index[2] = number / launch_.grid[0] / launch_.grid[1];
    std::fill(block_.local_written.begin(), block_.local_written.end(), std::byte{0});
    block_.random.seed(settings_.seed * 0x9e3779b97f4a7c15u + number);
    order_.seed(settings_.seed * 0xbf58476d1ce4e5b9u + number + 1);
    shared_.reset();
    block_.register_counts.assign(warps_.size(), 0);
    barriers_.start(warps_, shared_);
    for (int warp = 0; warp < static_cast<int>(warps_.size()); ++warp) {
        const std::uint32_t rest = threads_of(launch_) - static_cast<std::uint32_t>(warp * lanes);
        const Mask existing = rest >= lanes ? all_lanes : (Mask{1} << rest) - 1;
        std::byte* const registers = registers_.get() + static_cast<std::size_t>(warp) * file_bytes(code_);
        WarpRun& run = warps_[static_cast<std::size_t>(warp)];
        run.start(block_, warp, existing, registers, module_, code_, counts_, barriers_);
        fill_slots(run, registers);
    }
}

// The slots behind the registers: constants, and what the special registers say.
void BlockRun::fill_slots(const WarpRun& run, std::byte* registers) {
    if (!code_.constants.empty()) {
        std::memcpy(registers + static_cast<std::size_t>(code_.first_constant) * slot_bytes, code_.constants.data(),
                    code_.constants.size());
    }
    for (const SpecialSlot& slot : code_.specials) {
        for (int lane = 0; lane < lanes; ++lane) {
            run.warp().u32(slot.slot)[lane] = special(slot, run.warp().index, lane) & slot.cut;
        }
    }
}

std::uint32_t BlockRun::special(const SpecialSlot& slot, int warp, int lane) const {
    const auto thread = static_cast<std::uint32_t>(warp * lanes + lane);
    const std::uint32_t coordinates[3] = {thread % launch_.block[0], thread / launch_.block[0] % launch_.block[1],
                                          thread / launch_.block[0] / launch_.block[1]};
    const Mask own = Mask{1} << lane;
    const Mask relations[5] = {own, own | (own - 1), own - 1, ~(own - 1), ~(own | (own - 1))};
    const auto component = static_cast<std::size_t>(slot.component);
    constexpr std::uint32_t processors = 132, resident_warps = 64;
    switch (slot.special) {
        case Special::tid: return coordinates[component];
        case Special::ntid: return launch_.block[component];
        case Special::ctaid: return block_.index[component];
        case Special::nctaid: return launch_.grid[component];
        case Special::laneid: return static_cast<std::uint32_t>(lane);
        case Special::warpid: return static_cast<std::uint32_t>(warp);
        case Special::nwarpid: return resident_warps;
        case Special::smid: return block_.number % processors;
        case Special::nsmid: return processors;
        case Special::lanemask: return relations[component];
        case Special::dynamic_shared: return static_cast<std::uint32_t>(launch_.dynamic_shared_bytes);
    }
    return 0;
}

void BlockRun::run(std::uint32_t number) {
    start(number);
    const std::unique_ptr<AsyncCopies, void (*)(AsyncCopies*)> copies(
        make_async_copies(block_, static_cast<int>(threads_of(launch_))), destroy_async_copies);
    block_.copies = copies.get();
    const std::unique_ptr<AsyncProducts, void (*)(AsyncProducts*)> products(
        code_.has_wgmma ? make_async_products(static_cast<int>(warps_.size()), code_.slots) : nullptr,
        destroy_async_products);
    block_.products = products.get();
    if (settings_.order == Order::random) {
        run_at_random();
    } else {
        run_in_order();
    }
    barriers_.check_ended();
    check_register_counts(block_);
}

bool BlockRun::any_live() const {
    return std::any_of(warps_.begin(), warps_.end(), [](const WarpRun& warp) { return warp.live() != 0; });
}

// Round after round: each warp runs until it waits.
void BlockRun::run_in_order() {
    const int count = static_cast<int>(warps_.size());
    while (any_live()) {
        bool progress = false;
        for (int i = 0; i < count; ++i) {
            const int index = settings_.order == Order::ascending ? i : count - 1 - i;
            WarpRun& warp = warps_[static_cast<std::size_t>(index)];
            while (run_warp(warp)) progress = true;
            look_for_stuck(warp);
        }
        if (!progress && !rest()) deadlock();
    }
}

// Lets the fragment with the lowest (highest) lane run. False: none can, or all are tired.
bool BlockRun::run_warp(WarpRun& warp) {
    const std::vector<Fragment>& fragments = warp.fragments();
    const auto key = [&](const Fragment& fragment) {
        return settings_.order == Order::ascending ? __builtin_ctz(fragment.mask) : __builtin_clz(fragment.mask);
    };
    std::size_t best = fragments.size();
    for (std::size_t i = 0; i < fragments.size(); ++i) {
        if (fragments[i].state != Fragment::State::runnable || fragments[i].tired) continue;
        if (best == fragments.size() || key(fragments[i]) < key(fragments[best])) best = i;
    }
    if (best == fragments.size()) return false;
    running_ = &warp;
    at_statement_ = true;
    warp.run(best, share);
    return true;
}

// A warp, one of its fragments, and how long it runs: all drawn.
void BlockRun::run_at_random() {
    std::vector<std::pair<WarpRun*, std::size_t>> ready;
    while (any_live()) {
        ready.clear();
        WarpRun& warp = warps_[order_() % warps_.size()];
        const auto add_ready = [&](WarpRun& candidate) {
            for (std::size_t i = 0; i < candidate.fragments().size(); ++i) {
                if (candidate.fragments()[i].state == Fragment::State::runnable) ready.emplace_back(&candidate, i);
            }
        };
        add_ready(warp);
        if (ready.empty()) {
            look_for_stuck(warp);
            for (WarpRun& other : warps_) add_ready(other);
        }
        if (ready.empty()) deadlock();
        const auto [chosen, fragment] = ready[order_() % ready.size()];
        running_ = chosen;
        at_statement_ = true;
        const std::uint64_t draw = order_();
        chosen->run(fragment, 1 + (draw % 4 == 0 ? (draw >> 8) % 4 : (draw >> 8) % 128));
    }
}

// Lanes of the warp wait for each other, and none of them can come.
void BlockRun::look_for_stuck(const WarpRun& warp) {
    if (warp.live() == 0 || warp.waits_for_other_warps()) return;
    for (const Fragment& fragment : warp.fragments()) {
        if (fragment.state == Fragment::State::runnable) return;
    }
    at_statement_ = false;
    throw_fault("warp ", warp.warp().index, " cannot go on: ", warp.waiters());
}

// False: nobody was tired.
bool BlockRun::rest() {
    bool any = false;
    for (WarpRun& warp : warps_) {
        for (const Fragment& fragment : warp.fragments()) any = any || fragment.tired;
        warp.rest();
    }
    return any;
}

void BlockRun::deadlock() {
    at_statement_ = false;
    std::string text = "deadlock";
    for (const WarpRun& warp : warps_) {
        if (warp.live() != 0) text += "; warp " + std::to_string(warp.warp().index) + ": " + warp.waiters();
    }
    throw Fault(text);
}

std::string BlockRun::where() const {
    std::string text;
    const auto statement = static_cast<std::size_t>(running_ == nullptr ? 0 : running_->statement());
    const bool at_statement = running_ != nullptr && at_statement_ && statement < code_.steps.size();
    if (at_statement) text += describe(module_, *code_.steps[statement].statement) + ", ";
    text += "block (" + std::to_string(block_.index[0]) + "," + std::to_string(block_.index[1]) + "," +
            std::to_string(block_.index[2]) + ")";
    if (at_statement) text += ", warp " + std::to_string(running_->warp().index);
    return text;
}

}  // namespace headrace::ptx
