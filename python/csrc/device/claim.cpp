#include "claim.h"

#include <unistd.h>

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "../runtime.h"
#include "autocast.h"
#include "fallback.h"
#include "guard.h"
#include "hooks.h"
#include "memory.h"
#include "pinned.h"
#include "streams.h"

namespace py = pybind11;

namespace tpurun::device {

namespace {

pid_t claimed_by = 0;

bool is_forked() { return claimed_by != 0 && claimed_by != getpid(); }

// Nothing is left half done: what may fail comes first.
void claim(c10::DeviceIndex devices, uint64_t memory_bytes) {
  open_memory(memory_bytes);
  claimed_by = getpid();
  streams::install(devices);
  install_guard(devices);
  install_pinned();
  install_hooks();
  install_operations();
  install_autocast();
}

py::dict memory_counts() {
  TpurunMemoryStats now;
  tpurun_memory_stats(&now);
  py::dict counts;
  counts["limit"] = now.limit;
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
  module.def("device_count", &device_count, "How many devices a program may name.");
  module.def("device_is_forked", &is_forked, "Whether this is the fork of a process that had the device.");
  module.def("device_memory", &memory_counts, "Bytes of device memory: the limit, what is held, the peaks.");
  module.def("device_memory_report", &memory_report, "What is held and by which lines of the program, as JSON.");
}

}  // namespace tpurun::device
