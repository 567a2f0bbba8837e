// ChannelGradient: the page chunk_gradients under channel gates on tensor cores: all gradients of a chunk, from what
// the sweeps left of it.
#pragma once
// over 400 lines: one kernel whose sums stay in registers from part to part.

#include "cuda/chunk/channel_key_rows.hpp"
#include "cuda/chunk/channel_pairs.hpp"
#include "cuda/chunk/gradient_products.hpp"
#include "cuda/chunk/sweep_walk.hpp"
#include "cuda/tiles/token_matrices.hpp"
#include "cuda/tiles/token_tiles.hpp"

namespace headrace::cuda {

// A block has a chunk and a value head, 64 values at a time. A warp owns 16 channels: their rows, gates and gradients
// over the chunk's tokens never leave it (channel_tokens.hpp). Betas, norms and the scale are factors of the sums. With
// d = beta r, z = beta y as on the page (additive rule: d = v), rows q, k as given and their inverse norms |q|^-1,
// |k|^-1,
//     W_ij = scale |q_i|^-1 |k_j|^-1 (d_o_i . d_j), j <= i         L_ij = -|k_i|^-1 |k_j|^-1 (z_i . d_j), j < i
//     d_q = scale |q|^-1 e^G (S d_o) + pairs                       (ChannelPairs)
//     d_k = -|k|^-1 e^G (S z) + |k|^-1 e^{G_L - G} (D d) + pairs
// are gradients of unit rows times the inverse norms, and rows times these what a token adds to gates before or behind
// it.
//
// fine: of chunks whose keys overlap, residuals and what is made of them with 16 bits. Those are apart, as they take
// registers that no others should go without.
template <int K, bool delta, bool fine>
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
    ChannelKeyRows<K> rows;
    Stage first_stage;
    std::size_t stage_begin, stage_size;
    std::int64_t stage_elements;  // from a stage to the next
    Matrix<tensor_chunk> W, L, W_low, L_low;  // one behind the other
    float *beta_slope, *d_beta;               // [C]
    float *read, *erase, *write;              // [C] factors of rows, without decays
    float* own;                               // [C] diagonal of W
    float* totals;                            // [token_groups, K] decays through groups (Through)
    Tile<float> gates;                        // [C,K] decays, then the gate's gradient
    TokenTiles<float, delta, Gates::of_channels> tokens;

    __host__ __device__ ChannelGradient(const KernelArgs& arguments, Arena& arena)
        : args(arguments), rows(args, arena), tokens(args, carve_matrices(arena), 1, 16, true) {
        for (float** vector : {&beta_slope, &d_beta, &read, &erase, &write, &own})
            *vector = arena.take<float>(tensor_chunk);
        totals = arena.take<float>(token_groups * K);
        // Pairs of rows 8 banks apart, in pieces of 16 bytes.
        gates = {arena.take<float>(tensor_chunk * (K + 4)), K + 4};
        // Last, as whether it is there is not known to the compiler.
        take_padding(arena);
        stage_elements = static_cast<std::int64_t>((arena.shared_used - stage_begin) / sizeof(std::uint16_t));
        if (args.stages == 2) arena.take<char>(stage_size);
    }

    // The chunk in a row of all sequences' (part_at), one value head.
    HEADRACE_DEVICE void run(std::int64_t row, std::int64_t head) {
        if (!fine) clear_parameter_sums(args, row, head);
        if (!rows.find(row, head)) return;
        if (delta && keys_overlap(args, rows.at->of_head) != fine) return;
        rows.fetch();
        fetch_gates();
        PairSums d_P = {}, d_l = {};
        BorderSums border = {};
        const int blocks = value_blocks(), ahead = args.stages - 1;  // what arrives, of what is computed
        HEADRACE_ROLLED
        for (int block = -ahead; block < blocks; ++block) {
            if (block > -ahead) end_copies_of_block();
            if (block + ahead < blocks) fetch(block + ahead);
            if (block == -ahead) load_betas(), leave_level_operands(W);
            if (ahead == 0) end_copies_of_block();
            if (block < 0) continue;
            if (block == 0) {
                rows.weigh();
                ptx::sync_block();
                begin_head();
            }
            const Stage now = stage_of(block);
            multiply_both<true>(d_P, d_l, now, now.d);
            if (fine) add_rest(d_P, d_l, border, now, block);
            add_borders(border, now);
        }
        end_head(d_P, d_l, border);
    }

  private:
    // Ahead of numbers, as they begin at multiples of their rows.
    __host__ __device__ Arena& carve_matrices(Arena& arena) {
        take_padding(arena);
        const std::size_t begin = arena.shared_used;
        for (Matrix<K>* matrix : {&first_stage.S, &first_stage.D}) *matrix = Matrix<K>::take(arena, tensor_values);
        for (Matrix<tensor_values>* matrix : {&first_stage.d, &first_stage.d_o})
            *matrix = Matrix<tensor_values>::take(arena, tensor_chunk);
        first_stage.y = delta ? Matrix<tensor_values>::take(arena, tensor_chunk) : first_stage.d;
        stage_begin = begin, stage_size = arena.shared_used - begin;
        W = L = W_low = L_low = Matrix<tensor_chunk>::take(arena, tensor_chunk);
        if (delta) L = Matrix<tensor_chunk>::take(arena, tensor_chunk);
        if (fine)
            for (Matrix<tensor_chunk>* matrix : {&W_low, &L_low})
                *matrix = Matrix<tensor_chunk>::take(arena, tensor_chunk);
        return arena;
    }

    HEADRACE_DEVICE static int token_row() { return warp() / column_parts * 16; }
    HEADRACE_DEVICE static int pair_column() { return warp() % column_parts * 8 * pair_tiles; }
    HEADRACE_DEVICE int value_blocks() const { return (args.V + tensor_values - 1) / tensor_values; }
    HEADRACE_DEVICE Stage stage_of(int step) const {
        return first_stage.behind(args.stages == 2 ? step % 2 * stage_elements : 0);
    }
    // From the lane's first token and channel on.
    HEADRACE_DEVICE Tile<float> lane_gates() const {
        const int own = lane_here();
        return gates.from(own % 4 * 2, warp_channel() + own / 4);
    }

    // ---- inputs ----
    // Rows that lie behind the last value become zero: no sweep has written them.
    HEADRACE_DEVICE void fetch(int block) const {
        const int first = block * tensor_values, count = args.V - first,
                  values = count < tensor_values ? count : tensor_values;
        const std::int64_t head = rows.at->head, line = rows.at->of_head * round_up(args.V, 16) + first;
        const ChunkRange& range = rows.at->range;
        const Stage stage = stage_of(block);
        const SweptChunks& from = args.swept;
        HEADRACE_ROLLED  // here and below, the same code for both: what is new to a multiprocessor is slow
        for (int which = 0; which < 2; ++which)
            copy_lines<0, threads>(which == 0 ? stage.S : stage.D,
                                   (which == 0 ? from.states : from.adjoints) + line * K, count);
        if (delta) {
            HEADRACE_ROLLED
            for (int which = 0; which < 2; ++which)
                copy_lines<0, threads>(which == 0 ? stage.d : stage.y,
                                       (which == 0 ? from.residuals : from.d_written) + line * tensor_chunk, count);
        } else {
            copy_tokens<tensor_values, threads>(stage.d, args.v, range, head, first, values);
        }
        copy_tokens<tensor_values, threads>(stage.d_o, args.d_o, range, head, first, values);
        ptx::end_copies();
    }
    // Of gates, log decays or their gradients: the first of the head, elements to the next token.
    struct GateRows {
        std::int64_t first, step;
        bool in_pieces;  // of four floats
    };
    HEADRACE_DEVICE GateRows gate_rows(const Strided& tensor) const {
        const ChunkRange& range = rows.at->range;
        const std::int64_t first = tensor.given ? offset_of(tensor, range.row, range.token(0), rows.at->head) : 0;
        return {first, range.reverse ? -tensor.stride[1] : tensor.stride[1],
                tensor.given && tensor.dtype == DType::f32 && tensor.stride[3] == 1 && tensor.stride[1] % 4 == 0 &&
                    args.K % 4 == 0 && reinterpret_cast<std::uintptr_t>(tensor.data + 4 * first) % 16 == 0};
    }
    // Log decays; begin_head makes decays of them.
    HEADRACE_DEVICE void fetch_gates() const {
        const GateRows from_rows = gate_rows(args.log_decays);
        const int length = rows.at->range.length;
        constexpr int pieces = K / 4, step = threads / pieces;
        const int own_piece = thread_here(), i = own_piece / pieces, c = own_piece % pieces * 4;
        const float* const from = reinterpret_cast<const float*>(args.log_decays.data) + from_rows.first;
        const float* const own = from + i * from_rows.step + c;
        const std::uint32_t first = ptx::shared_address(&gates.at(i, c));
        each_own_row<threads, pieces>([&](int row, int n) {
            const bool inside = row < length && c < args.K;
            ptx::copy_16(first + 4 * (K + 4) * step * n, inside ? own + n * step * from_rows.step : from,
                         inside ? 16 : 0);
        });
        ptx::end_copies();
    }
    HEADRACE_DEVICE void load_betas() const {
        if (!delta) return;
        const ChunkRange& range = rows.at->range;
        each_token([&](int i) {
            const Beta<float> beta =
                i < range.length ? beta_value<float>(args, range.row, range.token(i), rows.at->head, 0)
                                 : Beta<float>{0, 1};
            write[i] = beta.value, beta_slope[i] = beta.slope;
        });
    }
    // Factors of tokens, and decays of the gates.
    HEADRACE_DEVICE void begin_head() const {
        const int length = rows.at->range.length;
        each_token([&](int i) {
            const float key = delta ? rows.k_norm[i] * write[i] : rows.k_norm[i];
            read[i] = static_cast<float>(args.scale) * rows.q_norm[i];
            erase[i] = -key, write[i] = key;
        });
        constexpr float log2_e = 1.4426950408889634f;
        const int c = thread_here() % (K / 4) * 4;
        each_own_row<threads, K / 4>([&](int i, int) {
            const int count = i < length ? args.K - c : 0;
            float4& all = *reinterpret_cast<float4*>(&gates.at(i, c));
            const float4 of = all;
            // NaN of a gate that is NaN or above 0, without a branch.
            const auto decay = [&](float log_decay, int n) {
                const float power = log_decay <= 0 ? log_decay * log2_e : not_a_number<float>();
                return ptx::exp2_approximate(n < count ? power : 0.0f);
            };
            all = {decay(of.x, 0), decay(of.y, 1), decay(of.z, 2), decay(of.w, 3)};
        });
        ptx::sync_block();
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
    // Without `reads` of d_l only.
    template <bool reads>
    HEADRACE_DEVICE static void multiply_both(PairSums& d_P, PairSums& d_l, const Stage& now,
                                              Matrix<tensor_values> written) {
        using At = OperandAt<tensor_values>;
        const At of_d_o = At::down(now.d_o), of_y = At::across(now.y), of_written = written_operands(written);
        HEADRACE_ROLLED
        for (int d = 0; d < tensor_values; d += 16) {
            std::uint32_t d_o[4], y[4];
            if (reads) ptx::load_matrix(d_o, of_d_o.at(token_row(), d));
            if (delta) ptx::load_matrix_transposed(y, of_y.at(d, token_row()));
            each_lower_tile([&](int tile) {
                std::uint32_t b[4];
                load_written(b, of_written, d, pair_column() + 8 * tile);
                if (reads) {
                    ptx::multiply_bf16(d_P[tile], d_o, {b[0], b[1]});
                    ptx::multiply_bf16(d_P[tile + 1], d_o, {b[2], b[3]});
                }
                if (!delta) return;
                ptx::multiply_bf16(d_l[tile], y, {b[0], b[1]});
                ptx::multiply_bf16(d_l[tile + 1], y, {b[2], b[3]});
            });
        }
    }
    // What r and y have below their bf16, which takes the place of W_low: y r^T and d_o r^T, D r and S y.
    HEADRACE_DEVICE void add_rest(PairSums& d_P, PairSums& d_l, BorderSums& border, Stage now, int block) const {
        const int first = block * tensor_values;
        const std::int64_t line = (rows.at->of_head * round_up(args.V, 16) + first) * tensor_chunk;
        const auto take = [&](const std::uint16_t* from) {
            copy_lines(W_low, from + line, args.V - first);
            ptx::end_copies();
            end_copies_of_block();
        };
        take(args.swept.residuals_low);
        multiply_both<true>(d_P, d_l, now, W_low);
        add_border(border.write, now.D, W_low);
        ptx::sync_block();
        take(args.swept.d_written_low);
        add_border(border.erase, now.S, W_low);
        now.y = W_low;
        multiply_both<false>(d_P, d_l, now, now.d);
        ptx::sync_block();
    }
    using Products = GradientProducts<ptx::multiplies_by_group>;
    static HEADRACE_DEVICE group_products::Sums& tiles_of(TokenGroups& sums) {
        static_assert(sizeof(TokenGroups) == sizeof(group_products::Sums));
        return reinterpret_cast<group_products::Sums&>(sums);
    }
    // Of states [64 values, K] left operands of this warp's channels; by groups loaded once for all products.
    struct Channels {
        static constexpr bool loads_all = ptx::multiplies_by_group;
        static constexpr int steps = tensor_values / 16;
        OperandAt<K> from;
        std::uint32_t all[loads_all ? steps : 1][4];

        HEADRACE_DEVICE explicit Channels(Matrix<K> states) : from(OperandAt<K>::across(states)) {
#pragma unroll
            for (int step = 0; step < (loads_all ? steps : 0); ++step) load(all[step], step);
        }
        HEADRACE_DEVICE void operator()(std::uint32_t (&a)[4], int step) const {
            if constexpr (loads_all) {
#pragma unroll
                for (int n = 0; n < 4; ++n) a[n] = all[step][n];
            } else {
                load(a, step);
            }
        }

      private:
        HEADRACE_DEVICE void load(std::uint32_t (&a)[4], int step) const {
            ptx::load_matrix_transposed(a, from.at(16 * step, warp_channel()));
        }
    };
    // sums += states m, states [64 values, K], m [64 values, C].
    HEADRACE_DEVICE static void add_border(TokenGroups& sums, Matrix<K> states, Matrix<tensor_values> m) {
        Products::multiply(tiles_of(sums), Channels(states), m, 0, true);
        Products::template wait<0>(tiles_of(sums));
    }
    HEADRACE_DEVICE static void add_borders(BorderSums& border, const Stage& now) {
        const Channels S(now.S), D(now.D);
        Products::multiply_transposed(tiles_of(border.read), S, now.d_o, true);
        if constexpr (delta) {
            Products::multiply(tiles_of(border.erase), S, now.y, 0, true);
            Products::multiply(tiles_of(border.write), D, now.d, 0, true);
        } else {
            Products::multiply_transposed(tiles_of(border.write), D, now.d, true);
        }
#pragma unroll
        for (int step = 0; step < Channels::steps; ++step) {
            std::uint32_t a[4], b[4];
            S(a, step), D(b, step);
            ptx::multiply_bf16(border.crossing[0], a, {b[0], b[2]});
            ptx::multiply_bf16(border.crossing[1], a, {b[1], b[3]});
        }
        Products::template wait<0>(tiles_of(border.read), tiles_of(border.write));
        if constexpr (delta) Products::template wait<0>(tiles_of(border.erase));
    }

    // ---- of a head, behind its values ----
    HEADRACE_DEVICE void end_head(const PairSums& d_P, const PairSums& d_l, const BorderSums& border) {
        weigh_pairs(d_P, d_l);
        ptx::sync_block();  // the stage has been read, too
        TokenGroups d_q, d_k, d_gate;
        fold_borders(d_q, d_k, d_gate, border, pairs_of<false>(0));
        add_pairs<Digits::high, fine>(d_q, d_k, d_gate, 0);
        if constexpr (fine) {
            pairs_of<false>(0).keep_since();
            add_pairs<Digits::low, false>(d_q, d_k, d_gate, 0);
            pairs_of<false>(0).keep_since();
            add_pairs<Digits::high, false>(d_q, d_k, d_gate, 1);
        }
        if (args.d_beta.given && delta) store_numbers(args.d_beta, d_beta, rows.at->range, rows.at->head);
        if (args.gate_gradient) {
            const Tile<float> to = lane_gates();
#pragma unroll
            for (int group = 0; group < token_groups; ++group) {
#pragma unroll
                for (int h = 0; h < 2; ++h) {
#pragma unroll
                    for (int n = 0; n < 4; ++n)
                        to.at(group_tokens * group + 8 * h + n % 2, n / 2 * 8) = d_gate[group][h][n];
                }
            }
        }
        if (args.group > 1) {
            using Sums = ChannelKeySums<K>;
            Sums::leave(Sums::left(args, rows.at->of_head, 0), d_q);
            Sums::leave(Sums::left(args, rows.at->of_head, 1), d_k);
        } else {
            rows.store(d_q, d_k);
        }
        ptx::sync_block();
        if (args.gate_gradient) store_gate_gradient();
    }
    template <Digits of_rows, bool fine_sums>
    HEADRACE_DEVICE void add_pairs(TokenGroups& d_q, TokenGroups& d_k, TokenGroups& d_gate, int part) const {
        const auto pairs = pairs_of<fine_sums>(part);
        pairs.template add_inside<of_rows>(d_q, d_k, d_gate);
        pairs.template add_across<of_rows>(d_q, d_k, d_gate);
    }
    // Of W and L, or of W_low and L_low. Made anew for each use, as registers are few.
    template <bool fine_sums>
    HEADRACE_DEVICE ChannelPairs<K, delta, fine_sums> pairs_of(int part) const {
        const int own = lane_here(), first_channel = warp_channel();
        return {{OperandAt<K>::across(rows.q, own).at(0, first_channel)},
                PairOperands({W.data + part * (2 * PairOperands::bytes / 2)}, own),
                lane_gates(),
                reinterpret_cast<float4*>(first_stage.S.data),
                {totals + first_channel + own / 4},
                GateSums(own),
                W,
                args.V};
    }
    // Of d_o r^T and y r^T makes W and L, and d_beta = y . r.
    HEADRACE_DEVICE void weigh_pairs(const PairSums& d_P, const PairSums& d_l) const {
        const LanePlace at;
        // Matrix's places, of (i, j) and on the diagonal of (j, i) and (j + 1, i): a tile on is one bit.
        const int first_row = ptx::not_before(token_row()), block = first_row / 8,
                  of_pair = place_of(first_row + at.row, pair_column() / 8) + at.column,
                  of_first = place_of(first_row + at.column, block) + at.row,
                  of_next = place_of(first_row + at.column + 1, block) + at.row;
        each_lower_tile([&](int first) {
            const bool on_diagonal = pair_column() + 8 * first == token_row();
#pragma unroll
            for (int tile = first; tile < first + 2; ++tile) {
                const int j = pair_column() + 8 * tile + at.column;
                const float2 of_j = *reinterpret_cast<const float2*>(write + j);
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int i = first_row + at.row + 8 * half,
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

    // Begins d_q and d_k with what tokens have from the chunk's borders and with themselves, the gate's gradient with
    // what of it spans gates up to the borders, and keeps decays in groups for the pairs across.
    HEADRACE_DEVICE void fold_borders(TokenGroups& d_q, TokenGroups& d_k, TokenGroups& d_gate, const BorderSums& border,
                                      const ChannelPairs<K, delta, false>& pairs) const {
        const Through<K>& through = pairs.through;
        ptx::sync_warp();
#pragma unroll
        for (int group = 0; group < token_groups; ++group)
            through.set(group, group_total(pairs.decays.from(group_tokens * group, 0)));
        ptx::sync_warp();
        float before[2] = {1, 1}, ended[token_groups][2], begun[4];
#pragma unroll
        for (int c = 0; c < 2; ++c)
            begun[2 * c] = begun[2 * c + 1] = crossing(border, c) * through.behind(0, c) * through.at(0, c);
#pragma unroll
        for (int group = 0; group < token_groups; ++group) {
            // Where registers are fewest.
            if (group > (fine && K > 64 ? 0 : 2) && !goes_on(args.V)) return;
            const int first = group_tokens * group;
            GroupDecays decays;
            decays.load(pairs.decays.from(first, 0));
            decays.join_all();
            if (group > 0) pairs.keep(decays.since, pairs.of_since(group));
            if (group < token_groups - 1) pairs.keep(decays.until, pairs.of_until(group));
            TokenGroup queries, keys, from_start, to_end;
            const float after[2] = {through.behind(group, 0), through.behind(group, 1)};
            pairs.load_queries(queries, group);
            pairs.load_keys(keys, group);
#pragma unroll
            for (int h = 0; h < 2; ++h) {
#pragma unroll
                for (int n = 0; n < 4; ++n) {
                    const int c = n / 2, i = first + group_token(h) + n % 2;
                    const float start = decays.since[h][n] * before[c], end = decays.until[h][n] * after[c],
                                of_read = border.read[group][h][n] * (start * read[i]),
                                of_erase = delta ? border.erase[group][h][n] * (start * erase[i]) : 0.0f,
                                of_write = border.write[group][h][n] * (end * write[i]);
                    d_q[group][h][n] = fmaf(own[i], keys[h][n], of_read);
                    d_k[group][h][n] = fmaf(own[i], queries[h][n], delta ? of_erase + of_write : of_write);
                    from_start[h][n] = queries[h][n] * of_read;
                    if (delta) from_start[h][n] = fmaf(keys[h][n], of_erase, from_start[h][n]);
                    to_end[h][n] = keys[h][n] * of_write;
                }
            }
#pragma unroll
            for (int n = 0; n < 4; ++n) d_gate[group][0][n] = d_gate[group][1][n] = begun[n];
            float own_ended[4] = {};
            HEADRACE_ROLLED
            for (int turn = 0; turn < (fine ? 2 : 1); ++turn)
                add_to_gates(d_gate[group], begun, own_ended, from_start, to_end, pairs.sums);
#pragma unroll
            for (int c = 0; c < 2; ++c) ended[group][c] = own_ended[2 * c], before[c] *= through.at(group, c);
        }
#pragma unroll
        for (int group = token_groups - 2; group >= 0; --group) {
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                d_gate[group][0][n] += ended[group + 1][n / 2], d_gate[group][1][n] += ended[group + 1][n / 2];
            }
            ended[group][0] += ended[group + 1][0], ended[group][1] += ended[group + 1][1];
        }
    }
    // d_gate of a group, `begun` for those behind it and `ended` for those before += what its tokens add to gates from
    // the chunk's first on, and up to its last.
    HEADRACE_DEVICE static void add_to_gates(TokenGroup& d_gate, float (&begun)[4], float (&ended)[4],
                                             TokenGroup& from_start, TokenGroup& to_end, const GateSums& sums) {
        constexpr std::uint32_t all = GateSums::all;
        std::uint32_t ending[4], beginning[4];
        take_operand<fine>(ending, from_start);
        take_operand<fine>(beginning, to_end);
        ptx::multiply_bf16(d_gate[0], ending, {sums.from_own, all});
        ptx::multiply_bf16(d_gate[1], ending, {0u, sums.from_own});
        ptx::multiply_bf16(d_gate[0], beginning, {sums.before, 0u});
        ptx::multiply_bf16(d_gate[1], beginning, {all, sums.before});
        ptx::multiply_bf16(begun, beginning, {all, all});
        ptx::multiply_bf16(ended, ending, {all, all});
    }
    // <S, D> of the lane's channel c, of the lane that has it on the diagonal.
    HEADRACE_DEVICE static float crossing(const BorderSums& border, int c) {
        const int g = lane() / 4;
        const float own = g % 2 == 0 ? border.crossing[c][2 * c] : border.crossing[c][2 * c + 1];
        return ptx::shuffle_from(own, 4 * g + g / 2);
    }
    HEADRACE_DEVICE void store_gate_gradient() {
        const GateRows to = gate_rows(args.d_g);
        const bool sums = args.d_gamma != nullptr || args.gate_formula != GateFormula::log_decay;
        if (sums || !to.in_pieces) {
            tokens.store_gate_gradient(gates, rows.at->row, rows.at->head, rows.at->range);
            return;
        }
        const int length = rows.at->range.length;
        constexpr int pieces = K / 4, step = threads / pieces;
        const int own_piece = thread_here(), i = own_piece / pieces, c = own_piece % pieces * 4;
        float* const own = reinterpret_cast<float*>(args.d_g.data) + to.first + i * to.step + c;
        const float* const from = &gates.at(i, c);
        each_own_row<threads, pieces>([&](int token, int n) {
            if (token < length && c < args.K)
                *reinterpret_cast<float4*>(own + n * step * to.step) =
                    *reinterpret_cast<const float4*>(from + n * step * (K + 4));
        });
        ptx::sync_block();
    }
};

}  // namespace headrace::cuda
