// From the status and the text of the engine to the exceptions of `tpurun.errors`.
#pragma once

#include <exception>
#include <string>
#include <vector>

#include <torch/csrc/Exceptions.h>

#include "abi/tpurun.h"

namespace tpurun {

// One failure of the engine. Every way out of torch's C++ (pybind11, autograd, futures) asks `python_type`,
// so that the kind survives where an exception derived from c10::DistBackendError would be flattened to it.
class CollectiveError : public torch::PyTorchError {
 public:
  explicit CollectiveError(const TpurunError& error);
  // `ranks` are the guilty, by their rank in the world.
  CollectiveError(TpurunStatus status, std::string text, std::vector<uint32_t> ranks);
  TpurunStatus status() const { return status_; }
  const std::vector<uint32_t>& ranks() const { return ranks_; }
  PyObject* python_type() override;

 private:
  TpurunStatus status_;
  std::vector<uint32_t> ranks_;
};

std::exception_ptr failure(const TpurunError& error);

void throw_unless_ok(TpurunStatus status, const TpurunError& error);

// Whether an operation failed, rather than being refused before anybody else could know of it.
bool is_failure(TpurunStatus status);

}  // namespace tpurun
