// AdditiveKernel: a thread block walks the chunks of one sequence or segment, value head and 64 values on tensor cores;
// four warps have 16 of the values each, four compute the scores of the next chunk meanwhile. Where there are more,
// they fetch, and find the decays of the chunk behind that; then stages go from them to those that score, to those that
// walk, and back, and no warp waits for others than these.
// over 400 lines: roles that hand each other chunk after chunk.
#pragma once

#include "cuda/chunk/additive_ops.hpp"
#include "cuda/chunk/additive_scores.hpp"
#include "cuda/chunk/segments.hpp"
#include "cuda/chunk/warp_values.hpp"
#include "cuda/tiles/hand_over.hpp"

namespace headrace::cuda {

// What a walk of the additive rule is of: a forward; a gradient of a backward (KeyGradient); one that leaves terms of a
// gate's gradient, too (GateWalk). Each is a kernel, as code that a walk jumps over is slow where it is new to a
// multiprocessor.
enum class AdditiveWalk { forward, gradient, gradient_with_terms };

// The additive rule with a scalar gate.
template <int K, AdditiveWalk walk_is, class Format>
struct AdditiveKernel {
    static constexpr bool of_backward = walk_is != AdditiveWalk::forward,
                          leaves_terms = walk_is == AdditiveWalk::gradient_with_terms;
    static constexpr bool has_third_group = cuda::has_third_group<K>;
    // Of threads that walk and of a third group; with those that score together what registers_allowed gives all.
    static constexpr int walking_registers = 232, fetching_registers = 2 * group_registers - walking_registers;
    using Ops = AdditiveOps<K, Format>;
    using Scores = AdditiveScores<K, Format>;
    static constexpr int values_of_block = tensor_values, score_threads = tensor_threads / 2, score_barrier = 1;
    using Filled = HandOver<0, 2 * block_threads>;
    using Scored = HandOver<1, 2 * block_threads>;
    using Emptied = HandOver<2, 2 * block_threads>;
    // Matrices of 64 columns that a turn has: values and scores.
    static constexpr int of_values = 2 + (leaves_terms ? 1 : 0) + (Format::splits_scores ? 1 : 0);

    // Rows of a chunk as they came. Those of keys arrive two chunks ahead, as scores are computed one ahead.
    struct Keys {
        Matrix<K> q, k;
    };
    struct Values {
        Matrix<64> v, partner;
    };
    // What others tell the warps that walk of a chunk.
    struct alignas(16) Chunk {
        float read[tensor_chunk], write[tensor_chunk], diagonal[tensor_chunk];
        float decay;     // CarriedDecay
        float crossing;  // the decay of terms that cross the chunk
    };
    // Of pairs of tokens.
    struct alignas(16) TokenDecays {
        ScalarDecays::Power powers[tensor_chunk];
        float meetings[AdditiveMeetings::size];
    };
    // Of a gate's terms, the parts of four warps; the decay of those that cross the chunk.
    struct alignas(16) Terms {
        float from_state[block_warps][tensor_chunk], in_all[block_warps][tensor_chunk], crossing[block_warps], decay;
    };
    // Which walk this is and where its tokens lie: in shared memory, as registers are few.
    struct Course {
        TokenRange sequence;
        std::int64_t n, head;
        int first_chunk, end_chunk, first_value, last;
        bool whole;  // whether all rows are near, and have all columns of the block's matrices
        TokenRows q, k, v, partner, o;
        // Of a backward: where the sums of the walk's first chunk go, and terms of its first token, of all such; how
        // far behind that those of the next one.
        std::int64_t first_sums, next_sums, first_term, next_term;
    };

    const KernelArgs& args;
    Keys first_keys;
    Values first_values;
    Matrix<64> first_scores, first_scores_low;
    OutputPatch patch;  // of this warp
    Chunk* chunks;      // of each turn (turns)
    Terms* terms;       // the same
    Course* course;
    TokenDecays* token_decays;  // the same
    float *q_norm, *k_norm;     // [C]
    Scores scores;
    Ops ops;
    double passed = 0;  // the log decay of all chunks so far, of the warp that knows them
    CarriedDecay carried;
    int turn = 0;  // of a group of warps, where there is a third group

    __host__ __device__ AdditiveKernel(const KernelArgs& arguments, Arena& arena) : args(arguments) {
        const auto stages = static_cast<std::size_t>(args.stages), turns = stages < 2 ? 2 : stages;
        chunks = arena.take<Chunk>(turns);
        terms = leaves_terms ? arena.take<Terms>(turns) : nullptr;
        course = arena.take<Course>(1);
        for (float** vector : {&q_norm, &k_norm}) *vector = arena.take<float>(tensor_chunk);
        token_decays = arena.take<TokenDecays>(turns);
        scores.q_norm = q_norm, scores.k_norm = k_norm, scores.normalised = args.l2norm;
        take_padding(arena);
        patch.matrix = Matrix<64>::take(arena, tensor_values);
        const auto matrix = [&] { return Matrix<64>::take(arena, tensor_chunk); };
        first_values.v = matrix();
        first_values.partner = leaves_terms ? matrix() : first_values.v;
        first_scores = matrix();
        if (Format::splits_scores) first_scores_low = matrix();
        if (stages > 1) Matrix<64>::take(arena, (args.stages - 1) * of_values * tensor_chunk);
        first_keys.q = Matrix<K>::take(arena, tensor_chunk);
        first_keys.k = Matrix<K>::take(arena, tensor_chunk);
        if (stages > 1) Matrix<K>::take(arena, 2 * 2 * tensor_chunk);  // three of them
#ifdef __CUDA_ARCH__
        patch.matrix.data += warp() % block_warps * 16 * 64;
#endif
    }

    // One value head, values [first, first + 64): of sequence `place`, or of the segment of that slot.
    HEADRACE_DEVICE void forward(std::int64_t place, std::int64_t head, int first) {
        const Walk walk = walk_of(args, place);
        if (walk.first_chunk < 0) return;
        begin(walk, head, first);
        const bool outputs = args.o.given || leaves_terms || (of_backward && args.key_gradient.left_q_norms != nullptr);
        if (!walks()) {
            assist(outputs);
            return;
        }
        if constexpr (has_third_group) ptx::take_registers<walking_registers>();
        const bool in_between = walk.first_chunk > 0;
        load(in_between ? segment_states() : args.initial_state, in_between ? place : walk.n);
        walk_all(outputs);
        if (leaves_terms || course->last == 0) return;  // no state is asked for of a walk of keys
        if (late() > 0 && course->end_chunk > 0) decay_by_last();
        store(args.final_state, course->n);
    }

    // What leaves the segment of a slot that no state enters, of 64 values.
    HEADRACE_DEVICE void states(std::int64_t slot, std::int64_t head, int first) {
        const Walk walk = segment_walk(args, slot);
        if (walk.first_chunk < 0 || (walk.last && !args.segments.to_end)) return;  // what leaves that no other needs
        begin(walk, head, first);
        if (walks()) {
            if constexpr (has_third_group) ptx::take_registers<walking_registers>();
            load({}, 0);
            walk_all(false);
            store(segment_states(), slot);
        } else {
            assist(false);
            if (first == 0 && knows_decays() && lane() == 0) args.segments.decays[slot * args.HV + head] = exp(passed);
        }
    }

  private:
    // Log decays as they came, of a lane's two tokens, and of the chunk's last where terms cross it.
    struct Tokens {
        float gate[2], last;
    };

    // Which warps fetch, have values, find the decays.
    static constexpr Warps fetching{has_third_group ? 2 * block_warps : 0, block_warps};
    HEADRACE_DEVICE static bool walks() { return warp() < block_warps; }
    HEADRACE_DEVICE static bool knows_decays() { return warp() == (has_third_group ? 2 : 1) * block_warps; }
    HEADRACE_DEVICE bool of_keys() const { return leaves_terms && args.gate_walk.terms == GateTerms::of_keys; }
    HEADRACE_DEVICE bool diagonal_apart() const { return leaves_terms || walks_keys(); }
    HEADRACE_DEVICE bool walks_keys() const { return of_backward && args.key_gradient.walk; }
    // Where outputs are left as fp32 sums, for a launch behind.
    HEADRACE_DEVICE bool leaves_sums() const { return of_backward && args.added.sums != nullptr; }
    HEADRACE_DEVICE bool knows_norms() const { return of_backward && args.key_gradient.row_norms != nullptr; }
    // The token whose gate decays another lies so many before it.
    HEADRACE_DEVICE int late() const { return of_backward && args.late_gate ? 1 : 0; }
    HEADRACE_DEVICE std::int64_t key_head() const { return quotient(course->head, args.group); }

    HEADRACE_DEVICE Strided segment_states() const {
        const std::int64_t head = static_cast<std::int64_t>(args.K) * args.V;
        const bool transposed = args.segments.transposed;
        const std::int64_t channel = transposed ? 1 : args.V, value = transposed ? args.K : 1;
        char* const data = reinterpret_cast<char*>(args.segments.states);
        return {data, {args.HV * head, head, channel, value}, DType::f32, true};
    }
    HEADRACE_DEVICE int own() const { return course->first_value + Ops::first_value(); }
    HEADRACE_DEVICE void load(const Strided& tensor, std::int64_t n) {
        load_values(ops.state, tensor, n, course->head, args.K, own(), args.V);
    }
    HEADRACE_DEVICE void store(const Strided& tensor, std::int64_t n) const {
        store_values(tensor, ops.state, n, course->head, args.K, own(), args.V);
    }

    HEADRACE_DEVICE void begin(const Walk& walk, std::int64_t head, int first) const {
        if (threadIdx.x == 0) {
            const TokenRange& s = walk.sequence;
            const ChunkRange all{s.row, s.begin, s.end, 0, 0, 0, args.reverse};
            const std::int64_t key_head = quotient(head, args.group), of_keys = walks_keys() ? head : key_head,
                               of_values = walks_keys() ? key_head : head;
            const TokenRows v = rows_of(args.v, all, of_values, first);
            *course = {s,
                       walk.n,
                       head,
                       static_cast<int>(walk.first_chunk),
                       static_cast<int>(walk.end_chunk),
                       first,
                       walk.last ? 1 : 0,
                       false,
                       rows_of(args.q, all, of_keys, 0),
                       rows_of(args.k, all, of_keys, 0),
                       v,
                       leaves_terms ? rows_of(args.key_gradient.rows, all, key_head, first) : v,
                       rows_of(args.o, all, of_values, first)};
            course->whole = args.K == K && args.V - first >= tensor_values && course->q.near() && course->k.near() &&
                            course->v.near() && course->partner.near();
            if constexpr (of_backward) find_places();
        }
        if constexpr (ptx::multiplies_by_group) clear_scores();
        ptx::sync_block();
    }

    // Above the diagonal's blocks, which no score is written to.
    HEADRACE_DEVICE void clear_scores() const {
        HEADRACE_ROLLED
        for (int turn = 0; turn < args.stages; ++turn) {
            const int at = turn * of_values * tensor_chunk * tensor_chunk;
            const SplitMatrix P{{first_scores.data + at}, {first_scores_low.data + at}};
            each(tensor_chunk * tensor_chunk / 8, [&](int piece) {
                reinterpret_cast<uint4*>(P.high.data)[piece] = {};
                if (Format::splits_scores) reinterpret_cast<uint4*>(P.low.data)[piece] = {};
            });
        }
        ptx::publish_to_products();
    }

    // ---- turns: while some warps walk a chunk, the others compute the scores of the next one, and the rows of the one
    // behind that arrive, of chunks that are there. With one stage a turn does all of one chunk, one after the other.
    // Where a third group fetches, there are no turns: it finds decays while rows arrive, and hands stages on.

    HEADRACE_DEVICE int lead() const { return args.stages == 2 ? 1 : 0; }
    HEADRACE_DEVICE bool there(int chunk) const { return chunk >= course->first_chunk && chunk < course->end_chunk; }
    HEADRACE_DEVICE int first_turn() const { return course->first_chunk - lead() - 1; }
    // From the state in registers to that behind all chunks.
    HEADRACE_DEVICE void walk_all(bool outputs) {
        const int end = course->end_chunk;
        if constexpr (has_third_group) {
            HEADRACE_ROLLED
            for (int chunk = course->first_chunk; chunk < end; ++chunk) {
                Scored::take(turn_of(chunk));
                compute(chunk, outputs);
                if (leaves_terms || chunk + args.stages < end) Emptied::give(turn_of(ptx::not_before(chunk)));
                next_turn();
            }
        } else {
            HEADRACE_ROLLED
            for (int chunk = first_turn(); chunk < end; ++chunk) {
                begin_turn<true>(chunk, outputs);
                if (lead() == 0) end_copies_of_block();
                if (there(chunk)) compute(chunk, outputs);
            }
            if (leaves_terms) end_copies_of_block();
        }
    }
    HEADRACE_DEVICE void assist(bool outputs) {
        if constexpr (has_third_group) {
            if (warp() < fetching.first) return score_all(outputs);
            ptx::keep_registers<fetching_registers>();
            fetch_all(outputs);
        } else {
            prepare_all(outputs);
        }
    }
    HEADRACE_DEVICE void fetch_all(bool outputs) {
        const int end = course->end_chunk, first = course->first_chunk;
        if (first >= end) return;
        int short_chunk = -1;  // the chunk that has not all rows, where there is one: the first or the last
        // Here and below the same code for several: what is new to a multiprocessor is slow.
        HEADRACE_ROLLED
        for (int chunk = first; chunk < end; chunk = chunk < end - 1 ? end - 1 : end) {
            if (range_of(chunk).length < tensor_chunk) short_chunk = chunk;
        }
        const bool copies_whole = course->whole;
        const std::int64_t first_token = this->first_token();
        Arriving arriving(*this, first_token);
        GatesAhead gates(*this, first_token);
        Tokens next{};
        HEADRACE_ROLLED
        for (int chunk = first - 1; chunk < end; ++chunk, gates.advance()) {
            const Tokens now = next;  // those of the next chunk arrive meanwhile
            const int behind = chunk + 1;
            const bool more = behind < end, next_whole = behind != short_chunk;
            if (knows_decays() && more)
                next = next_whole && behind > first && gates.serve() ? gates.load() : tokens_of(behind);
            if (chunk < first) continue;
            if (chunk - args.stages >= first) Emptied::take(turn_of(chunk));
            if (copies_whole && chunk != short_chunk) {
                arriving.copy(turn_of(chunk), outputs);
            } else {
                const ChunkRange range = range_of(chunk);
                fetch_keys(chunk, range, outputs), fetch_values(chunk, range);
            }
            ptx::end_copies();
            arriving.advance(copies_whole && more && next_whole, outputs);
            if (knows_decays()) publish(chunk, find_decays(chunk, outputs, now), now);
            ptx::wait_for_copies<0>();
            ptx::publish_to_products();
            Filled::give(turn_of(chunk));
            next_turn();
        }
    }
    HEADRACE_DEVICE void next_turn() {
        if (++turn == args.stages) turn = 0;
    }
    // Terms of a chunk are there when the stage is filled again, those of the last ones when it would be.
    HEADRACE_DEVICE void score_all(bool outputs) {
        const int first = course->first_chunk, end = course->end_chunk;
        HEADRACE_ROLLED
        for (int chunk = first; chunk < end; ++chunk) {
            Filled::take(turn_of(chunk));
            if (leaves_terms && chunk - args.stages >= first) store_terms(chunk - args.stages);
            prepare(chunk, outputs, {});
            ptx::publish_to_products();
            Scored::give(turn_of(chunk));
            next_turn();
        }
        if constexpr (leaves_terms) {
            HEADRACE_ROLLED
            for (int chunk = end - args.stages; chunk < end; ++chunk, next_turn()) {
                if (chunk < first) continue;
                Emptied::take(turn_of(chunk));
                store_terms(chunk);
            }
        }
    }
    // Where those that score find decays.
    HEADRACE_DEVICE void prepare_all(bool outputs) {
        const int end = course->end_chunk;
        Tokens next{};
        HEADRACE_ROLLED
        for (int chunk = first_turn(); chunk < end; ++chunk) {
            const int prepared = chunk + lead();
            const Tokens now = next;
            if (knows_decays() && there(prepared + 1)) next = tokens_of(prepared + 1);
            begin_turn<false>(chunk, outputs);
            if (leaves_terms && there(chunk - 1)) store_terms(chunk - 1);
            if (there(prepared)) prepare(prepared, outputs, now);
            if (lead() == 0) meet_block();
        }
        if (!leaves_terms) return;
        meet_block();
        if (there(end - 1)) store_terms(end - 1);
    }
    template <bool fetches>
    HEADRACE_DEVICE void begin_turn(int chunk, bool outputs) const {
        const int prepared = chunk + lead(), arriving = prepared + lead();
        end_copies_of_block();
        if constexpr (fetches) {
            if (there(arriving)) fetch_keys(arriving, range_of(arriving), outputs);
            if (there(prepared)) fetch_values(prepared, range_of(prepared));
            ptx::end_copies();
        }
        if (lead() == 0) end_copies_of_block();
    }

    // ---- a chunk, by the warps with values ----
    HEADRACE_DEVICE void compute(int chunk, bool outputs) {
        const Keys keys = keys_of(chunk);
        const Values values = values_of(chunk);
        const Chunk& of = chunks[known_turn(chunk)];
        ops.read = of.read, ops.write = of.write, ops.decay = of.decay;
        ops.diagonal = of.diagonal, ops.adds_diagonal = diagonal_apart();
        ops.dots_wanted = outputs && leaves_terms;
        ops.crossing = nullptr;
        ops.left = {};
        if (outputs && leaves_sums())
            ops.left.data = reinterpret_cast<char*>(args.added.sums + chunk_place(chunk) * added_outputs);
        if (ops.dots_wanted) {
            Terms& to = terms[known_turn(chunk)];
            if (of_keys() && threadIdx.x == 0) to.decay = of.crossing;
            ops.dots = {values.partner}, ops.in_all = to.in_all[warp()];
            ops.from_state = of_keys() ? to.from_state[warp()] : nullptr;
            cross_chunk(chunk, to.crossing + warp());
        }
        const auto tile = [](Matrix<64> matrix, Matrix<64> low = {}) {
            return typename Ops::Tile{matrix, low, {}, true};
        };
        ops.load(values.v, outputs);
        const SplitMatrix P = scores_of(chunk);
        const algorithms::ChunkInputs<Ops> in{{keys.q}, {keys.k}, {keys.k}, tile(values.v), nullptr, 1.0f, false};
        const algorithms::ForwardTiles<Ops> tiles{tile(P.high, P.low), {}, {}, {}, {}};
        algorithms::chunk_states<false>(ops, in, tiles, {}, {}, {{}, {}, patch, outputs});
        if (!outputs || !args.o.given || leaves_sums()) return;
        ptx::sync_warp();
        const ChunkRange range = range_of(chunk);
        store_outputs(args.o, course->o.from(range.first), patch, range.length, args.V - course->first_value);
    }
    HEADRACE_DEVICE void decay_by_last() {
        const ChunkRange range = range_of(course->end_chunk - 1);
        const float decay = expf(token_log_decay(args, range, range.length - 1, course->head));
#pragma unroll
        for (auto& tile : ops.state)
            for (float& element : tile) element *= decay;
    }

    // ---- decays and scores of a chunk, by the others ----
    HEADRACE_DEVICE void prepare(int chunk, bool outputs, const Tokens& tokens) {
        const Keys keys = keys_of(chunk);
        Chunk& to = chunks[known_turn(chunk)];
        ScalarDecays::OfLane of{};
        TokenDecays& known = token_decays_of(chunk);
        scores.decays = {known.powers}, scores.meetings = known.meetings;
        const KeyGradient& gradient = args.key_gradient;
        float row_norm = 1, value_norm = 1;
        if (const int i = score_thread(); knows_norms() && i < tensor_chunk) {
            const ChunkRange range = range_of(chunk);
            if (i < range.length)
                row_norm = gradient.row_norms[norm_place(range, i)],
                value_norm = gradient.value_norms[norm_place(range, i)];
        }
        if (!has_third_group && knows_decays()) of = find_decays(chunk, outputs, tokens);
        if (!has_third_group && outputs) scores.multiply_rows(keys.q, keys.k);
        if (knows_norms()) {
            if (score_thread() < tensor_chunk) q_norm[score_thread()] = row_norm, k_norm[score_thread()] = value_norm;
        } else if (!leaves_terms && args.l2norm) {
            weigh_rows(chunk, keys, outputs);
        }
        if (!has_third_group || args.l2norm) ptx::sync_threads(score_barrier, score_threads);
        if (!has_third_group && knows_decays()) publish(chunk, of, tokens);
        if (const int i = score_thread(); has_third_group && args.l2norm && i < tensor_chunk)
            to.read[i] *= q_norm[i], to.write[i] *= k_norm[i];
        if (!outputs) return;
        scores.diagonal = diagonal_apart() ? to.diagonal : nullptr;
        const auto scale = static_cast<float>(args.scale * args.write_scale);
        const auto find_weights = [&] { scores.find_weights(scale); };
        if constexpr (has_third_group) {
            scores.multiply_rows(keys.q, keys.k, find_weights);
        } else {
            find_weights();
        }
        const algorithms::ChunkInputs<Scores> in{{}, {}, {}, {}, nullptr, scale, false};
        const SplitMatrix P = scores_of(chunk);
        algorithms::chunk_scores<false>(scores, in, {{P.high, P.low}, {}, {}, {}, {}});
    }
    HEADRACE_DEVICE TokenDecays& token_decays_of(int chunk) const {
        return token_decays[has_third_group ? turn_of(chunk) : 0];
    }
    HEADRACE_DEVICE ScalarDecays::OfLane find_decays(int chunk, bool outputs, const Tokens& tokens) const {
        TokenDecays& to = token_decays_of(chunk);
        const ScalarDecays decays{to.powers};
        const ScalarDecays::OfLane of = decays.prepare(accepted(args, tokens.gate[0]), accepted(args, tokens.gate[1]));
        if (outputs) AdditiveMeetings(to.meetings).prepare(decays);
        return of;
    }
    HEADRACE_DEVICE void publish(int chunk, const ScalarDecays::OfLane& of, const Tokens& tokens) {
        Chunk& to = chunks[known_turn(chunk)];
#pragma unroll
        for (int token = 0; token < 2; ++token) {
            const int i = 2 * lane() + token;
            to.read[i] = static_cast<float>(args.scale) * of.start[token];
            to.write[i] = static_cast<float>(args.write_scale) * of.end[token];
            if (!has_third_group && args.l2norm) to.read[i] *= q_norm[i], to.write[i] *= k_norm[i];
        }
        passed += of.total;
        const float decay = carried.next(of.split_through());
        if (lane() != 0) return;
        to.decay = decay;
        if (!of_keys()) return;
        to.crossing = expf(static_cast<float>(of.total + static_cast<double>(accepted(args, tokens.last))));
    }
    HEADRACE_DEVICE Tokens tokens_of(int chunk) const {
        const ChunkRange range = range_of(chunk);
        const auto gate = [&](int i, int before) {
            return i < range.length && range.first + i >= before
                       ? given_log_decay(args, range, i - before, course->head)
                       : 0.0f;
        };
        const int i = 2 * lane();
        return {{gate(i, late()), gate(i + 1, late())}, of_keys() ? gate(range.length - 1, 0) : 0.0f};
    }
    // The same of whole chunks one after the other, but for the sequence's first, by addresses found once.
    struct GatesAhead {
        const char *from, *last;
        std::int64_t step;

        HEADRACE_DEVICE GatesAhead(const AdditiveKernel& of, std::int64_t first_token)
            : from(nullptr), last(nullptr), step(0) {
            const Strided& gates = of.args.log_decays;
            if (!gates.given) return;
            const TokenRange& s = of.course->sequence;
            const ChunkRange range{s.row, s.begin, s.end, first_token, tensor_chunk, tensor_chunk, of.args.reverse};
            const auto at = [&](int i) {
                return gates.data + 4 * offset_of(gates, range.row, range.token(i), of.course->head);
            };
            const int i = 2 * lane_here() - of.late();
            from = at(i), step = at(i + 1) - from;
            if (of.of_keys()) last = at(tensor_chunk - 1);
        }
        HEADRACE_DEVICE bool serve() const { return from != nullptr; }
        HEADRACE_DEVICE void advance() {
            from += tensor_chunk * step;
            if (leaves_terms && last != nullptr) last += tensor_chunk * step;
        }
        HEADRACE_DEVICE Tokens load() const {
            const auto gate = [](const char* at) { return *reinterpret_cast<const float*>(at); };
            return {{gate(from), gate(from + step)}, leaves_terms && last != nullptr ? gate(last) : 0.0f};
        }
    };
    HEADRACE_DEVICE static int score_thread() { return static_cast<int>(threadIdx.x) - block_threads; }
    HEADRACE_DEVICE std::int64_t norm_place(const ChunkRange& range, int i) const {
        return key_head() * args.key_gradient.tokens + range.row * args.T + range.token(i);
    }
    // Inverse norms. Four lanes have a row.
    HEADRACE_DEVICE void weigh_rows(int chunk, const Keys& of, bool outputs) const {
        const KeyGradient& to = args.key_gradient;
        const ChunkRange range = range_of(chunk);
        const bool leaves = of_backward && outputs && to.left_q_norms != nullptr && course->first_value == 0 &&
                            course->head == key_head() * args.group;
        HEADRACE_ROLLED
        for (int i = 8 * (warp() - block_warps) + lane() / 4; i < tensor_chunk; i += 8 * block_warps) {
            const float k_k = dot_of_rows<Format>(of.k, of.k, i),
                        q_q = outputs ? dot_of_rows<Format>(of.q, of.q, i) : 1.0f;
            if (lane() % 4 != 0) continue;
            q_norm[i] = inverse_norm(q_q), k_norm[i] = inverse_norm(k_k);
            if (!leaves || i >= range.length) continue;
            to.left_q_norms[norm_place(range, i)] = q_norm[i], to.left_k_norms[norm_place(range, i)] = k_norm[i];
        }
    }

    // ---- what arrives ----
    static constexpr int first_fetching_thread = fetching.first * warp_lanes;
    HEADRACE_DEVICE int turn_of(int chunk) const {
        if constexpr (has_third_group) return turn;
        return args.stages == 2 ? chunk % 2 : 0;
    }
    // Of what is known of chunks.
    HEADRACE_DEVICE int known_turn(int chunk) const { return has_third_group ? turn_of(chunk) : chunk % 2; }
    HEADRACE_DEVICE Keys keys_of(int chunk) const {
        const int turn = has_third_group    ? turn_of(chunk)
                         : args.stages == 2 ? chunk % 3
                                            : 0,
                  at = turn * 2 * tensor_chunk * K;
        return {{first_keys.q.data + at}, {first_keys.k.data + at}};
    }
    HEADRACE_DEVICE Values values_of(int chunk) const {
        const int at = turn_of(chunk) * of_values * tensor_chunk * tensor_values;
        return {{first_values.v.data + at}, {first_values.partner.data + at}};
    }
    HEADRACE_DEVICE SplitMatrix scores_of(int chunk) const {
        const int at = turn_of(chunk) * of_values * tensor_chunk * tensor_chunk;
        return {{first_scores.data + at}, {first_scores_low.data + at}};
    }
    HEADRACE_DEVICE ChunkRange range_of(int chunk) const {
        return of_backward ? walked_range(args, course->sequence, chunk) : chunk_range(args, course->sequence, chunk);
    }
    // What a thread of a third group copies of a chunk whose rows are whole, found once.
    struct Arriving {
        PlacedPieces<K> q, k;
        PlacedPieces<64> v;
        WholePieces<64> partner;
        const char *q_line, *k_line, *v_line;  // of the next chunk

        HEADRACE_DEVICE Arriving(const AdditiveKernel& of, std::int64_t first_token)
            : q(of.first_keys.q, of.course->q.from(first_token), first_fetching_thread),
              k(of.first_keys.k, of.course->k.from(first_token), first_fetching_thread),
              v(of.first_values.v, of.course->v.from(first_token), first_fetching_thread),
              partner(of.first_values.partner, of.course->partner.from(first_token), first_fetching_thread) {
            const int own = thread_here() - first_fetching_thread;
            q_line = line_of<K>(of.course->q.from(first_token), own);
            k_line = line_of<K>(of.course->k.from(first_token), own);
            // with terms also the partner's
            v_line = line_of<64>((own < tensor_chunk ? of.course->v : of.course->partner).from(first_token),
                                 own % tensor_chunk);
        }
        HEADRACE_DEVICE void copy(int turn, bool outputs) const {
            const auto of_keys = static_cast<std::uint32_t>(turn * 2 * 2 * tensor_chunk * K),
                       of_rows = static_cast<std::uint32_t>(turn * 2 * of_values * tensor_chunk * tensor_values);
            if (outputs) q.copy(of_keys);
            k.copy(of_keys), v.copy(of_rows);
            if (leaves_terms) partner.copy(of_rows);
        }
        // `whole`: whether there are all rows of the chunk that comes next, whose lines are asked for.
        HEADRACE_DEVICE void advance(bool whole, bool outputs) {
            q.advance(), k.advance(), v.advance(), partner.advance();
            const int own = thread_here() - first_fetching_thread;
            q_line += q.rows(), k_line += k.rows(), v_line += own < tensor_chunk ? v.rows() : partner.rows();
            if (!whole) return;
            if (outputs) ptx::prefetch(q_line);
            ptx::prefetch(k_line);
            if (leaves_terms || own < tensor_chunk) ptx::prefetch(v_line);
        }
    };
    // From which whole chunks follow one another: where the walk goes back, the first one may be shorter.
    HEADRACE_DEVICE std::int64_t first_token() const { return range_of(course->first_chunk + 1).first - tensor_chunk; }
    // Of a third group those that Arriving does not serve.
    HEADRACE_DEVICE void fetch_keys(int chunk, const ChunkRange& range, bool outputs) const {
        const Keys to = keys_of(chunk);
        if (!has_third_group && range.length == tensor_chunk && course->whole) {
            if (outputs) copy_whole(to.q, course->q.from(range.first), first_fetching_thread);
            copy_whole(to.k, course->k.from(range.first), first_fetching_thread);
            return;
        }
        HEADRACE_ROLLED
        for (int which = outputs ? 0 : 1; which < 2; ++which) {
            const TokenRows from = (which == 0 ? course->q : course->k).from(range.first);
            copy_rows<K, 0>(which == 0 ? to.q : to.k, from, range.length, tensor_chunk, args.K, K, fetching);
        }
    }
    HEADRACE_DEVICE void fetch_values(int chunk, const ChunkRange& range) const {
        const Values to = values_of(chunk);
        const int count = args.V - course->first_value;
        const bool whole = !has_third_group && range.length == tensor_chunk && course->whole;
        const auto copy = [&](Matrix<64> matrix, TokenRows rows) {
            whole ? copy_whole(matrix, rows, first_fetching_thread)
                  : copy_rows<64, 0>(matrix, rows, range.length, tensor_chunk, count, tensor_values, fetching);
        };
        copy(to.v, course->v.from(range.first));
        if (leaves_terms) copy(to.partner, course->partner.from(range.first));
    }

    // ---- what is left of d_q and d_k, and for a gate's gradient ----
    // Chunks and tokens are counted from the sequence's first token whichever way the walk goes.
    HEADRACE_DEVICE void find_places() const {
        const TokenRange& s = course->sequence;
        const std::int64_t block = args.added.first_block + course->first_value / tensor_values,
                           first_token = args.reverse ? s.end - 1 : s.begin;
        course->first_sums = block * args.added.chunks * args.HV +
                             saved_place(args, s, course->n, course->head, walked_chunk(args, s, 0), tensor_chunk);
        course->next_sums = args.late_gate ? -args.HV : args.HV;
        course->first_term = (block * args.key_gradient.tokens + s.row * args.T + first_token) * args.HV + course->head;
        course->next_term = args.reverse ? -args.HV : args.HV;
    }
    HEADRACE_DEVICE std::int64_t chunk_place(int chunk) const { return course->first_sums + chunk * course->next_sums; }
    // The walk of d_q saves the state that enters the chunk; that of d_k, which holds the gradient of what leaves it,
    // has their product.
    HEADRACE_DEVICE void cross_chunk(int chunk, float* crossing) {
        const GateWalk& walk = args.gate_walk;
        const bool narrow = !Format::splits_scores && walk.state_dtype == DType::bf16;
        const std::int64_t place = chunk_place(chunk), size = K * tensor_values * (narrow ? 2 : 4);
        ops.crossed.data =
            place < walk.in_d_v ? walk.states_in_d_v + place * size : walk.states + (place - walk.in_d_v) * size;
        ops.crossed.is_bf16 = narrow;
        if (of_keys()) {
            ops.crossed.load(), ops.crossing = crossing;
        } else {
            ops.crossed.save(ops.state);
        }
    }
    HEADRACE_DEVICE void store_terms(int chunk) const {
        const GateWalk& to = args.gate_walk;
        const Terms& of = terms[known_turn(chunk)];
        const ChunkRange range = range_of(chunk);
        const int i = score_thread();
        const auto sum = [](float a, float b, float c, float d) { return (a + b) + (c + d); };
        if (i == tensor_chunk && of_keys())
            to.crossing[chunk_place(chunk)] =
                sum(of.crossing[0], of.crossing[1], of.crossing[2], of.crossing[3]) * of.decay;
        if (i >= range.length) return;
        const std::int64_t at = course->first_term + (range.first + i) * course->next_term;
        const auto of_warps = [&](const float (&parts)[block_warps][tensor_chunk]) {
            return sum(parts[0][i], parts[1][i], parts[2][i], parts[3][i]);
        };
        const float all = of_warps(of.in_all);
        if (of_keys()) {
            const float state = of_warps(of.from_state);
            to.leaving[at] = state;
            to.inside[at] = all - state;
        } else {
            to.ending[at] = all;
        }
    }
};

}  // namespace headrace::cuda
