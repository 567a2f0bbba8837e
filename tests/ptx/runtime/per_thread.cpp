// The symbols of programs built with --default-stream per-thread: such a program is told so, and ends.
#include "runtime/runtime.hpp"

#define HEADRACE_PER_THREAD(symbol)                                                                                    \
    extern "C" void symbol() {                                                                                         \
        headrace::ptx::Runtime::plain_call([](headrace::ptx::Runtime& r) -> cudaError_t {                              \
            r.die(#symbol ": per-thread default streams are not in the stand-in");                                     \
        });                                                                                                            \
    }

HEADRACE_PER_THREAD(__cudaLaunchKernel_ptsz)
HEADRACE_PER_THREAD(cudaLaunchKernel_ptsz)
HEADRACE_PER_THREAD(cudaLaunchKernelExC_ptsz)
HEADRACE_PER_THREAD(cudaLaunchHostFunc_ptsz)
HEADRACE_PER_THREAD(cudaMallocAsync_ptsz)
HEADRACE_PER_THREAD(cudaMallocFromPoolAsync_ptsz)
HEADRACE_PER_THREAD(cudaFreeAsync_ptsz)
HEADRACE_PER_THREAD(cudaMemcpyAsync_ptsz)
HEADRACE_PER_THREAD(cudaMemcpy2DAsync_ptsz)
HEADRACE_PER_THREAD(cudaMemsetAsync_ptsz)
HEADRACE_PER_THREAD(cudaMemcpy_ptds)
HEADRACE_PER_THREAD(cudaMemcpy2D_ptds)
HEADRACE_PER_THREAD(cudaMemset_ptds)
HEADRACE_PER_THREAD(cudaStreamSynchronize_ptsz)
HEADRACE_PER_THREAD(cudaStreamQuery_ptsz)
HEADRACE_PER_THREAD(cudaStreamWaitEvent_ptsz)
HEADRACE_PER_THREAD(cudaStreamBeginCapture_ptsz)
HEADRACE_PER_THREAD(cudaStreamEndCapture_ptsz)
HEADRACE_PER_THREAD(cudaStreamIsCapturing_ptsz)
HEADRACE_PER_THREAD(cudaStreamGetCaptureInfo_ptsz)
HEADRACE_PER_THREAD(cudaStreamGetFlags_ptsz)
HEADRACE_PER_THREAD(cudaStreamGetPriority_ptsz)
HEADRACE_PER_THREAD(cudaStreamGetDevice_ptsz)
HEADRACE_PER_THREAD(cudaEventRecord_ptsz)
HEADRACE_PER_THREAD(cudaGraphLaunch_ptsz)
