// MovedToDevice: the tensors of a layer function's call in device memory, its stream, and back.
#pragma once

#include "tests/cuda/device_tensors.hpp"
#include "tests/layer_calls.hpp"

namespace headrace::test {

inline std::vector<TensorView*> views_of(ConvolutionCall& call) {
    return {&call.in.x,      &call.in.weight,       &call.in.bias,      &call.in.initial_state,
            &call.out.y,     &call.out.final_state, &call.d_out.d_y,    &call.d_out.d_final_state,
            &call.grads.d_x, &call.grads.d_weight,  &call.grads.d_bias, &call.grads.d_initial_state};
}
inline std::vector<TensorView*> views_of(RmsNormCall& call) {
    return {&call.in.x, &call.in.gate,   &call.in.weight,    &call.y,
            &call.d_y,  &call.grads.d_x, &call.grads.d_gate, &call.grads.d_weight};
}

// While it lives, the views of a call lie on the device, and its options name a stream.
class MovedToDevice {
  public:
    template <class LayerCall>
    explicit MovedToDevice(LayerCall& call, std::vector<TensorView*> more = {}) : stream_slot_(&call.options.stream) {
        expect_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
        *stream_slot_ = stream_;
        for (TensorView* view : views_of(call)) move(view);
        for (TensorView* view : more) move(view);
    }
    // Behind the work of the stream, everything as the device has it.
    ~MovedToDevice() {
        expect_cuda(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
        for (const Moved& moved : moved_) {
            transfer(moved.host, moved.memory.data(), moved.memory.bytes() - 1);
            moved.view->data = moved.host;
            moved.view->device = Device::cpu;
        }
        *stream_slot_ = nullptr;
        cudaStreamDestroy(stream_);
    }
    MovedToDevice(const MovedToDevice&) = delete;
    MovedToDevice& operator=(const MovedToDevice&) = delete;

  private:
    void move(TensorView* view) {
        if (!view->given()) return;
        moved_.push_back(
            {view, view->data, DeviceMemory(extent_bytes(*view) + 1)});  // + 1: an address for empty ones too
        transfer(moved_.back().memory.data(), view->data, extent_bytes(*view));
        view->data = moved_.back().memory.data();
        view->device = Device::cuda;
    }
    struct Moved {
        TensorView* view;
        void* host;
        DeviceMemory memory;
    };
    std::vector<Moved> moved_;
    void** stream_slot_;
    cudaStream_t stream_ = nullptr;
};

}  // namespace headrace::test
