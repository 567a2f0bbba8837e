// atom and red on global and shared memory: one lane after the other, in the order that the settings ask for.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "instructions/addresses.hpp"
#include "instructions/families.hpp"

namespace headrace::ptx {
namespace {

enum class Operation {
    add,
    min,
    max,
    bit_and,
    bit_or,
    bit_xor,
    exchange,
    compare_and_swap,
    increment,
    decrement,
    none
};

Operation operation_named(std::string_view name) {
    constexpr std::string_view names[] = {"add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec"};
    return static_cast<Operation>(std::find(std::begin(names), std::end(names), name) - std::begin(names));
}

// In Step::variant. An atomic of scope .cta is none for other blocks: there it counts as a read and a write.
constexpr int block_scope = 1;

// atom.add.f32 on global memory flushes subnormal numbers to zero, on shared memory it does not.
float flushed(float value) { return std::fpclassify(value) == FP_SUBNORMAL ? std::copysign(0.0F, value) : value; }

template <class T, Operation operation>
T combine(T old, T b, T c, Space space) {
    switch (operation) {
        case Operation::add:
            if constexpr (std::is_same_v<T, float>)
                return space == Space::global ? flushed(flushed(old) + flushed(b)) : old + b;
            else if constexpr (std::is_floating_point_v<T>)
                return old + b;
            else
                return static_cast<T>(static_cast<std::make_unsigned_t<T>>(old) +
                                      static_cast<std::make_unsigned_t<T>>(b));
        case Operation::min: return std::min(old, b);
        case Operation::max: return std::max(old, b);
        case Operation::exchange: return b;
        case Operation::compare_and_swap: return old == b ? c : old;
        case Operation::increment: return old >= b ? T{0} : static_cast<T>(old + 1);
        case Operation::decrement: return old == T{0} || old > b ? b : static_cast<T>(old - 1);
        default: break;
    }
    if constexpr (std::is_integral_v<T>) {
        if (operation == Operation::bit_and) return old & b;
        if (operation == Operation::bit_or) return old | b;
        if (operation == Operation::bit_xor) return old ^ b;
    }
    return old;
}

std::byte* place(Warp& warp, const Step& step, Space space, std::uint64_t address, unsigned bytes, int lane) {
    Block& block = *warp.block;
    if (space == Space::shared)
        return block.shared->atomic(shared_offset(block, address), bytes, warp.index, lane, step.statement->line);
    if (space == Space::local) throw_fault("uses an atomic on local memory");
    if ((step.variant & block_scope) == 0) return block.memory->atomic(address, bytes, block.number);
    block.memory->load(address, bytes, block.number);
    return block.memory->store(address, bytes, block.number);
}

template <class T>
T* values(const Warp& warp, int slot) {
    if constexpr (sizeof(T) == 8)
        return reinterpret_cast<T*>(warp.u64(slot));
    else
        return reinterpret_cast<T*>(warp.u32(slot));
}

template <class T, Operation operation>
void execute(Warp& warp, const Step& step, Mask active) {
    std::uint64_t addresses[lanes] = {};
    gather_addresses(warp, step.from[0], step.offset, (step.variant & wide_base) != 0, active, addresses);
    const T* b = values<T>(warp, step.from[1]);
    const T* c = step.from[2] >= 0 ? values<T>(warp, step.from[2]) : b;
    T results[lanes];
    const auto one_lane = [&](int lane) {
        std::uint64_t address = addresses[lane];
        const Space space = resolve(step.space, address);
        std::byte* at = place(warp, step, space, address, sizeof(T), lane);
        T old;
        std::memcpy(&old, at, sizeof(T));
        const T changed = combine<T, operation>(old, b[lane], c[lane], space);
        std::memcpy(at, &changed, sizeof(T));
        results[lane] = old;
    };
    Block& block = *warp.block;
    const Order order = block.settings->order;
    if (order == Order::descending || (order == Order::random && block.random() % 2 == 0)) {
        for (int lane = lanes - 1; lane >= 0; --lane)
            if ((active >> lane & 1) != 0) for_faulting_lanes(Mask{1} << lane, one_lane);
    } else {
        for_faulting_lanes(active, one_lane);
    }
    if (step.to[0] >= 0) for_lanes(active, [&](int lane) { values<T>(warp, step.to[0])[lane] = results[lane]; });
}

Execute of_bits(Operation operation, Type type) {
    const bool wide = bytes_of(type) == 8;
    switch (operation) {
        case Operation::bit_and:
            return wide ? execute<std::uint64_t, Operation::bit_and> : execute<std::uint32_t, Operation::bit_and>;
        case Operation::bit_or:
            return wide ? execute<std::uint64_t, Operation::bit_or> : execute<std::uint32_t, Operation::bit_or>;
        case Operation::bit_xor:
            return wide ? execute<std::uint64_t, Operation::bit_xor> : execute<std::uint32_t, Operation::bit_xor>;
        case Operation::exchange:
            return wide ? execute<std::uint64_t, Operation::exchange> : execute<std::uint32_t, Operation::exchange>;
        case Operation::compare_and_swap:
            return wide ? execute<std::uint64_t, Operation::compare_and_swap>
                        : execute<std::uint32_t, Operation::compare_and_swap>;
        default: return nullptr;
    }
}

template <Operation operation>
Execute of_integers(Type type) {
    switch (type) {
        case Type::u32: return execute<std::uint32_t, operation>;
        case Type::s32: return execute<std::int32_t, operation>;
        case Type::u64: return execute<std::uint64_t, operation>;
        case Type::s64: return operation == Operation::add ? nullptr : execute<std::int64_t, operation>;
        default: return nullptr;
    }
}

Execute execute_for(Operation operation, Type type) {
    if (type == Type::b32 || type == Type::b64) return of_bits(operation, type);
    switch (operation) {
        case Operation::add:
            if (type == Type::f32) return execute<float, Operation::add>;
            if (type == Type::f64) return execute<double, Operation::add>;
            return of_integers<Operation::add>(type);
        case Operation::min: return of_integers<Operation::min>(type);
        case Operation::max: return of_integers<Operation::max>(type);
        case Operation::increment: return type == Type::u32 ? execute<std::uint32_t, Operation::increment> : nullptr;
        case Operation::decrement: return type == Type::u32 ? execute<std::uint32_t, Operation::decrement> : nullptr;
        default: return nullptr;
    }
}

}  // namespace

bool decode_atomic(const Statement& statement, Decoder& decoder, Step& step) {
    const bool returns = statement.opcode == "atom";
    auto operation = Operation::none;
    bool has_policy = false;
    for (const std::string& modifier : statement.modifiers) {
        if (const Operation named = operation_named(modifier); named != Operation::none)
            operation = named;
        else if (const Type type = type_named(modifier); type != Type::none)
            step.type = type;
        else if (modifier == "global" || modifier == "shared" || modifier == "shared::cta")
            step.space = space_named(modifier);
        else if (modifier == "cta")
            step.variant |= block_scope;
        else if (modifier == "L2::cache_hint")
            has_policy = true;
        else if (modifier != "relaxed" && modifier != "acquire" && modifier != "release" && modifier != "acq_rel" &&
                 modifier != "gpu" && modifier != "sys")
            decoder.unknown(statement);
    }
    const bool swaps = operation == Operation::compare_and_swap;
    const std::size_t address = returns ? 1 : 0;
    if (statement.operands.size() != address + (swaps ? 3U : 2U) + (has_policy ? 1U : 0U)) decoder.unknown(statement);
    if (!returns && (swaps || operation == Operation::exchange)) decoder.unknown(statement);
    step.to[0] = returns ? decoder.destination(statement.operands[0]) : -1;
    step.offset = decode_address(statement, statement.operands[address], decoder, step, 0, wide_base);
    step.from[1] = decoder.source(statement.operands[address + 1], step.type);
    step.from[2] = swaps ? decoder.source(statement.operands[address + 2], step.type) : -1;
    step.destinations = returns ? 1 : 0;
    step.sources = swaps ? 3 : 2;
    step.execute = execute_for(operation, step.type);
    if (step.execute == nullptr) decoder.unknown(statement);
    return true;
}

}  // namespace headrace::ptx
