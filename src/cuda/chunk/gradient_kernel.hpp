// GradientKernel: the page chunk_gradients of the delta rule on tensor cores: all gradients of a chunk, from what the
// sweeps (sweep_kernel.hpp) left of it.
#pragma once
// over 400 lines: one kernel whose sums stay in registers from part to part.

#include "cuda/chunk/gradient_pairs.hpp"
#include "cuda/chunk/sweep_kernel.hpp"
#include "cuda/chunk/tensor_decays.hpp"
#include "cuda/tiles/token_matrices.hpp"
#include "cuda/tiles/warp_products.hpp"

namespace headrace::cuda {

// A block of eight warps has a chunk and a key head, and its value heads one after another, 64 values at a time. Of
// products with tokens as rows a warp has 32 of them and a quarter of the columns. Everything enters them as it came or
// was saved; betas, decays and norms are factors of the sums. With d = beta r, z = beta y as on the page, rows of q, k,
// e as given and their inverse norms |q|^-1, |k|^-1, |e|^-1,
//     W_ij = scale |q_i|^-1 |k_j|^-1 e^{G_i - G_j} (d_o_i . d_j), j <= i
//     L_ij = -|e_i|^-1 |k_j|^-1 e^{Ge_i - G_j} (z_i . d_j), j < i
//     d_q = scale |q|^-1 e^G (d_o S^T) + W k        d_k = |k|^-1 e^{G_L - G} (d D^T) + W^T q + L^T e
//     d_e = -|e|^-1 e^{Ge} (z S^T) + L k
// are gradients of unit rows times the inverse norms, and W_ij q_i.k_j + L_ij e_i.k_j what the pair adds to a gate
// between its tokens. With e = k (not `comba`) d_e is added to d_k as it is made. W and L are multiplied once, as sums
// of all value heads.
template <int K, bool comba>
struct GradientKernel {
    static constexpr int tiles = K / 32, row_blocks = 2;  // of 8 channels: a warp's quarter of them; of 16 tokens
    using Sums = float[row_blocks][tiles][4];
    using PairSums = SpanningPairs::Sums;
    using Left = std::uint32_t[row_blocks][4];
    using Right = std::uint32_t[tiles / 2][4];
    using RowSums = float[row_blocks][2];  // of this lane's tokens

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
    // What is computed: in shared memory, as registers are few.
    struct Task {
        ChunkRange range;
        std::int64_t row, key_head;  // of all sequences' chunks (part_at)
    };
    // 64 values of one of the value heads.
    struct Values {
        int member, block;
    };
    // Products of rows with their gradients' part from the chunk's borders, of this lane's rows: q with d_q, e with
    // d_e, k with d_k; all of q and e in q, but of comba.
    struct BorderDots {
        RowSums q, e, k;
    };

    const KernelArgs& args;
    Task* task;
    Matrix<K> q, k, e;
    Stage first_stage;
    std::int64_t stage_elements;                  // from a stage to the next
    Matrix<tensor_chunk> W, L, W_low, L_low;      // where a stage was
    Matrix<tensor_values> rest;                   // of r, then of y at hand, where keys overlap
    float *q_norm, *k_norm, *e_norm, *d_beta;     // [C]
    float *of_column, *of_erasing, *beta_slope;   // [C] factors of a head's W and L by column, of L by row, of d_beta
    float2* next_numbers;                         // [3,C/2] of the next head's tokens: log decays, betas, their slopes
    float *read, *erase, *write;                  // [C] factors of a head's rows from the chunk's start, and to its end
    float* through;                               // [1] the chunk's decay
    float *of_q, *of_e, *of_k;                    // [4,C] BorderDots by quarters of channels
    float* warp_sums;                             // [8]
    ScalarDecays decays;
    SpanningPairs pairs;
    Tile<float> gradient;  // [1,C] of the gate
    float4 *weights, *scores;  // [8, 6 warps, lanes] sums of W and L; q k^T and e k^T, not of comba

    __host__ __device__ GradientKernel(const KernelArgs& arguments, Arena& arena) : args(arguments) {
        q = Matrix<K>::take(arena, tensor_chunk);
        k = Matrix<K>::take(arena, tensor_chunk);
        e = comba ? Matrix<K>::take(arena, tensor_chunk) : k;
        rest = Matrix<tensor_values>::take(arena, tensor_values);
        for (float** vector :
             {&q_norm, &k_norm, &d_beta, &of_column, &of_erasing, &beta_slope, &read, &erase, &write})
            *vector = arena.take<float>(tensor_chunk);
        through = arena.take<float>(1);
        e_norm = comba ? arena.take<float>(tensor_chunk) : k_norm;
        next_numbers = arena.take<float2>(3 * tensor_chunk / 2);
        task = arena.take<Task>(1);
        for (float** vector : {&of_q, &of_k}) *vector = arena.take<float>(4 * tensor_chunk);
        of_e = comba ? arena.take<float>(4 * tensor_chunk) : nullptr;
        warp_sums = arena.take<float>(8);
        decays.carve(arena);
        pairs.carve(arena);
        gradient = arena.tile<float>(1, tensor_chunk);
        weights = arena.take<float4>(8 * 6 * warp_lanes);
        scores = comba ? nullptr : arena.take<float4>(8 * 6 * warp_lanes);
        // Behind all of these, so that their places do not depend on how many there are.
        const std::size_t before = arena.shared_used;
        for (Matrix<K>* matrix : {&first_stage.S, &first_stage.D}) *matrix = Matrix<K>::take(arena, tensor_values);
        const std::size_t padding = arena.shared_used - before - 2 * sizeof(std::uint16_t) * tensor_values * K;
        for (Matrix<tensor_values>* matrix : {&first_stage.r, &first_stage.y, &first_stage.d_o})
            *matrix = Matrix<tensor_values>::take(arena, tensor_chunk);
        stage_elements = static_cast<std::int64_t>((arena.shared_used - before - padding) / sizeof(std::uint16_t));
        if (args.stages == 2) arena.take<std::uint16_t>(static_cast<std::size_t>(stage_elements));
        W.data = first_stage.S.data, L.data = first_stage.D.data;
        W_low.data = first_stage.r.data, L_low.data = first_stage.y.data;
    }

    // The chunk in a row of all sequences' (part_at), all value heads of a key head.
    HEADRACE_DEVICE void run(std::int64_t row, std::int64_t key_head) {
        const PartAt at = part_at(args, row, tensor_chunk);
        const TokenRange s = sequence_of(args, at.n);
        if (at.part * tensor_chunk >= s.end - s.begin) return;
        if (threadIdx.x == 0) *task = {chunk_range(args, s, at.part), row, key_head};
        ptx::sync_block();
        HEADRACE_ROLLED  // here and below, the same code for several: what is new to a multiprocessor is slow
        for (int which = 0; which < (comba ? 3 : 2); ++which)
            copy_tokens(which == 0 ? q : which == 1 ? k : e, which == 0 ? args.q : which == 1 ? args.k : args.p,
                        task->range, key_head, 0, args.K);
        Sums d_q = {}, d_k = {}, d_e = {};
        heads(d_q, d_k, d_e);
        store_keys(d_q, d_k, d_e);
    }

  private:
    // Of this warp, or that of a thread.
    HEADRACE_DEVICE static int token_row(int of = static_cast<int>(threadIdx.x)) { return of / 128 * 32; }
    HEADRACE_DEVICE static int pair_column(int of = static_cast<int>(threadIdx.x)) { return of / 32 % 4 * 16; }
    HEADRACE_DEVICE static int key_column(int of = static_cast<int>(threadIdx.x)) { return of / 32 % 4 * (K / 4); }
    HEADRACE_DEVICE static bool on_or_below_diagonal() { return pair_column() < token_row() + 32; }
    HEADRACE_DEVICE std::int64_t first_head() const { return task->key_head * args.group; }
    HEADRACE_DEVICE int value_blocks() const { return (args.V + tensor_values - 1) / tensor_values; }
    HEADRACE_DEVICE Stage stage_of(int step) const {
        return first_stage.behind(args.stages == 2 ? step % 2 * stage_elements : 0);
    }

    // Adds up d_q, d_k and d_e of all value heads; stores d_beta and the gate's gradient of each.
    HEADRACE_DEVICE void heads(Sums& d_q, Sums& d_k, Sums& d_e) {
        PairSums d_P = {}, d_l = {};
        BorderDots dots{};
        float crossing = 0;
        bool any_fine = false;
        const int ahead = args.stages - 1;  // what arrives, of what is computed
        HEADRACE_ROLLED
        for (int step = -ahead; step < args.group * value_blocks(); ++step) {
            if (step > -ahead) end_copies_of_block();
            fetch(step + ahead);
            if (step == -ahead) take_numbers(0);
            if (ahead == 0) end_copies_of_block();
            if (step < 0) continue;
            if (step == 0) {
                weigh_rows();
                if (!comba && args.gate_gradient) keep_scores();
                ptx::sync_block();
            }
            const Values now = values_of(step);
            if (now.block == 0) begin_head();
            if (now.block == value_blocks() - 1) take_numbers(now.member + 1);
            const Stage stage = stage_of(step);
            const bool fine = keys_overlap(args, task->row * args.HV + first_head() + now.member);
            any_fine = any_fine || fine;
            add_values(stage, d_q, d_k, d_e, d_P, d_l, dots);
            if (fine) add_rest(stage, step, d_k, d_e, d_P, d_l, dots);
            if (args.gate_gradient) crossing += cross(stage);
            if (now.block == value_blocks() - 1) {
                end_head(now.member, d_P, d_l, dots, crossing);
                clear(d_P), clear(d_l);
                dots = {}, crossing = 0;
            }
        }
        add_pairs(any_fine, d_q, d_k, d_e);
    }
    HEADRACE_DEVICE Values values_of(int step) const {
        const int blocks = ptx::not_before(value_blocks());  // what a division by it takes has no registers before
        return {step / blocks, step % blocks};
    }
    HEADRACE_DEVICE static void clear(PairSums& sums) {
#pragma unroll
        for (auto& rows : sums)
            for (auto& tile : rows)
                for (float& sum : tile) sum = 0;
    }

    // Rows that lie behind the last value become zero: no sweep has written them.
    HEADRACE_DEVICE void fetch(int step) const {
        const Values values = values_of(step);
        if (values.member >= args.group) return;
        const int first = values.block * tensor_values, count = args.V - first;
        const std::int64_t head = first_head() + values.member, line = first_line(values);
        const Stage stage = stage_of(step);
        const SweptChunks& from = args.swept;
        HEADRACE_ROLLED
        for (int which = 0; which < 2; ++which)
            copy(which == 0 ? stage.S : stage.D, (which == 0 ? from.states : from.adjoints) + line * K, count);
        HEADRACE_ROLLED
        for (int which = 0; which < 2; ++which)
            copy(which == 0 ? stage.r : stage.y, (which == 0 ? from.residuals : from.d_written) + line * tensor_chunk,
                 count);
        copy_tokens<tensor_values, tensor_threads>(stage.d_o, args.d_o, task->range, head, first,
                                                   count < tensor_values ? count : tensor_values);
        ptx::end_copies();
    }
    // Queues copies of 64 lines; where there are as many, of pieces that a thread has at distances known beforehand.
    template <int columns>
    HEADRACE_DEVICE static void copy(Matrix<columns> to, const std::uint16_t* from, int count) {
        if (count < tensor_values) return copy_lines(to, from, count);
        constexpr int pieces = columns / 8, bytes = 16 * tensor_threads;
        static_assert(tensor_threads / pieces % 8 == 0);
        const int of = own();
        const std::uint32_t first = to.piece(of / pieces, of % pieces * 8);
        const char* const source = reinterpret_cast<const char*>(from) + 16 * of;
#pragma unroll
        for (int at = 0; at < 2 * columns * tensor_values; at += bytes)
            ptx::copy_16(first + at / columns * Matrix<columns>::row, source + at, 16);
    }
    // Of these values in what the sweeps saved.
    HEADRACE_DEVICE std::int64_t first_line(Values values) const {
        return (task->row * args.HV + first_head() + values.member) * round_up(args.V, 16) +
               values.block * tensor_values;
    }

    // ---- numbers of tokens ----
    // By the first warp, whose lanes have two tokens each.
    HEADRACE_DEVICE void take_numbers(int member) const {
        if (warp() > 0 || member >= args.group) return;
        HEADRACE_ROLLED  // the code of beta's formulas once
            for (int i = 2 * lane_here(), end = i + 2; i < end; ++i) {
            float log_decay = 0;
            Beta<float> beta{0, 1};
            if (i < task->range.length) {
                const std::int64_t head = first_head() + member;
                log_decay = token_log_decay(args, task->range, i, head);
                beta = beta_value<float>(args, task->range.row, task->range.token(i), head, 0);
            }
            float* const to = reinterpret_cast<float*>(next_numbers) + i;
            to[0] = log_decay, to[tensor_chunk] = beta.value, to[2 * tensor_chunk] = beta.slope;
        }
    }
    // Four lanes have a row.
    HEADRACE_DEVICE void weigh_rows() const {
        const int i = 8 * warp() + lane_here() / 4;
        const auto norm = [&](float* to, Matrix<K> x) {
            const float of_row = args.l2norm ? inverse_norm(dot_of_rows(x, x, i)) : 1.0f;
            if (lane() % 4 == 0) to[i] = of_row;
        };
        norm(q_norm, q), norm(k_norm, k);
        if (comba) norm(e_norm, e);
    }
    HEADRACE_DEVICE void begin_head() const {
        if (warp() == 0) {
            const float2* const from = next_numbers + lane();
            const float2 values = from[warp_lanes], slopes = from[2 * warp_lanes];
            const ScalarDecays::OfLane of = decays.prepare(from[0].x, from[0].y);
            if (lane() == 0) *through = static_cast<float>(of.through());
#pragma unroll
            for (int token = 0; token < 2; ++token) {
                const int i = 2 * lane() + token;
                const float beta = token == 0 ? values.x : values.y;
                of_column[i] = beta * k_norm[i], of_erasing[i] = -beta * e_norm[i];
                beta_slope[i] = token == 0 ? slopes.x : slopes.y;
                read[i] = static_cast<float>(args.scale) * of.start[token] * q_norm[i];
                erase[i] = (comba ? of.before[token] : of.start[token]) * of_erasing[i];
                write[i] = of.end[token] * of_column[i];
            }
        }
        ptx::sync_block();
    }

    // ---- operands ----
    // This thread's number, of which nothing is kept from step to step.
    HEADRACE_DEVICE static int own() { return thread_here(); }
    // Where a matrix has what is the warp's of a thread: tokens as its rows, as its columns; channels as its columns.
    template <int columns>
    HEADRACE_DEVICE static OperandAt<columns> token_rows(Matrix<columns> m, int of) {
        return {OperandAt<columns>::down(m, of % warp_lanes).at(token_row(of), 0)};
    }
    HEADRACE_DEVICE static OperandAt<64> token_columns(Matrix<64> m, int of) {
        return {OperandAt<64>::across(m, of % warp_lanes).at(0, token_row(of))};
    }
    HEADRACE_DEVICE static OperandAt<K> channels(Matrix<K> m, int of) {
        return {OperandAt<K>::down(m, of % warp_lanes).at(0, key_column(of))};
    }
    HEADRACE_DEVICE static OperandAt<64> pair_columns(Matrix<64> m, int of) {
        return {OperandAt<64>::down(m, of % warp_lanes).at(0, pair_column(of))};
    }

    template <int columns>
    HEADRACE_DEVICE static void load_rows(Left& a, OperandAt<columns> from, int d) {
#pragma unroll
        for (int block = 0; block < row_blocks; ++block) ptx::load_matrix(a[block], from.at(16 * block, d));
    }
    HEADRACE_DEVICE static void load_columns(Left& a, OperandAt<64> from, int d) {
#pragma unroll
        for (int block = 0; block < row_blocks; ++block) ptx::load_matrix_transposed(a[block], from.at(d, 16 * block));
    }
    HEADRACE_DEVICE static void load_channels(Right& b, OperandAt<K> from, int d) {
#pragma unroll
        for (int pair = 0; pair < tiles / 2; ++pair) ptx::load_matrix_transposed(b[pair], from.at(d, 16 * pair));
    }
    HEADRACE_DEVICE static void multiply(Sums& sums, const Left& a, const Right& b) {
#pragma unroll
        for (int block = 0; block < row_blocks; ++block) {
#pragma unroll
            for (int pair = 0; pair < tiles / 2; ++pair) {
                ptx::multiply_bf16(sums[block][2 * pair], a[block], {b[pair][0], b[pair][1]});
                ptx::multiply_bf16(sums[block][2 * pair + 1], a[block], {b[pair][2], b[pair][3]});
            }
        }
    }
    HEADRACE_DEVICE static void multiply_pairs(PairSums& sums, const Left& a, const std::uint32_t (&b)[4]) {
#pragma unroll
        for (int block = 0; block < row_blocks; ++block) {
            ptx::multiply_bf16(sums[block][0], a[block], {b[0], b[1]});
            ptx::multiply_bf16(sums[block][1], a[block], {b[2], b[3]});
        }
    }

    // ---- of 64 values ----
    HEADRACE_DEVICE void add_values(const Stage& now, Sums& d_q, Sums& d_k, Sums& d_e, PairSums& d_P, PairSums& d_l,
                                    BorderDots& dots) const {
        const int of = own();
        const OperandAt<K> S = channels(now.S, of), D = channels(now.D, of);
        const OperandAt<64> d_o = token_rows(now.d_o, of), y = token_columns(now.y, of), r = token_columns(now.r, of),
                            r_pairs = pair_columns(now.r, of);
        const PairsAt<K> at{token_row(of), key_column(of), of % warp_lanes};
        const bool with_pairs = on_or_below_diagonal();
        {
            Sums reads = {}, erases = {};
            HEADRACE_ROLLED
            for (int d = 0; d < tensor_values; d += 16) {
                Left a;
                Right b;
                std::uint32_t of_pairs[4];
                load_channels(b, S, d);
                if (with_pairs) ptx::load_matrix_transposed(of_pairs, r_pairs.at(d, 0));
                load_rows(a, d_o, d);
                multiply(reads, a, b);
                if (with_pairs) multiply_pairs(d_P, a, of_pairs);
                load_columns(a, y, d);
                if (!comba) multiply(erases, a, b);
                if (with_pairs) multiply_pairs(d_l, a, of_pairs);
            }
            fold(d_q, dots.q, reads, q, read, at);
            if (!comba) fold(d_k, dots.q, erases, e, erase, at);
        }
        // One after another, as registers have no room for two such sums beside the totals.
        if (comba) add_border(d_e, dots.e, y, S, e, erase, at);
        add_border(d_k, dots.k, r, D, k, write, at);
    }
    // total += factors * (left^T right), by rows, and its products with the rows x.
    HEADRACE_DEVICE static void add_border(Sums& total, RowSums& dots_of, OperandAt<64> left, OperandAt<K> right,
                                           Matrix<K> x, const float* factors, const PairsAt<K>& at) {
        Sums part = {};
        HEADRACE_ROLLED
        for (int d = 0; d < tensor_values; d += 16) {
            Left a;
            Right b;
            load_columns(a, left, d), load_channels(b, right, d);
            multiply(part, a, b);
        }
        fold(total, dots_of, part, x, factors, at);
    }
    // Of what r and y have below their bf16, one after the other: y r^T, d_o r^T and D r; y r^T and S y.
    HEADRACE_DEVICE void add_rest(const Stage& now, int step, Sums& d_k, Sums& d_e, PairSums& d_P, PairSums& d_l,
                                  BorderDots& dots) const {
        take_rest(args.swept.residuals_low, step);
        const int of = own();
        const PairsAt<K> at{token_row(of), key_column(of), of % warp_lanes};
        if (on_or_below_diagonal()) {
            const OperandAt<64> r = pair_columns(rest, of);
            add_pairs_of_rest(d_P, r, [&](Left& a, int d) { load_rows(a, token_rows(now.d_o, of), d); });
            add_pairs_of_rest(d_l, r, [&](Left& a, int d) { load_columns(a, token_columns(now.y, of), d); });
        }
        const OperandAt<64> columns = token_columns(rest, of);
        add_border(d_k, dots.k, columns, channels(now.D, of), k, write, at);
        ptx::sync_block();
        take_rest(args.swept.d_written_low, step);
        if (on_or_below_diagonal())
            add_pairs_of_rest(d_l, pair_columns(now.r, of), [&](Left& a, int d) { load_columns(a, columns, d); });
        add_border(comba ? d_e : d_k, comba ? dots.e : dots.q, columns, channels(now.S, of), e, erase, at);
        ptx::sync_block();
    }
    HEADRACE_DEVICE void take_rest(const std::uint16_t* from, int step) const {
        const Values values = values_of(step);
        copy_lines(rest, from + first_line(values) * tensor_chunk, args.V - values.block * tensor_values);
        ptx::end_copies();
        ptx::wait_for_copies<0>();
        ptx::sync_block();
    }
    template <class Load>
    HEADRACE_DEVICE static void add_pairs_of_rest(PairSums& sums, OperandAt<64> right, Load load) {
        HEADRACE_ROLLED
        for (int d = 0; d < tensor_values; d += 16) {
            Left a;
            std::uint32_t b[4];
            load(a, d), ptx::load_matrix_transposed(b, right.at(d, 0));
            multiply_pairs(sums, a, b);
        }
    }
    // f(block, half, tile) for the pairs of this lane's sums: two neighbours in a row of 16 block + 8 half on.
    template <class F>
    HEADRACE_DEVICE static void each_own_pair(F f) {
#pragma unroll
        for (int block = 0; block < row_blocks; ++block) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
#pragma unroll
                for (int tile = 0; tile < tiles; ++tile) f(block, half, tile);
            }
        }
    }
    HEADRACE_DEVICE static int own_row(int block, int half) {
        return token_row() + lane() / 4 + 16 * block + 8 * half;
    }
    // total += factors * part, by rows, and the part's products with the rows x.
    HEADRACE_DEVICE static void fold(Sums& total, RowSums& dots, const Sums& part, Matrix<K> x, const float* factors,
                                     const PairsAt<K>& at) {
        float of = 0, dot = 0;
        each_own_pair([&](int block, int half, int tile) {
            if (tile == 0) of = factors[own_row(block, half)], dot = 0;
            const float left = part[block][tile][2 * half], right = part[block][tile][2 * half + 1];
            const std::uint32_t row = at.of(x, tile, 16 * block + 8 * half);
            float(&sums)[4] = total[block][tile];
            sums[2 * half] = fmaf(of, left, sums[2 * half]), sums[2 * half + 1] = fmaf(of, right, sums[2 * half + 1]);
            dot = fmaf(left, low_half(row), fmaf(right, high_half(row), dot));
            if (tile == tiles - 1) dots[block][half] = fmaf(of, dot, dots[block][half]);
        });
    }
    // <S,D>, this lane's part: of the diagonal of S D^T, of 16 channels and all values or, of 64 channels, half of them.
    HEADRACE_DEVICE static float cross(const Stage& now) {
        float sums[2][4] = {};
        constexpr int warps_of_values = 8 / (K / 16);
        const int of = own(), warp_of = of / warp_lanes, channel = warp_of % (K / 16) * 16,
                  value = warp_of / (K / 16) * (tensor_values / warps_of_values);
        const OperandAt<K> S{OperandAt<K>::down(now.S, of % warp_lanes).at(value, channel)},
            D{OperandAt<K>::across(now.D, of % warp_lanes).at(value, channel)};
#pragma unroll
        for (int i = 0; i < tensor_values / warps_of_values; i += 16) {
            std::uint32_t a[4], b[4];
            ptx::load_matrix(a, S.at(i, 0)), ptx::load_matrix(b, D.at(i, 0));
            ptx::multiply_bf16(sums[0], a, {b[0], b[1]}), ptx::multiply_bf16(sums[1], a, {b[2], b[3]});
        }
        const LanePlace at(of % warp_lanes);
        return at.row == at.column ? sums[0][0] + sums[1][2] : at.row == at.column + 1 ? sums[0][1] + sums[1][3] : 0.0f;
    }

    // ---- of a head, behind its values ----
    HEADRACE_DEVICE void end_head(int member, const PairSums& d_P, const PairSums& d_l, const BorderDots& dots,
                                  float crossing) {
        PairSums spans = {}, erases = {};
        if (comba && args.gate_gradient && on_or_below_diagonal()) score(spans, erases);
        if (on_or_below_diagonal()) weigh_pairs(d_P, d_l, member > 0, spans, erases);
        if (args.gate_gradient) {
            leave(of_q, dots.q), leave(of_k, dots.k);
            if (comba) leave(of_e, dots.e);
            crossing = sum_of_warp(crossing);
            if (lane() == 0) warp_sums[warp()] = crossing;
            pairs.sum_rows(spans);
        }
        ptx::sync_block();
        if (args.d_beta.given) store_numbers(args.d_beta, d_beta, task->range, first_head() + member);
        if (!args.gate_gradient) return;
        pairs.sum_columns(spans, true);
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
        store_numbers(args.d_log_decays, gradient.data, task->range, first_head() + member);
    }
    // q k^T and e k^T
    HEADRACE_DEVICE void score(PairSums& of_q_k, PairSums& of_e_k) const {
        const int of = own();
        const OperandAt<K> from_q = token_rows(q, of), from_e = token_rows(e, of),
                           from_k{OperandAt<K>::across(k).at(pair_column(), 0)};
        HEADRACE_ROLLED
        for (int d = 0; d < K; d += 16) {
            Left a, b;
            std::uint32_t right[4];
            load_rows(a, from_q, d), load_rows(b, from_e, d);
            ptx::load_matrix(right, from_k.at(0, d));
            multiply_pairs(of_q_k, a, right), multiply_pairs(of_e_k, b, right);
        }
    }
    // This lane's sums of two such matrices, kept from head to head, by the six warps on or below the diagonal: 0, 1, 4
    // to 7.
    HEADRACE_DEVICE static float4& kept_at(float4* sums, int block, int tile, int which) {
        const int own = static_cast<int>(threadIdx.x) - (warp() < 4 ? 0 : 2 * warp_lanes);
        return sums[((2 * block + tile) * 2 + which) * 6 * warp_lanes + own];
    }
    HEADRACE_DEVICE static float4 four(const float (&x)[4]) { return {x[0], x[1], x[2], x[3]}; }
    HEADRACE_DEVICE static void set(float (&to)[4], float4 from) {
        to[0] = from.x, to[1] = from.y, to[2] = from.z, to[3] = from.w;
    }
    HEADRACE_DEVICE void keep_scores() const {
        if (!on_or_below_diagonal()) return;
        PairSums of_q_k = {}, of_e_k = {};
        score(of_q_k, of_e_k);
#pragma unroll
        for (int block = 0; block < row_blocks; ++block) {
#pragma unroll
            for (int tile = 0; tile < 2; ++tile) {
                kept_at(scores, block, tile, 0) = four(of_q_k[block][tile]);
                kept_at(scores, block, tile, 1) = four(of_e_k[block][tile]);
            }
        }
    }
    // Of d_o r^T and y r^T makes W and L, to add to those of heads before, and d_beta = y . r; of the scores, in `spans`,
    // what a pair adds to a gate, comba's erases apart.
    HEADRACE_DEVICE void weigh_pairs(const PairSums& d_P, const PairSums& d_l, bool heads_before, PairSums& spans,
                                     PairSums& erases) const {
        const LanePlace at;
        const bool with_gate = args.gate_gradient;
        RowSums diagonal = {};
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
            const int j = pair_column() + 8 * tile + at.column;
            const float2 of_columns = *reinterpret_cast<const float2*>(of_column + j);
            ScalarDecays::Power earlier[2];
            decays.pair_at(earlier, j);
            const float factor[2] = {of_columns.x, of_columns.y};
#pragma unroll
            for (int block = 0; block < row_blocks; ++block) {
                if (!comba && with_gate) {
                    set(spans[block][tile], kept_at(scores, block, tile, 0));
                    set(erases[block][tile], kept_at(scores, block, tile, 1));
                }
                float w[4] = {}, l[4] = {};
                if (heads_before) set(w, kept_at(weights, block, tile, 0)), set(l, kept_at(weights, block, tile, 1));
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int i = own_row(block, half);
                    const ScalarDecays::Power own = decays.at(i), before = comba ? decays.at(i > 0 ? i - 1 : 0) : own;
                    const float of_read = static_cast<float>(args.scale) * q_norm[i], of_erase = of_erasing[i];
#pragma unroll
                    for (int side = 0; side < 2; ++side) {
                        const int column = j + side, place = 2 * half + side;
                        const float decay = ScalarDecays::between(own, earlier[side]),
                                    erased = comba ? ScalarDecays::between(before, earlier[side]) : decay;
                        const float d_l_ij = d_l[block][tile][place];
                        const float W_ij =
                            column <= i ? d_P[block][tile][place] * (factor[side] * of_read) * decay : 0.0f;
                        const float L_ij = column < i ? d_l_ij * (factor[side] * of_erase) * erased : 0.0f;
                        // Of comba at once, as registers are few.
                        if (comba && column == i) d_beta[i] = d_l_ij * beta_slope[i];
                        if (!comba && column == i) diagonal[block][half] = d_l_ij;
                        w[place] += W_ij, l[place] += L_ij;
                        if (!with_gate) continue;
                        float &span = spans[block][tile][place], &of_erases = erases[block][tile][place];
                        if (comba) {
                            span = column < i ? span * W_ij : 0.0f, of_erases = column < i ? of_erases * L_ij : 0.0f;
                        } else {
                            span = column < i ? fmaf(span, W_ij, of_erases * L_ij) : 0.0f;
                        }
                    }
                }
                kept_at(weights, block, tile, 0) = four(w), kept_at(weights, block, tile, 1) = four(l);
            }
        }
#pragma unroll
        for (int block = 0; block < row_blocks; ++block) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int i = own_row(block, half);
                if (!comba && i / 16 * 16 == pair_column() && i % 8 / 2 == lane() % 4)
                    d_beta[i] = diagonal[block][half] * beta_slope[i];
            }
        }
    }
    // Sums over a row's lanes, which have a quarter of it.
    HEADRACE_DEVICE static void leave(float* sums, const RowSums& dots) {
#pragma unroll
        for (int block = 0; block < row_blocks; ++block) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float dot = dots[block][half];
                dot += ptx::shuffle_xor(dot, 1);
                dot += ptx::shuffle_xor(dot, 2);
                if (lane() % 4 == 0) sums[warp() % 4 * tensor_chunk + own_row(block, half)] = dot;
            }
        }
    }
    HEADRACE_DEVICE static float of_quarters(const float* sums, int i) {
        return sums[i] + sums[tensor_chunk + i] + (sums[2 * tensor_chunk + i] + sums[3 * tensor_chunk + i]);
    }
    HEADRACE_DEVICE void take_spanning(float (&spanning)[2]) const {
#pragma unroll
        for (int token = 0; token < 2; ++token) spanning[token] += pairs.spanning(2 * lane() + token);
    }
    // By one warp; a lane has two tokens. All terms that span a gate, docs/math.md, section 6.
    HEADRACE_DEVICE void add_up(const float (&spanning)[2]) const {
        const int i = 2 * lane();
        float across = 0;
#pragma unroll
        for (int w = 0; w < 8; ++w) across += warp_sums[w];
        across *= *through;
        const float u_0 = of_quarters(of_q, i), u_1 = of_quarters(of_q, i + 1), k_0 = of_quarters(of_k, i),
                    k_1 = of_quarters(of_k, i + 1), e_0 = comba ? of_quarters(of_e, i) : 0.0f,
                    e_1 = comba ? of_quarters(of_e, i + 1) : 0.0f;
        // Of all tokens behind this lane's; comba's erase terms do not see the own gate. And of all before them.
        const float behind = sum_of_later(u_0 + u_1 + e_0 + e_1), before = sum_of_earlier(k_0 + k_1);
        gradient.at(0, i) = behind + u_0 + u_1 + e_1 + before + spanning[0] + across;
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

    // ---- of all value heads ----
    HEADRACE_DEVICE void add_pairs(bool fine, Sums& d_q, Sums& d_k, Sums& d_e) const {
        ptx::sync_block();
        if (on_or_below_diagonal()) leave_pairs(fine);
        ptx::sync_block();
        add_scored(W, L, d_q, d_k, d_e);
        if (fine) add_scored(W_low, L_low, d_q, d_k, d_e);
    }
    HEADRACE_DEVICE void leave_pairs(bool fine) const {
        const PairsAt<64> at(token_row(), pair_column());
#pragma unroll
        for (int block = 0; block < row_blocks; ++block) {
#pragma unroll
            for (int tile = 0; tile < 2; ++tile) {
                float w[4], l[4];
                set(w, kept_at(weights, block, tile, 0)), set(l, kept_at(weights, block, tile, 1));
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int row = 16 * block + 8 * half;
                    const SplitPair of_w = split_pair(w[2 * half], w[2 * half + 1]),
                                    of_l = split_pair(l[2 * half], l[2 * half + 1]);
                    at.of(W, tile, row) = of_w.high, at.of(L, tile, row) = of_l.high;
                    if (fine) at.of(W_low, tile, row) = of_w.low, at.of(L_low, tile, row) = of_l.low;
                }
            }
        }
    }
    // d_q += W k, d_e += L k, d_k += W^T q + L^T e. Of blocks of 16 above the diagonal those that are read are zero.
    HEADRACE_DEVICE void add_scored(Matrix<tensor_chunk> of_reads, Matrix<tensor_chunk> of_erases, Sums& d_q, Sums& d_k,
                                    Sums& d_e) const {
        const int of = own();
        HEADRACE_ROLLED
        for (int d = 0; d < token_row() + 32; d += 16) {
            Left a;
            Right b;
            load_channels(b, channels(k, of), d);
            load_rows(a, token_rows(of_reads, of), d);
            multiply(d_q, a, b);
            load_rows(a, token_rows(of_erases, of), d);
            multiply(comba ? d_e : d_k, a, b);
        }
        HEADRACE_ROLLED
        for (int d = token_row(); d < tensor_chunk; d += 16) {
            Left a;
            Right b;
            load_channels(b, channels(q, of), d), load_columns(a, token_columns(of_reads, of), d);
            multiply(d_k, a, b);
            load_channels(b, channels(e, of), d), load_columns(a, token_columns(of_erases, of), d);
            multiply(d_k, a, b);
        }
    }

    // ---- rows of keys ----
    HEADRACE_DEVICE void store_keys(Sums& d_q, Sums& d_k, Sums& d_e) {
        store_rows(args.d_q, d_q, q, q_norm);
        store_rows(args.d_k, d_k, k, k_norm);
        if (comba) store_rows(args.d_p, d_e, e, e_norm);
    }
    // Of the gradient times the inverse norm: with y = x r the unit rows, d - y (y . d) is that of x. It takes the
    // place of the rows.
    HEADRACE_DEVICE void store_rows(const Strided& tensor, Sums& d, Matrix<K> x, const float* inverse_norm) const {
        if (!tensor.given) return;
        const PairsAt<K> at{token_row(), key_column()};
        RowSums along = {};
        if (args.l2norm) {
            each_own_pair([&](int block, int half, int tile) {
                const std::uint32_t row = at.of(x, tile, 16 * block + 8 * half);
                along[block][half] = fmaf(d[block][tile][2 * half], low_half(row),
                                          fmaf(d[block][tile][2 * half + 1], high_half(row), along[block][half]));
            });
            leave(of_q, along);
            ptx::sync_block();
#pragma unroll
            for (int block = 0; block < row_blocks; ++block) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int i = own_row(block, half);
                    along[block][half] = of_quarters(of_q, i) * inverse_norm[i] * inverse_norm[i];
                }
            }
        }
        ptx::sync_block();  // other warps' products with x, and what they read of the sums
        each_own_pair([&](int block, int half, int tile) {
            std::uint32_t& row = at.of(x, tile, 16 * block + 8 * half);
            const float of = along[block][half];
            row = ptx::round_to_bf16(d[block][tile][2 * half] - of * low_half(row),
                                     d[block][tile][2 * half + 1] - of * high_half(row));
        });
        ptx::sync_block();
        store_matrix(tensor, x, task->range, task->key_head, 0, args.K);
    }
};

}  // namespace headrace::cuda
