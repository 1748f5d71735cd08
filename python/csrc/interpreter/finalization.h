// Threads that ask for Python's lock when the interpreter goes.
//
// Until 3.13 the interpreter ends such a thread: it unwinds its stack. Where a frame of C++ allows no
// unwinding, as pybind11's destructors, the process aborts in its very last moment, though its program has
// ended well. From 3.14 on the interpreter stops the thread instead.
#pragma once

namespace tpurun {

// Stops such a thread with every version. Any other cause that terminates this process does so as before.
void stop_threads_that_are_late();

}  // namespace tpurun
