// Small handlers for tests of `cuda_call`.
#include "ejkernel.cuh"

namespace {

using ejkernel::Stream;

// out[i] = a * x[i] + b, and b alone where x is missing
__global__ void affine_kernel(const float* x, float a, float b, int64_t size, float* out) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < size) out[i] = x == nullptr ? b : a * x[i] + b;
}

ffi::Error affine(Stream stream, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> out, double a,
                  int64_t b, bool negative, std::string_view name) {
  if (name != "affine") return ffi::Error::InvalidArgument("the name is " + std::string(name));
  const int64_t size = out->element_count();
  const float* from = x.element_count() == 0 ? nullptr : static_cast<float*>(x.untyped_data());
  return ejkernel::launch(stream, ejkernel::cdiv(size, 64), 64, 0, affine_kernel, from,
                          static_cast<float>(negative ? -a : a), static_cast<float>(b), size,
                          static_cast<float*>(out->untyped_data()));
}

// The sum of a block of x in each of its elements: by halves in shared memory, or by lanes of a warp.
template <bool WITH_BARRIER>
__global__ void sum_kernel(const float* x, float* out) {
  float* partial = ejkernel::shared<float>();
  const unsigned i = threadIdx.x;
  partial[i] = x[blockIdx.x * blockDim.x + i];
  for (unsigned half = blockDim.x / 2; half > 0; half /= 2) {
    if (WITH_BARRIER) __syncthreads();
    if (i < half) partial[i] += partial[i + half];
  }
  __syncthreads();
  out[blockIdx.x * blockDim.x + i] = partial[0];
}

__global__ void lanes_kernel(const float* x, float* out) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  float value = x[i];
  for (int mask = 16; mask > 0; mask /= 2) value += __shfl_xor_sync(0xffffffff, value, mask);
  out[i] = value;
}

// Only some of the threads reach the barrier, and the others wait at another one.
__global__ void stuck_kernel(const float* x, float* out) {
  const unsigned i = threadIdx.x;
  out[i] = x[i];
  if (i == 0) {
    out[0] = __shfl_xor_sync(0xffffffff, out[0], 1);
  } else {
    __syncthreads();
  }
}

// Writes all elements of a block but the first.
__global__ void hole_kernel(const float* x, float* out) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  if (threadIdx.x > 0) out[i] = x[i];
}

ffi::Error sum(Stream stream, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> out,
               std::string_view kind, int64_t threads) {
  auto kernel = kind == "barrier"      ? sum_kernel<true>
                : kind == "no barrier" ? sum_kernel<false>
                : kind == "lanes"      ? lanes_kernel
                : kind == "hole"       ? hole_kernel
                                       : stuck_kernel;
  return ejkernel::launch(stream, x.element_count() / threads, threads, threads * sizeof(float),
                          kernel, static_cast<const float*>(x.untyped_data()),
                          static_cast<float*>(out->untyped_data()));
}

// Floats of 16 bits to 32, or back.
template <typename T>
__global__ void widen_kernel(const T* x, float* out) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  out[i] = ejkernel::to_float(x[i]);
}

template <typename T>
__global__ void narrow_kernel(const float* x, T* out) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  out[i] = ejkernel::from_float<T>(x[i]);
}

template <typename T>
ffi::Error convert_as(Stream stream, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> out) {
  const int64_t blocks = x.element_count() / 64;
  if (x.element_type() == ffi::F32) {
    return ejkernel::launch(stream, blocks, 64, 0, narrow_kernel<T>,
                            static_cast<const float*>(x.untyped_data()),
                            static_cast<T*>(out->untyped_data()));
  }
  return ejkernel::launch(stream, blocks, 64, 0, widen_kernel<T>,
                          static_cast<const T*>(x.untyped_data()),
                          static_cast<float*>(out->untyped_data()));
}

ffi::Error convert(Stream stream, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> out) {
  const bool is_bfloat16 = x.element_type() == ffi::BF16 || out->element_type() == ffi::BF16;
  return is_bfloat16 ? convert_as<ejkernel::BFloat16>(stream, x, out)
                     : convert_as<ejkernel::Float16>(stream, x, out);
}

}  // namespace

EJKERNEL_HANDLER(affine_handler, affine,
                 EJKERNEL_BIND.Arg<ffi::AnyBuffer>()
                     .Ret<ffi::AnyBuffer>()
                     .Attr<double>("a")
                     .Attr<int64_t>("b")
                     .Attr<bool>("negative")
                     .Attr<std::string_view>("name"));

EJKERNEL_HANDLER(sum_handler, sum,
                 EJKERNEL_BIND.Arg<ffi::AnyBuffer>()
                     .Ret<ffi::AnyBuffer>()
                     .Attr<std::string_view>("kind")
                     .Attr<int64_t>("threads"));

EJKERNEL_HANDLER(convert_handler, convert,
                 EJKERNEL_BIND.Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>());
