// The kernel of a pointwise operation: a function over contiguous elements.
#pragma once

#include <cstdint>

namespace tpurun::program {

// Computes `count` elements: the first `vector_count` of them as ATen's vector loop does, the rest as its
// scalar loop does, where the two have different bits. `vector_count` is a multiple of the loop's step, so a
// piece of a tensor begins at such a multiple. `out` may be the memory of an operand whose elements are as
// wide. An operand that an operation does not have is null. Memory needs no alignment but that of its
// elements.
using Kernel = void (*)(void* out, const void* a, const void* b, const void* c, const double* numbers,
                        int64_t vector_count, int64_t count);

// Whether the bits of a result depend on where ATen's vector loop ends and its scalar loop begins.
enum class Loops : uint8_t { kAlike, kDifferent };

}  // namespace tpurun::program
