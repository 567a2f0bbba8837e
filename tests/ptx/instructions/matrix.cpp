// ldmatrix, stmatrix, movmatrix and mma: how a warp holds small matrices in its registers.
#include <cmath>
#include <cstring>

#include "instructions/addresses.hpp"
#include "instructions/fragments.hpp"

namespace headrace::ptx {
namespace {

constexpr int transposed = 1;  // of Step::variant

void check_whole_warp(Mask active) {
    if (active != all_lanes) throw_fault("only the lanes ", std::hex, active, " execute what takes a whole warp");
}

// Row r of a matrix of 8 x 8 elements of 16 bits. Lane l holds elements (l / 4, 2 (l % 4)) and the next of its row, or
// the same of the transpose.
using Matrix = std::uint16_t[8][8];

inline void to_registers(const Matrix& matrix, bool is_transposed, std::uint32_t* registers) {
    for (int lane = 0; lane < lanes; ++lane) {
        const int g = lane / 4, t = 2 * (lane % 4);
        const std::uint32_t low = is_transposed ? matrix[t][g] : matrix[g][t];
        const std::uint32_t high = is_transposed ? matrix[t + 1][g] : matrix[g][t + 1];
        registers[lane] = low | high << 16;
    }
}

inline void from_registers(Matrix& matrix, bool is_transposed, const std::uint32_t* registers) {
    for (int lane = 0; lane < lanes; ++lane) {
        const int g = lane / 4, t = 2 * (lane % 4);
        (is_transposed ? matrix[t][g] : matrix[g][t]) = static_cast<std::uint16_t>(registers[lane]);
        (is_transposed ? matrix[t + 1][g] : matrix[g][t + 1]) = static_cast<std::uint16_t>(registers[lane] >> 16);
    }
}

// The rows' offsets in shared memory: lane 8 m + r has that of row r of matrix m.
Mask gather_rows(const Warp& warp, const Step& step, std::uint64_t* offsets) {
    const Mask rows = step.width == 4 ? all_lanes : (Mask{1} << 8 * step.width) - 1;
    gather_addresses(warp, step.from[0], step.offset, (step.variant & wide_base) != 0, rows, offsets);
    if (step.space == Space::generic)
        for_faulting_lanes(rows, [&](int lane) {
            if (resolve(Space::generic, offsets[lane]) != Space::shared)
                throw_fault("gives address ", offsets[lane], ", which is not in shared memory");
        });
    return rows;
}

// A row reaches lanes other than the one that gave its address: it is read for the whole warp.
void load_matrices(Warp& warp, const Step& step, Mask active) {
    check_whole_warp(active);
    std::uint64_t offsets[lanes] = {};
    const Mask rows = gather_rows(warp, step, offsets);
    Block& block = *warp.block;
    Matrix matrices[4];
    for_faulting_lanes(rows, [&](int lane) {
        const std::uint32_t offset = shared_offset(block, offsets[lane]);
        std::memcpy(matrices[lane / 8][lane % 8], block.shared->load(offset, 16, warp.index, -1, step.statement->line),
                    16);
    });
    for (int m = 0; m < step.width; ++m)
        if (const int slot = step.to[static_cast<std::size_t>(m)]; slot >= 0)
            to_registers(matrices[m], (step.variant & transposed) != 0, warp.u32(slot));
    count_conflicts(step, offsets, rows, 16);
}

void store_matrices(Warp& warp, const Step& step, Mask active) {
    check_whole_warp(active);
    std::uint64_t offsets[lanes] = {};
    const Mask rows = gather_rows(warp, step, offsets);
    Block& block = *warp.block;
    Matrix matrices[4];
    for (int m = 0; m < step.width; ++m)
        from_registers(matrices[m], (step.variant & transposed) != 0,
                       warp.u32(step.from[static_cast<std::size_t>(m) + 1]));
    for_faulting_lanes(rows, [&](int lane) {
        const std::uint32_t offset = shared_offset(block, offsets[lane]);
        std::memcpy(block.shared->store(offset, 16, warp.index, lane, step.statement->line),
                    matrices[lane / 8][lane % 8], 16);
    });
    count_conflicts(step, offsets, rows, 16);
}

void move_matrix(Warp& warp, const Step& step, Mask active) {
    check_whole_warp(active);
    Matrix matrix;
    from_registers(matrix, /*is_transposed=*/false, warp.u32(step.from[0]));
    if (step.to[0] >= 0) to_registers(matrix, /*is_transposed=*/true, warp.u32(step.to[0]));
}

// mma: registers of A, then of B, then of C in Step::from.
template <class Element>
void gather_factors(const Warp& warp, const Step& step, int depth, Product& product) {
    const int registers_of_b = depth / (std::is_same_v<Element, Tf32> ? 4 : 8), registers_of_a = 2 * registers_of_b;
    for (int r = 0; r < registers_of_a; ++r)
        place_a<Element>(warp.u32(step.from[static_cast<std::size_t>(r)]), r, product);
    for (int r = 0; r < registers_of_b; ++r)
        place_b<Element>(warp.u32(step.from[static_cast<std::size_t>(registers_of_a + r)]), r, product);
}

void gather_addend(const Warp& warp, const int* slots, bool is_f16, Product& product) {
    for (int h = 0; h < 2 && !is_f16; ++h) place_c(warp.u32(slots[2 * h]), warp.u32(slots[2 * h + 1]), h, product);
    for (int r = 0; r < 2 && is_f16; ++r)
        for (int lane = 0; lane < lanes; ++lane) {
            double* const c = &product.c[lane / 4 + 8 * r][2 * (lane % 4)];
            c[0] = value_of_f16(warp.u32(slots[r])[lane]);
            c[1] = value_of_f16(warp.u32(slots[r])[lane] >> 16);
        }
}

void scatter_result(const Warp& warp, const Step& step, bool is_f16, const Product& product) {
    for (int r = 0; r < (is_f16 ? 2 : 4); ++r) {
        const int slot = step.to[static_cast<std::size_t>(r)];
        if (slot < 0) continue;
        if (!is_f16) {
            take_d(product, r, warp.u32(slot));
            continue;
        }
        for (int lane = 0; lane < lanes; ++lane) {
            const double* const d = &product.d[lane / 4 + 8 * r][2 * (lane % 4)];
            warp.u32(slot)[lane] = bits_of_f16(d[0]) | bits_of_f16(d[1]) << 16;
        }
    }
}

template <class Element>
void multiply(Warp& warp, const Step& step, Mask active) {
    check_whole_warp(active);
    Product product;
    const int depth = step.width;
    const bool is_f16 = step.type == Type::f16;
    gather_factors<Element>(warp, step, depth, product);
    gather_addend(warp, &step.from[static_cast<std::size_t>(step.other)], is_f16, product);
    multiply(product, depth, is_f16 ? SumType::f16 : SumType::f32, warp.block->settings->mma);
    scatter_result(warp, step, is_f16, product);
}

// m8n8k4 of f64: lane 4 g + t has A (g, t), B (t, g) and C (g, 2t), (g, 2t + 1). A fused multiplication and addition
// for each k, ascending, in either arithmetic.
void multiply_doubles(Warp& warp, const Step& step, Mask active) {
    check_whole_warp(active);
    const double *a = warp.f64(step.from[0]), *b = warp.f64(step.from[1]);
    double sums[2][lanes];
    for (int r = 0; r < 2; ++r)
        for (int lane = 0; lane < lanes; ++lane) {
            const int n = 2 * (lane % 4) + r;
            double sum = warp.f64(step.from[static_cast<std::size_t>(r) + 2])[lane];
            for (int k = 0; k < 4; ++k) sum = std::fma(a[lane / 4 * 4 + k], b[4 * n + k], sum);
            sums[r][lane] = sum;
        }
    for (std::size_t r = 0; r < 2; ++r)
        if (step.to[r] >= 0) std::memcpy(warp.f64(step.to[r]), sums[r], sizeof(sums[r]));
}

// The registers of a fragment: {a, b, ...}, or a single one without braces. False: their number is another.
template <class F>
bool each_register(const Operand& operand, std::size_t count, F f) {
    const bool is_vector = operand.kind == Operand::Kind::vector;
    if ((is_vector ? operand.parts.size() : 1) != count) return false;
    for (std::size_t i = 0; i < count; ++i) f(is_vector ? operand.parts[i] : operand);
    return true;
}

void decode_fragments(const Statement& statement, Decoder& decoder, Step& step, const std::size_t (&counts)[4],
                      const Type (&types)[4]) {
    if (statement.operands.size() != 4) decoder.unknown(statement);
    std::size_t to = 0, from = 0;
    bool fits = each_register(statement.operands[0], counts[0],
                              [&](const Operand& operand) { step.to[to++] = decoder.destination(operand); });
    for (std::size_t i = 1; i < 4 && fits; ++i) {
        if (i == 3) step.other = static_cast<int>(from);
        fits = each_register(statement.operands[i], counts[i],
                             [&](const Operand& operand) { step.from[from++] = decoder.source(operand, types[i]); });
    }
    if (!fits) decoder.unknown(statement);
    step.destinations = static_cast<std::int16_t>(to);
    step.sources = static_cast<std::int16_t>(from);
}

// mma.sync.aligned.SHAPE.row.col.D.A.B.C
bool decode_mma(const Statement& statement, Decoder& decoder, Step& step) {
    const auto& words = statement.modifiers;
    if (words.size() != 9 || words[0] != "sync" || words[1] != "aligned" || words[3] != "row" || words[4] != "col")
        decoder.unknown(statement);
    const std::string& shape = words[2];
    const Type d = type_named(words[5]), a = type_named(words[6]), b = type_named(words[7]), c = type_named(words[8]);
    if (a != b || c != d) decoder.unknown(statement);
    step.type = d;
    step.source_type = a;
    if (shape == "m8n8k4" && a == Type::f64 && d == Type::f64) {
        step.execute = multiply_doubles;
        decode_fragments(statement, decoder, step, {2, 1, 1, 2}, {d, a, b, c});
        return true;
    }
    const bool is_tf32 = a == Type::tf32, is_pair = a == Type::f16 || a == Type::bf16;
    if (!is_tf32 && !is_pair) decoder.unknown(statement);
    if (d != Type::f32 && (d != Type::f16 || a != Type::f16)) decoder.unknown(statement);
    step.width = shape == "m16n8k16" && is_pair ? 16 : shape == "m16n8k8" ? 8 : shape == "m16n8k4" && is_tf32 ? 4 : 0;
    if (step.width == 0) decoder.unknown(statement);
    step.execute = is_tf32 ? multiply<Tf32> : a == Type::f16 ? multiply<F16> : multiply<Bf16>;
    const auto of_b = static_cast<std::size_t>(step.width / (is_tf32 ? 4 : 8));
    const std::size_t of_c = d == Type::f16 ? 2 : 4;
    const Type bits = Type::b32;
    decode_fragments(statement, decoder, step, {of_c, 2 * of_b, of_b, of_c},
                     {bits, bits, bits, d == Type::f16 ? bits : d});
    return true;
}

// {ldmatrix|stmatrix}.sync.aligned.m8n8.NUMBER{.trans}{.shared}.b16
bool decode_matrices(const Statement& statement, Decoder& decoder, Step& step, bool is_load) {
    for (const std::string& word : statement.modifiers) {
        if (word == "x1")
            step.width = 1;
        else if (word == "x2")
            step.width = 2;
        else if (word == "x4")
            step.width = 4;
        else if (word == "trans")
            step.variant |= transposed;
        else if (word == "shared" || word == "shared::cta")
            step.space = Space::shared;
        else if (word != "sync" && word != "aligned" && word != "m8n8" && word != "b16")
            decoder.unknown(statement);
    }
    if (!statement.has("sync") || !statement.has("aligned") || !statement.has("m8n8") ||
        statement.type() != Type::b16 || statement.operands.size() != 2)
        decoder.unknown(statement);
    step.offset = decode_address(statement, statement.operands[is_load ? 1 : 0], decoder, step, 0, wide_base);
    const auto count = static_cast<std::size_t>(step.width);
    std::size_t next = 0;
    const bool fits = each_register(statement.operands[is_load ? 0 : 1], count, [&](const Operand& operand) {
        if (is_load)
            step.to[next++] = decoder.destination(operand);
        else
            step.from[1 + next++] = decoder.source(operand, Type::b32);
    });
    if (!fits) decoder.unknown(statement);
    step.destinations = static_cast<std::int16_t>(is_load ? count : 0);
    step.sources = static_cast<std::int16_t>(is_load ? 1 : count + 1);
    step.type = Type::b16;
    step.execute = is_load ? load_matrices : store_matrices;
    return true;
}

}  // namespace

bool decode_matrix(const Statement& statement, Decoder& decoder, Step& step) {
    const std::string& opcode = statement.opcode;
    step.meeting = Meeting::whole_warp;
    if (opcode == "mma") return decode_mma(statement, decoder, step);
    if (opcode == "ldmatrix" || opcode == "stmatrix")
        return decode_matrices(statement, decoder, step, /*is_load=*/opcode == "ldmatrix");
    step.meeting = Meeting::none;
    if (opcode != "movmatrix") return false;
    const std::vector<std::string> known{"sync", "aligned", "m8n8", "trans", "b16"};
    if (statement.modifiers != known || statement.operands.size() != 2) decoder.unknown(statement);
    step.meeting = Meeting::whole_warp;
    step.to[0] = decoder.destination(statement.operands[0]);
    step.from[0] = decoder.source(statement.operands[1], Type::b32);
    step.destinations = step.sources = 1;
    step.execute = move_matrix;
    return true;
}

}  // namespace headrace::ptx
