// The thread that the process began with.
#pragma once

#include <sys/syscall.h>
#include <unistd.h>

namespace tpurun {

// Whether this is the one.
inline bool is_main_thread() { return syscall(SYS_gettid) == getpid(); }

}  // namespace tpurun
