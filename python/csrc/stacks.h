// What only a signal handler can say about a rank whose stacks are asked for.
#pragma once

namespace tpurun {

// Puts a handler before the one that is installed for `signal`: it writes to `fd` whether the interrupted
// thread holds the interpreter's lock, and, when the other handler has written its stacks, that they end.
// Does nothing when no handler is installed.
void tell_gil(int signal, int fd);

}  // namespace tpurun
