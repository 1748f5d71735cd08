#include "errors.h"

#include <algorithm>
#include <utility>

#include <c10/util/Exception.h>

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

}  // namespace

CollectiveError::CollectiveError(TpurunStatus status, std::string text)
    : torch::PyTorchError(std::move(text)), status_(status) {}

PyObject* CollectiveError::python_type() {
  try {
    // The module keeps its classes alive, so the borrowed pointer stays valid.
    return pybind11::module_::import("tpurun.errors").attr(class_name(status_)).ptr();
  } catch (pybind11::error_already_set&) {
    // An interpreter that is going down imports nothing any more.
    return PyExc_RuntimeError;
  }
}

std::exception_ptr failure(TpurunStatus status, std::string text) {
  if (status == TPURUN_INVALID_USAGE) {
    return std::make_exception_ptr(
        c10::ValueError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, std::move(text)));
  }
  return std::make_exception_ptr(CollectiveError(status, std::move(text)));
}

void throw_unless_ok(TpurunStatus status, const TpurunError& error) {
  if (status != TPURUN_OK) {
    const size_t bytes = std::min<size_t>(error.bytes, sizeof(error.text));
    std::rethrow_exception(failure(status, std::string(error.text, bytes)));
  }
}

}  // namespace tpurun
