// The extension module `tpurun._C`.
#include <array>
#include <string>

#include <pybind11/chrono.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "device/claim.h"
#include "interpreter/call_site.h"
#include "interpreter/finalization.h"
#include "operation/callbacks.h"
#include "process_group/process_group.h"
#include "process_group/shared.h"
#include "process_group/shortcut.h"
#include "program/bind.h"
#include "program/fused/recorder.h"
#include "program/run_pointwise.h"

namespace py = pybind11;

namespace {

void stream_copy(const at::Tensor& to, const at::Tensor& source) {
  const auto is_plain = [](const at::Tensor& tensor) { return tensor.is_cpu() && tensor.is_contiguous(); };
  TORCH_CHECK_VALUE(is_plain(to) && is_plain(source), "stream_copy expects contiguous CPU tensors");
  TORCH_CHECK_VALUE(to.nbytes() == source.nbytes(), "stream_copy expects as many bytes, ", source.nbytes(),
                    ", got ", to.nbytes());
  TORCH_CHECK_VALUE(!to.is_alias_of(source), "stream_copy expects tensors apart, got views of one storage");
  tpurun_stream_copy(to.mutable_data_ptr(), source.const_data_ptr(), source.nbytes());
}

// An engine of another build reads other fields than this extension writes.
void check_abi() {
  const uint32_t engine = tpurun_abi_version();
  if (engine != TPURUN_ABI_VERSION) {
    throw py::import_error("tpurun: expected an engine of ABI version " + std::to_string(TPURUN_ABI_VERSION) +
                           ", which this extension was compiled for, given one of version " +
                           std::to_string(engine) + "; build both anew with `make clean build`");
  }
}

py::dict fused_counts() {
  const auto counts = tpurun::program::fused::counts();
  py::dict found;
  found["operations"] = counts.operations;
  found["together"] = counts.together;
  found["stretches"] = counts.stretches;
  found["plans"] = counts.plans;
  constexpr std::array kNames = {"operation", "memory", "stream", "mode", "thread", "bound", "fork"};
  static_assert(kNames.size() == tpurun::device::streams::kCuts);
  for (std::size_t at = 0; at < kNames.size(); ++at) {
    found[py::str(std::string("cut_by_") + kNames[at])] = counts.cuts[at];
  }
  return found;
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  check_abi();
  tpurun::stop_threads_that_are_late();
  tpurun::prepare_call_sites();
  // The bases are bound by torch.
  py::module_::import("torch.distributed");

  using Pg = tpurun::ProcessGroup;
  py::class_<tpurun::ProcessGroupOptions, c10d::Backend::Options,
             c10::intrusive_ptr<tpurun::ProcessGroupOptions>>(module, "ProcessGroupOptions")
      .def(py::init([](std::chrono::milliseconds timeout) {
             return c10::make_intrusive<tpurun::ProcessGroupOptions>(timeout);
           }),
           py::arg("timeout") = kBackendDefaultTimeout);

  py::class_<Pg, c10d::Backend, c10::intrusive_ptr<Pg>>(module, "ProcessGroup")
      .def(py::init([](const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                       const std::vector<int32_t>& global_ranks, const std::string& name,
                       std::chrono::milliseconds timeout, uint32_t epoch, bool beyond_job) {
             return c10::make_intrusive<Pg>(store, rank, size, global_ranks, name, timeout, epoch,
                                            beyond_job);
           }),
           py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("global_ranks"), py::arg("name"),
           py::arg("timeout"), py::arg("epoch") = 0, py::arg("beyond_job") = false,
           py::call_guard<py::gil_scoped_release>())
      .def("survivors", &Pg::survivors, py::arg("lost"), py::arg("timeout"))
      // Torch calls it on the ranks that a new group is not for when there is a device_id; splitting needs
      // none of them here.
      .def(
          "perform_nocolor_split", [](const Pg&, const py::object&) {}, py::arg("device"))
      .def_property_readonly("traffic",
                             [](const Pg& self) {
                               const auto moved = self.traffic();
                               return py::make_tuple(moved.read, moved.written, moved.staged);
                             })
      .def_property_readonly("epoch", [](const Pg& self) { return self.members().epoch; })
      .def_property_readonly("group_id",
                             [](const Pg& self) {
                               const auto members = self.members();
                               return std::string(members.name, members.name_bytes);
                             })
      .def_property_readonly("global_ranks", [](const Pg& self) {
        const auto members = self.members();
        return std::vector<uint32_t>(members.global_ranks, members.global_ranks + members.size);
      });

  tpurun::device::bind(module);
  tpurun::program::bind(module);
  tpurun::program::bind_pointwise(module);
  tpurun::program::fused::install();
  module.def("fused_counts", &fused_counts, "What the mode that fuses has recorded and run so far.");
  tpurun::bind_shortcuts(module);
  module.def(
      "shared_empty",
      [](const std::vector<int64_t>& sizes, at::ScalarType dtype) {
        return tpurun::shared::empty(sizes, dtype);
      },
      py::arg("sizes"), py::arg("dtype"), "An uninitialised CPU tensor that collectives use where it is.");
  module.def("is_shared", &tpurun::shared::is_shared, py::arg("tensor"),
             "Whether a tensor is in memory that the other ranks of the host map.");
  module.def("stream_copy", &stream_copy, py::arg("to"), py::arg("source"),
             py::call_guard<py::gil_scoped_release>(),
             "Copies a CPU tensor as large collectives do, past the caches.");
  module.def("call_site", &tpurun::call_site, "The place in the calling program, as messages show it.");
  module.def("stop_callbacks", &tpurun::stop_callbacks, "Run no more callbacks of futures; for exit.");
}
