// Blocking without the Python lock. Ops arrive both with it (DTensor's dispatch, Python kernels) and without
// it (c10d's bindings, autograd threads); whoever blocks with it stops the thread that would end the wait.
#pragma once

#include <optional>

#include <pybind11/pybind11.h>

namespace tpurun {

inline bool holds_gil() { return Py_IsInitialized() != 0 && PyGILState_Check() != 0; }

template <class Blocking>
auto without_gil(Blocking&& blocking) {
  std::optional<pybind11::gil_scoped_release> released;
  if (holds_gil()) {
    released.emplace();
  }
  return blocking();
}

}  // namespace tpurun
