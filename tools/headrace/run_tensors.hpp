// The tensors and options of headrace run: what a file may hold, its metadata, and the outputs of a call on it.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "harness/tensors.hpp"
#include "tools/headrace/common.hpp"

namespace headrace::cli {

using TensorMap = std::map<std::string, harness::Tensor>;
using Metadata = std::map<std::string, std::string>;

// Every tensor that some call reads, by its name in the API and in files.
const std::vector<std::string>& input_names();

// The options of a problem that change its result or hint at how to compute it, as a file's metadata. Defaults are left
// out, but for "operator"; "problem" is the line itself.
Metadata metadata_of(const ProblemLine& line);

// The reverse: sets the options that the metadata names; other keys are left alone. `who` begins the message of the
// Failure that a bad value is: a file's name, or "--" for options of the command line.
void apply_options(const std::string& who, const Metadata& options, ProblemLine* line);

// Takes the tensors that the line's direction reads out of a file's. `unused` gets the names of the rest. A missing
// tensor without which there is nothing to compute is a Failure beginning with `path`.
TensorMap take_inputs(const std::string& path, TensorMap* file, const ProblemLine& line,
                      std::vector<std::string>* unused);

// Sets the line's sizes and dtype from its tensors, as far as their ranks allow; the library judges them.
void set_sizes(const TensorMap& tensors, ProblemLine* line);

// Adds the outputs of the call to `tensors` and returns their names: o and final_state, o alone, or a gradient of each
// floating input. A step's result is also its pool.
std::vector<std::string> add_outputs(const ProblemLine& line, TensorMap* tensors, harness::Memory memory);

}  // namespace headrace::cli
