// Kernels that write results where they are told, and nowhere else.
#pragma once

#include <string_view>

namespace tpurun::program {

// Whether the `out=` form of an operation of ATen never resizes what it is given, also not for a moment: the
// memory behind a result belongs to another value.
bool keeps_size(std::string_view name);

}  // namespace tpurun::program
