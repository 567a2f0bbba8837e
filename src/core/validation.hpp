// The parts of make_problem: each returns true, or false after stating the first mistake it found.
#pragma once

#include <locale>
#include <sstream>
#include <string>
#include <vector>

#include "core/problem.hpp"

namespace headrace {

// Takes the message of the first mistake: `return fault("k: expected ", 64, ", got ", 32);`
class Fault {
  public:
    template <typename... Parts>
    bool operator()(const Parts&... parts) {
        std::ostringstream text;
        text.imbue(std::locale::classic());
        (text << ... << parts);
        message_ = text.str();
        return false;
    }
    const std::string& message() const { return message_; }

  private:
    std::string message_;
};

enum class Role {
    input,   // floating-point, read
    index,   // i32 or i64, read
    output,  // floating-point, written; a pool of states is read as well
};

// A tensor that the caller gave, under its name in messages.
struct NamedView {
    const char* name;
    const TensorView* view;
    Role role;
};

// All views of the call whose rank is not 0. Fields of other directions are not listed.
std::vector<NamedView> named_views(const Problem& problem);

// Rank, sizes, strides and kind of dtype of each view by itself; data pointers with Contents::check.
bool check_each_view(const std::vector<NamedView>& views, Contents contents, Fault& fault);

// That all lie on this device, but cu_seqlens, which may be on the host. source: " as q", where that fixed the device.
bool check_devices(const std::vector<NamedView>& views, Device device, const char* source, Fault& fault);

// Dtypes that depend on that of q; sets problem.dtype and problem.wide.
bool check_dtypes(const std::vector<NamedView>& views, Problem& problem, Fault& fault);

// No output shares memory with an input or another output.
bool check_aliasing(const std::vector<NamedView>& views, Fault& fault);

// Which tensors the operator, the direction and the forms require or refuse; sets rule and gates.
bool check_presence(Problem& problem, Fault& fault);

// Sizes of all tensors; sets B, T, H, HV, K, V, N and group.
bool check_shapes(Problem& problem, Fault& fault);

// Options; resolves their defaults.
bool check_options(Problem& problem, Contents contents, Fault& fault);

// cu_seqlens, whose contents are read in either case; sets the list of sequences.
bool check_sequences(Problem& problem, Fault& fault);

// Sizes of the undivided problem; resolves those not given.
bool check_piece(Problem& problem, Fault& fault);

// Values of g: log decays, or numbers where it is a pre-activation.
bool check_gate(const Problem& problem, Fault& fault);

// Values of the other gates, of beta and of the pool's indices; in step of g too.
bool check_contents(const Problem& problem, Fault& fault);

}  // namespace headrace
