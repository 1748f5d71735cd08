// Blocking collectives on ordinary tensors, from torch's Python functions straight to the backend.
//
// Torch's own work between the two (options as Python objects, bindings, the dispatcher) takes longer than
// the engine does. It takes several times as long where many ranks share a core and its caches.
#pragma once

#include <pybind11/pybind11.h>

namespace tpurun {

// `Shortcut(name, original)` stands for the function `original` that torch.distributed calls `name`: it does
// the same, or has `original` do it. `Shortcut.PARAMETERS` says which names there are, and the parameters
// that their functions must have, in order.
void bind_shortcuts(pybind11::module_& module);

}  // namespace tpurun
