// Where in the user's Python program an operation was asked for.
#pragma once

#include <string>

namespace tpurun {

// "train.py:28" of the innermost frame of this thread outside torch, or empty on a thread without Python.
std::string call_site();

}  // namespace tpurun
