// key_directions: keys that are nearly parallel, or combinations of few directions.
#pragma once

#include <cmath>
#include <string>
#include <vector>

#include "harness/random.hpp"
#include "harness/tensors.hpp"

namespace headrace::test {

using harness::CallTensors;
using harness::ProblemLine;

// What is drawn: the cosine of every key (and erase key) with its head's direction, and the range of beta up to 1.
struct Overlap {
    double cosine, lowest_beta;
    std::string text() const {
        return " cosine " + std::to_string(cosine) + " beta from " + std::to_string(lowest_beta);
    }
};

inline void draw_overlapping(CallTensors& made, const ProblemLine& line, const Overlap& overlap) {
    const harness::Stream directions(line.seed, "directions"), betas(line.seed, "overlapping beta");
    const auto K = static_cast<std::size_t>(line.K);
    const auto normalise = [](std::vector<double>& x, double length) {
        double sum = 0;
        for (const double value : x) sum += value * value;
        for (double& value : x) value *= length / std::sqrt(sum);
    };
    for (const char* name : {"k", "p"}) {
        if (!made.tensors.count(name)) continue;
        const harness::Stream noises(line.seed, std::string("overlapping ") + name);
        harness::Tensor& tensor = made.tensors.at(name);
        for (std::int64_t row = 0; row < tensor.numel() / line.K; ++row) {
            std::vector<double> key(K), noise(K);
            for (std::size_t c = 0; c < K; ++c) {
                key[c] = directions.normal(row % line.H * line.K + static_cast<std::int64_t>(c));
                noise[c] = noises.normal(row * line.K + static_cast<std::int64_t>(c));
            }
            normalise(key, overlap.cosine);
            normalise(noise, std::sqrt(1 - overlap.cosine * overlap.cosine) + 1e-300);
            for (std::size_t c = 0; c < K; ++c) key[c] += noise[c];
            normalise(key, line.l2norm ? 3 : 1);
            tensor.write(row * line.K, line.K, key.data());
        }
    }
    harness::Tensor& beta = made.tensors.at("beta");
    for (std::int64_t i = 0; i < beta.numel(); ++i) {
        beta.set(i, 1 - (1 - overlap.lowest_beta) * betas.uniform(i));
    }
}

// Keys of few directions: the gradient of the state grows in all others, where no key erases it, and what keys read in
// it is far below its roundings to bf16.
inline void draw_few_directions(CallTensors& made, const ProblemLine& line, std::int64_t directions) {
    const harness::Stream basis(line.seed, "basis");
    std::vector<double> key(static_cast<std::size_t>(line.K)), kept;
    for (const char* name : {"k", "p"}) {
        if (!made.tensors.count(name)) continue;
        const harness::Stream weights(line.seed, std::string("weights of ") + name);
        harness::Tensor& tensor = made.tensors.at(name);
        for (std::int64_t row = 0; row < tensor.numel() / line.K; ++row) {
            double sum = 0;
            for (std::int64_t c = 0; c < line.K; ++c) {
                double value = 0;
                for (std::int64_t i = 0; i < directions; ++i) {
                    value += weights.normal(row * directions + i) *
                             basis.normal((row % line.H * directions + i) * line.K + c);
                }
                // erase keys point about where k does
                if (name[0] == 'p') value = made.tensors.at("k").get(row * line.K + c) + 0.05 * value;
                key[static_cast<std::size_t>(c)] = value;
                sum += value * value;
            }
            for (double& value : key) value *= 0.99 / std::sqrt(sum);
            tensor.write(row * line.K, line.K, key.data());
        }
    }
}

}  // namespace headrace::test
