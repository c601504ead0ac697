// What CUDA sources of this package include: XLA's calling convention, types, shared memory, launches.
//
// A source that keeps to what stands here also compiles as C++ with EJKERNEL_ON_HOST, for a CPU, where
// the threads of a block take turns (ejkernel_host.h). There `kernel<<<...>>>` and `__shared__` do not
// exist: launches go through `ejkernel::launch`, and shared memory is `ejkernel::shared<T>()`.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

#ifdef EJKERNEL_ON_HOST
#include "ejkernel_host.h"
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#endif

namespace ejkernel {

#ifndef EJKERNEL_ON_HOST

using Stream = cudaStream_t;
using BFloat16 = __nv_bfloat16;
using Float16 = __half;

// The shared memory of a block, as many bytes as its launch asked for.
template <typename T>
__device__ __forceinline__ T* shared() {
  extern __shared__ __align__(16) unsigned char ejkernel_shared_memory[];
  return reinterpret_cast<T*>(ejkernel_shared_memory);
}

// Starts a kernel on a stream; an error tells why it did not start.
template <typename... Parameters, typename... Arguments>
ffi::Error launch(Stream stream, dim3 grid, dim3 block, size_t shared_bytes,
                  void (*kernel)(Parameters...), Arguments... arguments) {
  cudaError_t status = cudaSuccess;
  if (shared_bytes > 48 * 1024) {  // more than a kernel gets without asking
    status = cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                  cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  static_cast<int>(shared_bytes));
  }
  if (status == cudaSuccess) {
    kernel<<<grid, block, shared_bytes, stream>>>(static_cast<Parameters>(arguments)...);
    status = cudaGetLastError();
  }
  return status == cudaSuccess ? ffi::Error::Success()
                               : ffi::Error::Internal(cudaGetErrorString(status));
}

// Defines the symbol that XLA calls: `function(Stream, ...)` with what the binding lists.
#define EJKERNEL_HANDLER(symbol, function, binding)    \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(symbol, function, binding, \
                                {xla::ffi::Traits::kCmdBufferCompatible})
#define EJKERNEL_BIND xla::ffi::Ffi::Bind().Ctx<xla::ffi::PlatformStream<cudaStream_t>>()

#endif

// Numbers that neighbouring threads read and write as one access of up to 16 bytes.
template <typename T, int N>
struct alignas(sizeof(T) * N) Vector {
  T values[N];
};

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(BFloat16 x) { return static_cast<float>(x); }
__device__ __forceinline__ float to_float(Float16 x) { return static_cast<float>(x); }

template <typename T>
__device__ __forceinline__ T from_float(float x) {
  return static_cast<T>(x);
}

inline int64_t cdiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Whether an address is a multiple of 16 bytes.
inline bool is_aligned(const void* address) {
  return reinterpret_cast<uintptr_t>(address) % 16 == 0;
}

}  // namespace ejkernel
