#include "interpreter/finalization.h"

#include <exception>

#include <unistd.h>

#include <pybind11/pybind11.h>

#include "interpreter/main_thread.h"

namespace tpurun {

namespace {

std::terminate_handler before = nullptr;

bool is_interpreter_going() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsFinalizing() != 0 || Py_IsInitialized() == 0;
#else
  return _Py_IsFinalizing() != 0 || Py_IsInitialized() == 0;
#endif
}

[[noreturn]] void terminated() {
  const bool is_unwound = std::current_exception() == nullptr;
  while (is_unwound && !is_main_thread() && is_interpreter_going()) {
    pause();
  }
  before();
  __builtin_unreachable();  // no handler may return
}

}  // namespace

void stop_threads_that_are_late() { before = std::set_terminate(&terminated); }

}  // namespace tpurun
