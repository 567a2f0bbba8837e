// gpu_bound: what a call on a GPU has to compute and to move however it is done, and what others publish for the shape.
#pragma once

#include <string>
#include <vector>

#include "harness/gpu_model.hpp"
#include "harness/problem_line.hpp"

namespace headrace::harness {

// FLOP of a forward or backward in the chunk form with chunks of 64 tokens, a multiply-add as two; of a step token by
// token.
double chunk_flop(const ProblemLine& line);

// The larger of chunk_flop at matrix_flop and of the bytes that have to be moved (least_bytes) at the bandwidth.
struct Bound {
    double flop = 0, bytes = 0, seconds = 0;
};
Bound bound_of(const ProblemLine& line, double bytes, const Gpu& gpu);

// A published time.
struct PeerTime {
    const char *problem, *gpu, *peer;
    double seconds;
    const char* source;
};
const std::vector<PeerTime>& peer_times();

// The problems of the table above, with those of the same models for which nobody publishes a time.
const std::vector<std::string>& peer_problems();

// The published times of the line's operator, direction, sizes, sequences and dtype on a GPU.
std::vector<PeerTime> peers_of(const ProblemLine& line, const Gpu& gpu);

}  // namespace headrace::harness
