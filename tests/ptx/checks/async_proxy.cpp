// SharedMemory: reads by the async proxy, what has to be fenced before them, and what must not change behind them.
#include <algorithm>
#include <array>

#include "checks/shared_shadow.hpp"
#include "machine/fault.hpp"

namespace headrace::ptx {
namespace {

constexpr int piece = 8;  // granules of 16 bytes

}  // namespace

// A fence ends an interval: what the lanes wrote up to it is told from what they write later.
void SharedMemory::fence_proxy(int warp, std::uint32_t lanes) {
    Implementation& my = *implementation_;
    const auto own = static_cast<std::size_t>(warp);
    my.fences[own].push_back({my.clock[own]++, lanes});
    if (lanes != ~std::uint32_t{0}) return;
    const auto row = static_cast<std::ptrdiff_t>(own * my.warps), size = static_cast<std::ptrdiff_t>(my.warps);
    std::copy_n(my.seen.begin() + row, size, my.fenced.begin() + row);
}

// Whether a fence of the proxy lies between the write and the warp's read.
bool SharedMemory::Implementation::is_fenced(int warp, int writing_warp, int lane, Clock when) {
    const std::size_t at = static_cast<std::size_t>(warp) * warps + static_cast<std::size_t>(writing_warp);
    if (when <= fenced[at]) return true;
    const std::vector<Fence>& list = fences[static_cast<std::size_t>(writing_warp)];
    const auto end =
        std::partition_point(list.begin(), list.end(), [&](const Fence& f) { return f.clock <= seen[at]; });
    for (auto fence = end; fence != list.begin() && (--fence)->clock >= when;) {
        if (fence->lanes == ~std::uint32_t{0}) fenced[at] = fence->clock;
        if ((fence->lanes >> lane & 1) != 0) return true;
    }
    return false;
}

void SharedMemory::Implementation::check_proxy(std::size_t granule, int warp) {
    const auto check = [&](Actor by, Clock when) {
        if (is_fenced(warp, by.warp, by.lane, when)) return;
        throw_fault("reads shared offset ", 2 * granule, " by the async proxy, which warp ", by.warp, " lane ", by.lane,
                    " wrote at line ", by.line,
                    "; no fence.proxy.async of that thread lies between the write and what orders it before the read");
    };
    const Entry entry = writer[granule];
    if ((entry & atomics_only) == 0)
        return check({warp_of(entry), lane_of(entry), line_of(entry)}, written_at[granule]);
    for (const Atomic& atomic : atomics.at(granule)) check(atomic.actor, atomic.clock);
}

// Whether all are settled and fenced.
template <int n>
inline bool SharedMemory::Implementation::may_load_by_async_proxy(std::size_t first, int warp) {
    if (!all_below_floor(first, n, warp))
        for (std::size_t i = first; i < first + n; ++i)
            if (!settled(i, {warp, -1, 0})) return false;
    for (std::size_t at = first; at < first + n && races; at += piece) {
        const Entry* const by = &writer[at];
        const Clock* const when = &written_at[at];
        int others = 0;
        for (int i = 1; i < piece; ++i) others |= (by[i] != by[0]) | (when[i] != when[0]);
        for (int i = 0; i < (others != 0 ? piece : 1); ++i)
            if (!is_fenced(warp, warp_of(by[i]), lane_of(by[i]), when[i])) return false;
    }
    return true;
}

const std::byte* SharedMemory::load_by_async_proxy(std::uint32_t offset, unsigned bytes, int warp, int line) {
    const std::byte* const contents = load(offset, bytes, warp, -1, line);
    Implementation& my = *implementation_;
    for (std::size_t granule = offset / 2; granule < (offset + bytes) / 2 && my.races; ++granule)
        my.check_proxy(granule, warp);
    return contents;
}

template <class F>
inline auto with_pieces(unsigned bytes, F f) {
    if (bytes == 128) return f(std::integral_constant<int, 8 * piece>{});
    if (bytes == 32) return f(std::integral_constant<int, 2 * piece>{});
    return f(std::integral_constant<int, piece>{});
}

const std::byte* SharedMemory::load_together_by_async_proxy(std::uint32_t offset, unsigned bytes, int warp, int line) {
    Implementation& my = *implementation_;
    if (!my.holds(offset, bytes, bytes)) return nullptr;
    const bool done = with_pieces(bytes, [&](auto n) { return my.may_load_by_async_proxy<n()>(offset / 2, warp); });
    if (done) read_on(offset, bytes, warp, line);
    return done ? &my.data[offset] : nullptr;
}

void SharedMemory::read_on(std::uint32_t offset, unsigned bytes, int warp, int line) {
    Implementation& my = *implementation_;
    if (!my.races) return;
    with_pieces(bytes, [&](auto n) {
        my.mark_readers(offset / 2, n(), {warp, -1, line}, [](int) { return ~std::uint32_t{0}; });
    });
}

std::uint64_t SharedMemory::version(std::uint32_t offset) const {
    const Implementation& my = *implementation_;
    // Odd factors: where one granule was written, the sums differ.
    constexpr std::array<std::uint32_t, piece> factors = {0x9e3779b1, 0x85ebca77, 0xc2b2ae3d, 0x27d4eb2f,
                                                          0x165667b1, 0xcc9e2d51, 0x1b873593, 0xe6546b65};
    const Clock* const when = &my.written_at[offset / 2];
    const Entry* const by = &my.writer[offset / 2];
    std::uint32_t times = 0, writers = 0;
    for (std::size_t i = 0; i < factors.size(); ++i) times += factors[i] * static_cast<std::uint32_t>(when[i]);
    for (std::size_t i = 0; i < factors.size(); ++i) writers += factors[i] * by[i];
    return static_cast<std::uint64_t>(times) << 32 | writers;
}

int SharedMemory::writer_line(std::uint32_t offset) const { return line_of(implementation_->writer[offset / 2]); }

}  // namespace headrace::ptx
