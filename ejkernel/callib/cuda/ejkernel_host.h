// CUDA's language on a CPU, for tests: blocks run one after the other, and the threads of a block take
// turns on one stack each, from barrier to barrier.
//
// Results and shared memory start as NaN, and a barrier that some threads never reach is an error. After
// `ejkernel_reverse_threads(true)` the last thread is the first to run: a kernel whose numbers then differ
// lacks a barrier.
#pragma once

#include <ucontext.h>

#include <atomic>
#include <cmath>
#include <functional>
#include <memory>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __restrict__ __restrict

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

inline thread_local dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace ejkernel {

struct Stream {};

namespace host {

struct Thread {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  dim3 index;
  bool has_ended = false;
};

// The block that runs: its threads, its shared memory, and who waits where.
class Block {
 public:
  explicit Block(size_t shared_bytes) : shared_(shared_bytes + 16) {}

  // Runs all threads to their end; false if some wait at a barrier that others never reach.
  bool run(dim3 size, const std::function<void()>& body) {
    // every bit set is NaN in each type of floats
    std::memset(shared_.data(), 0xff, shared_.size());
    const unsigned count = size.x * size.y * size.z;
    threads_.resize(count);
    live_ = count;
    arrived_ = 0;
    lanes_.assign((count + 31) / 32, Lanes{});
    body_ = &body;
    for (unsigned i = 0; i < count; ++i) {
      Thread& thread = threads_[i];
      if (!thread.stack) thread.stack.reset(new char[kStack]);
      thread.has_ended = false;
      thread.index = dim3(i % size.x, i / size.x % size.y, i / (size.x * size.y));
      getcontext(&thread.context);
      thread.context.uc_stack.ss_sp = thread.stack.get();
      thread.context.uc_stack.ss_size = kStack;
      thread.context.uc_link = &scheduler_;
      makecontext(&thread.context, &Block::start, 0);
      if (i % 32 == 0) lanes_[i / 32].live = count - i < 32 ? count - i : 32;
    }
    while (live_ > 0) {
      moved_ = false;
      for (unsigned i = 0; i < count; ++i) {
        current_ = is_reversed() ? count - 1 - i : i;
        Thread& thread = threads_[current_];
        if (thread.has_ended) continue;
        threadIdx = thread.index;
        swapcontext(&scheduler_, &thread.context);
      }
      if (!moved_) return false;
    }
    return true;
  }

  // Waits for all threads of the block that have not ended.
  void barrier() { wait(arrived_, generation_, live_); }

  // What `value` is in another lane of the warp; all lanes that have not ended take part.
  template <typename T>
  T exchange(T value, unsigned source) {
    static_assert(sizeof(T) <= 8, "lanes exchange 8 bytes at most");
    Lanes& lanes = lanes_[current_ / 32];
    std::memcpy(&lanes.values[current_ % 32], &value, sizeof(T));
    wait(lanes.arrived, lanes.generation, lanes.live);
    T result;
    std::memcpy(&result, &lanes.values[source % 32], sizeof(T));
    wait(lanes.arrived, lanes.generation, lanes.live);  // before a lane writes the next value
    return result;
  }

  unsigned lane() const { return current_ % 32; }

  void* shared() {
    const uintptr_t address = reinterpret_cast<uintptr_t>(shared_.data());
    return reinterpret_cast<void*>((address + 15) / 16 * 16);
  }

  static std::atomic<bool>& is_reversed() {
    static std::atomic<bool> value{false};
    return value;
  }

  static Block*& running() {
    static thread_local Block* block = nullptr;
    return block;
  }

 private:
  static constexpr size_t kStack = 64 * 1024;

  struct Lanes {
    uint64_t values[32];
    unsigned live = 0, arrived = 0, generation = 0;
  };

  static void start() {
    Block* block = running();
    (*block->body_)();
    Thread& thread = block->threads_[block->current_];
    thread.has_ended = true;
    block->moved_ = true;
    Lanes& lanes = block->lanes_[block->current_ / 32];
    // those that wait for this thread wait no longer
    block->leave(block->arrived_, block->generation_, --block->live_);
    block->leave(lanes.arrived, lanes.generation, --lanes.live);
  }

  void leave(unsigned& arrived, unsigned& generation, unsigned live) {
    if (arrived > 0 && arrived == live) {
      arrived = 0;
      ++generation;
    }
  }

  void wait(unsigned& arrived, unsigned& generation, const unsigned& live) {
    const unsigned mine = generation;
    moved_ = true;
    if (++arrived == live) {
      arrived = 0;
      ++generation;
      return;
    }
    while (generation == mine) {
      swapcontext(&threads_[current_].context, &scheduler_);
    }
    moved_ = true;
  }

  std::vector<Thread> threads_;
  std::vector<Lanes> lanes_;
  std::vector<char> shared_;
  ucontext_t scheduler_;
  const std::function<void()>* body_ = nullptr;
  unsigned current_ = 0, live_ = 0, arrived_ = 0, generation_ = 0;
  bool moved_ = false;
};

// A float of 16 bits that is computed with as a float of 32.
class BFloat16 {
 public:
  BFloat16() = default;
  explicit BFloat16(float x) {
    uint32_t word;
    std::memcpy(&word, &x, 4);
    const bool is_nan = (word & 0x7fffffff) > 0x7f800000;
    // to the nearest, ties to even
    bits_ = is_nan ? 0x7fc0 : static_cast<uint16_t>((word + 0x7fff + (word >> 16 & 1)) >> 16);
  }
  explicit operator float() const {
    const uint32_t word = static_cast<uint32_t>(bits_) << 16;
    float x;
    std::memcpy(&x, &word, 4);
    return x;
  }

 private:
  uint16_t bits_;
};

class Float16 {
 public:
  Float16() = default;
  explicit Float16(float x) {
    uint32_t word;
    std::memcpy(&word, &x, 4);
    const uint16_t sign = word >> 16 & 0x8000;
    const float size = std::fabs(x);
    if (std::isnan(x)) {
      bits_ = sign | 0x7e00;
    } else if (size >= 65520.0f) {  // rounds to infinity
      bits_ = sign | 0x7c00;
    } else if (size < 6.103515625e-05f) {  // without a leading 1: multiples of 2^-24
      bits_ = sign | static_cast<uint16_t>(std::nearbyint(size * 16777216.0f));
    } else {
      std::memcpy(&word, &size, 4);
      word += 0xfff + (word >> 13 & 1);  // to the nearest, ties to even
      bits_ = sign | static_cast<uint16_t>((word >> 13) - (112 << 10));
    }
  }
  explicit operator float() const {
    const uint32_t exponent = bits_ >> 10 & 31, fraction = bits_ & 1023;
    const float sign = bits_ & 0x8000 ? -1.0f : 1.0f;
    if (exponent == 31) return fraction ? std::nanf("") : sign * INFINITY;
    if (exponent == 0) return sign * std::ldexp(static_cast<float>(fraction), -24);
    return sign * std::ldexp(static_cast<float>(fraction | 1024), static_cast<int>(exponent) - 25);
  }

 private:
  uint16_t bits_;
};

// Fills results with NaN, but for those that share the memory of an argument.
class Poison {
 public:
  template <typename... Arguments>
  explicit Poison(Arguments&... arguments) {
    (note(arguments), ...);
    (fill(arguments), ...);
  }

 private:
  template <typename T>
  void note(const T&) {}
  void note(const ffi::AnyBuffer& buffer) { inputs_.push_back(buffer.untyped_data()); }
  template <ffi::DataType dtype, size_t rank>
  void note(const ffi::Buffer<dtype, rank>& buffer) {
    inputs_.push_back(buffer.untyped_data());
  }

  template <typename T>
  void fill(const T&) {}
  template <typename T>
  void fill(ffi::Result<T>& result) {
    for (const void* input : inputs_) {
      if (input == result->untyped_data()) return;
    }
    std::memset(result->untyped_data(), 0xff, result->size_bytes());
  }

  std::vector<const void*> inputs_;
};

}  // namespace host

using host::BFloat16;
using host::Float16;

template <typename T>
T* shared() {
  return static_cast<T*>(host::Block::running()->shared());
}

template <typename... Parameters, typename... Arguments>
ffi::Error launch(Stream, dim3 grid, dim3 block, size_t shared_bytes,
                  void (*kernel)(Parameters...), Arguments... arguments) {
  host::Block threads(shared_bytes);
  host::Block::running() = &threads;
  blockDim = block;
  gridDim = grid;
  const std::function<void()> body = [&] { kernel(static_cast<Parameters>(arguments)...); };
  for (unsigned z = 0; z < grid.z; ++z) {
    for (unsigned y = 0; y < grid.y; ++y) {
      for (unsigned x = 0; x < grid.x; ++x) {
        blockIdx = dim3(x, y, z);
        if (!threads.run(block, body)) {
          return ffi::Error::Internal("some threads of a block wait at a barrier for ever");
        }
      }
    }
  }
  return ffi::Error::Success();
}

}  // namespace ejkernel

extern "C" void ejkernel_reverse_threads(bool on) { ejkernel::host::Block::is_reversed() = on; }

inline void __syncthreads() { ejkernel::host::Block::running()->barrier(); }

template <typename T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  auto* block = ejkernel::host::Block::running();
  return block->exchange(value, block->lane() ^ mask);
}

#define EJKERNEL_HANDLER(symbol, function, binding)                     \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(symbol, ([](auto... arguments) {        \
                                  ejkernel::host::Poison(arguments...); \
                                  return function(ejkernel::Stream{}, arguments...); \
                                }),                                     \
                                binding)
#define EJKERNEL_BIND xla::ffi::Ffi::Bind()
