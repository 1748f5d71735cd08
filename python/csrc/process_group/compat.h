// This file alone knows how the supported versions of torch (2.12 to 2.15) differ.
#pragma once

#include <torch/version.h>

#if TORCH_VERSION_MAJOR != 2 || TORCH_VERSION_MINOR < 12
#error "tpurun needs torch 2.12 or newer (2.x)"
#endif

// Virtual functions that the base classes got in 2.14; before that they are plain members nobody calls.
#if TORCH_VERSION_MINOR >= 14
#define TPURUN_OVERRIDE_SINCE_2_14 override
#else
#define TPURUN_OVERRIDE_SINCE_2_14
#endif
