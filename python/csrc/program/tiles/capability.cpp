// Which build of a kernel runs on this machine: the one that ATen runs there.
#include <string>

#include <ATen/Version.h>

#include "program/tiles/functions.h"

namespace tpurun::program::tiles {
namespace {

using Find = Compiled (*)(Function, c10::ScalarType);

Compiled find_nothing(Function, c10::ScalarType) { return {}; }

Compiled find_widest(Function function, c10::ScalarType dtype) {
  const Compiled found = find_avx512(function, dtype);
  return found.kernel != nullptr ? found : find_avx2(function, dtype);
}

// ATen reads ATEN_CPU_CAPABILITY as well as the processor.
Find find_of_machine() {
  const std::string capability = at::get_cpu_capability();
  if (capability == "AVX512") return &find_widest;
  if (capability == "AVX2") return &find_avx2;
  if (capability == "DEFAULT" || capability == "NO AVX") return &find_default;
  return &find_nothing;
}

}  // namespace

Compiled find(Function function, c10::ScalarType dtype) {
  static const Find find_here = find_of_machine();
  return find_here(function, dtype);
}

}  // namespace tpurun::program::tiles
