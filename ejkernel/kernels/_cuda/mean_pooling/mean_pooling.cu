// Mean pooling: sums over spans of tokens, and each token's share of a cotangent.
//
// Heads and features are one axis of `width` columns. A block has blockDim.x * V columns, V of them a
// thread, and blockDim.y tokens at a time. Every sum is in one order, whatever the device.
#include "ejkernel.cuh"

namespace {

using ejkernel::Stream;

// Sums of inputs [tokens, width] over tokens [starts[i], stops[i]) that the mask keeps, or their means
// where `counts` tells by how many to divide. Long spans are cut: their sums are added by a second launch.
template <typename T, typename Out, int V>
__global__ void mean_pooling_fwd_kernel(const T* inputs, const bool* mask, const int32_t* starts,
                                        const int32_t* stops, const int32_t* counts, int64_t width,
                                        Out* out) {
  const int64_t span = blockIdx.x;
  const int64_t column = (static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x) * V;
  float sum[V] = {};
  if (column < width) {
    const int32_t stop = stops[span];
#pragma unroll 4
    for (int32_t token = starts[span] + threadIdx.y; token < stop; token += blockDim.y) {
      if (mask != nullptr && !mask[token]) continue;
      const auto tile =
          *reinterpret_cast<const ejkernel::Vector<T, V>*>(inputs + token * width + column);
      for (int v = 0; v < V; ++v) sum[v] += ejkernel::to_float(tile.values[v]);
    }
  }
  // the tokens of a block, by halves
  float* partial = ejkernel::shared<float>();  // [blockDim.y, V, blockDim.x]
  auto at = [&](unsigned y, int v) -> float& {
    return partial[(y * V + v) * blockDim.x + threadIdx.x];
  };
  for (int v = 0; v < V; ++v) at(threadIdx.y, v) = sum[v];
  for (unsigned half = blockDim.y / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.y < half) {
      for (int v = 0; v < V; ++v) at(threadIdx.y, v) += at(threadIdx.y + half, v);
    }
  }
  if (threadIdx.y == 0 && column < width) {
    const int32_t count = counts == nullptr ? 1 : counts[span];
    const float divisor = static_cast<float>(count > 0 ? count : 1);
    ejkernel::Vector<Out, V> tile;
    for (int v = 0; v < V; ++v) tile.values[v] = ejkernel::from_float<Out>(at(0, v) / divisor);
    *reinterpret_cast<ejkernel::Vector<Out, V>*>(out + span * width + column) = tile;
  }
}

// Gives each of dinputs [tokens, width] the cotangent of its row over the row's count; 0 where the row
// is negative. A block has `block_t` tokens.
template <typename T, int V>
__global__ void mean_pooling_bwd_kernel(const T* dout, const int32_t* rows, const int32_t* counts,
                                        int64_t tokens, int64_t width, int64_t block_t, T* dinputs) {
  const int64_t first = blockIdx.x * block_t;
  const int64_t column = (static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x) * V;
  if (column >= width) return;
  const int64_t stop = first + block_t < tokens ? first + block_t : tokens;
  int32_t known = -1;  // the row whose share `tile` holds
  ejkernel::Vector<T, V> tile;
  for (int v = 0; v < V; ++v) tile.values[v] = ejkernel::from_float<T>(0.0f);
  for (int64_t token = first + threadIdx.y; token < stop; token += blockDim.y) {
    const int32_t row = rows[token];
    if (row != known) {
      known = row;
      if (row >= 0) {
        tile = *reinterpret_cast<const ejkernel::Vector<T, V>*>(dout + row * width + column);
      }
      const float divisor = row >= 0 && counts[row] > 1 ? static_cast<float>(counts[row]) : 1.0f;
      for (int v = 0; v < V; ++v) {
        const float share = row >= 0 ? ejkernel::to_float(tile.values[v]) / divisor : 0.0f;
        tile.values[v] = ejkernel::from_float<T>(share);
      }
    }
    *reinterpret_cast<ejkernel::Vector<T, V>*>(dinputs + token * width + column) = tile;
  }
}

// How `threads` threads are laid over tokens and columns, `block_w` columns a block at most.
struct Shape {
  dim3 block;
  unsigned column_blocks;

  Shape(int64_t threads, int64_t block_w, int64_t width, int V) {
    int64_t across = 1;
    while (across < threads && across * V < block_w && across * V < width) across *= 2;
    block = dim3(static_cast<unsigned>(across), static_cast<unsigned>(threads / across));
    column_blocks = static_cast<unsigned>(ejkernel::cdiv(width, across * V));
  }
};

// A pointer to the elements of a buffer, null if it has none.
template <typename T>
const T* elements(const ffi::AnyBuffer& buffer) {
  return buffer.element_count() == 0 ? nullptr : static_cast<const T*>(buffer.untyped_data());
}

int64_t width_of(const ffi::AnyBuffer& buffer) { return buffer.dimensions().back(); }

template <typename T, typename Out, int V>
ffi::Error start_forward(Stream stream, ffi::AnyBuffer inputs, ffi::AnyBuffer mask,
                         ffi::AnyBuffer starts, ffi::AnyBuffer stops, ffi::AnyBuffer counts,
                         ffi::Result<ffi::AnyBuffer> out, int64_t threads, int64_t block_w) {
  const int64_t width = width_of(inputs);
  const Shape shape(threads, block_w, width, V);
  const dim3 grid(static_cast<unsigned>(starts.element_count()), shape.column_blocks);
  return ejkernel::launch(stream, grid, shape.block, threads * V * sizeof(float),
                          mean_pooling_fwd_kernel<T, Out, V>, elements<T>(inputs),
                          elements<bool>(mask), elements<int32_t>(starts),
                          elements<int32_t>(stops), elements<int32_t>(counts), width,
                          static_cast<Out*>(out->untyped_data()));
}

// As many columns a thread as 16 bytes of inputs hold, where rows begin at multiples of 16 bytes.
template <typename T, typename Out, typename... Rest>
ffi::Error start_forward_wide(Stream stream, ffi::AnyBuffer inputs, Rest... rest) {
  constexpr int V = 16 / sizeof(T);
  if (width_of(inputs) % V == 0 && ejkernel::is_aligned(inputs.untyped_data())) {
    return start_forward<T, Out, V>(stream, inputs, rest...);
  }
  return start_forward<T, Out, 1>(stream, inputs, rest...);
}

ffi::Error forward(Stream stream, ffi::AnyBuffer inputs, ffi::AnyBuffer mask, ffi::AnyBuffer starts,
                   ffi::AnyBuffer stops, ffi::AnyBuffer counts, ffi::Result<ffi::AnyBuffer> out,
                   int64_t threads, int64_t block_w) {
  const auto start = [&](auto run) {
    return run(stream, inputs, mask, starts, stops, counts, out, threads, block_w);
  };
  using ejkernel::BFloat16;
  using ejkernel::Float16;
  using Start = ffi::Error (*)(Stream, ffi::AnyBuffer, ffi::AnyBuffer, ffi::AnyBuffer,
                               ffi::AnyBuffer, ffi::AnyBuffer, ffi::Result<ffi::AnyBuffer>, int64_t,
                               int64_t);
  const auto from = inputs.element_type(), to = out->element_type();
  Start run = nullptr;
  if (from == ffi::BF16 && to == ffi::BF16) run = start_forward_wide<BFloat16, BFloat16>;
  if (from == ffi::BF16 && to == ffi::F32) run = start_forward_wide<BFloat16, float>;
  if (from == ffi::F16 && to == ffi::F16) run = start_forward_wide<Float16, Float16>;
  if (from == ffi::F16 && to == ffi::F32) run = start_forward_wide<Float16, float>;
  if (from == ffi::F32 && to == ffi::F32) run = start_forward_wide<float, float>;
  if (from == ffi::F32 && to == ffi::BF16) run = start_forward_wide<float, BFloat16>;
  if (from == ffi::F32 && to == ffi::F16) run = start_forward_wide<float, Float16>;
  if (run == nullptr) return ffi::Error::InvalidArgument("mean_pooling: no such dtypes");
  return start(run);
}

template <typename T, int V>
ffi::Error start_backward(Stream stream, ffi::AnyBuffer dout, ffi::AnyBuffer rows,
                          ffi::AnyBuffer counts, ffi::Result<ffi::AnyBuffer> dinputs,
                          int64_t threads, int64_t block_w, int64_t block_t) {
  const int64_t width = width_of(dout), tokens = rows.element_count();
  const Shape shape(threads, block_w, width, V);
  const dim3 grid(static_cast<unsigned>(ejkernel::cdiv(tokens, block_t)), shape.column_blocks);
  return ejkernel::launch(stream, grid, shape.block, 0, mean_pooling_bwd_kernel<T, V>,
                          elements<T>(dout), elements<int32_t>(rows), elements<int32_t>(counts),
                          tokens, width, block_t, static_cast<T*>(dinputs->untyped_data()));
}

template <typename T, typename... Rest>
ffi::Error start_backward_wide(Stream stream, ffi::AnyBuffer dout, Rest... rest) {
  constexpr int V = 16 / sizeof(T);
  if (width_of(dout) % V == 0 && ejkernel::is_aligned(dout.untyped_data())) {
    return start_backward<T, V>(stream, dout, rest...);
  }
  return start_backward<T, 1>(stream, dout, rest...);
}

ffi::Error backward(Stream stream, ffi::AnyBuffer dout, ffi::AnyBuffer rows, ffi::AnyBuffer counts,
                    ffi::Result<ffi::AnyBuffer> dinputs, int64_t threads, int64_t block_w,
                    int64_t block_t) {
  const auto start = [&](auto type) {
    return start_backward_wide<decltype(type)>(stream, dout, rows, counts, dinputs, threads, block_w,
                                               block_t);
  };
  switch (dout.element_type()) {
    case ffi::BF16:
      return start(ejkernel::BFloat16());
    case ffi::F16:
      return start(ejkernel::Float16());
    case ffi::F32:
      return start(0.0f);
    default:
      return ffi::Error::InvalidArgument("mean_pooling: no such dtype");
  }
}

}  // namespace

EJKERNEL_HANDLER(mean_pooling_fwd, forward,
                 EJKERNEL_BIND.Arg<ffi::AnyBuffer>()    // inputs [tokens, width]
                     .Arg<ffi::AnyBuffer>()             // mask [tokens], or empty
                     .Arg<ffi::AnyBuffer>()             // starts [spans]
                     .Arg<ffi::AnyBuffer>()             // stops [spans]
                     .Arg<ffi::AnyBuffer>()             // counts [spans], or empty
                     .Ret<ffi::AnyBuffer>()             // out [spans, width]
                     .Attr<int64_t>("threads")
                     .Attr<int64_t>("block_w"));

EJKERNEL_HANDLER(mean_pooling_bwd, backward,
                 EJKERNEL_BIND.Arg<ffi::AnyBuffer>()    // dout [rows, width]
                     .Arg<ffi::AnyBuffer>()             // rows [tokens]
                     .Arg<ffi::AnyBuffer>()             // counts [rows]
                     .Ret<ffi::AnyBuffer>()             // dinputs [tokens, width]
                     .Attr<int64_t>("threads")
                     .Attr<int64_t>("block_w")
                     .Attr<int64_t>("block_t"));
