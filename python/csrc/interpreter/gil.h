// Blocking without the Python lock. Ops arrive both with it (DTensor's dispatch, Python kernels) and without
// it (c10d's bindings, autograd threads); whoever blocks with it stops the thread that would end the wait.
#pragma once

#include <cstdint>
#include <optional>

#include <pybind11/pybind11.h>

namespace tpurun {

inline bool holds_gil() { return Py_IsInitialized() != 0 && PyGILState_Check() != 0; }

// Python threads of this process, for who holds the lock.
inline uint32_t count_python_threads() {
  uint32_t threads = 0;
  for (auto* state = PyInterpreterState_ThreadHead(PyInterpreterState_Get()); state != nullptr;
       state = PyThreadState_Next(state)) {
    ++threads;
  }
  return threads;
}

// Python threads of this process, for a caller that is one and is about to block; 0 for any other thread.
// Whoever judges whether a rank can still go on has to know that nobody else of it is running. The bindings
// release the lock before they come here; going on needs it again anyway, so taking it delays nothing.
inline uint32_t python_threads() {
  if (Py_IsInitialized() == 0 || PyGILState_GetThisThreadState() == nullptr) {
    return 0;
  }
  const pybind11::gil_scoped_acquire gil;
  return count_python_threads();
}

template <class Blocking>
auto without_gil(Blocking&& blocking) {
  std::optional<pybind11::gil_scoped_release> released;
  if (holds_gil()) {
    released.emplace();
  }
  return blocking();
}

}  // namespace tpurun
