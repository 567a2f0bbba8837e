// GradientKernel: the page chunk_gradients of the delta rule on tensor cores: all gradients of a chunk, from what the
// sweeps (sweep_kernel.hpp) left of it.
#pragma once
// over 400 lines: one kernel whose sums stay in registers from part to part.

#include "cuda/chunk/gradient_pairs.hpp"
#include "cuda/chunk/gradient_products.hpp"
#include "cuda/chunk/sweep_kernel.hpp"
#include "cuda/chunk/tensor_decays.hpp"
#include "cuda/tiles/token_matrices.hpp"

namespace headrace::cuda {

// A block of eight warps has a chunk and a key head, and its value heads one after another, 64 values at a time or,
// with two stages, 128. Of products with tokens as rows a warp has 16 of them and half of the columns; of d_o r^T and y
// r^T, of which half is needed, all columns of one of the two (TokenPairs). Everything enters them as it came or was
// saved; betas, decays and norms are factors of the sums. With d = beta r, z = beta y as on the page, rows of q, k, e
// as given and their inverse norms |q|^-1, |k|^-1, |e|^-1,
//     W_ij = scale |q_i|^-1 |k_j|^-1 e^{G_i - G_j} (d_o_i . d_j), j <= i
//     L_ij = -|e_i|^-1 |k_j|^-1 e^{Ge_i - G_j} (z_i . d_j), j < i
//     d_q = scale |q|^-1 e^G (d_o S^T) + W k        d_k = |k|^-1 e^{G_L - G} (d D^T) + W^T q + L^T e
//     d_e = -|e|^-1 e^{Ge} (z S^T) + L k
// are gradients of unit rows times the inverse norms, and W_ij q_i.k_j + L_ij e_i.k_j what the pair adds to a gate
// between its tokens. With e = k (not `comba`) d_e is added to d_k as it is made. W and L are multiplied once, as sums
// of all value heads. Keys of more channels are taken `parts` times K one after the other, as what is added up over
// channels, gates' gradients and with l2norm y . d, adds up over parts; K below are those of a part.
template <int K, bool comba, int parts = 1>
struct GradientKernel {
    // Of 64 channels the groups' right operands would begin within a row.
    using Products = GradientProducts<ptx::multiplies_by_group && K == 128>;
    static constexpr int tiles = K / 16;  // of 8 channels: a warp's half of them
    using Sums = float[tiles][4];
    using PairSums = TokenPairs::Sums;
    using RowSums = float[2];  // of this lane's tokens

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
        std::int64_t first_line;     // of the key head's values in what the sweeps saved
        TokenRows d_o;               // of its first value head
        bool whole;                  // whether these are as many as in a chunk, and near
        int first_channel;           // of the part
    };
    // Values of one of the value heads, 64 for each stage, from that block of 64 on.
    struct Values {
        int member, block;
    };
    // What is asked for of these at once: S, y and d_o, or D and r.
    enum class Part { reads, writes };
    // Products of rows with their gradients' part from the chunk's borders, of this lane's rows: q with d_q, e with
    // d_e, k with d_k; all of q and e in q, but of comba.
    struct BorderDots {
        RowSums q, e, k;
    };
    // Where a thread reaches into matrices, in bytes from their begin: for its part of left operands, whose rows or
    // columns are tokens of its warp or those of its pairs; for pieces that it copies, of K or 64 columns.
    struct alignas(8) Places {
        std::uint32_t rows, columns, rows_of_pairs, columns_of_pairs, piece_of_channels, piece_of_values;
    };

    const KernelArgs& args;
    Task* task;
    Matrix<K> q, k, e;
    Stage first_stage;
    std::int64_t stage_elements;                  // from a stage to the next
    Matrix<tensor_chunk> W, L, W_low, L_low;      // where a stage was
    Matrix<tensor_values> rest;                   // of r, then of y at hand, where keys overlap
    float *q_norm, *k_norm, *e_norm, *d_beta;     // [C]
    float *betas, *beta_slope;                    // [C] of a head's tokens; factors of d_beta
    float *of_column, *of_erasing;                // [C] factors of a head's W and L by column, of L by row
    float *read, *erase, *write;                  // [C] factors of a head's rows from the chunk's start, and to its end
    float* through;                               // [2] the chunk's decay, of a head and the next
    float *of_q, *of_e, *of_k;                    // [2,C] BorderDots by halves of channels
    float* warp_sums;                             // [8]
    Places* places;                               // [threads]
    float* along_rows;                            // [3,C] of parts, with l2norm: d_q, d_k and d_e along their rows
    ScalarDecays decays;
    SpanningPairs pairs;
    Tile<float> gradient;      // [1,C] of the gate
    float2 *weights, *scores;  // [blocks, threads] sums of W or L; q k^T or e k^T, not of comba

    __host__ __device__ GradientKernel(const KernelArgs& arguments, Arena& arena) : args(arguments) {
        take_padding(arena);
        q = Matrix<K>::take(arena, tensor_chunk);
        k = Matrix<K>::take(arena, tensor_chunk);
        e = comba ? Matrix<K>::take(arena, tensor_chunk) : k;
        rest = Matrix<tensor_values>::take(arena, tensor_values);
        for (float** vector :
             {&q_norm, &k_norm, &d_beta, &betas, &of_column, &of_erasing, &beta_slope, &read, &erase, &write})
            *vector = arena.take<float>(tensor_chunk);
        through = arena.take<float>(2);
        e_norm = comba ? arena.take<float>(tensor_chunk) : k_norm;
        task = arena.take<Task>(1);
        for (float** vector : {&of_q, &of_k}) *vector = arena.take<float>(2 * tensor_chunk);
        of_e = comba ? arena.take<float>(2 * tensor_chunk) : nullptr;
        warp_sums = arena.take<float>(8);
        places = arena.take<Places>(tensor_threads);
        along_rows = parts > 1 ? arena.take<float>(3 * tensor_chunk) : nullptr;
        decays.carve(arena);
        pairs.carve(arena);
        gradient = arena.tile<float>(1, tensor_chunk);
        weights = arena.take<float2>(TokenPairs::blocks * tensor_threads);
        scores = comba ? nullptr : arena.take<float2>(TokenPairs::blocks * tensor_threads);
        // Behind all of these, so that their places do not depend on how many there are.
        take_padding(arena);
        const std::size_t before = arena.shared_used;
        for (Matrix<K>* matrix : {&first_stage.S, &first_stage.D}) *matrix = Matrix<K>::take(arena, tensor_values);
        for (Matrix<tensor_values>* matrix : {&first_stage.r, &first_stage.y, &first_stage.d_o})
            *matrix = Matrix<tensor_values>::take(arena, tensor_chunk);
        stage_elements = static_cast<std::int64_t>((arena.shared_used - before) / sizeof(std::uint16_t));
        if (args.stages == 2) arena.take<std::uint16_t>(static_cast<std::size_t>(stage_elements));
        W.data = first_stage.S.data, L.data = first_stage.D.data;
        W_low.data = first_stage.r.data, L_low.data = first_stage.y.data;
    }

    // The chunk in a row of all sequences' (part_at), all value heads of a key head.
    HEADRACE_DEVICE void run(std::int64_t row, std::int64_t key_head) {
        const PartAt at = part_at(args, row, tensor_chunk);
        const TokenRange s = sequence_of(args, at.n);
        if (at.part * tensor_chunk >= s.end - s.begin) return;
        if (threadIdx.x == 0) {
            const ChunkRange range = chunk_range(args, s, at.part);
            const std::int64_t head = key_head * args.group;
            const TokenRows d_o = cuda::rows_of(args.d_o, range, head, 0);
            *task = {range, row, key_head, (row * args.HV + head) * lines_of_head(), d_o,
                     range.length == tensor_chunk && d_o.near(), 0};
        }
        find_places();
        ptx::sync_block();
        if constexpr (parts > 1) {
            run_parts();
        } else {
            fetch_keys();
            Sums d_q = {}, d_k = {}, d_e = {};
            heads(d_q, d_k, d_e);
            store_keys(d_q, d_k, d_e);
        }
    }

  private:
    // Of this warp, or that of a thread.
    HEADRACE_DEVICE static int token_row(int of = static_cast<int>(threadIdx.x)) { return of / 32 % 4 * 16; }
    HEADRACE_DEVICE static int key_column(int of = static_cast<int>(threadIdx.x)) { return of / 128 * (K / 2); }
    HEADRACE_DEVICE static bool of_erases() { return TokenPairs::matrix() == 1; }  // whether y r^T is this warp's
    HEADRACE_DEVICE void fetch_keys() const {
        // Here and below, the same code for several: what is new to a multiprocessor is slow.
        HEADRACE_ROLLED
        for (int which = 0; which < (comba ? 3 : 2); ++which) {
            const Matrix<K> to = which == 0 ? q : which == 1 ? k : e;
            const Strided& from = which == 0 ? args.q : which == 1 ? args.k : args.p;
            copy_tokens<K, tensor_threads>(to, from, task->range, task->key_head, first_channel(),
                                           args.K - first_channel());
        }
    }

    // ---- parts of the channels ----
    HEADRACE_DEVICE int first_channel() const { return parts > 1 ? task->first_channel : 0; }
    HEADRACE_DEVICE void run_parts() {
        HEADRACE_ROLLED
        for (int part = parts - 1; args.l2norm && part >= 0; --part) add_squares(part);
        if (own() < tensor_chunk) finish_norms(own());
        HEADRACE_ROLLED
        for (int part = 0; part < parts; ++part) {
            begin_part(part);
            fetch_keys();
            Sums d_q = {}, d_k = {}, d_e = {};
            heads(d_q, d_k, d_e);
            if (args.l2norm) add_along(d_q, d_k, d_e);
            if (args.l2norm && part < parts - 1) {
                keep(d_q, d_k, d_e);
            } else {
                store_keys(d_q, d_k, d_e);
            }
        }
        if (!args.l2norm) return;
        HEADRACE_ROLLED
        for (int part = 0; part < parts - 1; ++part) {
            begin_part(part);
            fetch_keys();
            Sums d_q, d_k, d_e = {};
            ptx::end_copies();
            take(d_q, d_k, d_e);
            end_copies_of_block();
            store_keys(d_q, d_k, d_e);
        }
    }
    HEADRACE_DEVICE void begin_part(int part) const {
        ptx::sync_block();  // all have read the rows of the one before
        if (threadIdx.x == 0) task->first_channel = part * K;
        ptx::sync_block();
    }
    // Of rows of a part, to those of parts before: in place of the norms, and along them zeros.
    HEADRACE_DEVICE void add_squares(int part) const {
        begin_part(part);
        fetch_keys();
        ptx::end_copies();
        end_copies_of_block();
        const int i = 8 * warp() + lane_here() / 4;
        HEADRACE_ROLLED
        for (int which = 0; which < (comba ? 3 : 2); ++which) {
            const Matrix<K> x = which == 0 ? q : which == 1 ? k : e;
            float* const to = which == 0 ? q_norm : which == 1 ? k_norm : e_norm;
            const float square = dot_of_rows(x, x, i);
            if (lane() % 4 == 0) {
                to[i] = part < parts - 1 ? to[i] + square : square;
                along_rows[which * tensor_chunk + i] = 0;
            }
            ptx::sync_warp();
        }
        ptx::sync_block();
    }
    HEADRACE_DEVICE void finish_norms(int i) const {
        q_norm[i] = args.l2norm ? inverse_norm(q_norm[i]) : 1.0f;
        k_norm[i] = args.l2norm ? inverse_norm(k_norm[i]) : 1.0f;
        if (comba) e_norm[i] = args.l2norm ? inverse_norm(e_norm[i]) : 1.0f;
    }
    HEADRACE_DEVICE void add_along(const Sums& d_q, const Sums& d_k, const Sums& d_e) const {
        add_along(along_rows, d_q, q), add_along(along_rows + tensor_chunk, d_k, k);
        if (comba) add_along(along_rows + 2 * tensor_chunk, d_e, e);
    }
    HEADRACE_DEVICE void add_along(float* to, const Sums& d, Matrix<K> x) const {
        find_along(d, x);
        if (const int i = own(); i < tensor_chunk) to[i] += of_halves(of_q, i);
        ptx::sync_block();
    }
    // d_q, d_k and d_e as threads hold them, until y . d is known of all parts.
    HEADRACE_DEVICE float4* kept_sums(int which) const {
        const std::int64_t place = task->row * args.H + task->key_head;
        return reinterpret_cast<float4*>(args.swept.key_gradients) + (3 * place + which) * (tensor_chunk * K / 4) +
               own();
    }
    HEADRACE_DEVICE void keep(const Sums& d_q, const Sums& d_k, const Sums& d_e) const {
#pragma unroll
        for (int which = 0; which < (comba ? 3 : 2); ++which) {
            const Sums& of = which == 0 ? d_q : which == 1 ? d_k : d_e;
            float4* const to = kept_sums(which);
#pragma unroll
            for (int tile = 0; tile < tiles; ++tile)
                to[tile * tensor_threads] = {of[tile][0], of[tile][1], of[tile][2], of[tile][3]};
        }
    }
    HEADRACE_DEVICE void take(Sums& d_q, Sums& d_k, Sums& d_e) const {
#pragma unroll
        for (int which = 0; which < (comba ? 3 : 2); ++which) {
            Sums& to = which == 0 ? d_q : which == 1 ? d_k : d_e;
            const float4* const from = kept_sums(which);
#pragma unroll
            for (int tile = 0; tile < tiles; ++tile) {
                const float4 of = from[tile * tensor_threads];
                to[tile][0] = of.x, to[tile][1] = of.y, to[tile][2] = of.z, to[tile][3] = of.w;
            }
        }
    }

    HEADRACE_DEVICE std::int64_t first_head() const { return task->key_head * args.group; }
    HEADRACE_DEVICE int value_blocks() const {
        return static_cast<int>((static_cast<unsigned>(args.V) + tensor_values - 1) / tensor_values);
    }
    // Of the i-th 64 values at hand.
    HEADRACE_DEVICE Stage stage_of(int i) const { return first_stage.behind(i * stage_elements); }

    // Adds up d_q, d_k and d_e of all value heads; stores d_beta and the gate's gradient of each. What is needed next
    // is asked for as soon as all have read what is there.
    HEADRACE_DEVICE void heads(Sums& d_q, Sums& d_k, Sums& d_e) {
        PairSums d_pairs = {};
        BorderDots dots{};
        float crossing = 0;
        bool any_fine = false;
        Values now{-1, 0};  // at first none
        HEADRACE_ROLLED
        while (now.member < args.group) {
            const bool some = now.member >= 0;
            const Values next = some ? behind(now) : Values{};
            bool fine = false;
            if (some) {
                end_copies_of_block<1>();
                if (now.member == 0 && now.block == 0) begin_heads();
                fine = keys_overlap(args, task->row * args.HV + first_head() + now.member);
                any_fine = any_fine || fine;
                crossing += add_reads(now, d_q, d_k, d_e, d_pairs, dots);
                ptx::sync_block();
            }
            if (!fine) fetch(next, Part::reads);
            if (some) {
                add_writes(now, d_k, dots);
                if (fine) add_rest(now, d_k, d_e, d_pairs, dots);
                ptx::sync_block();
            }
            HEADRACE_ROLLED
            for (int part = fine ? 0 : 1; part < 2; ++part) fetch(next, part == 0 ? Part::reads : Part::writes);
            if (!some) find_numbers(0);
            if (some && next.member > now.member) {
                end_head(now.member, d_pairs, dots, crossing);
                dots = {}, crossing = 0;
            }
            now = next;
        }
        add_pairs(any_fine, d_q, d_k, d_e);
    }
    // When rows of keys are there.
    HEADRACE_DEVICE void begin_heads() const {
        if constexpr (parts == 1) {
            weigh_rows();
            ptx::sync_block();
        }
        weigh_numbers();
        if (!comba && args.gate_gradient) keep_scores();
        ptx::sync_block();
    }
    // How many times 64 there are of these.
    HEADRACE_DEVICE int blocks_of(Values values) const {
        const int left = value_blocks() - values.block;
        return left < args.stages ? left : args.stages;
    }
    // The next ones.
    HEADRACE_DEVICE Values behind(Values values) const {
        const bool same = values.block + args.stages < value_blocks();
        return {same ? values.member : values.member + 1, same ? values.block + args.stages : 0};
    }
    // sums = the products that multiply(stage, add) begins with each 64 of so many; `add` with all but the first.
    template <class Multiply>
    HEADRACE_DEVICE void find_products(Sums& sums, int count, Multiply multiply) const {
        if (!Products::may_begin) clear(sums);
        HEADRACE_ROLLED  // products that go on may not leave a turn
            for (int i = 0; i < count; ++i) {
            multiply(stage_of(i), !Products::may_begin || i > 0);
            Products::template wait<0>(sums);
        }
    }
    // What a thread copies of 64 lines, so many elements apart: pieces at distances known beforehand.
    template <int step, int columns>
    struct Lines {
        static constexpr int pieces = columns / 8, bytes = 16 * tensor_threads;
        static_assert(tensor_threads / pieces % 8 == 0);
        const char* from;
        std::uint32_t to;

        HEADRACE_DEVICE Lines(Matrix<columns> matrix, const std::uint16_t* lines, std::uint32_t piece)
            : to(ptx::shared_address(matrix.data) + piece) {
            const int of = own();
            from = reinterpret_cast<const char*>(lines) +
                   (step == columns ? 16 * of : of / pieces * (2 * step) + of % pieces * 16);
        }
        HEADRACE_DEVICE void copy() const {
#pragma unroll
            for (int at = 0; at < 2 * columns * tensor_values; at += bytes)
                ptx::copy_16(to + at / columns * Matrix<columns>::row, from + at / columns * step, 16);
        }
        // To the next 64, and a matrix so many bytes behind.
        HEADRACE_DEVICE void advance(std::uint32_t behind) { from += 2 * tensor_values * step, to += behind; }
    };
    // Rows that lie behind the last value become zero: no sweep has written them.
    HEADRACE_DEVICE void fetch(Values values, Part part) const {
        if (values.member >= args.group) return;
        const bool reads = part == Part::reads;
        const SweptChunks& swept = args.swept;
        const std::int64_t line = first_line(values);
        const std::uint16_t *states = (reads ? swept.states : swept.adjoints) + (line * (parts * K) + first_channel()),
                            *rows = (reads ? swept.d_written : swept.residuals) + line * tensor_chunk;
        TokenRows d_o = task->d_o;
        d_o.first += 2 * (values.member * args.d_o.stride[2] + values.block * tensor_values);
        const Stage& to = first_stage;
        const Places& places = places_of_thread();
        Lines<parts * K, K> of_states(reads ? to.S : to.D, states, places.piece_of_channels);
        Lines<tensor_chunk, tensor_values> of_rows(reads ? to.y : to.r, rows, places.piece_of_values);
        WholePieces<tensor_values, tensor_threads> of_d_o(to.d_o, d_o, 0);
        const auto behind = static_cast<std::uint32_t>(2 * stage_elements);
        HEADRACE_ROLLED
        for (int i = 0, left = args.V - values.block * tensor_values; i < args.stages && left > 0; ++i) {
            const bool whole = left >= tensor_values;
            if (whole) {
                of_states.copy(), of_rows.copy();
            } else {
                const Stage stage = stage_of(i);
                copy_lines<parts * K>(reads ? stage.S : stage.D, states + i * tensor_values * (parts * K), left);
                copy_lines(reads ? stage.y : stage.r, rows + i * tensor_values * tensor_chunk, left);
            }
            if (reads && whole && task->whole) {
                of_d_o.copy();
            } else if (reads) {
                copy_rows<tensor_values, 0>(stage_of(i).d_o, d_o, task->range.length, task->range.rows,
                                            whole ? tensor_values : left);
            }
            of_states.advance(behind), of_rows.advance(behind);
            of_d_o.from += 2 * tensor_values, of_d_o.to += behind;
            d_o.first += 2 * tensor_values, left -= tensor_values;
        }
        ptx::end_copies();
    }
    // Of a value head in what the sweeps saved; the first of these values.
    HEADRACE_DEVICE int lines_of_head() const {
        return static_cast<int>((static_cast<unsigned>(args.V) + 15) / 16 * 16);
    }
    HEADRACE_DEVICE std::int64_t first_line(Values values) const {
        return task->first_line + values.member * lines_of_head() + values.block * tensor_values;
    }

    // ---- numbers of tokens ----
    // Of a head, by the second warp, whose lanes have two tokens each: the decays of its tokens, of which weigh_numbers
    // makes factors, and their betas.
    HEADRACE_DEVICE void find_numbers(int member) const {
        if (warp_here() != 1 || member >= args.group) return;
        float log_decays[2] = {};
        HEADRACE_ROLLED  // the code of beta's formulas once
            for (int token = 0; token < 2; ++token) {
            const int i = 2 * lane_here() + token;
            float log_decay = 0;
            Beta<float> beta{0, 1};
            if (i < task->range.length) {
                const std::int64_t head = first_head() + member;
                log_decay = token_log_decay(args, task->range, i, head);
                beta = beta_value<float>(args, task->range.row, task->range.token(i), head, 0);
            }
            betas[i] = beta.value, beta_slope[i] = beta.slope;
            (token == 0 ? log_decays[0] : log_decays[1]) = log_decay;
        }
        const ScalarDecays::OfLane of = decays.prepare(log_decays[0], log_decays[1]);
        if (lane() == 0) through[member % 2] = static_cast<float>(of.through());
#pragma unroll
        for (int token = 0; token < 2; ++token) {
            const int i = 2 * lane() + token;
            read[i] = of.start[token], erase[i] = comba ? of.before[token] : of.start[token], write[i] = of.end[token];
        }
        ptx::sync_warp();  // before it meets others
    }
    // By the next two warps.
    HEADRACE_DEVICE void weigh_numbers() const {
        const int i = own() - 2 * warp_lanes;
        if (i < 0 || i >= tensor_chunk) return;
        of_column[i] = betas[i] * k_norm[i], of_erasing[i] = -betas[i] * e_norm[i];
        read[i] *= static_cast<float>(args.scale) * q_norm[i], erase[i] *= of_erasing[i], write[i] *= of_column[i];
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

    // ---- operands ----
    // This thread's number, of which nothing is kept from step to step.
    HEADRACE_DEVICE static int own() { return thread_here(); }
    template <class T>
    HEADRACE_DEVICE static T& either(T& of_k, T& of_p) {
        if constexpr (comba)
            return of_p;
        else
            return of_k;
    }
    // Each thread's, found once and read each time, as registers are few.
    HEADRACE_DEVICE void find_places() const {
        const int of = own(), lane = of % warp_lanes, row = lane % 16, piece = lane / 16 * 8, column = lane / 8 % 2 * 8,
                  along = lane % 8 + piece;
        const auto bytes = [](int i, int j) {
            return 2 * static_cast<std::uint32_t>(Matrix<tensor_chunk>::place(i, j));
        };
        const auto of_pairs = [&](int half) { return TokenPairs::first_row(half, of / warp_lanes); };
        const auto copied = [&](auto matrix, int pieces) {
            return 2 * static_cast<std::uint32_t>(decltype(matrix)::place(of / pieces, of % pieces * 8));
        };
        places[of] = {bytes(token_row(of) + row, piece),
                      bytes(along, token_row(of) + column),
                      bytes(of_pairs(row / 8) + row % 8, piece),
                      bytes(along, of_pairs(column / 8)),
                      copied(Matrix<K>{}, K / 8),
                      copied(Matrix<tensor_values>{}, tensor_values / 8)};
    }
    HEADRACE_DEVICE const Places& places_of_thread() const { return places[own()]; }
    template <int columns>
    HEADRACE_DEVICE static OperandAt<columns> at(Matrix<columns> m, std::uint32_t place) {
        return {ptx::shared_address(m.data) + place};
    }
    // Left operands, 16 other columns or rows of the matrix from step to step.
    template <int columns>
    HEADRACE_DEVICE static auto rows_of(Matrix<columns> m, std::uint32_t place) {
        return [from = at(m, place)](std::uint32_t(&a)[4], int step) { ptx::load_matrix(a, from.at(0, 16 * step)); };
    }
    HEADRACE_DEVICE static auto columns_of(Matrix<64> m, std::uint32_t place) {
        return [from = at(m, place)](std::uint32_t(&a)[4], int step) {
            ptx::load_matrix_transposed(a, from.at(16 * step, 0));
        };
    }

    // ---- of the values at hand ----
    // What S, y and d_o are needed for, when they are there; D and r are when it comes back. Gives <S,D>, this lane's
    // part.
    HEADRACE_DEVICE float add_reads(Values now, Sums& d_q, Sums& d_k, Sums& d_e, PairSums& d_pairs,
                                    BorderDots& dots) const {
        const Places at = places_of_thread();
        const int channel = key_column(own()), count = blocks_of(now);
        Sums part;
        find_products(part, count, [&](const Stage& of, bool add) {
            Products::multiply(part, rows_of(of.d_o, at.rows), of.S, channel, add);
        });
        end_copies_of_block<0>();
        float crossing = 0;
        HEADRACE_ROLLED
        for (int i = 0; i < count; ++i) {
            const Stage of = stage_of(i);
            Products::multiply(d_pairs, pairs_left(of.d_o, of.y, at), of.r, 0, i > 0 || now.block > 0);
            if (comba) Products::template wait<0>(d_pairs);  // as registers are few
            if (i == 0) fold(d_q, dots.q, part, q, read, at);
            if (args.gate_gradient) crossing += cross(of);
            if (!comba) Products::template wait<0>(d_pairs);
        }
        find_products(part, count, [&](const Stage& of, bool add) {
            Products::multiply(part, columns_of(of.y, at.columns), of.S, channel, add);
        });
        fold(either(d_k, d_e), either(dots.q, dots.e), part, e, erase, at);
        return crossing;
    }
    // What D and r are needed for.
    HEADRACE_DEVICE void add_writes(Values now, Sums& d_k, BorderDots& dots) const {
        const Places at = places_of_thread();
        const int channel = key_column(own());
        Sums part;
        find_products(part, blocks_of(now), [&](const Stage& of, bool add) {
            Products::multiply(part, columns_of(of.r, at.columns), of.D, channel, add);
        });
        fold(d_k, dots.k, part, k, write, at);
    }
    // Of what r and y have below their bf16, one after the other: y r^T, d_o r^T and D r; y r^T and S y.
    HEADRACE_DEVICE void add_rest(Values values, Sums& d_k, Sums& d_e, PairSums& d_pairs, BorderDots& dots) const {
        HEADRACE_ROLLED
        for (int turn = 0, end = 2 * blocks_of(values); turn < end; ++turn) {
            const bool of_r = turn % 2 == 0;
            const Stage now = stage_of(turn / 2);
            take_rest(of_r ? args.swept.residuals_low : args.swept.d_written_low,
                      {values.member, values.block + turn / 2});
            const Places at = places_of_thread();
            const int channel = key_column(own());
            // The second time zeros of d_o.
            Products::multiply(d_pairs, pairs_left(now.d_o, of_r ? now.y : rest, at, of_r), of_r ? rest : now.r, 0,
                               true);
            Products::template wait<0>(d_pairs);
            Sums part;
            Products::multiply(part, columns_of(rest, at.columns), of_r ? now.D : now.S, channel, false);
            Products::template wait<0>(part);
            if (of_r) {
                fold(d_k, dots.k, part, k, write, at);
            } else {
                fold(either(d_k, d_e), either(dots.q, dots.e), part, e, erase, at);
            }
            ptx::sync_block();
        }
    }
    // d_o, where it is `given`, or the transpose of y, of this warp's rows of pairs.
    HEADRACE_DEVICE static auto pairs_left(Matrix<64> d_o, Matrix<64> y, const Places& places, bool given = true) {
        const OperandAt<64> rows = at(d_o, places.rows_of_pairs), columns = at(y, places.columns_of_pairs);
        return [rows, columns, given, erases = of_erases()](std::uint32_t(&a)[4], int step) {
            if (erases) {
                ptx::load_matrix_transposed(a, columns.at(16 * step, 0));
            } else {
                ptx::load_matrix(a, rows.at(0, 16 * step));
#pragma unroll
                for (std::uint32_t& pair : a) pair = given ? pair : 0;
            }
        };
    }
    HEADRACE_DEVICE void take_rest(const std::uint16_t* from, Values values) const {
        copy_lines(rest, from + first_line(values) * tensor_chunk, args.V - values.block * tensor_values);
        ptx::end_copies();
        end_copies_of_block();
    }
    // f(half, tile, pair) for the pairs of this lane's sums, two neighbours in a row of 8 half on, with those of x
    // there.
    template <class F>
    HEADRACE_DEVICE static void each_pair_of(Matrix<K> x, const Places& places, F f) {
        const OperandAt<K> from{at(x, places.rows).at(0, key_column(own()))};
#pragma unroll
        for (int tile = 0; tile < tiles; tile += 2) {
            std::uint32_t rows[4];
            ptx::load_matrix(rows, from.at(0, 8 * tile));
#pragma unroll
            for (int i = 0; i < 4; ++i) f(i % 2, tile + i / 2, rows[i]);
        }
    }
    HEADRACE_DEVICE static int own_row(int half) { return token_row() + lane() / 4 + 8 * half; }
    // total += factors * part, by rows, and the part's products with the rows x.
    HEADRACE_DEVICE static void fold(Sums& total, RowSums& dots, const Sums& part, Matrix<K> x, const float* factors,
                                     const Places& places) {
        const float of_rows[2] = {factors[own_row(0)], factors[own_row(1)]};
        RowSums dot = {};
        each_pair_of(x, places, [&](int half, int tile, std::uint32_t row) {
            const float left = part[tile][2 * half], right = part[tile][2 * half + 1], of = of_rows[half];
            float(&sums)[4] = total[tile];
            sums[2 * half] = fmaf(of, left, sums[2 * half]), sums[2 * half + 1] = fmaf(of, right, sums[2 * half + 1]);
            dot[half] = fmaf(left, low_half(row), fmaf(right, high_half(row), dot[half]));
        });
#pragma unroll
        for (int half = 0; half < 2; ++half) dots[half] = fmaf(of_rows[half], dot[half], dots[half]);
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
    HEADRACE_DEVICE void end_head(int member, const PairSums& d_pairs, const BorderDots& dots, float crossing) {
        PairSums spans;
        if (comba) score(spans);
        weigh_pairs(d_pairs, member > 0, spans);
        if (args.gate_gradient) {
            leave(of_q, dots.q), leave(of_k, dots.k);
            if (comba) leave(of_e, dots.e);
            crossing = sum_of_warp(crossing);
            if (lane() == 0) warp_sums[warp()] = crossing;
            pairs.add_up(spans, !comba || !of_erases());
        }
        ptx::sync_block();
        if (args.gate_gradient && warp_here() == 0) add_up(member, pairs.spanning());
        find_numbers(member + 1);
        if (first_channel() == 0) store_by_warps(args.d_beta, d_beta, 4, member);
        ptx::sync_block();
        if (args.gate_gradient) store_by_warps(args.d_log_decays, gradient.data, 0, member, first_channel() > 0);
        if (member + 1 < args.group) weigh_numbers();
    }
    // Of a head's tokens, by two warps. `add`: to what they have stored of the part before, in fp32.
    HEADRACE_DEVICE void store_by_warps(const Strided& tensor, const float* numbers, int first_warp, int member,
                                        bool add = false) const {
        const int i = own() - first_warp * warp_lanes;
        const ChunkRange& range = task->range;
        if (!tensor.given || i < 0 || i >= range.length) return;
        const std::int64_t place = offset_of(tensor, range.row, range.token(i), first_head() + member);
        const float before = parts > 1 && add ? reinterpret_cast<const float*>(tensor.data)[place] : 0.0f;
        store_element<float>(tensor.data, tensor.dtype, place, parts > 1 ? before + numbers[i] : numbers[i]);
    }
    // q k^T or e k^T
    HEADRACE_DEVICE void score(PairSums& sums) const {
        const auto left = rows_of(of_erases() ? e : q, places_of_thread().rows_of_pairs);
        Products::multiply_transposed(sums, left, k);
        Products::template wait<0>(sums);
    }
    // This lane's two sums of a block (TokenPairs), kept from head to head.
    HEADRACE_DEVICE static float2& kept_at(float2* sums, int place) {
        return sums[place * tensor_threads + static_cast<int>(threadIdx.x)];
    }
    HEADRACE_DEVICE void keep_scores() const {
        PairSums sums;
        score(sums);
        TokenPairs::each_block([&](int half, int tile, int place, bool) {
            kept_at(scores, place) = {sums[tile][2 * half], sums[tile][2 * half + 1]};
        });
    }
    // Of d_o r^T or y r^T makes W or L, to add to those of heads before, and of the latter d_beta = y . r; of the
    // scores, in `spans`, what a pair adds to a gate.
    HEADRACE_DEVICE void weigh_pairs(const PairSums& d_pairs, bool heads_before, PairSums& spans) const {
        const LanePlace at;
        const bool erases = of_erases(), with_gate = args.gate_gradient;
        ScalarDecays::Power own[2];
        float of_rows[2], of_diagonal[2] = {};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int i = TokenPairs::row(half);
            own[half] = decays.at(comba && erases && i > 0 ? i - 1 : i);
            of_rows[half] = erases ? of_erasing[i] : static_cast<float>(args.scale) * q_norm[i];
        }
        TokenPairs::each_block([&](int half, int tile, int place, bool on_diagonal) {
            const int j = 8 * tile + at.column;
            const float2 of_columns = *reinterpret_cast<const float2*>(of_column + j);
            ScalarDecays::Power earlier[2];
            decays.pair_at(earlier, j);
            const float decay[2] = {ScalarDecays::between(own[half], earlier[0]),
                                    ScalarDecays::between(own[half], earlier[1])};
            const float2 given = {d_pairs[tile][2 * half], d_pairs[tile][2 * half + 1]};
            float left = given.x * (of_columns.x * of_rows[half]) * decay[0],
                  right = given.y * (of_columns.y * of_rows[half]) * decay[1];
            if (on_diagonal) {
                left = at.column < at.row || (!erases && at.column == at.row) ? left : 0.0f;
                right = at.column + 1 < at.row || (!erases && at.column + 1 == at.row) ? right : 0.0f;
                of_diagonal[half] = at.row % 2 == 0 ? given.x : given.y;
            }
            float2 kept = {};
            if (heads_before) kept = kept_at(weights, place);
            kept_at(weights, place) = {kept.x + left, kept.y + right};
            if (!with_gate) return;
            const float2 score =
                comba ? float2{spans[tile][2 * half], spans[tile][2 * half + 1]} : kept_at(scores, place);
            left *= score.x, right *= score.y;
            if (on_diagonal) {
                left = at.column < at.row ? left : 0.0f, right = at.column + 1 < at.row ? right : 0.0f;
            }
            spans[tile][2 * half] = left, spans[tile][2 * half + 1] = right;
        });
        if (erases && at.column / 2 == at.row / 2) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int i = TokenPairs::row(half);
                d_beta[i] = of_diagonal[half] * beta_slope[i];
            }
        }
    }
    // Sums over a row's lanes, which have half of it.
    HEADRACE_DEVICE static void leave(float* sums, const RowSums& dots) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float dot = sum_of_quad(dots[half]);
            if (lane() % 4 == 0) sums[warp() / 4 * tensor_chunk + own_row(half)] = dot;
        }
    }
    HEADRACE_DEVICE static float of_halves(const float* sums, int i) { return sums[i] + sums[tensor_chunk + i]; }
    // By one warp; a lane has two tokens. All terms that span a gate, docs/math.md, section 6.
    HEADRACE_DEVICE void add_up(int member, float2 spanning) const {
        const int i = 2 * lane();
        float across = 0;
#pragma unroll
        for (int w = 0; w < 8; ++w) across += warp_sums[w];
        across *= through[member % 2];
        const float u_0 = of_halves(of_q, i), u_1 = of_halves(of_q, i + 1), k_0 = of_halves(of_k, i),
                    k_1 = of_halves(of_k, i + 1), e_0 = comba ? of_halves(of_e, i) : 0.0f,
                    e_1 = comba ? of_halves(of_e, i + 1) : 0.0f;
        // Of all tokens behind this lane's; comba's erase terms do not see the own gate. And of all before them.
        const float behind = sum_of_later(u_0 + u_1 + e_0 + e_1), before = sum_of_earlier(k_0 + k_1);
        gradient.at(0, i) = behind + u_0 + u_1 + e_1 + before + spanning.x + across;
        gradient.at(0, i + 1) = behind + u_1 + before + k_0 + spanning.y + across;
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
        leave_pairs(fine);
        ptx::sync_block();
        HEADRACE_ROLLED
        for (int turn = 0; turn <= (fine ? 1 : 0); ++turn)
            add_scored(turn == 0 ? W : W_low, turn == 0 ? L : L_low, d_q, d_k, d_e);
    }
    // Zeros above the diagonal, too.
    HEADRACE_DEVICE void leave_pairs(bool fine) const {
        const int erases = of_erases() ? 1 : 0;
        const Matrix<64> to{W.data + erases * (L.data - W.data)},
            to_low{W_low.data + erases * (L_low.data - W_low.data)};
        float sums[8][4] = {};
        TokenPairs::each_block([&](int half, int tile, int place, bool) {
            const float2 kept = kept_at(weights, place);
            sums[tile][2 * half] = kept.x, sums[tile][2 * half + 1] = kept.y;
        });
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const PairsAt<64> at(TokenPairs::first_row(half), 0);
#pragma unroll
            for (int tile = 0; tile < 8; ++tile) {
                const SplitPair of = split_pair(sums[tile][2 * half], sums[tile][2 * half + 1]);
                at.of(to, tile, 0) = of.high;
                if (fine) at.of(to_low, tile, 0) = of.low;
            }
        }
    }
    // d_q += W k, d_e += L k, d_k += W^T q + L^T e
    HEADRACE_DEVICE void add_scored(Matrix<tensor_chunk> of_reads, Matrix<tensor_chunk> of_erases, Sums& d_q, Sums& d_k,
                                    Sums& d_e) const {
        const Places at = places_of_thread();
        const int channel = key_column(own());
        Products::multiply(d_q, rows_of(of_reads, at.rows), k, channel, true);
        Products::multiply(either(d_k, d_e), rows_of(of_erases, at.rows), k, channel, true);
        Products::template wait<1>(d_q);
        Products::multiply(d_k, columns_of(of_reads, at.columns), q, channel, true);
        Products::template wait<1>(either(d_k, d_e));
        Products::multiply(d_k, columns_of(of_erases, at.columns), e, channel, true);
        Products::template wait<0>(d_q, d_k, either(d_k, d_e));
    }

    // ---- rows of keys ----
    HEADRACE_DEVICE void store_keys(Sums& d_q, Sums& d_k, Sums& d_e) {
        store_rows(args.d_q, d_q, q, q_norm, along_rows);
        store_rows(args.d_k, d_k, k, k_norm, along_rows + tensor_chunk);
        if (comba) store_rows(args.d_p, d_e, e, e_norm, along_rows + 2 * tensor_chunk);
    }
    // d along the rows, of all channels of a part: behind a barrier, by halves (of_halves).
    HEADRACE_DEVICE void find_along(const Sums& d, Matrix<K> x) const {
        RowSums sums = {};
        each_pair_of(x, places_of_thread(), [&](int half, int tile, std::uint32_t row) {
            sums[half] =
                fmaf(d[tile][2 * half], low_half(row), fmaf(d[tile][2 * half + 1], high_half(row), sums[half]));
        });
        leave(of_q, sums);
        ptx::sync_block();
    }
    // Of the gradient times the inverse norm: with y = x r the unit rows, d - y (y . d) is that of x. It takes the
    // place of the rows. Of parts x . d is known.
    HEADRACE_DEVICE void store_rows(const Strided& tensor, Sums& d, Matrix<K> x, const float* inverse_norm,
                                    const float* of_parts) const {
        if (!tensor.given) return;
        RowSums along = {};
        if (args.l2norm) {
            if constexpr (parts == 1) find_along(d, x);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int i = own_row(half);
                along[half] = (parts > 1 ? of_parts[i] : of_halves(of_q, i)) * inverse_norm[i] * inverse_norm[i];
            }
        }
        ptx::sync_block();  // other warps' products with x, and what they read of the sums
        if (args.l2norm) {
            each_pair_of(x, places_of_thread(), [&](int half, int tile, std::uint32_t row) {
                d[tile][2 * half] -= along[half] * low_half(row), d[tile][2 * half + 1] -= along[half] * high_half(row);
            });
            ptx::sync_warp();
        }
        const PairsAt<K> at{token_row(), key_column()};
#pragma unroll
        for (int tile = 0; tile < tiles; ++tile) {
#pragma unroll
            for (int half = 0; half < 2; ++half)
                at.of(x, tile, 8 * half) = ptx::round_to_bf16(d[tile][2 * half], d[tile][2 * half + 1]);
        }
        ptx::sync_block();
        store_matrix(tensor, x, task->range, task->key_head, first_channel(), args.K - first_channel());
    }
};

}  // namespace headrace::cuda
