#include "device/claim.h"

#include <ATen/Parallel.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "abi/runtime.h"
#include "device/dispatch/checks.h"
#include "device/dispatch/fallback.h"
#include "device/hooks.h"
#include "device/memory/memory.h"
#include "device/memory/pinned.h"
#include "device/order/autograd_threads.h"
#include "device/order/guard.h"
#include "device/order/mode.h"
#include "device/order/streams.h"
#include "device/special/autocast.h"
#include "device/special/whole.h"
#include "interpreter/gil.h"

namespace py = pybind11;

namespace tpurun::device {

namespace {

void claim(c10::DeviceIndex devices, uint64_t memory_bytes) {
  claim_memory(memory_bytes);
  at::init_num_threads();  // as with a group: autograd gets threads for the device
  streams::install(devices);
  install_guard(devices);
  install_pinned();
  install_hooks();
  install_operations();
  install_whole();
  install_autocast();
}

EagerMode known_mode(int32_t mode) {
  TORCH_CHECK_VALUE(mode >= 0 && mode <= 2, "expected an eager mode of 0, 1 or 2, got ", mode);
  return static_cast<EagerMode>(mode);
}

py::dict memory_counts() {
  streams::run_deferred_to_count();
  TpurunMemoryStats now;
  tpurun_memory_stats(&now);
  py::dict counts;
  counts["limit"] = memory_limit();
  counts["allocated"] = now.allocated;
  counts["allocated_peak"] = now.allocated_peak;
  counts["reserved"] = now.reserved;
  counts["reserved_peak"] = now.reserved_peak;
  counts["live"] = now.live;
  return counts;
}

}  // namespace

void bind(py::module_& module) {
  module.def("claim_device", &claim, py::arg("devices"), py::arg("memory_bytes"),
             "Give this process device tpu: so many names of one memory of so many bytes at most. Once.");
  module.def(
      "eager_mode", [] { return static_cast<int32_t>(eager_mode()); },
      "Of this thread: 0 Strict, 1 Debug, 2 Fused.");
  module.def(
      "set_process_mode", [](int32_t mode) { set_process_mode(known_mode(mode)); }, "For all threads.");
  module.def(
      "push_thread_mode", [](int32_t mode) { push_thread_mode(known_mode(mode)); }, "For this thread.");
  module.def(
      "set_debug_checks",
      [](int32_t when) {
        TORCH_CHECK_VALUE(when >= 0 && when <= 2, "expected debug checks of 0, 1 or 2, got ", when);
        checks::set_when(static_cast<checks::When>(when));
      },
      "Look at the results of operations: 0 in Debug, 1 never, 2 always.");
  module.def("debug_checks_are_on", &checks::are_on, "Whether results are looked at, in this thread.");
  module.def("pop_thread_mode", &pop_thread_mode, "Back to what it was before the last push.");
  module.def(
      "settle_device",
      [] {
        without_gil(&settle_autograd);
        streams::synchronize_all();
      },
      "Wait for everything that any stream or autograd has begun; for exit.");
  module.def(
      "run_deferred", [] { streams::run_deferred(streams::Cut::kMemory); },
      py::call_guard<py::gil_scoped_release>(),
      "Run what the mode that fuses has recorded, if there is anything.");
  module.def("count_deferred", &streams::count_deferred, py::call_guard<py::gil_scoped_release>(),
             "How many operations are recorded.");
  module.def("device_count", &device_count, "How many devices a program may name.");
  module.def("device_is_forked", &is_forked, "Whether this is the fork of a process that had the device.");
  module.def("device_memory", &memory_counts, "Bytes of device memory: the limit, what is held, the peaks.");
  module.def("device_memory_report", &memory_report,
             "What is held and by which lines of the program, as JSON.");
}

}  // namespace tpurun::device
