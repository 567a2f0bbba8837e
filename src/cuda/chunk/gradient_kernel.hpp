// GradientKernel: the page chunk_gradients of the delta rule on tensor cores: all gradients of a chunk, from what the
// sweeps (sweep_kernel.hpp) left of it.
#pragma once
// over 400 lines: one kernel whose sums stay in registers from part to part.

#include "cuda/chunk/gradient_pairs.hpp"
#include "cuda/chunk/sweep_kernel.hpp"
#include "cuda/chunk/tensor_decays.hpp"
#include "cuda/tiles/token_matrices.hpp"
#include "cuda/tiles/token_tiles.hpp"

namespace headrace::cuda {

// A block of eight warps has a chunk and a key head, and its value heads one after another, 64 values at a time. Of
// products with tokens as rows a warp has 16 of them and half of the columns. Everything enters them as it came or was
// saved; betas, decays and norms are factors of the sums. With d = beta r, z = beta y as on the page, rows of q, k, e
// as given and their inverse norms |q|^-1, |k|^-1, |e|^-1,
//     W_ij = scale |q_i|^-1 |k_j|^-1 e^{G_i - G_j} (d_o_i . d_j), j <= i
//     L_ij = -|e_i|^-1 |k_j|^-1 e^{Ge_i - G_j} (z_i . d_j), j < i
//     d_q = scale |q|^-1 e^G (d_o S^T) + W k        d_k = |k|^-1 e^{G_L - G} (d D^T) + W^T q + L^T e
//     d_e = -|e|^-1 e^{Ge} (z S^T) + L k
// are gradients of unit rows times the inverse norms, and W_ij q_i.k_j + L_ij e_i.k_j what the pair adds to a gate
// between its tokens. With e = k (not `comba`) d_e is added to d_k as it is made.
template <int K, bool comba>
struct GradientKernel {
    static constexpr int tiles = K / 16;  // of 8 channels: a warp's half of them
    using Sums = float[tiles][4];
    using PairSums = float[4][4];

    // 64 values of a head, as saved and given.
    struct Stage {
        Matrix<K> S, D;                   // [64 values, K]
        Matrix<tensor_values> r, y, d_o;  // r, y [64 values, C]; d_o [C, 64 values]
        HEADRACE_DEVICE Stage behind(std::int64_t elements) const {
            return {{S.data + elements},
                    {D.data + elements},
                    {r.data + elements},
                    {y.data + elements},
                    {d_o.data + elements}};
        }
    };
    // Of tokens 2 lane and 2 lane + 1.
    struct Numbers {
        float log_decay[2];
        Beta<float> beta[2];
    };
    // Products of rows with their gradients' part from the chunk's borders, of this lane's rows: q with d_q, e with
    // d_e, k with d_k.
    struct BorderDots {
        float q[2], e[2], k[2];
    };

    const KernelArgs& args;
    Matrix<K> q, k, e;
    Stage first_stage;
    std::int64_t stage_elements;  // from a stage to the next
    Matrix<tensor_chunk> W, L, W_low, L_low;
    Matrix<tensor_values> r_low, y_low;                            // of the values at hand, where keys overlap
    float *q_norm, *k_norm, *e_norm, *beta, *beta_slope, *d_beta;  // [C]
    float *read, *erase, *write;  // [C] factors of a head's rows from the chunk's start, and to its end
    float* through;               // [1] the chunk's decay
    float *of_q, *of_e, *of_k;    // [2,C] BorderDots by halves of channels
    float* warp_sums;             // [8]
    ScalarDecays decays;
    SpanningPairs pairs;
    Tile<float> gradient;  // [1,C] of the gate
    TokenTiles<float, true> tokens;

    __host__ __device__ GradientKernel(const KernelArgs& arguments, Arena& arena)
        : args(arguments), tokens(args, arena, 1, 16, true) {
        q = Matrix<K>::take(arena, tensor_chunk);
        k = Matrix<K>::take(arena, tensor_chunk);
        e = comba ? Matrix<K>::take(arena, tensor_chunk) : k;
        const std::size_t before = arena.shared_used;
        for (Matrix<K>* matrix : {&first_stage.S, &first_stage.D}) *matrix = Matrix<K>::take(arena, tensor_values);
        for (Matrix<tensor_values>* matrix : {&first_stage.r, &first_stage.y, &first_stage.d_o})
            *matrix = Matrix<tensor_values>::take(arena, tensor_chunk);
        stage_elements = static_cast<std::int64_t>((arena.shared_used - before) / sizeof(std::uint16_t));
        if (args.stages == 2) arena.take<std::uint16_t>(static_cast<std::size_t>(stage_elements));
        for (Matrix<tensor_chunk>* matrix : {&W, &L, &W_low, &L_low, &r_low})
            *matrix = Matrix<tensor_chunk>::take(arena, tensor_chunk);
        y_low = comba ? Matrix<tensor_values>::take(arena, tensor_values) : r_low;
        for (float** vector : {&q_norm, &k_norm, &beta, &beta_slope, &d_beta, &read, &erase, &write})
            *vector = arena.take<float>(tensor_chunk);
        through = arena.take<float>(1);
        e_norm = comba ? arena.take<float>(tensor_chunk) : k_norm;
        for (float** vector : {&of_q, &of_e, &of_k}) *vector = arena.take<float>(2 * tensor_chunk);
        warp_sums = arena.take<float>(8);
        decays.carve(arena);
        pairs.carve(arena);
        gradient = arena.tile<float>(1, tensor_chunk);
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
        copy_tokens(q, args.q, range, key_head, 0, args.K);
        copy_tokens(k, args.k, range, key_head, 0, args.K);
        if (comba) copy_tokens(e, args.p, range, key_head, 0, args.K);
        Sums d_q = {}, d_k = {}, d_e = {};
        heads(range, row, first_head, d_q, d_k, d_e);
        store_keys(range, key_head, d_q, d_k, d_e);
    }

  private:
    HEADRACE_DEVICE static int token_row() { return warp() / 2 * 16; }
    HEADRACE_DEVICE static int pair_column() { return warp() % 2 * 32; }
    HEADRACE_DEVICE static int key_column() { return warp() % 2 * (K / 2); }
    HEADRACE_DEVICE static bool on_or_below_diagonal() { return pair_column() <= token_row() + 15; }
    HEADRACE_DEVICE int value_blocks() const { return (args.V + tensor_values - 1) / tensor_values; }
    HEADRACE_DEVICE Stage stage_of(int step) const {
        return first_stage.behind(args.stages == 2 ? step % 2 * stage_elements : 0);
    }

    // Adds up d_q, d_k and d_e of all value heads; stores d_beta and the gate's gradient of each.
    HEADRACE_DEVICE void heads(const ChunkRange& range, std::int64_t row, std::int64_t first_head, Sums& d_q, Sums& d_k,
                               Sums& d_e) {
        const int blocks = value_blocks(), steps = args.group * blocks;
        Numbers next = numbers(range, first_head);
        fetch(range, row, first_head, 0);
        PairSums d_P = {}, d_l = {};
        BorderDots dots{};
        float crossing = 0;
        HEADRACE_ROLLED
        for (int step = 0; step < steps; ++step) {
            ptx::wait_for_copies<0>();
            ptx::sync_block();
            const std::int64_t head = first_head + step / blocks;
            const bool more = step + 1 < steps, last = step % blocks == blocks - 1;
            if (more && args.stages == 2) fetch(range, row, first_head, step + 1);
            if (step == 0) {
                weigh_rows();
                ptx::sync_block();
            }
            if (step % blocks == 0) begin_head(next);
            if (more && last) next = numbers(range, head + 1);
            const Stage now = stage_of(step);
            const bool fine = keys_overlap(args, row * args.HV + head);
            add_values(now, d_q, d_k, d_e, d_P, d_l, dots);
            if (fine) add_rest(now, row, head, step % blocks * tensor_values, d_P, d_l);
            if (args.gate_gradient) crossing += cross(now);
            if (last) {
                end_head(range, row, head, fine, d_q, d_k, d_e, d_P, d_l, dots, crossing);
                clear(d_P), clear(d_l);
                dots = {}, crossing = 0;
            }
            if (more && args.stages == 1) {
                ptx::sync_block();
                fetch(range, row, first_head, step + 1);
            }
        }
    }
    HEADRACE_DEVICE static void clear(PairSums& sums) {
#pragma unroll
        for (auto& tile : sums)
            for (float& sum : tile) sum = 0;
    }

    // Rows that lie behind the last value become zero: no sweep has written them.
    HEADRACE_DEVICE void fetch(const ChunkRange& range, std::int64_t row, std::int64_t first_head, int step) const {
        const int blocks = value_blocks(), first = step % blocks * tensor_values, count = args.V - first;
        const std::int64_t head = first_head + step / blocks, rows = round_up(args.V, 16),
                           line = (row * args.HV + head) * rows + first;
        const Stage stage = stage_of(step);
        const SweptChunks& from = args.swept;
        copy_lines(stage.S, from.states + line * K, count);
        copy_lines(stage.D, from.adjoints + line * K, count);
        copy_lines(stage.r, from.residuals + line * tensor_chunk, count);
        copy_lines(stage.y, from.d_written + line * tensor_chunk, count);
        copy_tokens<tensor_values, false>(stage.d_o, args.d_o, range, head, first,
                                          count < tensor_values ? count : tensor_values);
        ptx::end_copies();
    }

    // ---- numbers of tokens ----
    // By the first warp.
    HEADRACE_DEVICE Numbers numbers(const ChunkRange& range, std::int64_t head) const {
        Numbers of{{0, 0}, {{0, 1}, {0, 1}}};
#pragma unroll
        for (int token = 0; token < 2; ++token) {
            const int i = 2 * lane() + token;
            if (warp() > 0 || i >= range.length) continue;
            of.log_decay[token] = token_log_decay(args, range, i, head);
            of.beta[token] = beta_value<float>(args, range.row, range.token(i), head, 0);
        }
        return of;
    }
    // Four lanes have a row.
    HEADRACE_DEVICE void weigh_rows() const {
        const int i = 8 * warp() + ptx::not_before(lane()) / 4;
        const auto norm = [&](float* to, Matrix<K> x) {
            const float of_row = args.l2norm ? inverse_norm(dot_of_rows(x, x, i)) : 1.0f;
            if (lane() % 4 == 0) to[i] = of_row;
        };
        norm(q_norm, q), norm(k_norm, k);
        if (comba) norm(e_norm, e);
    }
    HEADRACE_DEVICE void begin_head(const Numbers& of) const {
        if (warp() == 0) {
            const ScalarDecays::OfLane lane_decays = decays.prepare(of.log_decay[0], of.log_decay[1]);
            if (lane() == 0) *through = static_cast<float>(lane_decays.through);
#pragma unroll
            for (int token = 0; token < 2; ++token) {
                const int i = 2 * lane() + token;
                const float own = of.beta[token].value;
                beta[i] = own, beta_slope[i] = of.beta[token].slope;
                read[i] = static_cast<float>(args.scale) * lane_decays.start[token] * q_norm[i];
                erase[i] = -(comba ? lane_decays.before[token] : lane_decays.start[token]) * e_norm[i] * own;
                write[i] = lane_decays.end[token] * k_norm[i] * own;
            }
        }
        ptx::sync_block();
    }

    // ---- of 64 values ----
    HEADRACE_DEVICE void add_values(const Stage& now, Sums& d_q, Sums& d_k, Sums& d_e, PairSums& d_P, PairSums& d_l,
                                    BorderDots& dots) const {
        if (on_or_below_diagonal()) {
            HEADRACE_ROLLED
            for (int d = 0; d < tensor_values; d += 16) {
                std::uint32_t d_o[4], y[4];
                load_a(d_o, now.d_o, token_row(), d);
                load_a_transposed(y, now.y, token_row(), d);
                multiply_both(d_P, d_l, d_o, y, now.r, d, pair_column());
            }
        }
        // One after another, as registers have no room for two such sums beside the totals.
        const auto add = [&](Sums& total, float(&dots_of)[2], Matrix<K> state, Matrix<K> x, const float* factors,
                             auto left) {
            Sums part = {};
            add_product(part, 0, tensor_values, left,
                        [&](auto& b, int d, int j) { load_b(b, state, d, key_column() + j); });
            fold(total, dots_of, part, x, factors);
        };
        add(d_q, dots.q, now.S, q, read, [&](auto& a, int d) { load_a(a, now.d_o, token_row(), d); });
        add(comba ? d_e : d_k, dots.e, now.S, e, erase,
            [&](auto& a, int d) { load_a_transposed(a, now.y, token_row(), d); });
        add(d_k, dots.k, now.D, k, write, [&](auto& a, int d) { load_a_transposed(a, now.r, token_row(), d); });
    }
    // d_P and d_l of what residuals (comba: and y) have below their bf16.
    HEADRACE_DEVICE void add_rest(const Stage& now, std::int64_t row, std::int64_t head, int first, PairSums& d_P,
                                  PairSums& d_l) const {
        const std::int64_t line = ((row * args.HV + head) * round_up(args.V, 16) + first) * tensor_chunk;
        copy_lines(r_low, args.swept.residuals_low + line, args.V - first);
        if (comba) copy_lines(y_low, args.swept.d_written_low + line, args.V - first);
        ptx::end_copies();
        ptx::wait_for_copies<0>();
        ptx::sync_block();
        if (on_or_below_diagonal()) {
            HEADRACE_ROLLED
            for (int d = 0; d < tensor_values; d += 16) {
                std::uint32_t d_o[4], y[4];
                load_a(d_o, now.d_o, token_row(), d);
                load_a_transposed(y, now.y, token_row(), d);
                multiply_both(d_P, d_l, d_o, y, r_low, d, pair_column());
            }
        }
        if (comba && on_or_below_diagonal()) {
            add_product(
                d_l, 0, tensor_values, [&](auto& a, int d) { load_a_transposed(a, y_low, token_row(), d); },
                [&](auto& b, int d, int j) { load_b(b, now.r, d, pair_column() + j); });
        }
        ptx::sync_block();
    }
    // Both sums take of the same right operands.
    template <int count, int columns>
    HEADRACE_DEVICE static void multiply_both(float (&x)[count][4], float (&y)[count][4],
                                              const std::uint32_t (&of_x)[4], const std::uint32_t (&of_y)[4],
                                              Matrix<columns> right, int d, int column) {
#pragma unroll
        for (int tile = 0; tile < count; tile += 2) {
            std::uint32_t b[4];
            load_b(b, right, d, column + 8 * tile);
            ptx::multiply_bf16(x[tile], of_x, {b[0], b[1]});
            ptx::multiply_bf16(x[tile + 1], of_x, {b[2], b[3]});
            ptx::multiply_bf16(y[tile], of_y, {b[0], b[1]});
            ptx::multiply_bf16(y[tile + 1], of_y, {b[2], b[3]});
        }
    }
    // total += factors * part, by rows, and the part's products with the rows x.
    HEADRACE_DEVICE void fold(Sums& total, float (&dots)[2], const Sums& part, Matrix<K> x,
                              const float* factors) const {
        const LanePlace at;
        const float of_row[2] = {factors[token_row() + at.row], factors[token_row() + at.row + 8]};
        each_pair<tiles>(token_row(), key_column(), [&](int tile, int place, int i, int j) {
            const float of = of_row[place / 2], left = of * part[tile][place], right = of * part[tile][place + 1];
            const std::uint32_t row = x.pair(i, j);
            total[tile][place] += left, total[tile][place + 1] += right;
            dots[place / 2] = fmaf(left, low_half(row), fmaf(right, high_half(row), dots[place / 2]));
        });
    }
    // <S,D>, this thread's part.
    HEADRACE_DEVICE static float cross(const Stage& now) {
        float sum = 0;
        each_piece<K>(tensor_values, [&](int i, int j) {
            const uint4 S = *reinterpret_cast<const uint4*>(&now.S.pair(i, j)),
                        D = *reinterpret_cast<const uint4*>(&now.D.pair(i, j));
            const std::uint32_t left[4] = {S.x, S.y, S.z, S.w}, right[4] = {D.x, D.y, D.z, D.w};
#pragma unroll
            for (int p = 0; p < 4; ++p) {
                sum = fmaf(low_half(left[p]), low_half(right[p]), fmaf(high_half(left[p]), high_half(right[p]), sum));
            }
        });
        return sum;
    }

    // ---- of a head, behind its values ----
    HEADRACE_DEVICE void end_head(const ChunkRange& range, std::int64_t row, std::int64_t head, bool fine, Sums& d_q,
                                  Sums& d_k, Sums& d_e, PairSums& d_P, PairSums& d_l, BorderDots& dots,
                                  float crossing) {
        PairSums reads = {}, erases = {};
        if (args.gate_gradient && on_or_below_diagonal()) score(reads, erases);
        weigh_pairs(d_P, d_l, reads, erases, fine);
        if (args.gate_gradient) {
            leave(of_q, dots.q), leave(of_e, dots.e), leave(of_k, dots.k);
            crossing = sum_of_warp(crossing);
            if (lane() == 0) warp_sums[warp()] = crossing;
            if (!comba) add(reads, erases);
            pairs.sum_rows(reads);
        }
        ptx::sync_block();
        if (args.gate_gradient) pairs.sum_columns(reads, true);
        add_scored(W, L, d_q, d_k, d_e);
        if (fine) add_scored(W_low, L_low, d_q, d_k, d_e);
        if (args.d_beta.given) store_numbers(args.d_beta, d_beta, range, head);
        if (!args.gate_gradient) return;
        ptx::sync_block();
        float spanning[2] = {};  // of two tokens of a lane, in every warp
        take_spanning(spanning);
        if (comba) {
            ptx::sync_block();
            pairs.sum_rows(erases);
            ptx::sync_block();
            pairs.sum_columns(erases, false);
            ptx::sync_block();
            take_spanning(spanning);
        }
        if (warp() == 0) add_up(spanning);
        ptx::sync_block();
        tokens.store_gate_gradient(gradient, row, head, range);
    }
    // q k^T and e k^T
    HEADRACE_DEVICE void score(PairSums& of_q_k, PairSums& of_e_k) const {
        HEADRACE_ROLLED
        for (int d = 0; d < K; d += 16) {
            std::uint32_t a[4], b[4];
            load_a(a, q, token_row(), d);
            load_a(b, e, token_row(), d);
#pragma unroll
            for (int tile = 0; tile < 4; tile += 2) {
                std::uint32_t right[4];
                load_b_transposed(right, k, d, pair_column() + 8 * tile);
                ptx::multiply_bf16(of_q_k[tile], a, {right[0], right[1]});
                ptx::multiply_bf16(of_q_k[tile + 1], a, {right[2], right[3]});
                ptx::multiply_bf16(of_e_k[tile], b, {right[0], right[1]});
                ptx::multiply_bf16(of_e_k[tile + 1], b, {right[2], right[3]});
            }
        }
    }
    // Of d_o r^T and y r^T makes W and L, and d_beta = y . r; of the scores what a pair adds to a gate.
    HEADRACE_DEVICE void weigh_pairs(const PairSums& d_P, const PairSums& d_l, PairSums& reads, PairSums& erases,
                                     bool fine) const {
        if (!on_or_below_diagonal()) return;
        const float scale = static_cast<float>(args.scale);
        each_pair<4>(token_row(), pair_column(), [&](int tile, int place, int i, int j) {
            float w[2], l[2];
#pragma unroll
            for (int side = 0; side < 2; ++side) {
                const int column = j + side, at = place + side;
                const float of_column = beta[column] * k_norm[column],
                            d_l_ij = d_l[tile][at] * of_column * (beta[i] * e_norm[i]);
                w[side] =
                    column <= i ? d_P[tile][at] * of_column * (scale * q_norm[i]) * decays.between(i, column) : 0.0f;
                l[side] = column < i ? -d_l_ij * decays.between(comba ? i - 1 : i, column) : 0.0f;
                if (column == i) d_beta[i] = d_l[tile][at] * beta_slope[i];
                reads[tile][at] = column < i ? reads[tile][at] * w[side] : 0.0f;
                erases[tile][at] = column < i ? erases[tile][at] * l[side] : 0.0f;
            }
            const SplitPair of_w = split_pair(w[0], w[1]), of_l = split_pair(l[0], l[1]);
            W.pair(i, j) = of_w.high, L.pair(i, j) = of_l.high;
            if (fine) W_low.pair(i, j) = of_w.low, L_low.pair(i, j) = of_l.low;
        });
    }
    HEADRACE_DEVICE static void add(PairSums& sums, const PairSums& others) {
#pragma unroll
        for (int tile = 0; tile < 4; ++tile)
            for (int place = 0; place < 4; ++place) sums[tile][place] += others[tile][place];
    }
    HEADRACE_DEVICE static void leave(float* sums, const float (&dots)[2]) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float dot = dots[half];
            dot += ptx::shuffle_xor(dot, 1);
            dot += ptx::shuffle_xor(dot, 2);
            if (lane() % 4 == 0) sums[warp() % 2 * tensor_chunk + token_row() + lane() / 4 + 8 * half] = dot;
        }
    }
    // d_q += W k, d_e += L k, d_k += W^T q + L^T e
    HEADRACE_DEVICE void add_scored(Matrix<tensor_chunk> of_reads, Matrix<tensor_chunk> of_erases, Sums& d_q, Sums& d_k,
                                    Sums& d_e) const {
        HEADRACE_ROLLED
        for (int d = 0; d <= token_row(); d += 16) {
            std::uint32_t w[4], l[4];
            load_a(w, of_reads, token_row(), d);
            load_a(l, of_erases, token_row(), d);
            multiply_both(d_q, comba ? d_e : d_k, w, l, k, d, key_column());
        }
        const auto add_columns = [&](Matrix<tensor_chunk> weights, Matrix<K> x) {
            add_product(
                d_k, token_row(), tensor_chunk, [&](auto& a, int d) { load_a_transposed(a, weights, token_row(), d); },
                [&](auto& b, int d, int j) { load_b(b, x, d, key_column() + j); });
        };
        add_columns(of_reads, q);
        add_columns(of_erases, e);
    }

    // ---- the gate's gradient ----
    HEADRACE_DEVICE void take_spanning(float (&spanning)[2]) const {
#pragma unroll
        for (int token = 0; token < 2; ++token) spanning[token] += pairs.spanning(2 * lane() + token);
    }
    // By one warp; a lane has two tokens. All terms that span a gate, docs/math.md, section 6.
    HEADRACE_DEVICE void add_up(const float (&spanning)[2]) const {
        const auto both = [](const float* halves, int i) { return halves[i] + halves[tensor_chunk + i]; };
        const int i = 2 * lane();
        float across = 0;
#pragma unroll
        for (int w = 0; w < 8; ++w) across += warp_sums[w];
        across *= *through;
        const float e_0 = both(of_e, i), e_1 = both(of_e, i + 1), k_0 = both(of_k, i), k_1 = both(of_k, i + 1);
        const float u_0 = both(of_q, i) + (comba ? 0.0f : e_0), u_1 = both(of_q, i + 1) + (comba ? 0.0f : e_1);
        // Of all tokens behind this lane's; comba's erase terms do not see the own gate. And of all before them.
        const float behind = sum_of_later(u_0 + u_1 + (comba ? e_0 + e_1 : 0.0f)), before = sum_of_earlier(k_0 + k_1);
        gradient.at(0, i) = behind + u_0 + u_1 + (comba ? e_1 : 0.0f) + before + spanning[0] + across;
        gradient.at(0, i + 1) = behind + u_1 + before + k_0 + spanning[1] + across;
    }
    HEADRACE_DEVICE static float sum_of_later(float x) {
        float sum = x;
#pragma unroll
        for (int distance = 1; distance < warp_lanes; distance *= 2) {
            const float later = ptx::shuffle_from(sum, (lane() + distance) & (warp_lanes - 1));
            if (lane() + distance < warp_lanes) sum += later;
        }
        const float next = ptx::shuffle_from(sum, (lane() + 1) & (warp_lanes - 1));
        return lane() + 1 < warp_lanes ? next : 0.0f;
    }
    HEADRACE_DEVICE static float sum_of_earlier(float x) {
        float sum = x;
#pragma unroll
        for (int distance = 1; distance < warp_lanes; distance *= 2) {
            const float earlier = ptx::shuffle_from(sum, (lane() - distance) & (warp_lanes - 1));
            if (lane() >= distance) sum += earlier;
        }
        const float last = ptx::shuffle_from(sum, (lane() - 1) & (warp_lanes - 1));
        return lane() > 0 ? last : 0.0f;
    }

    // ---- rows of keys ----
    HEADRACE_DEVICE void store_keys(const ChunkRange& range, std::int64_t key_head, Sums& d_q, Sums& d_k, Sums& d_e) {
        store_rows(args.d_q, d_q, q, q_norm, range, key_head);
        store_rows(args.d_k, d_k, k, k_norm, range, key_head);
        if (comba) store_rows(args.d_p, d_e, e, e_norm, range, key_head);
    }
    // Of the gradient times the inverse norm: with y = x r the unit rows, d - y (y . d) is that of x. It takes the
    // place of the rows.
    HEADRACE_DEVICE void store_rows(const Strided& tensor, Sums& d, Matrix<K> x, const float* inverse_norm,
                                    const ChunkRange& range, std::int64_t key_head) const {
        if (!tensor.given) return;
        float along[2] = {};
        if (args.l2norm) {
            each_pair<tiles>(token_row(), key_column(), [&](int tile, int place, int i, int j) {
                const std::uint32_t row = x.pair(i, j);
                along[place / 2] =
                    fmaf(d[tile][place], low_half(row), fmaf(d[tile][place + 1], high_half(row), along[place / 2]));
            });
            leave(of_q, along);
            ptx::sync_block();
            const LanePlace at;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int i = token_row() + at.row + 8 * half;
                along[half] = (of_q[i] + of_q[tensor_chunk + i]) * inverse_norm[i] * inverse_norm[i];
            }
        }
        ptx::sync_block();  // other warps' products with x, and what they read of the sums
        each_pair<tiles>(token_row(), key_column(), [&](int tile, int place, int i, int j) {
            const std::uint32_t row = x.pair(i, j);
            const float of = along[place / 2];
            x.pair(i, j) =
                ptx::round_to_bf16(d[tile][place] - of * low_half(row), d[tile][place + 1] - of * high_half(row));
        });
        ptx::sync_block();
        store_matrix(tensor, x, range, key_head, 0, args.K);
    }
};

}  // namespace headrace::cuda
