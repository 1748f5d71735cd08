#include "interpreter/errors.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include <c10/util/Exception.h>
#include <pybind11/stl.h>

namespace tpurun {

namespace {

const char* class_name(TpurunStatus status) {
  switch (status) {
    case TPURUN_MISMATCH:
      return "CollectiveMismatchError";
    case TPURUN_RANK_LOST:
      return "RankLostError";
    case TPURUN_DEADLOCK:
      return "DeadlockError";
    case TPURUN_TIMEOUT:
      return "CollectiveTimeoutError";
    case TPURUN_ABORTED:
      return "AbortedError";
    default:
      return "DistBackendError";
  }
}

std::string text_of(const TpurunError& error) {
  return std::string(error.text, std::min<size_t>(error.bytes, sizeof(error.text)));
}

// Raises what a signal handler raised at the next instruction of the main thread, as the interpreter does.
int raise_stored(void* stored) {
  auto* error = static_cast<PyObject*>(stored);
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error)), error);
  Py_DECREF(error);
  return -1;
}

// Runs the signal handlers that are due, which otherwise would run while our exception is made and take its
// place. Returns what one of them raised, to be the context of ours. An exception that ends a program
// (KeyboardInterrupt, SystemExit) must not be hidden in a context. It is raised right after our exception,
// whose handler it then interrupts.
pybind11::object run_due_handlers() {
  if (PyErr_CheckSignals() == 0) {
    return pybind11::none();
  }
  pybind11::error_already_set raised;
  pybind11::object error = raised.value();
  if (PyObject_IsInstance(error.ptr(), PyExc_Exception) == 1) {
    return error;
  }
  PyErr_Clear();
  if (Py_AddPendingCall(raise_stored, error.inc_ref().ptr()) != 0) {
    error.dec_ref();
  }
  return pybind11::none();
}

}  // namespace

CollectiveError::CollectiveError(const TpurunError& error)
    : torch::PyTorchError(text_of(error)),
      status_(static_cast<TpurunStatus>(error.status)),
      ranks_(error.ranks, error.ranks + std::min<size_t>(error.rank_count, std::size(error.ranks))) {}

CollectiveError::CollectiveError(TpurunStatus status, std::string text, std::vector<uint32_t> ranks)
    : torch::PyTorchError(std::move(text)), status_(status), ranks_(std::move(ranks)) {}

PyObject* CollectiveError::python_type() {
  try {
    const pybind11::object context = run_due_handlers();
    const auto module = pybind11::module_::import("tpurun.errors");
    // Torch makes the exception from its class and its text alone, so the ranks take another way.
    module.attr("_remember")(what(), pybind11::tuple(pybind11::cast(ranks_)), context);
    // The module keeps its classes alive, so the borrowed pointer stays valid.
    return module.attr(class_name(status_)).ptr();
  } catch (pybind11::error_already_set&) {
    // An interpreter that is going down imports nothing any more.
    return PyExc_RuntimeError;
  }
}

std::exception_ptr failure(const TpurunError& error) {
  if (error.status == TPURUN_INVALID_USAGE) {
    return std::make_exception_ptr(
        c10::ValueError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, text_of(error)));
  }
  return std::make_exception_ptr(CollectiveError(error));
}

void throw_unless_ok(TpurunStatus status, const TpurunError& error) {
  if (status != TPURUN_OK) {
    std::rethrow_exception(failure(error));
  }
}

bool is_failure(TpurunStatus status) { return status != TPURUN_OK && status != TPURUN_INVALID_USAGE; }

}  // namespace tpurun
