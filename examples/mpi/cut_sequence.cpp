// An operator, forward and backward, over a sequence cut across MPI ranks; to copy: exchange.hpp and cut_sequence.hpp.
//
//     mpiexec -n 3 example_mpi kda 4 64 64 192 0 100      heads, key and value size, tokens of each rank, in turn
//     mpiexec -n 4 example_mpi --ring gla
//
// A rank has no tokens but its own. For a scan it sends, of each value head, a transition (delta rule: K x K numbers,
// else K or 1) and a state (K x V), in forward and in backward, as often as MPI_Exscan does. For a ring it sends one
// state in each, in f64, and in backward one more where a backward computes other bits of it than forward.
//
// At the end rank 0 gathers all tensors and runs one undivided call: the exit status is 0 if every tensor is within its
// bar of docs/numerics.md and, in a ring whose ranks begin at multiples of 64 tokens, has the same bits; gradients of
// parameters, sums over the ranks, need not.
#include <charconv>
#include <cmath>
#include <cstdio>
#include <map>
#include <random>
#include <string_view>

#include "cut_sequence.hpp"

using namespace headrace_mpi;

namespace {

struct Settings {
    bool ring = false;
    Operator op = Operator::gated_delta_rule;
    std::int64_t heads = 4, key_dim = 64, value_dim = 64;
    std::vector<std::int64_t> tokens = {256};

    std::int64_t tokens_of(int rank) const { return tokens[static_cast<std::size_t>(rank) % tokens.size()]; }
};

bool parse(int count, char** words, Settings& settings) {
    std::vector<std::string_view> rest(words + 1, words + count);
    if (!rest.empty() && rest[0] == "--ring") settings.ring = true, rest.erase(rest.begin());
    for (int op = 0; !rest.empty(); ++op) {
        if (op > static_cast<int>(Operator::kda)) return false;
        settings.op = static_cast<Operator>(op);
        if (rest[0] == name_of(settings.op)) break;
    }
    std::vector<std::int64_t> numbers;
    for (std::size_t i = 1; i < rest.size(); ++i) {
        const char* const end = rest[i].data() + rest[i].size();
        std::int64_t number = 0;
        const auto [stop, error] = std::from_chars(rest[i].data(), end, number);
        if (error != std::errc() || stop != end || number < (i <= 3 ? 1 : 0) || number > 1 << 20) return false;
        numbers.push_back(number);
    }
    if (numbers.empty()) return true;
    if (numbers.size() < 3) return false;
    settings.heads = numbers[0], settings.key_dim = numbers[1], settings.value_dim = numbers[2];
    if (numbers.size() > 3) settings.tokens.assign(numbers.begin() + 3, numbers.end());
    return true;
}

// The tensors of one call by name.
using Tensors = std::map<std::string, std::vector<float>>;

const char* const names[] = {"q",       "k",     "v",       "p", "g",          "beta", "initial_state",
                             "g_gamma", "A_log", "dt_bias", "o", "final_state"};
bool is_parameter(const std::string& name) { return name == "g_gamma" || name == "A_log" || name == "dt_bias"; }

// Of q and d_q, d_o and o: what is given, and what a call computes.
bool is_output(const std::string& name) { return name == "o" || name == "final_state"; }
std::string input_of(const std::string& name) { return is_output(name) ? "d_" + name : name; }
std::string output_of(const std::string& name) { return is_output(name) ? name : "d_" + name; }

bool has_channel_gate(Operator op) { return op == Operator::gla || op == Operator::kda; }
bool has_raw_gate(Operator op) {
    return op != Operator::linear_attention && op != Operator::retention && op != Operator::delta_rule;
}

// What one rank knows: its tokens, the parameters, at the ends the initial state and the gradient of the final one.
Tensors random_inputs(const Settings& s, int rank, int ranks) {
    Tensors t;
    std::mt19937 own(static_cast<unsigned>(rank)), shared(1000);
    const auto draw = [&](std::mt19937& random, const char* name, std::int64_t size, double mean, double deviation) {
        std::normal_distribution<double> normal(mean, deviation);
        t[name].resize(static_cast<std::size_t>(size));
        for (float& x : t[name]) x = static_cast<float>(normal(random));
    };
    const std::int64_t T = s.tokens_of(rank), H = s.heads, K = s.key_dim, V = s.value_dim;
    const std::int64_t gates = has_channel_gate(s.op) ? H * K : H;
    for (const char* name : {"q", "k"}) draw(own, name, T * H * K, 0, 1);
    for (const char* name : {"v", "d_o"}) draw(own, name, T * H * V, 0, 1);
    if (s.op == Operator::comba) draw(own, "p", T * H * K, 0, 1);
    if (s.op >= Operator::delta_rule) draw(own, "beta", T * H, 0, 1);
    if (s.op == Operator::retention) draw(shared, "g_gamma", H, -0.01, 0.001);
    if (has_raw_gate(s.op)) {
        draw(own, "g", T * gates, 0, 1);
        draw(shared, "A_log", H, -4, 0.5);
        draw(shared, "dt_bias", gates, 0, 0.5);
    }
    if (rank == 0) draw(own, "initial_state", H * K * V, 0, 0.3);
    if (rank + 1 == ranks) draw(own, "d_final_state", H * K * V, 0, 0.3);
    return t;
}

Options options_for(Operator op) {
    Options options;
    options.qk_l2norm = true;
    if (op >= Operator::delta_rule) options.beta_form = BetaForm::sigmoid;
    if (has_raw_gate(op)) options.gate_form = GateForm::softplus;
    return options;
}

// Makes room for what follows from the inputs that are there.
void add_outputs(Tensors& t) {
    for (const char* name : names) {
        const auto input = t.find(input_of(name));
        if (input != t.end()) t[output_of(name)].resize(input->second.size());
    }
}

struct Views {
    Inputs in;
    Outputs out;
    OutputGradients d_out;
    Gradients grads;
};

// Of the tensors that are there.
Views views_of(Tensors& t, const Settings& s) {
    const std::int64_t B = 1, H = s.heads, K = s.key_dim, V = s.value_dim;
    const auto T = static_cast<std::int64_t>(t["v"].size()) / (H * V);
    const auto give = [&](TensorView& view, TensorView& gradient, const std::string& name, auto... sizes) {
        const auto tensor = t.find(name), d_tensor = t.find("d_" + name);
        if (tensor != t.end()) view = {tensor->second.data(), DType::f32, {sizes...}};
        if (d_tensor != t.end()) gradient = {d_tensor->second.data(), DType::f32, {sizes...}};
    };
    Views views;
    auto& [in, out, d_out, grads] = views;
    give(in.q, grads.d_q, "q", B, T, H, K);
    give(in.k, grads.d_k, "k", B, T, H, K);
    give(in.v, grads.d_v, "v", B, T, H, V);
    give(in.p, grads.d_p, "p", B, T, H, K);
    give(in.beta, grads.d_beta, "beta", B, T, H);
    give(in.g_gamma, grads.d_g_gamma, "g_gamma", H);
    give(in.A_log, grads.d_A_log, "A_log", H);
    if (has_channel_gate(s.op)) {
        give(in.g, grads.d_g, "g", B, T, H, K);
        give(in.dt_bias, grads.d_dt_bias, "dt_bias", H, K);
    } else {
        give(in.g, grads.d_g, "g", B, T, H);
        give(in.dt_bias, grads.d_dt_bias, "dt_bias", H);
    }
    give(in.initial_state, grads.d_initial_state, "initial_state", B, H, K, V);
    give(out.o, d_out.d_o, "o", B, T, H, V);
    give(out.final_state, d_out.d_final_state, "final_state", B, H, K, V);
    return views;
}

template <class Way>
void run(Way way, const Views& views) {
    way.forward(views.in, views.out);
    way.backward(views.in, views.d_out, views.grads);
}

// On rank 0 the tensors of all ranks, one behind the other; of parameters, which are alike, one.
Tensors gather(Tensors t, MPI_Comm comm) {
    Tensors whole;
    for (const char* name : names) {
        for (const std::string& tensor : {input_of(name), output_of(name)}) {
            std::vector<float>&mine = t[tensor], all;
            if (is_parameter(name) && rank_in(comm) != 0) mine.clear();
            std::vector<int> sizes(static_cast<std::size_t>(ranks_of(comm))), offsets(sizes.size() + 1);
            const auto size = static_cast<int>(mine.size());
            MPI_Gather(&size, 1, MPI_INT, sizes.data(), 1, MPI_INT, 0, comm);
            for (std::size_t i = 0; i < sizes.size(); ++i) offsets[i + 1] = offsets[i] + sizes[i];
            all.resize(static_cast<std::size_t>(offsets.back()));
            MPI_Gatherv(mine.data(), size, MPI_FLOAT, all.data(), sizes.data(), offsets.data(), MPI_FLOAT, 0, comm);
            if (!all.empty()) whole[tensor] = std::move(all);
        }
    }
    return whole;
}

double relative_error(const std::vector<float>& actual, const std::vector<float>& expected) {
    double difference = 0, norm = 0;
    for (std::size_t i = 0; i < expected.size(); ++i) {
        difference += std::pow(double(actual[i]) - double(expected[i]), 2);
        norm += std::pow(double(expected[i]), 2);
    }
    return difference == 0 ? 0 : std::sqrt(difference / norm);
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// One undivided call of what was gathered.
Status run_one_process(const Tensors& gathered, const Settings& s, Tensors& one) {
    for (const char* name : names) {
        if (const auto input = gathered.find(input_of(name)); input != gathered.end()) one.insert(*input);
    }
    add_outputs(one);
    const Views views = views_of(one, s);
    const Options options = options_for(s.op);
    const Status status = forward(s.op, views.in, views.out, options);
    return status.ok() ? backward(s.op, views.in, views.d_out, views.grads, options) : status;
}

// Whether the ranks computed what one process does.
bool compare(const Tensors& gathered, const Settings& s, int ranks) {
    Tensors one;
    if (const Status status = run_one_process(gathered, s, one); !status.ok()) {
        std::fprintf(stderr, "one process: %s\n", status.message().c_str());
        return false;
    }
    std::int64_t begin = 0;
    bool keeps_bits = s.ring, good = true;  // ranks that begin at multiples of 64
    for (int rank = 0; rank < ranks; begin += s.tokens_of(rank++)) keeps_bits = keeps_bits && begin % 64 == 0;
    double furthest = 0;  // from one process, in bars
    int tensors = 0, equal = 0;
    std::string others;
    for (const char* name : names) {
        const auto expected = one.find(output_of(name));
        if (expected == one.end()) continue;
        const auto actual = gathered.find(expected->first);
        const bool there = actual != gathered.end() && actual->second.size() == expected->second.size();
        const double bar = is_output(name) ? 3e-6 : 1e-5;  // of f32, docs/numerics.md
        const double bars = there ? relative_error(actual->second, expected->second) / bar : INFINITY;
        const bool same = there && same_bits(actual->second, expected->second);
        ++tensors, equal += same ? 1 : 0;
        if (!same) others += (others.empty() ? ", others: " : " ") + expected->first;
        good = good && bars <= 1 && (same || !keeps_bits || is_parameter(name));  // parameters: sums over the ranks
        furthest = std::max(furthest, std::isnan(bars) ? INFINITY : bars);
    }
    std::printf("%s, %s on %d ranks: %s; relative error at most %.2g of its bar; same bits in %d of %d tensors%s\n",
                name_of(s.op), s.ring ? "ring" : "scan", ranks, good ? "right" : "WRONG", furthest, equal, tensors,
                others.c_str());
    return good;
}

bool run_on_all(const Settings& s, MPI_Comm comm) {
    Tensors tensors = random_inputs(s, rank_in(comm), ranks_of(comm));
    add_outputs(tensors);
    const Views views = views_of(tensors, s);
    if (s.ring) {
        run(Ring(comm, s.op, options_for(s.op)), views);
    } else {
        run(Scan(comm, s.op, options_for(s.op)), views);
    }
    const Tensors gathered = gather(std::move(tensors), comm);
    int good = rank_in(comm) != 0 || compare(gathered, s, ranks_of(comm)) ? 1 : 0;
    MPI_Bcast(&good, 1, MPI_INT, 0, comm);
    return good != 0;
}

}  // namespace

int main(int argc, char** argv) {
    MPI_Init(&argc, &argv);
    const bool speaks = rank_in(MPI_COMM_WORLD) == 0;
    Settings settings;
    int result = 2;
    if (!parse(argc, argv, settings)) {
        const char* const words = "[--ring] [OPERATOR [HEADS KEY_DIM VALUE_DIM [TOKENS...]]]";
        if (speaks) std::fprintf(stderr, "usage: %s %s\n", argv[0], words);
    } else {
        MPI_Comm comm{};
        MPI_Comm_dup(MPI_COMM_WORLD, &comm);
        try {
            result = run_on_all(settings, comm) ? 0 : 1;
        } catch (const AgreedError& error) {
            if (speaks) std::fprintf(stderr, "%s\n", error.what());
        } catch (const std::exception& error) {  // of this rank alone: nobody else would hear of it
            std::fprintf(stderr, "%s\n", error.what());
            MPI_Abort(MPI_COMM_WORLD, 2);
        }
        MPI_Comm_free(&comm);
    }
    MPI_Finalize();
    return result;
}
