// Kernels that write results where they are told, and nowhere else.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>
#include <vector>

namespace tpurun::program {

// The namespace of our own kernels that programs call as they call ATen's.
constexpr std::string_view kOurKernels = "tpurun_kernel::";

// Whether the `out=` form of an operation of ATen never resizes what it is given, also not for a moment: the
// memory behind a result belongs to another value.
bool keeps_size(std::string_view name);

// A kernel that may put its result where an operand is: it has read what it computes an element, or a row,
// from before it writes there.
struct Overwriting {
  std::string_view name;
  std::array<int8_t, 2> operands;  // their arguments; -1: none
  int8_t dimension;                // the argument that has to say the last one; -1: none
};

const std::vector<Overwriting>& all_overwriting();
// Null where a kernel is not known to be such.
const Overwriting* overwriting(std::string_view name);

}  // namespace tpurun::program
