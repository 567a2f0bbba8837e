// make_tensors, make_shapes and make_call: the tensors that a problem line stands for, and the call on them.
// over 400 lines: what each tensor of a line holds, in one place.
#include "harness/tensors.hpp"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <limits>
#include <mutex>
#include <numeric>
#include <set>
#include <thread>

#include "harness/device_call.hpp"
#include "harness/gate_values.hpp"
#include "harness/variants.hpp"

namespace headrace::harness {
namespace {

using Shape = std::vector<std::int64_t>;

class Maker {
  public:
    Maker(const ProblemLine& problem, bool odd_strides, Memory memory)
        : line_(problem), strided_(odd_strides), memory_(memory), delta_(has_delta_rule(problem.op)) {
        wide_ = wide_dtype(line_);
        state_ = {line_.sequences(), line_.HV, line_.vfirst ? line_.V : line_.K, line_.vfirst ? line_.K : line_.V};
    }

    std::map<std::string, Tensor> make() {
        add_cu_seqlens();
        add_query_key_value();
        add_gates();
        add_beta();
        if (line_.direction == Direction::step) add_pool();
        if (line_.direction == Direction::forward || line_.direction == Direction::step) {
            add("o", line_.dtype, token_shape(line_.HV, line_.V));
        }
        if (line_.direction != Direction::step) add_states();
        if (line_.direction == Direction::backward) add_gradients();
        if (line_.direction == Direction::summarize) add_summary();
        if (line_.direction == Direction::summarize_backward) {
            if (has_d_o()) add_normal("d_o", line_.dtype, token_shape(line_.HV, line_.V));
            add("d_initial_state", wide_, state_);
        }
        return std::move(tensors_);
    }

  private:
    Shape token_shape(std::int64_t heads, std::int64_t size) const { return {line_.B, line_.T, heads, size}; }

    // Contiguous, rows padded, dimensions 1 and 2 exchanged in memory (heads before tokens), or inner stride 2.
    Shape draw_strides(const std::string& name, const Shape& shape) const {
        const Stream stream(line_.seed, "strides " + name);
        const std::int64_t kind = stream.below(0, 10);
        std::vector<std::size_t> order(shape.size());  // innermost first
        std::iota(order.rbegin(), order.rend(), 0);
        if ((kind == 7 || kind == 8) && shape.size() == 4) std::swap(order[1], order[2]);
        Shape strides(shape.size());
        std::int64_t stride = kind == 9 ? 2 : 1;
        for (std::size_t position = 0; position < order.size(); ++position) {
            const std::size_t dimension = order[position];
            strides[dimension] = stride;
            stride *= std::max<std::int64_t>(shape[dimension], 1);
            if (kind >= 4 && kind <= 7) stride += stream.below(static_cast<std::int64_t>(position) + 1, 8);
        }
        return strides;
    }

    Tensor& add(const std::string& name, DType dtype, const Shape& shape) {
        Shape strides = strided_ ? draw_strides(name, shape) : Shape{};
        return tensors_[name] = Tensor(dtype, shape, std::move(strides), memory_);
    }

    // element(i) for every logical index i.
    template <typename Element>
    void fill(Tensor& tensor, Element element) {
        fill_rows(tensor, 256, [&](std::int64_t row, std::int64_t count, double* values) {
            for (std::int64_t i = 0; i < count; ++i) values[i] = element(row * 256 + i);
        });
    }

    // row(number of the row, its length, values) for consecutive pieces of `length` elements, large tensors by several
    // threads.
    template <typename Row>
    void fill_rows(Tensor& tensor, std::int64_t length, Row row) {
        if (memory_ == Memory::none) return;
        const std::int64_t total = tensor.numel(), rows = (total + length - 1) / length;
        const auto fill_some = [&](std::int64_t begin, std::int64_t end) {
            std::vector<double> values(static_cast<std::size_t>(length));
            for (std::int64_t i = begin; i < end; ++i) {
                const std::int64_t count = std::min(length, total - i * length);
                row(i, count, values.data());
                tensor.write(i * length, count, values.data());
            }
        };
        const std::int64_t processors = std::thread::hardware_concurrency(), useful = total >> 22;
        const std::int64_t parts = std::clamp<std::int64_t>(useful, 1, std::max<std::int64_t>(processors, 1));
        std::vector<std::jthread> threads;
        for (std::int64_t part = 1; part < parts; ++part) {
            threads.emplace_back(fill_some, rows * part / parts, rows * (part + 1) / parts);
        }
        fill_some(0, rows / parts);
    }

    void add_normal(const std::string& name, DType dtype, const Shape& shape, double scale = 1) {
        const Stream stream(line_.seed, name);
        fill(add(name, dtype, shape), [&](std::int64_t i) { return scale * stream.normal(i); });
    }

    void add_cu_seqlens() {
        if (line_.varlen.empty()) return;
        const DType dtype = variant(line_, index_dtype, 2) ? DType::i64 : DType::i32;
        Tensor cu_seqlens(dtype, {static_cast<std::int64_t>(line_.varlen.size())});
        for (std::size_t i = 0; i < line_.varlen.size(); ++i) {
            cu_seqlens.set(static_cast<std::int64_t>(i), static_cast<double>(line_.varlen[i]));
        }
        tensors_["cu_seqlens"] = std::move(cu_seqlens);
    }

    void add_query_key_value() {
        const bool with_q = line_.direction != Direction::summarize || variant(line_, wanted_gradients, 8) == 1;
        if (with_q) add_normal("q", line_.dtype, token_shape(line_.H, line_.K));  // by a summary not read
        add_normal("v", line_.dtype, token_shape(line_.HV, line_.V));
        const Stream key_stream(line_.seed, "k");
        fill_rows(add("k", line_.dtype, token_shape(line_.H, line_.K)), line_.K,
                  [&](std::int64_t row, std::int64_t, double* values) { draw_key(key_stream, row, values); });
        if (line_.op != Operator::comba) return;
        // Erase keys point about where k does (cosine 0.9) and are no longer than k: the recurrence stays contractive.
        const Stream noise_stream(line_.seed, "p");
        fill_rows(add("p", line_.dtype, token_shape(line_.H, line_.K)), line_.K,
                  [&](std::int64_t row, std::int64_t count, double* values) {
                      std::vector<double> noise(static_cast<std::size_t>(count));
                      draw_key(key_stream, row, values);
                      draw_key(noise_stream, row, noise.data());
                      for (std::int64_t c = 0; c < count; ++c) values[c] += 0.5 * noise[static_cast<std::size_t>(c)];
                      if (!line_.l2norm) normalise(values, 0.5 + 0.5 * noise_stream.uniform(-1 - row_of_key(row)));
                  });
    }

    // The row, or the one that its key repeats.
    std::int64_t row_of_key(std::int64_t row) const {
        const std::int64_t token = row / line_.H % line_.T;
        return line_.directions == 0 ? row : token % line_.directions * line_.H + row % line_.H;
    }

    // Delta rules need keys of unit length, or their states grow without bound; l2norm makes them so inside the call.
    void draw_key(const Stream& stream, std::int64_t row, double* values) const {
        const double scale = line_.l2norm ? 1 : 1 / std::sqrt(static_cast<double>(line_.K));
        row = row_of_key(row);
        for (std::int64_t c = 0; c < line_.K; ++c) values[c] = scale * stream.normal(row * line_.K + c);
        if (delta_ && !line_.l2norm) normalise(values, 1);
    }

    void normalise(double* values, double length) const {
        double sum = 1e-30;
        for (std::int64_t c = 0; c < line_.K; ++c) sum += values[c] * values[c];
        for (std::int64_t c = 0; c < line_.K; ++c) values[c] *= length / std::sqrt(sum);
    }

    void add_gates() {
        if (has_head(line_.gate)) {
            const double factor = line_.gates == GateValues::zero      ? 0
                                  : line_.gates == GateValues::strong  ? 20
                                  : line_.gates == GateValues::lasting ? line_.forget
                                                                       : 1;
            fill(add("g_gamma", dtype_of_gate(line_, 0), {line_.HV}),
                 [&](std::int64_t h) { return line_.gamma ? *line_.gamma : factor * head_slope(h, line_.HV); });
        }
        if (has_step(line_.gate)) add_gate("g", dtype_of_gate(line_, 1), {line_.B, line_.T, line_.HV}, 1);
        if (has_channel(line_.gate)) add_gate("g", dtype_of_gate(line_, 1), token_shape(line_.HV, line_.K), line_.K);
        if (line_.value_gate) add_gate("gv", dtype_of_gate(line_, 1), token_shape(line_.HV, line_.V), line_.V);
        if (line_.gate_raw) add_gate_parameters();
    }

    // `inner` elements of a token share a head.
    void add_gate(const std::string& name, DType dtype, const Shape& shape, std::int64_t inner) {
        const Stream stream(line_.seed, name);
        std::vector<double> decays(static_cast<std::size_t>(line_.HV));  // 1, 1/4, 1/16 or 1/64 for each head
        for (std::size_t h = 0; h < decays.size(); ++h) {
            decays[h] = std::ldexp(1, static_cast<int>(-2 * stream.below(-1 - static_cast<std::int64_t>(h), 4)));
        }
        const bool raw = line_.gate_raw && name == "g";
        const Stream share(line_.seed, "share");
        fill_rows(add(name, dtype, shape), inner, [&](std::int64_t row, std::int64_t count, double* values) {
            const double decay = decays[static_cast<std::size_t>(row % line_.HV)];
            for (std::int64_t i = 0; i < count; ++i) {
                const bool lasts = line_.share == 1 || share.uniform(row % line_.HV * inner + i) < line_.share;
                const GateValues gates = lasts ? line_.gates : GateValues::random;
                values[i] = raw ? gate_preactivation(stream, row * inner + i, gates, line_.forget)
                                : log_decay(stream, row * inner + i, gates, decay, line_.forget);
            }
        });
    }

    void add_gate_parameters() {
        const Stream stream(line_.seed, "A_log");
        const std::int64_t shape = variant(line_, bias_shape, 8);
        const bool first_is_still = shape == 3 && line_.HV > 1;
        fill(add("A_log", dtype_of_gate(line_, 2), {line_.HV}),
             [&](std::int64_t h) { return first_is_still && h == 0 ? subnormal_decay : 3 * stream.uniform(h) - 2; });
        if (shape == 1) return;  // dt_bias is optional
        const bool per_channel = has_channel(line_.gate) && shape != 2;
        const Shape sizes = !per_channel ? Shape{line_.HV}
                            : shape >= 5 ? Shape{line_.HV * line_.K}
                                         : Shape{line_.HV, line_.K};
        add_normal("dt_bias", dtype_of_gate(line_, 2), sizes, 0.3);
    }

    // As a value or the logit that gives it.
    double beta_between(Range range, double position) const {
        const double beta = range.least + position * (range.most - range.least);
        const double share = beta / (line_.beta_form == 2 ? 2 : 1);
        if (line_.beta_form == 0) return beta;
        return std::clamp(std::log(share) - std::log1p(-share), -30.0, 30.0);
    }
    void add_beta() {
        if (!delta_) return;
        const Stream stream(line_.seed, "beta");
        Shape shape = {line_.B, line_.T, line_.HV};
        if (line_.elementwise_beta) shape.push_back(line_.V);
        fill(add("beta", dtype_of_gate(line_, 1), shape), [&](std::int64_t i) {
            if (line_.betas) return beta_between(*line_.betas, stream.uniform(i));
            if (line_.beta_form == 0) return 0.02 + 0.96 * stream.uniform(i);
            const bool is_nothing = line_.gates == GateValues::reset && mix(stream.bits(i)) % 16 == 0;
            const double logit = is_nothing ? subnormal_decay : 1.5 * stream.normal(i);
            // comba erases from the undecayed state: beta above 1 would make it grow
            return line_.op == Operator::comba && line_.beta_form == 2 ? -std::abs(logit) : logit;
        });
    }

    void add_states() {
        const bool backward =
            line_.direction == Direction::backward || line_.direction == Direction::summarize_backward;
        if (line_.state_in) add_normal("initial_state", dtype_of_states(line_), state_);
        if (line_.state_out && !backward) add("final_state", wide_, state_);
        if (line_.state_out && backward) add_normal("d_final_state", dtype_of_states(line_), state_);
    }

    void add_pool() {
        const std::int64_t sequences = line_.sequences(), slots = std::max<std::int64_t>(line_.speculative, 1);
        Shape shape = state_;
        shape[0] = line_.pool > 0 ? line_.pool : sequences * slots;
        const bool narrow = size_of(line_.dtype) == 2 && variant(line_, state_dtype, 4) == 1;
        add_normal("pool", narrow ? line_.dtype : wide_, shape);
        if (line_.pool == 0 && line_.speculative == 0) return;
        add_indices(shape[0], sequences, slots);
        if (line_.speculative > 0 && variant(line_, accepted, 4) != 1) {
            const Stream stream(line_.seed, "num_accepted_tokens");
            tensors_["num_accepted_tokens"] = Tensor(dtype_of_indices(), {sequences}, {}, memory_);
            fill(tensors_["num_accepted_tokens"],
                 [&](std::int64_t n) { return static_cast<double>(1 + stream.below(n, slots)); });
        }
    }

    DType dtype_of_indices() const { return variant(line_, index_dtype, 2) ? DType::i64 : DType::i32; }

    // Different rows in random order; with some seeds a sequence is padding, all of its indices -1.
    void add_indices(std::int64_t rows, std::int64_t sequences, std::int64_t slots) {
        const Stream stream(line_.seed, "indices");
        std::vector<std::int64_t> order(memory_ == Memory::none ? 0 : static_cast<std::size_t>(rows));
        std::iota(order.begin(), order.end(), 0);
        for (std::int64_t i = 0; i < sequences * slots && !order.empty(); ++i) {
            std::swap(order[static_cast<std::size_t>(i)],
                      order[static_cast<std::size_t>(i + stream.below(i, rows - i))]);
        }
        const bool padded = line_.pool > 0 && variant(line_, padding, 4) == 1;
        const Shape shape = line_.speculative > 0 ? Shape{sequences, slots} : Shape{sequences};
        Tensor& indices = tensors_["indices"] = Tensor(dtype_of_indices(), shape, {}, memory_);
        fill(indices, [&](std::int64_t i) {
            const bool is_padding = padded && stream.below(-1 - i / slots, 3) == 0;
            return is_padding ? -1.0 : static_cast<double>(order[static_cast<std::size_t>(i)]);
        });
    }

    // All gradients; with some seeds only some of them, one of an initial state that is not given, or no d_o.
    bool has_d_o() const { return variant(line_, wanted_gradients, 8) != 1 || !line_.state_out; }
    void add_summary() {
        if (line_.part != Parts::state) {
            Shape shape = {line_.sequences(), line_.HV};
            if (delta_ || has_channel(line_.gate)) shape.push_back(line_.K);
            if (delta_) shape.push_back(line_.K);
            add("transition", wide_, shape);
        }
        if (line_.part != Parts::transition) add("state", wide_, state_);
    }
    void add_gradients() {
        const std::int64_t choice = variant(line_, wanted_gradients, 8);
        if (has_d_o()) add_normal("d_o", line_.dtype, token_shape(line_.HV, line_.V));
        const auto wanted = [&](const std::string& name) {
            return choice != 2 || name == "v" || Stream(line_.seed, "wanted " + name).below(0, 2) == 0;
        };
        for (const char* name : {"q", "k", "v", "p", "g", "gv", "beta"}) {
            const auto input = tensors_.find(name);
            if (input == tensors_.end() || !wanted(name)) continue;
            add("d_" + input->first, input->second.dtype(), input->second.shape());
        }
        for (const char* name : {"g_gamma", "A_log", "dt_bias"}) {  // sums over all tokens: never in 16 bits
            const auto input = tensors_.find(name);
            if (input == tensors_.end() || !wanted(name)) continue;
            add("d_" + input->first, wide_, input->second.shape());
        }
        if ((line_.state_in && wanted("initial_state")) || choice == 3)
            add("d_initial_state", dtype_of_states(line_), state_);
    }

    const ProblemLine& line_;
    const bool strided_;
    const Memory memory_;
    const bool delta_;
    DType wide_;   // of states and, mostly, gates
    Shape state_;  // of initial and final states
    std::map<std::string, Tensor> tensors_;
};

// The view of the tensor of that name; not given when there is none.
TensorView view_of(const std::map<std::string, Tensor>& tensors, const char* name) {
    const auto found = tensors.find(name);
    return found == tensors.end() ? TensorView{} : found->second.view();
}

TensorView state_view_of(const ProblemLine& line, const std::map<std::string, Tensor>& tensors, const char* name) {
    const TensorView view = view_of(tensors, name);
    return line.vfirst && view.rank == 4 ? view.transposed(2, 3) : view;
}

// A copy of the name that lives as long as the process: Options keeps only a pointer.
const char* lasting_name(const std::string& name) {
    static std::mutex mutex;
    static std::set<std::string> names;
    const std::lock_guard<std::mutex> lock(mutex);
    return names.insert(name).first->c_str();
}

Options make_options(const ProblemLine& line) {
    Options options;
    options.scale = line.scale;
    options.reverse = line.reverse;
    options.qk_l2norm = line.l2norm;
    if (line.gate_raw) options.gate_form = line.lower_bound ? GateForm::bounded : GateForm::softplus;
    if (line.lower_bound) options.lower_bound = *line.lower_bound;
    options.beta_form = static_cast<BetaForm>(line.beta_form);
    options.chunk = line.chunk;
    options.num_steps = line.num_steps;
    options.state_dtype = line.state_dtype;
    options.threads = line.threads;
    if (!line.force.empty()) options.force = lasting_name(line.force);
    return options;
}

CallTensors make_call_tensors(const ProblemLine& line, bool odd_strides, Memory memory) {
    CallTensors result;
    result.tensors = Maker(line, odd_strides || line.strided, memory).make();
    result.call = make_call(line, result.tensors);
    return result;
}

}  // namespace

CallTensors make_tensors(const ProblemLine& line, bool odd_strides) {
    return make_call_tensors(line, odd_strides, Memory::allocate);
}

CallTensors make_shapes(const ProblemLine& line) {
    CallTensors shapes = make_call_tensors(line, false, Memory::none);
    if (line.cuda) shapes.call = seen_from_device(shapes.call);
    return shapes;
}

Call make_call(const ProblemLine& line, std::map<std::string, Tensor>& tensors) {
    const auto view = [&](const char* name) { return view_of(tensors, name); };
    const auto state_view = [&](const char* name) { return state_view_of(line, tensors, name); };
    Call call;
    call.op = line.op;
    call.direction = line.direction;
    call.options = make_options(line);
    call.in = {view("q"),
               view("k"),
               view("v"),
               view("p"),
               view("g"),
               view("gv"),
               view("g_gamma"),
               view("beta"),
               view("A_log"),
               view("dt_bias"),
               state_view("initial_state"),
               view("cu_seqlens")};
    call.out = {view("o"), state_view("final_state")};
    call.d_out = {view("d_o"), state_view("d_final_state")};
    call.grads = {view("d_q"),
                  view("d_k"),
                  view("d_v"),
                  view("d_p"),
                  view("d_g"),
                  view("d_gv"),
                  view("d_g_gamma"),
                  view("d_beta"),
                  view("d_A_log"),
                  view("d_dt_bias"),
                  state_view("d_initial_state")};
    call.pool = {state_view("pool"), view("indices"), view("num_accepted_tokens")};
    call.summary = {view("transition"), state_view("state")};
    return call;
}

}  // namespace headrace::harness
