// ChannelGradient: the page chunk_gradients under channel gates on tensor cores: all gradients of a chunk, from what
// the sweeps left of it.
#pragma once
// over 400 lines: one kernel whose sums stay in registers from part to part.

#include "cuda/chunk/channel_pairs.hpp"
#include "cuda/chunk/sweep_walk.hpp"
#include "cuda/tiles/token_matrices.hpp"
#include "cuda/tiles/token_tiles.hpp"

namespace headrace::cuda {

// A block has a chunk and a key head, and its value heads one after another, 64 values at a time. A warp owns 16
// channels: their rows, gates and gradients over the chunk's tokens never leave it (channel_tokens.hpp). Betas, norms
// and the scale are factors of the sums. With d = beta r, z = beta y as on the page (additive rule: d = v), rows q, k
// as given and their inverse norms |q|^-1, |k|^-1,
//     W_ij = scale |q_i|^-1 |k_j|^-1 (d_o_i . d_j), j <= i         L_ij = -|k_i|^-1 |k_j|^-1 (z_i . d_j), j < i
//     d_q = scale |q|^-1 e^G (S d_o) + pairs                       (ChannelPairs)
//     d_k = -|k|^-1 e^G (S z) + |k|^-1 e^{G_L - G} (D d) + pairs
// are gradients of unit rows times the inverse norms, and rows times these what a token adds to gates before or behind
// it.
template <int K, bool delta>
struct ChannelGradient {
    // Of products with tokens as rows and columns a warp has 16 rows, and half of the columns or all.
    static constexpr int threads = channel_gradient_threads(K), column_parts = K / group_channels / token_groups,
                         pair_tiles = 8 / column_parts;
    using PairSums = float[pair_tiles][4];

    // 64 values of a head, as saved and given.
    struct Stage {
        Matrix<K> S, D;                   // [64 values, K]
        Matrix<tensor_values> d, y, d_o;  // r, y [64 values, C]; d_o and for r v of the additive rule [C, 64]
        HEADRACE_DEVICE Stage behind(std::int64_t elements) const {
            return {{S.data + elements},
                    {D.data + elements},
                    {d.data + elements},
                    {y.data + elements},
                    {d_o.data + elements}};
        }
    };
    // Sums over values of a warp's channels: S d_o, S y, D r, by tokens; the diagonal of S D^T (`crossing`), in two
    // accumulators.
    struct BorderSums {
        TokenGroups read, erase, write;
        float crossing[2][4];
    };

    const KernelArgs& args;
    Matrix<K> q, k;
    Stage first_stage;
    std::int64_t stage_elements;  // from a stage to the next
    Matrix<tensor_chunk> W, L, W_low, L_low;
    float *q_norm, *k_norm, *beta_slope, *d_beta;  // [C]
    float *read, *erase, *write;                   // [C] factors of a head's rows, without decays
    float* own;                                    // [C] diagonal of W
    float* of_rows;                                // [warps, C]
    Tile<float> gates;                             // [C,K] decays, then the gate's gradient
    TokenTiles<float, delta, Gates::of_channels> tokens;

    __host__ __device__ ChannelGradient(const KernelArgs& arguments, Arena& arena)
        : args(arguments), tokens(args, carve_matrices(arena), 1, 16, true) {
        for (float** vector : {&q_norm, &k_norm, &beta_slope, &d_beta, &read, &erase, &write, &own})
            *vector = arena.take<float>(tensor_chunk);
        of_rows = arena.take<float>(K / group_channels * tensor_chunk);
        // Pairs of rows 8 banks apart, in pieces of 16 bytes.
        gates = {arena.take<float>(tensor_chunk * (K + 4)), K + 4};
    }

    // The chunk in a row of all sequences' (part_at), all value heads of a key head.
    HEADRACE_DEVICE void run(std::int64_t row, std::int64_t key_head) {
        const std::int64_t first_head = key_head * args.group;
        HEADRACE_ROLLED
        for (int member = 0; member < args.group; ++member) clear_parameter_sums(args, row, first_head + member);
        const PartAt at = part_at(args, row, tensor_chunk);
        const TokenRange s = sequence_of(args, at.n);
        if (at.part * tensor_chunk >= s.end - s.begin) return;
        const ChunkRange range = chunk_range(args, s, at.part);
        copy_tokens<K, false>(q, args.q, range, key_head, 0, args.K);
        copy_tokens<K, false>(k, args.k, range, key_head, 0, args.K);
        TokenGroups d_q = {}, d_k = {};
        heads(range, row, first_head, d_q, d_k);
        store_rows(args.d_q, d_q, q, q_norm, range, key_head);
        store_rows(args.d_k, d_k, k, k_norm, range, key_head);
    }

  private:
    // First, as they begin at multiples of their rows.
    __host__ __device__ Arena& carve_matrices(Arena& arena) {
        q = Matrix<K>::take(arena, tensor_chunk);
        k = Matrix<K>::take(arena, tensor_chunk);
        const std::size_t before = arena.shared_used;
        for (Matrix<K>* matrix : {&first_stage.S, &first_stage.D}) *matrix = Matrix<K>::take(arena, tensor_values);
        for (Matrix<tensor_values>* matrix : {&first_stage.d, &first_stage.d_o})
            *matrix = Matrix<tensor_values>::take(arena, tensor_chunk);
        first_stage.y = delta ? Matrix<tensor_values>::take(arena, tensor_chunk) : first_stage.d;
        stage_elements = static_cast<std::int64_t>((arena.shared_used - before) / sizeof(std::uint16_t));
        if (args.stages == 2) arena.take<std::uint16_t>(static_cast<std::size_t>(stage_elements));
        W = L = W_low = L_low = Matrix<tensor_chunk>::take(arena, tensor_chunk);
        if (delta)
            for (Matrix<tensor_chunk>* matrix : {&L, &W_low, &L_low})
                *matrix = Matrix<tensor_chunk>::take(arena, tensor_chunk);
        return arena;
    }

    HEADRACE_DEVICE static int channel() { return warp() * group_channels; }
    HEADRACE_DEVICE static int token_row() { return warp() / column_parts * 16; }
    HEADRACE_DEVICE static int pair_column() { return warp() % column_parts * 8 * pair_tiles; }
    HEADRACE_DEVICE int value_blocks() const { return (args.V + tensor_values - 1) / tensor_values; }
    HEADRACE_DEVICE Stage stage_of(int step) const {
        return first_stage.behind(args.stages == 2 ? step % 2 * stage_elements : 0);
    }
    // From the lane's first token and channel on.
    HEADRACE_DEVICE Tile<float> lane_gates() const { return gates.from(group_token(0), channel() + group_channel(0)); }

    // Adds up d_q and d_k of all value heads; stores d_beta and the gate's gradient of each.
    HEADRACE_DEVICE void heads(const ChunkRange& range, std::int64_t row, std::int64_t first_head, TokenGroups& d_q,
                               TokenGroups& d_k) {
        const int blocks = value_blocks(), steps = args.group * blocks;
        fetch_gates(range, first_head);
        fetch(range, row, first_head, 0);
        PairSums d_P = {}, d_l = {};
        BorderSums border = {};
        HEADRACE_ROLLED
        for (int step = 0; step < steps; ++step) {
            const std::int64_t head = first_head + step / blocks;
            const bool more = step + 1 < steps, last = step % blocks == blocks - 1;
            if (step % blocks == 0) load_betas(range, head);
            ptx::wait_for_copies<0>();
            ptx::sync_block();
            if (more && args.stages == 2) fetch(range, row, first_head, step + 1);
            if (step == 0) {
                weigh_rows();
                ptx::sync_block();
            }
            if (step % blocks == 0) begin_head(range, head);
            const Stage now = stage_of(step);
            const bool fine = delta && keys_overlap(args, row * args.HV + head);
            add_pairs(d_P, d_l, now);
            if (fine) add_rest(d_P, d_l, now, row, head, step % blocks * tensor_values);
            add_borders(border, now);
            if (last) {
                end_head(range, row, head, fine, now, d_q, d_k, d_P, d_l, border);
                clear(d_P), clear(d_l);
                border = {};
                if (more) fetch_gates(range, head + 1);
            }
            if (more && args.stages == 1) {
                ptx::sync_block();
                fetch(range, row, first_head, step + 1);
            }
        }
    }

    // ---- inputs ----
    // Rows that lie behind the last value become zero: no sweep has written them.
    HEADRACE_DEVICE void fetch(const ChunkRange& range, std::int64_t row, std::int64_t first_head, int step) const {
        const int blocks = value_blocks(), first = step % blocks * tensor_values, count = args.V - first,
                  values = count < tensor_values ? count : tensor_values;
        const std::int64_t head = first_head + step / blocks, rows = round_up(args.V, 16),
                           line = (row * args.HV + head) * rows + first;
        const Stage stage = stage_of(step);
        const SweptChunks& from = args.swept;
        copy_lines(stage.S, from.states + line * K, count);
        copy_lines(stage.D, from.adjoints + line * K, count);
        if (delta) {
            copy_lines(stage.d, from.residuals + line * tensor_chunk, count);
            copy_lines(stage.y, from.d_written + line * tensor_chunk, count);
        } else {
            copy_tokens<tensor_values, false>(stage.d, args.v, range, head, first, values);
        }
        copy_tokens<tensor_values, false>(stage.d_o, args.d_o, range, head, first, values);
        ptx::end_copies();
    }
    // Of gates, log decays or their gradients: the first of the head, elements to the next token.
    struct GateRows {
        std::int64_t first, step;
        bool in_pieces;  // of four floats
    };
    HEADRACE_DEVICE GateRows gate_rows(const Strided& tensor, const ChunkRange& range, std::int64_t head) const {
        const std::int64_t first = tensor.given ? offset_of(tensor, range.row, range.token(0), head) : 0;
        return {first, range.reverse ? -tensor.stride[1] : tensor.stride[1],
                tensor.given && tensor.dtype == DType::f32 && tensor.stride[3] == 1 && tensor.stride[1] % 4 == 0 &&
                    args.K % 4 == 0 && reinterpret_cast<std::uintptr_t>(tensor.data + 4 * first) % 16 == 0};
    }
    // As given; begin_head makes decays of them.
    HEADRACE_DEVICE void fetch_gates(const ChunkRange& range, std::int64_t head) const {
        const GateRows rows = gate_rows(args.g, range, head);
        if (rows.in_pieces) {
            constexpr int pieces = K / 4, step = threads / pieces;
            const int i = static_cast<int>(threadIdx.x) / pieces, c = static_cast<int>(threadIdx.x) % pieces * 4;
            const float* const from = reinterpret_cast<const float*>(args.g.data) + rows.first;
            const float* const own = from + i * rows.step + c;
            const std::uint32_t first = ptx::shared_address(&gates.at(i, c));
            each_own_row<threads, pieces>([&](int row, int n) {
                const bool inside = row < range.length && c < args.K;
                ptx::copy_16(first + 4 * (K + 4) * step * n, inside ? own + n * step * rows.step : from,
                             inside ? 16 : 0);
            });
            ptx::end_copies();
            return;
        }
        each(tensor_chunk * K, [&](int place) {
            const int i = place / K, c = place % K;
            const bool inside = args.g.given && i < range.length && c < args.K;
            gates.at(i, c) = inside ? load_element<float>(args.g.data, args.g.dtype,
                                                          rows.first + i * rows.step + c * args.g.stride[3])
                                    : 0.0f;
        });
    }
    HEADRACE_DEVICE void load_betas(const ChunkRange& range, std::int64_t head) const {
        if (!delta) return;
        each(tensor_chunk, [&](int i) {
            const Beta<float> beta =
                i < range.length ? beta_value<float>(args, range.row, range.token(i), head, 0) : Beta<float>{0, 1};
            write[i] = beta.value, beta_slope[i] = beta.slope;
        });
    }
    // Of a row, threads side by side.
    HEADRACE_DEVICE void weigh_rows() const {
        constexpr int sharing = threads / tensor_chunk, pieces = K / 8 / sharing;
        const int i = static_cast<int>(threadIdx.x) / sharing, part = static_cast<int>(threadIdx.x) % sharing;
        const auto inverse_norm_of = [&](float* norm, Matrix<K> x) {
            float sum = 0;
#pragma unroll
            for (int piece = 0; args.l2norm && piece < pieces; ++piece) {
                const uint4 of = *reinterpret_cast<const uint4*>(&x.pair(i, (piece * sharing + part) * 8));
                const std::uint32_t pairs[4] = {of.x, of.y, of.z, of.w};
#pragma unroll
                for (const std::uint32_t pair : pairs)
                    sum = fmaf(low_half(pair), low_half(pair), fmaf(high_half(pair), high_half(pair), sum));
            }
#pragma unroll
            for (int distance = 1; distance < sharing; distance *= 2) sum += ptx::shuffle_xor(sum, distance);
            if (part == 0) norm[i] = args.l2norm ? static_cast<float>(1 / sqrt(static_cast<double>(sum) + 1e-6)) : 1.0f;
        };
        inverse_norm_of(q_norm, q);
        inverse_norm_of(k_norm, k);
    }
    // Factors of tokens, and decays of the gates.
    HEADRACE_DEVICE void begin_head(const ChunkRange& range, std::int64_t head) const {
        each(tensor_chunk, [&](int i) {
            const float key = delta ? k_norm[i] * write[i] : k_norm[i];
            read[i] = static_cast<float>(args.scale) * q_norm[i];
            erase[i] = -key, write[i] = key;
        });
        const GateParameters<float> gate = gate_parameters<float>(args, head);
        const bool formula = args.g.given && gate.formula != GateFormula::log_decay;
        constexpr float log2_e = 1.4426950408889634f;
        const int c = static_cast<int>(threadIdx.x) % (K / 4) * 4;
        each_own_row<threads, K / 4>([&](int i, int) {
            const int count = i < range.length ? args.K - c : 0;
            float4& all = *reinterpret_cast<float4*>(&gates.at(i, c));
            if (formula) apply_formula(&all.x, count, head, c, gate);
            const float4 of = all;
            const auto decay = [&](float log_decay, int n) {
                const float sum = log_decay + gate.gamma;
                return n < count ? ptx::exp2_approximate((sum < 0 ? sum : 0.0f) * log2_e) : 1.0f;
            };
            all = {decay(of.x, 0), decay(of.y, 1), decay(of.z, 2), decay(of.w, 3)};
        });
        ptx::sync_block();
    }
    // One channel after the other, as the code of a formula is long.
    HEADRACE_DEVICE void apply_formula(float* of, int count, std::int64_t head, int c,
                                       const GateParameters<float>& gate) const {
        HEADRACE_ROLLED
        for (int n = 0; n < 4 && n < count; ++n) {
            const std::int64_t bias =
                head * args.dt_bias.stride[0] + (args.bias_per_channel ? (c + n) * args.dt_bias.stride[1] : 0);
            float x = of[n];
            if (args.dt_bias.given) x += load_element<float>(args.dt_bias.data, args.dt_bias.dtype, bias);
            of[n] = gate_value(x, gate);
        }
    }

    // ---- of 64 values ----
    HEADRACE_DEVICE static void clear(PairSums& sums) {
#pragma unroll
        for (auto& tile : sums)
            for (float& sum : tile) sum = 0;
    }
    // Of pairs of 8 x 16 on and below the diagonal's blocks: f(tile) for the first of two.
    template <class F>
    HEADRACE_DEVICE static void each_lower_tile(F f) {
#pragma unroll
        for (int tile = 0; tile < pair_tiles; tile += 2)
            if (pair_column() + 8 * tile <= token_row()) f(tile);
    }
    // Right operands of what is written, depth along values.
    static HEADRACE_DEVICE OperandAt<tensor_values> written_operands(Matrix<tensor_values> m) {
        return delta ? OperandAt<tensor_values>::down(m) : OperandAt<tensor_values>::across(m);
    }
    HEADRACE_DEVICE static void load_written(std::uint32_t (&b)[4], OperandAt<tensor_values> from, int d, int token) {
        if (delta) {
            ptx::load_matrix_transposed(b, from.at(d, token));
        } else {
            ptx::load_matrix(b, from.at(token, d));
        }
    }
    HEADRACE_DEVICE static void multiply_both(PairSums& d_P, PairSums& d_l, const Stage& now,
                                              Matrix<tensor_values> written) {
        using At = OperandAt<tensor_values>;
        const At of_d_o = At::down(now.d_o), of_y = At::across(now.y), of_written = written_operands(written);
        HEADRACE_ROLLED
        for (int d = 0; d < tensor_values; d += 16) {
            std::uint32_t d_o[4], y[4];
            ptx::load_matrix(d_o, of_d_o.at(token_row(), d));
            if (delta) ptx::load_matrix_transposed(y, of_y.at(d, token_row()));
            each_lower_tile([&](int tile) {
                std::uint32_t b[4];
                load_written(b, of_written, d, pair_column() + 8 * tile);
                ptx::multiply_bf16(d_P[tile], d_o, {b[0], b[1]});
                ptx::multiply_bf16(d_P[tile + 1], d_o, {b[2], b[3]});
                if (!delta) return;
                ptx::multiply_bf16(d_l[tile], y, {b[0], b[1]});
                ptx::multiply_bf16(d_l[tile + 1], y, {b[2], b[3]});
            });
        }
    }
    HEADRACE_DEVICE void add_pairs(PairSums& d_P, PairSums& d_l, const Stage& now) const {
        multiply_both(d_P, d_l, now, now.d);
    }
    // What residuals have below their bf16; it takes the place of W_low.
    HEADRACE_DEVICE void add_rest(PairSums& d_P, PairSums& d_l, const Stage& now, std::int64_t row, std::int64_t head,
                                  int first) const {
        const std::int64_t line = ((row * args.HV + head) * round_up(args.V, 16) + first) * tensor_chunk;
        copy_lines(W_low, args.swept.residuals_low + line, args.V - first);
        ptx::end_copies();
        ptx::wait_for_copies<0>();
        ptx::sync_block();
        multiply_both(d_P, d_l, now, W_low);
        ptx::sync_block();
    }
    HEADRACE_DEVICE static void add_borders(BorderSums& border, const Stage& now) {
        using At = OperandAt<tensor_values>;
        const auto of_S = OperandAt<K>::across(now.S), of_D = OperandAt<K>::across(now.D);
        const At of_d_o = At::across(now.d_o), of_y = At::down(now.y), of_written = written_operands(now.d);
        HEADRACE_ROLLED
        for (int d = 0; d < tensor_values; d += 16) {
            std::uint32_t S[4], D[4];
            ptx::load_matrix_transposed(S, of_S.at(d, channel()));
            ptx::load_matrix_transposed(D, of_D.at(d, channel()));
            ptx::multiply_bf16(border.crossing[0], S, {D[0], D[2]});
            ptx::multiply_bf16(border.crossing[1], S, {D[1], D[3]});
#pragma unroll
            for (int group = 0; group < token_groups; ++group) {
                const int token = group_tokens * group;
                std::uint32_t b[4];
                ptx::load_matrix(b, of_d_o.at(token, d));
                add_group(border.read[group], S, b);
                load_written(b, of_written, d, token);
                add_group(border.write[group], D, b);
                if (!delta) continue;
                ptx::load_matrix_transposed(b, of_y.at(d, token));
                add_group(border.erase[group], S, b);
            }
        }
    }
    HEADRACE_DEVICE static void add_group(TokenGroup& sums, const std::uint32_t (&a)[4], const std::uint32_t (&b)[4]) {
        ptx::multiply_bf16(sums[0], a, {b[0], b[1]});
        ptx::multiply_bf16(sums[1], a, {b[2], b[3]});
    }

    // ---- of a head, behind its values ----
    HEADRACE_DEVICE void end_head(const ChunkRange& range, std::int64_t row, std::int64_t head, bool fine,
                                  const Stage& now, TokenGroups& d_q, TokenGroups& d_k, const PairSums& d_P,
                                  const PairSums& d_l, const BorderSums& border) {
        weigh_pairs(d_P, d_l, fine);
        ptx::sync_block();  // the stage has been read, too
        TokenGroups d_gate;
        float through[token_groups][2];
#pragma unroll
        for (int group = 0; group < token_groups; ++group)
            group_total(through[group], lane_gates().from(group_tokens * group, 0));
        const GateSums sums;
        ChannelPairs<K, delta> pairs{OperandAt<K>::across(q),
                                     OperandAt<K>::across(k),
                                     PairOperands(W),
                                     PairOperands(L),
                                     Digits::high,
                                     lane_gates(),
                                     channel(),
                                     reinterpret_cast<float4*>(now.S.data),
                                     through,
                                     sums};
        fold_borders(d_q, d_k, d_gate, border, pairs);
        // W as rows, their low halves, W's.
        HEADRACE_ROLLED
        for (int part = 0; part < (fine ? 3 : 1); ++part) {
            pairs.of_rows = part == 1 ? Digits::low : Digits::high;
            pairs.W = PairOperands(part == 2 ? W_low : W), pairs.L = PairOperands(part == 2 ? L_low : L);
            pairs.add_inside(d_q, d_k, d_gate);
            pairs.add_across(d_q, d_k, d_gate);
        }
        if (args.d_beta.given && delta) store_numbers(args.d_beta, d_beta, range, head);
        if (args.gate_gradient) {
#pragma unroll
            for (int group = 0; group < token_groups; ++group) {
#pragma unroll
                for (int h = 0; h < 2; ++h) {
#pragma unroll
                    for (int n = 0; n < 4; ++n)
                        lane_gates().at(group_tokens * group + 8 * h + n % 2, n / 2 * 8) = d_gate[group][h][n];
                }
            }
        }
        ptx::sync_block();
        if (!args.gate_gradient) return;
        store_gate_gradient(range, row, head);
    }
    // Of d_o r^T and y r^T makes W and L, and d_beta = y . r.
    HEADRACE_DEVICE void weigh_pairs(const PairSums& d_P, const PairSums& d_l, bool fine) const {
        const LanePlace at;
        // Matrix's places, of (i, j) and on the diagonal of (j, i) and (j + 1, i): a tile on is one bit.
        const int block = token_row() / 8, of_pair = place_of(token_row() + at.row, pair_column() / 8) + at.column,
                  of_first = place_of(token_row() + at.column, block) + at.row,
                  of_next = place_of(token_row() + at.column + 1, block) + at.row;
        each_lower_tile([&](int first) {
            const bool on_diagonal = pair_column() + 8 * first == token_row();
#pragma unroll
            for (int tile = first; tile < first + 2; ++tile) {
                const int j = pair_column() + 8 * tile + at.column;
                const float2 of_j = *reinterpret_cast<const float2*>(write + j);
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int i = token_row() + at.row + 8 * half,
                              place = (of_pair ^ 8 * tile) + 8 * tensor_chunk * half;
                    const float* const read_ij = d_P[tile] + 2 * half;
                    const float* const erase_ij = d_l[tile] + 2 * half;
                    const float of_read = read[i], of_erase = delta ? erase[i] : 0.0f;
                    const float w[2] = {read_ij[0] * of_j.x * of_read, read_ij[1] * of_j.y * of_read},
                                l[2] = {erase_ij[0] * of_j.x * of_erase, erase_ij[1] * of_j.y * of_erase};
                    const SplitPair of_w = split_pair(w[0], w[1]), of_l = split_pair(l[0], l[1]);
                    if (!on_diagonal) {
                        const auto set = [&](Matrix<tensor_chunk> m, std::uint32_t both) {
                            *reinterpret_cast<std::uint32_t*>(m.data + place) = both;
                        };
                        set(W, of_w.high);
                        if (delta) set(L, of_l.high);
                        if (fine) set(W_low, of_w.low), set(L_low, of_l.low);
                        continue;
                    }
#pragma unroll
                    for (int side = 0; side < 2; ++side) {
                        if (i < j + side) continue;
                        const bool itself = i == j + side;
                        if (itself) {
                            own[i] = w[side];
                            if (delta) d_beta[i] = erase_ij[side] * beta_slope[i];
                        }
                        const int mirrored =
                            ((side == 0 ? of_first : of_next) ^ 8 * half) + 8 * tensor_chunk * (tile - first);
                        const auto set = [&](Matrix<tensor_chunk> m, std::uint32_t both) {
                            const std::uint32_t bits = itself ? 0u : both >> 16 * side;
                            m.data[place + side] = m.data[mirrored] = static_cast<std::uint16_t>(bits);
                        };
                        set(W, of_w.high);
                        if (delta) set(L, of_l.high);
                        if (fine) set(W_low, of_w.low), set(L_low, of_l.low);
                    }
                }
            }
        });
    }
    // Where Matrix<tensor_chunk> has the first element of a piece of a row.
    HEADRACE_DEVICE static int place_of(int row, int piece) { return row * tensor_chunk + ((piece ^ row % 8) * 8); }

    // Adds what tokens have from the chunk's borders and with themselves to d_q and d_k, begins the gate's gradient
    // with what of it spans gates up to the borders, and keeps decays in groups for the pairs across.
    HEADRACE_DEVICE void fold_borders(TokenGroups& d_q, TokenGroups& d_k, TokenGroups& d_gate, const BorderSums& border,
                                      const ChannelPairs<K, delta>& pairs) const {
        const auto& through = pairs.through;
        float before[2] = {1, 1}, after[token_groups][2], ended[token_groups][4], begun[4];
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            after[token_groups - 1][c] = 1;
#pragma unroll
            for (int group = token_groups - 1; group > 0; --group)
                after[group - 1][c] = after[group][c] * through[group][c];
            begun[2 * c] = begun[2 * c + 1] = crossing(border, c) * after[0][c] * through[0][c];
        }
#pragma unroll
        for (int group = 0; group < token_groups; ++group) {
            const int first = group_tokens * group;
            GroupDecays decays;
            decays.load(lane_gates().from(first, 0));
            decays.join_all();
            if (group > 0) pairs.keep(decays.since, pairs.of_since(group));
            if (group < token_groups - 1) pairs.keep(decays.until, pairs.of_until(group));
            TokenGroup queries, keys, from_start, to_end;
            load_group(queries, pairs.q, channel(), first);
            load_group(keys, pairs.k, channel(), first);
#pragma unroll
            for (int h = 0; h < 2; ++h) {
#pragma unroll
                for (int n = 0; n < 4; ++n) {
                    const int c = n / 2, i = first + group_token(h) + n % 2;
                    const float start = decays.since[h][n] * before[c], end = decays.until[h][n] * after[group][c],
                                of_read = border.read[group][h][n] * (start * read[i]),
                                of_erase = delta ? border.erase[group][h][n] * (start * erase[i]) : 0.0f,
                                of_write = border.write[group][h][n] * (end * write[i]);
                    d_q[group][h][n] += fmaf(own[i], keys[h][n], of_read);
                    d_k[group][h][n] += fmaf(own[i], queries[h][n], delta ? of_erase + of_write : of_write);
                    from_start[h][n] = queries[h][n] * of_read;
                    if (delta) from_start[h][n] = fmaf(keys[h][n], of_erase, from_start[h][n]);
                    to_end[h][n] = keys[h][n] * of_write;
                }
            }
            std::uint32_t ending[4], beginning[4];
            to_operand(ending, from_start);
            to_operand(beginning, to_end);
#pragma unroll
            for (int n = 0; n < 4; ++n) d_gate[group][0][n] = d_gate[group][1][n] = begun[n], ended[group][n] = 0;
            constexpr std::uint32_t all = GateSums::all;
            ptx::multiply_bf16(d_gate[group][0], ending, {pairs.sums.from_own, all});
            ptx::multiply_bf16(d_gate[group][1], ending, {0u, pairs.sums.from_own});
            ptx::multiply_bf16(d_gate[group][0], beginning, {pairs.sums.before, 0u});
            ptx::multiply_bf16(d_gate[group][1], beginning, {all, pairs.sums.before});
            ptx::multiply_bf16(begun, beginning, {all, all});
            ptx::multiply_bf16(ended[group], ending, {all, all});
#pragma unroll
            for (int c = 0; c < 2; ++c) before[c] *= through[group][c];
        }
#pragma unroll
        for (int group = token_groups - 2; group >= 0; --group) {
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                d_gate[group][0][n] += ended[group + 1][n], d_gate[group][1][n] += ended[group + 1][n];
                ended[group][n] += ended[group + 1][n];
            }
        }
    }
    // <S, D> of the lane's channel c, of the lane that has it on the diagonal.
    HEADRACE_DEVICE static float crossing(const BorderSums& border, int c) {
        const int g = lane() / 4;
        const float own = g % 2 == 0 ? border.crossing[c][2 * c] : border.crossing[c][2 * c + 1];
        return ptx::shuffle_from(own, 4 * g + g / 2);
    }
    HEADRACE_DEVICE void store_gate_gradient(const ChunkRange& range, std::int64_t row, std::int64_t head) {
        const GateRows rows = gate_rows(args.d_g, range, head);
        const bool sums = args.d_gamma != nullptr || args.gate_formula != GateFormula::log_decay;
        if (sums || !rows.in_pieces) return tokens.store_gate_gradient(gates, row, head, range);
        constexpr int pieces = K / 4, step = threads / pieces;
        const int i = static_cast<int>(threadIdx.x) / pieces, c = static_cast<int>(threadIdx.x) % pieces * 4;
        float* const own = reinterpret_cast<float*>(args.d_g.data) + rows.first + i * rows.step + c;
        const float* const from = &gates.at(i, c);
        each_own_row<threads, pieces>([&](int token, int n) {
            if (token < range.length && c < args.K)
                *reinterpret_cast<float4*>(own + n * step * rows.step) =
                    *reinterpret_cast<const float4*>(from + n * step * (K + 4));
        });
        ptx::sync_block();
    }

    // ---- rows of keys ----
    // Of the gradient times the inverse norm: with y = x r the unit rows, d - y (y . d) is that of x. It takes the
    // place of the rows.
    HEADRACE_DEVICE void store_rows(const Strided& tensor, const TokenGroups& d, Matrix<K> x, const float* inverse_norm,
                                    const ChunkRange& range, std::int64_t key_head) const {
        if (!tensor.given) return;
        const auto from = OperandAt<K>::across(x);
        float* const along = own;  // [C] y . d times r^2, of which no head has need any more
        if (args.l2norm) {
#pragma unroll
            for (int group = 0; group < token_groups; ++group) add_products(d[group], from, group_tokens * group);
            ptx::sync_block();
            each(tensor_chunk, [&](int i) {
                float sum = 0;
#pragma unroll
                for (int w = 0; w < K / group_channels; ++w) sum += of_rows[w * tensor_chunk + i];
                along[i] = sum * inverse_norm[i] * inverse_norm[i];
            });
            ptx::sync_block();
        }
        const int even = element_of(group_token(0)), odd = element_of(group_token(0) + 1);
#pragma unroll
        for (int group = 0; group < token_groups; ++group) {
            TokenGroup rows;
            if (args.l2norm) load_group(rows, from, channel(), group_tokens * group);
            ptx::sync_warp();  // every lane has its rows
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int i = group_tokens * group + 8 * h;
                float2 of{};
                if (args.l2norm) of = *reinterpret_cast<const float2*>(along + i + group_token(0));
#pragma unroll
                for (int p = 0; p < 2; ++p) {
                    float left = d[group][h][p], right = d[group][h][2 + p];
                    if (args.l2norm) {
                        const float of_token = p == 0 ? of.x : of.y;
                        left -= of_token * rows[h][p], right -= of_token * rows[h][2 + p];
                    }
                    const std::uint32_t both = ptx::round_to_bf16(left, right);
                    const int place = p == 0 ? even : odd;
                    x.data[place + i * K] = static_cast<std::uint16_t>(both);
                    x.data[(place ^ 8) + i * K] = static_cast<std::uint16_t>(both >> 16);
                }
            }
        }
        ptx::sync_block();
        store_matrix(tensor, x, range, key_head, 0, args.K);
    }
    // Where Matrix<K> has the lane's first channel of one of the first eight tokens; its other one lies in the next
    // piece.
    HEADRACE_DEVICE static int element_of(int token) {
        return token * K + (channel() / 8 ^ token) * 8 + group_channel(0);
    }
    // of_rows = the warp's part of d . x, of tokens from `first` on.
    HEADRACE_DEVICE void add_products(const TokenGroup& d, OperandAt<K> x, int first) const {
        TokenGroup rows;
        load_group(rows, x, channel(), first);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
#pragma unroll
            for (int p = 0; p < 2; ++p) {
                float sum = fmaf(d[h][p], rows[h][p], d[h][2 + p] * rows[h][2 + p]);
#pragma unroll
                for (int distance = 4; distance < warp_lanes; distance *= 2) sum += ptx::shuffle_xor(sum, distance);
                if (lane() < 4) of_rows[warp() * tensor_chunk + first + group_token(h) + p] = sum;
            }
        }
    }
};

}  // namespace headrace::cuda
