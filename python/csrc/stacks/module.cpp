#include "stacks.h"

#include <csignal>
#include <string_view>

#include <unistd.h>
#include <cerrno>

#include "gil.h"

namespace tpurun {
namespace {

// A signal handler has no other way to find them. Written before the handler is installed.
void (*next_handler)(int) = nullptr;
int file = -1;

void put(std::string_view text) {
  // A full disk is nothing that a signal handler could do about.
  [[maybe_unused]] auto written = write(file, text.data(), text.size());
}

// Only calls that are safe in a signal handler: reading the current thread's state takes no lock.
void on_signal(int number) {
  const int saved = errno;
  put(holds_gil() ? "tpurun: GIL held\n" : "tpurun: GIL free\n");
  next_handler(number);
  put("tpurun: end\n");
  errno = saved;
}

}  // namespace

void tell_gil(int signal, int fd) {
  struct sigaction action{};
  if (sigaction(signal, nullptr, &action) != 0 || (action.sa_flags & SA_SIGINFO) != 0 ||
      action.sa_handler == SIG_DFL || action.sa_handler == SIG_IGN || action.sa_handler == on_signal) {
    return;
  }
  next_handler = action.sa_handler;
  file = fd;
  action.sa_handler = on_signal;
  sigaction(signal, &action, nullptr);
}

}  // namespace tpurun
