// wgmma: products of a warpgroup that land when its warps wait for them; fence.proxy.async.
#include <algorithm>
#include <array>
#include <charconv>
#include <cstring>
#include <string>
#include <vector>

#include "instructions/addresses.hpp"
#include "instructions/factor_b.hpp"
#include "instructions/families.hpp"
#include "instructions/fragments.hpp"

namespace headrace::ptx {
namespace {

constexpr int depth = FactorB::depth, warps_of_group = 4;
constexpr int b_by_rows = 1, scale_negated = 2, is_f16 = 4;        // of Step::variant; rows: trans-b, n is contiguous
constexpr std::size_t a_registers = 4, descriptor = 4, scale = 5;  // in Step::from

using Lanes = std::array<std::uint32_t, lanes>;

// What D will be; products of the same registers add to it in their order.
struct Accumulator {
    std::vector<int> slots;
    std::vector<Lanes> values;
    std::size_t in_flight = 0;  // products
};

struct PendingProduct {
    const Step* step = nullptr;
    FactorB b;
    std::vector<std::uint64_t> versions;  // of the pieces of B at issue
    std::size_t accumulator = 0;
};

struct WarpProducts {
    FragmentRegisters registers;
    std::vector<Accumulator> accumulators;
    std::vector<PendingProduct> products;  // in the order of issue
    std::vector<std::size_t> groups;       // the numbers of products of committed groups, oldest first
    std::size_t committed = 0;             // products
    std::size_t executed = 0;              // wgmma.mma_async so far
    bool has_ended = false;
};

// What the first warp of a warpgroup executed; the others have to do the same.
struct Executed {
    int line;
    std::uint64_t descriptor;
    bool adds;
    int warp;
};

}  // namespace

struct AsyncProducts {
    std::vector<WarpProducts> warps;
    std::vector<std::vector<Executed>> groups;
};

namespace {

WarpProducts& products_of(const Warp& warp) {
    return warp.block->products->warps[static_cast<std::size_t>(warp.index)];
}

// f(k, n, offset in shared memory) for the pieces of B, behind start(offset, bytes) of the part that the next ones
// fill; a Fault gets the piece's place.
template <class Start, class F>
void for_faulting_pieces(const Warp& warp, const FactorB& b, Start start, F f) {
    const int together = b.pieces_together();
    const auto bytes = static_cast<std::uint32_t>(16 * together);
    int row = 0, column = 0, left = 0;
    try {
        b.each_piece([&](int k, int n, std::uint64_t address) {
            row = k, column = n;
            const std::uint32_t offset = shared_offset(*warp.block, address);
            if (left == 0) start(offset & ~(bytes - 1), bytes), left = together;
            --left;
            f(k, n, offset);
        });
    } catch (const Fault& fault) {
        throw_fault(fault.what(), " (B at k ", row, ", n ", column, ")");
    }
}

// [k][n]
std::vector<std::uint16_t> read_b(const Warp& warp, PendingProduct& product) {
    const FactorB& b = product.b;
    const int line = product.step->statement->line;
    SharedMemory& shared = *warp.block->shared;
    std::vector<std::uint16_t> elements(static_cast<std::size_t>(depth * b.columns));
    const std::byte* part = nullptr;  // at `first`, if all of it may be read
    std::uint32_t first = 0;
    const auto start = [&](std::uint32_t offset, std::uint32_t bytes) {
        first = offset;
        part = shared.load_together_by_async_proxy(offset, bytes, warp.index, line);
    };
    for_faulting_pieces(warp, b, start, [&](int k, int n, std::uint32_t offset) {
        std::uint16_t piece[8];
        std::memcpy(
            piece, part != nullptr ? part + (offset - first) : shared.load_by_async_proxy(offset, 16, warp.index, line),
            16);
        std::uint16_t* const to = &elements[static_cast<std::size_t>(k * b.columns + n)];
        for (int i = 0; i < 8; ++i) to[b.by_rows ? i : i * b.columns] = piece[i];
        product.versions.push_back(shared.version(offset));
    });
    return elements;
}

// At the end of the product: it may have read B until now, and nobody may have written there.
void read_b_again(const Warp& warp, const PendingProduct& product) {
    SharedMemory& shared = *warp.block->shared;
    std::size_t piece = 0;
    const auto start = [&](std::uint32_t offset, std::uint32_t bytes) {
        shared.read_on(offset, bytes, warp.index, product.step->statement->line);
    };
    for_faulting_pieces(warp, product.b, start, [&](int, int, std::uint32_t offset) {
        if (shared.version(offset) != product.versions[piece++])
            throw_fault("line ", shared.writer_line(offset), " wrote shared offset ", offset, " since it was issued");
    });
}

std::uint64_t uniform_descriptor(const Warp& warp, const Step& step) {
    const std::uint64_t* const bits = warp.u64(step.from[descriptor]);
    for (int lane = 1; lane < lanes; ++lane)
        if (bits[lane] != bits[0]) throw_fault("lanes 0 and ", lane, " have different descriptors of B");
    return bits[0];
}

bool uniform_scale(const Warp& warp, const Step& step) {
    const Mask mask = warp.predicate(step.from[scale]);
    if (mask != 0 && mask != all_lanes) throw_fault("the predicate scale-d is true in a part of the lanes only");
    return (mask != 0) != ((step.variant & scale_negated) != 0);
}

// The warp does what the others of its warpgroup did at this place of their sequence, or is the first to come to it.
void follow_warpgroup(const Warp& warp, int line, std::uint64_t bits, bool adds) {
    AsyncProducts& all = *warp.block->products;
    const auto group = static_cast<std::size_t>(warp.index / warps_of_group);
    if ((group + 1) * warps_of_group > all.warps.size())
        throw_fault("a warpgroup of ", all.warps.size() - group * warps_of_group, " warps: the block ends within it");
    WarpProducts& own = products_of(warp);
    std::vector<Executed>& sequence = all.groups[group];
    const std::size_t place = own.executed++;
    if (place == sequence.size()) {
        for (std::size_t other = group * warps_of_group; other < (group + 1) * warps_of_group; ++other)
            if (all.warps[other].has_ended)
                throw_fault("wgmma number ", place + 1, " of the warp, but warp ", other,
                            " of its warpgroup has ended after ", all.warps[other].executed);
        sequence.push_back({line, bits, adds, warp.index});
        return;
    }
    const Executed& first = sequence[place];
    const auto differs = [&](const char* how) {
        throw_fault("wgmma number ", place + 1, " of the warp", how, " that of warp ", first.warp,
                    " in its warpgroup, at line ", first.line);
    };
    if (first.line != line) differs(" is another than");
    if (first.descriptor != bits) differs(" has another descriptor than");
    if (first.adds != adds) differs(" has another scale-d than");
}

void take_registers(WarpProducts& own, const Step& step) {
    const std::vector<Operand>& operands = step.statement->operands;
    for (std::size_t r = 0; r < a_registers; ++r)
        own.registers.take_a({step.from[r], operands[1].parts[r].name}, step.statement->line);
    for (std::size_t r = 0; r < step.accumulators.size(); ++r)
        own.registers.take_d(step.accumulators, r, operands[0].parts[r].name, step.statement->line);
}

// The accumulator in flight of these registers, or a new one with their values.
std::size_t accumulator_of(const Warp& warp, WarpProducts& own, const std::vector<int>& slots) {
    std::size_t unused = own.accumulators.size();
    for (std::size_t i = 0; i < own.accumulators.size(); ++i) {
        if (own.accumulators[i].in_flight == 0)
            unused = i;
        else if (own.accumulators[i].slots == slots)
            return i;
    }
    if (unused == own.accumulators.size()) own.accumulators.emplace_back();
    Accumulator& accumulator = own.accumulators[unused];
    accumulator.slots = slots;
    accumulator.values.resize(slots.size());
    for (std::size_t r = 0; r < slots.size(); ++r)
        std::copy_n(warp.u32(slots[r]), lanes, accumulator.values[r].begin());
    return unused;
}

template <class Element>
void multiply_warp(const Warp& warp, const Step& step, const std::vector<std::uint16_t>& b, std::vector<Lanes>& sums) {
    Product product;
    const int columns = step.width;
    for (int r = 0; r < static_cast<int>(a_registers); ++r)
        place_a<Element>(warp.u32(step.from[static_cast<std::size_t>(r)]), r, product);
    for (int first = 0; first < columns; first += Product::columns) {
        Lanes* const own = &sums[static_cast<std::size_t>(first / 2)];
        for (int h = 0; h < 2; ++h) place_c(own[2 * h].data(), own[2 * h + 1].data(), h, product);
        for (int k = 0; k < depth; ++k)
            for (int n = 0; n < Product::columns; ++n)
                product.b[k][n] = Element::value(b[static_cast<std::size_t>(k * columns + first + n)]);
        multiply(product, depth, SumType::f32, warp.block->settings->mma);
        for (int r = 0; r < 4; ++r) take_d(product, r, own[r].data());
    }
}

// The hardware reads A and B at any time until the product lands: A must not be written, B is read at both ends.
void issue(Warp& warp, const Step& step, Mask) {
    WarpProducts& own = products_of(warp);
    const int line = step.statement->line;
    const std::uint64_t bits = uniform_descriptor(warp, step);
    const bool adds = uniform_scale(warp, step);
    follow_warpgroup(warp, line, bits, adds);
    take_registers(own, step);
    PendingProduct product;
    product.step = &step;
    product.b = decode_descriptor(bits, (step.variant & b_by_rows) != 0, step.width);
    product.versions.reserve(static_cast<std::size_t>(depth * step.width / 8));
    const std::vector<std::uint16_t> elements = read_b(warp, product);
    product.accumulator = accumulator_of(warp, own, step.accumulators);
    Accumulator& accumulator = own.accumulators[product.accumulator];
    if (!adds)
        for (Lanes& value : accumulator.values) value.fill(0);
    if ((step.variant & is_f16) != 0)
        multiply_warp<F16>(warp, step, elements, accumulator.values);
    else
        multiply_warp<Bf16>(warp, step, elements, accumulator.values);
    ++accumulator.in_flight;
    own.products.push_back(std::move(product));
}

void land(Warp& warp, WarpProducts& own, const PendingProduct& product) {
    try {
        read_b_again(warp, product);
    } catch (const Fault& fault) {
        throw_fault("waits for the wgmma of line ", product.step->statement->line, ", but: ", fault.what());
    }
    Accumulator& accumulator = own.accumulators[product.accumulator];
    --accumulator.in_flight;
    for (std::size_t r = 0; r < a_registers; ++r) own.registers.release_a(product.step->from[r]);
    for (std::size_t r = 0; r < accumulator.slots.size(); ++r) {
        own.registers.release_d(accumulator.slots[r]);
        if (accumulator.in_flight == 0)
            std::copy_n(accumulator.values[r].begin(), lanes, warp.u32(accumulator.slots[r]));
    }
}

void fence(Warp& warp, const Step&, Mask) { products_of(warp).registers.fence(); }

void commit_group(Warp& warp, const Step&, Mask) {
    WarpProducts& own = products_of(warp);
    own.groups.push_back(own.products.size() - own.committed);
    own.committed = own.products.size();
}

// Lands the groups before the warp's last step.other.
void wait_group(Warp& warp, const Step& step, Mask) {
    WarpProducts& own = products_of(warp);
    const auto pending = static_cast<std::size_t>(step.other);
    if (own.groups.size() <= pending) return;
    const auto done = static_cast<std::ptrdiff_t>(own.groups.size() - pending);
    std::size_t landing = 0;
    for (auto group = own.groups.begin(); group != own.groups.begin() + done; ++group) landing += *group;
    for (std::size_t i = 0; i < landing; ++i) land(warp, own, own.products[i]);
    own.groups.erase(own.groups.begin(), own.groups.begin() + done);
    own.products.erase(own.products.begin(), own.products.begin() + static_cast<std::ptrdiff_t>(landing));
    own.committed -= landing;
}

void fence_proxy(Warp& warp, const Step&, Mask active) { warp.block->shared->fence_proxy(warp.index, active); }

// m64nNk16; 0 for another shape.
int columns_of(const std::string& shape) {
    int columns = 0;
    const char* const end = shape.data() + shape.size();
    if (!shape.starts_with("m64n")) return 0;
    const auto [rest, error] = std::from_chars(shape.data() + 4, end, columns);
    const bool known = error == std::errc{} && std::string_view(rest, end) == "k16";
    return known && columns % 8 == 0 && columns >= 8 && columns <= 256 ? columns : 0;
}

bool is_integer(const Operand& operand, std::uint64_t value) {
    return operand.kind == Operand::Kind::immediate && operand.literal == Type::s64 && operand.bits == value;
}

// wgmma.mma_async.sync.aligned.SHAPE.f32.AB.AB {d}, {a}, descriptor, scale-d, scale-a, scale-b, trans-b
void decode_product(const Statement& statement, Decoder& decoder, Step& step) {
    const auto& words = statement.modifiers;
    const auto& operands = statement.operands;
    if (words.size() != 7 || words[1] != "sync" || words[2] != "aligned" || words[4] != "f32" || words[5] != words[6])
        decoder.unknown(statement);
    const auto refuse = [](const char* what) { throw_fault("not done by this interpreter: wgmma ", what); };
    step.width = static_cast<std::int16_t>(columns_of(words[3]));
    if (step.width == 0) refuse("of a shape other than m64nNk16");
    if (words[5] != "bf16" && words[5] != "f16") refuse("of types other than bf16 and f16");
    if (operands.size() < 2 || operands[1].kind != Operand::Kind::vector) refuse("with A in shared memory");
    if (operands.size() != 7 || operands[0].kind != Operand::Kind::vector) decoder.unknown(statement);
    const auto has_type = [&](const Operand& operand, Type type) {
        return operand.kind == Operand::Kind::reg && bytes_of(decoder.type_of(operand)) == bytes_of(type) &&
               (decoder.type_of(operand) == Type::pred) == (type == Type::pred);
    };
    const auto require = [&](bool condition) {
        if (!condition) decoder.unknown(statement);
    };
    require(operands[0].parts.size() == static_cast<std::size_t>(step.width / 2));
    for (const Operand& part : operands[0].parts) {
        require(has_type(part, Type::f32));
        step.accumulators.push_back(decoder.destination(part));
    }
    require(operands[1].parts.size() == a_registers);
    for (std::size_t r = 0; r < a_registers; ++r) {
        require(has_type(operands[1].parts[r], Type::b32));
        step.from[r] = decoder.source(operands[1].parts[r], Type::b32);
    }
    require(has_type(operands[2], Type::b64) && has_type(operands[3], Type::pred));
    step.from[descriptor] = decoder.source(operands[2], Type::b64);
    step.from[scale] = decoder.source(operands[3], Type::pred);
    step.sources = 6;
    if (!is_integer(operands[4], 1) || !is_integer(operands[5], 1)) refuse("with a scale of A or B other than 1");
    require(is_integer(operands[6], 0) || is_integer(operands[6], 1));
    step.variant = (operands[6].bits != 0 ? b_by_rows : 0) | (operands[3].negated ? scale_negated : 0) |
                   (words[5] == "f16" ? is_f16 : 0);
    step.execute = issue;
}

}  // namespace

bool decode_wgmma(const Statement& statement, Decoder& decoder, Step& step) {
    const auto& words = statement.modifiers;
    if (statement.opcode == "fence") {
        const bool of_block = words.size() == 3 && words[2] == "shared::cta";
        if (words.size() < 2 || words[0] != "proxy" || words[1] != "async" || (words.size() != 2 && !of_block))
            decoder.unknown(statement);
        step.execute = fence_proxy;
        return true;
    }
    if (statement.opcode != "wgmma") return false;
    step.meeting = Meeting::whole_warp;
    const std::string form = words.empty() ? "" : words[0];
    if (form == "mma_async") return decode_product(statement, decoder, step), true;
    if (words.size() != 3 || words[1] != "sync" || words[2] != "aligned") decoder.unknown(statement);
    if (form == "fence") {
        step.execute = fence;
    } else if (form == "commit_group") {
        step.execute = commit_group;
    } else if (form == "wait_group" && statement.operands.size() == 1 &&
               statement.operands[0].kind == Operand::Kind::immediate) {
        step.other = static_cast<int>(statement.operands[0].bits);
        step.execute = wait_group;
    }
    if (step.execute == nullptr) decoder.unknown(statement);
    return true;
}

AsyncProducts* make_async_products(int warps, int slots) {
    auto* products = new AsyncProducts;
    for (int warp = 0; warp < warps; ++warp) products->warps.push_back({FragmentRegisters(slots), {}, {}, {}});
    products->groups.resize(static_cast<std::size_t>((warps + warps_of_group - 1) / warps_of_group));
    return products;
}

void destroy_async_products(AsyncProducts* products) { delete products; }

FragmentRegisters& fragment_registers(const Warp& warp) { return products_of(warp).registers; }

void check_products_at_exit(const Warp& warp) {
    WarpProducts& own = products_of(warp);
    if (!own.products.empty())
        throw_fault("ends while the wgmma of line ", own.products[0].step->statement->line, " is in flight",
                    own.committed == 0 ? ", not committed" : "");
    const auto& sequence = warp.block->products->groups[static_cast<std::size_t>(warp.index / warps_of_group)];
    if (own.executed < sequence.size())
        throw_fault("ends after ", own.executed, " wgmma; warp ", sequence[own.executed].warp,
                    " of its warpgroup executed that of line ", sequence[own.executed].line, " behind them");
    own.has_ended = true;
}

}  // namespace headrace::ptx
