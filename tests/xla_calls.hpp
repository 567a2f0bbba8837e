// XlaCall: a call as XLA makes it of a handler of headrace.jax, with a hand-made frame; and what XLA stands in it for.
#pragma once

#include <cmath>
#include <cstdint>
#include <deque>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "headrace/headrace.hpp"
#include "python/src/xla_ffi.hpp"
#include "python/src/xla_handlers.hpp"

namespace headrace::python::xla {

struct Error {
    std::string message;
    ErrorCode code;
};

}  // namespace headrace::python::xla

namespace headrace::test {

namespace xla = python::xla;

inline xla::Handler* handler_named(std::string_view name, Device device) {
    for (const auto& [known, handler] : python::xla_handlers(device)) {
        if (known == name) return handler;
    }
    throw std::invalid_argument("no handler " + std::string(name));
}

// The functions of XLA that a handler on a CPU needs. An error lies in memory of its own until the next one.
inline xla::Api host_api() {
    xla::Api api = {};
    api.struct_size = sizeof(api);
    api.version = {sizeof(xla::Version), nullptr, xla::version_major, xla::version_minor};
    api.create_error = [](xla::ErrorCreation* creation) {
        static xla::Error error;
        error = {creation->message, creation->code};
        return &error;
    };
    return api;
}

// Tensors are row-major; their places count from 0 in the order of the calls below.
class XlaCall {
  public:
    // A view that is not given takes a place and no buffer.
    void arguments(std::initializer_list<TensorView> views) {
        for (const TensorView& view : views) add(view, argument_places_++, given_, arguments_);
    }
    void results(std::initializer_list<TensorView> views) {
        for (const TensorView& view : views) add(view, result_places_++, wanted_, results_);
    }
    void attribute(const std::string& name, const std::string& value) {
        texts_.push_back({&held_.emplace_back(value)[0], value.size()});
        name_attribute(name, xla::AttributeKind::string, &texts_.back());
    }
    void attribute(const std::string& name, std::int64_t value) {
        scalars_.push_back({xla::DataType::s64, &integers_.emplace_back(value)});
        name_attribute(name, xla::AttributeKind::scalar, &scalars_.back());
    }
    void attribute(const std::string& name, double value) {
        scalars_.push_back({xla::DataType::f64, &reals_.emplace_back(value)});
        name_attribute(name, xla::AttributeKind::scalar, &scalars_.back());
    }

    // What the handler says: null, or an error.
    xla::Error* run(xla::Handler* handler, const xla::Api& api, xla::ExecutionContext* context = nullptr) {
        attribute("given", given_);
        attribute("wanted", wanted_);
        xla::CallFrame frame = {};
        frame.struct_size = sizeof(frame);
        frame.api = &api;
        frame.context = context;
        frame.stage = xla::Stage::execute;
        frame.arguments = values_of(arguments_);
        frame.results = values_of(results_);
        frame.attributes = {sizeof(frame.attributes), nullptr,       static_cast<std::int64_t>(names_.size()),
                            attribute_kinds_.data(),  names_.data(), attributes_.data()};
        return handler(&frame);
    }

  private:
    static xla::DataType type_of(DType dtype) {
        switch (dtype) {
            case DType::f64: return xla::DataType::f64;
            case DType::f32: return xla::DataType::f32;
            case DType::bf16: return xla::DataType::bf16;
            case DType::f16: return xla::DataType::f16;
            case DType::i32: return xla::DataType::s32;
            case DType::i64: return xla::DataType::s64;
        }
        throw std::invalid_argument("a type without a number");
    }
    void add(const TensorView& view, std::int64_t place, std::int64_t& bits, std::vector<void*>& values) {
        if (!view.given()) return;
        bits |= std::int64_t{1} << place;
        std::vector<std::int64_t>& dims = shapes_.emplace_back(view.shape, view.shape + view.rank);
        std::int64_t stride = 1;
        for (int d = view.rank - 1; d >= 0; --d) {
            if (view.strides[d] != stride && view.shape[d] > 1) throw std::invalid_argument("not row-major");
            stride *= view.shape[d];
        }
        buffers_.push_back({sizeof(xla::Buffer), nullptr, type_of(view.dtype), view.data, view.rank, dims.data()});
        values.push_back(&buffers_.back());
    }
    void name_attribute(const std::string& name, xla::AttributeKind kind, void* value) {
        named_.push_back({&held_.emplace_back(name)[0], name.size()});
        names_.push_back(&named_.back());
        attribute_kinds_.push_back(kind);
        attributes_.push_back(value);
    }
    xla::Values values_of(std::vector<void*>& values) {
        return {sizeof(xla::Values), nullptr, static_cast<std::int64_t>(values.size()), buffer_kinds_.data(),
                values.data()};
    }

    std::int64_t argument_places_ = 0, result_places_ = 0, given_ = 0, wanted_ = 0;
    std::vector<xla::ArgumentKind> buffer_kinds_ = std::vector(32, xla::ArgumentKind::buffer);
    std::deque<std::vector<std::int64_t>> shapes_;
    std::deque<xla::Buffer> buffers_;
    std::vector<void*> arguments_, results_, attributes_;
    std::deque<std::string> held_;
    std::deque<xla::Text> texts_, named_;
    std::vector<xla::Text*> names_;
    std::vector<xla::AttributeKind> attribute_kinds_;
    std::deque<xla::Scalar> scalars_;
    std::deque<std::int64_t> integers_;
    std::deque<double> reals_;
};

// An operator's call as headrace.jax asks for it; V-first states are those whose views are transposed.
inline XlaCall xla_call(const Call& call, bool state_v_first = false) {
    const auto stored = [&](const TensorView& state) {
        return state_v_first && state.given() ? state.transposed(2, 3) : state;
    };
    static const char* const gate_forms[] = {"log_decay", "softplus", "bounded"};
    static const char* const beta_forms[] = {"value", "sigmoid", "two_sigmoid"};
    const Inputs& in = call.in;
    const Gradients& g = call.grads;
    XlaCall made;
    made.attribute("op", name_of(call.op));
    made.attribute("scale", call.options.scale.value_or(1 / std::sqrt(static_cast<double>(in.q.shape[3]))));
    made.attribute("reverse", std::int64_t{call.options.reverse});
    made.attribute("qk_l2norm", std::int64_t{call.options.qk_l2norm});
    made.attribute("gate_form", gate_forms[static_cast<int>(call.options.gate_form)]);
    made.attribute("lower_bound", call.options.lower_bound);
    made.attribute("beta_form", beta_forms[static_cast<int>(call.options.beta_form)]);
    made.attribute("chunk", std::int64_t{call.options.chunk});
    made.attribute("state_v_first", std::int64_t{state_v_first});
    made.attribute("parts", std::int64_t{1});
    made.arguments({in.q, in.k, in.v, in.p, in.g, in.gv, in.g_gamma, in.beta, in.A_log, in.dt_bias,
                    stored(in.initial_state), in.cu_seqlens, call.d_out.d_o, stored(call.d_out.d_final_state),
                    stored(call.pool.states)});
    if (call.direction == Direction::backward) {
        made.results({g.d_q, g.d_k, g.d_v, g.d_p, g.d_g, g.d_gv, g.d_g_gamma, g.d_beta, g.d_A_log, g.d_dt_bias,
                      stored(g.d_initial_state)});
    } else {
        made.results({call.out.o, stored(call.direction == Direction::step ? call.pool.states : call.out.final_state)});
    }
    return made;
}

}  // namespace headrace::test
