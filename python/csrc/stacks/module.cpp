// The module `tpurun._stacks`: a rank writes the stacks of its threads when a signal asks for them. It needs
// nothing but Python: a rank may be asked long before its program imports torch.
#include <Python.h>

#include <atomic>
#include <cerrno>
#include <csetjmp>
#include <csignal>
#include <string_view>

#include <sys/syscall.h>
#include <unistd.h>

// A function of Python itself, which hides it from 3.13 on. Faulthandler calls it on a signal, too, but never
// again after one walk that has not come to its end.
extern "C" const char* _Py_DumpTracebackThreads(int fd, PyInterpreterState* interpreter,
                                                PyThreadState* current) __attribute__((weak));

namespace {

// A signal handler has no other way to find them. Written before the handler is installed.
void (*faulthandlers_own)(int) = nullptr;
int file = -1;

// The state of the thread that is walking through stacks now.
std::atomic_flag is_walking;
std::atomic<long> walker{0};
sigjmp_buf way_out;
struct sigaction before_segv, before_bus;

void put(std::string_view text) {
  // A full disk is nothing that a signal handler could do about.
  [[maybe_unused]] auto written = write(file, text.data(), text.size());
}

long thread_id() { return syscall(SYS_gettid); }

void on_fault(int number) {
  if (thread_id() == walker) {
    siglongjmp(way_out, 1);
  }
  // Another thread has faulted. Its instruction runs again and faults again, and then finds the handler that
  // would have been here without us.
  sigaction(number, number == SIGSEGV ? &before_segv : &before_bus, nullptr);
}

// Walks through the stacks of all threads. A frame that the interrupted thread was just making, or that
// another thread leaves meanwhile, may point to code that is gone; see
// https://github.com/python/cpython/issues/116008. Such a walk is broken off, and no harm is done: it only
// reads, and holds no lock.
void walk(int number) {
  walker = thread_id();
  struct sigaction guard{};
  guard.sa_handler = on_fault;
  guard.sa_flags = SA_ONSTACK;
  sigaction(SIGSEGV, &guard, &before_segv);
  sigaction(SIGBUS, &guard, &before_bus);
  if (sigsetjmp(way_out, 1) != 0) {
    put("\ntpurun: cut\n");
  } else if (_Py_DumpTracebackThreads != nullptr) {
    _Py_DumpTracebackThreads(file, nullptr, nullptr);
  } else {
    faulthandlers_own(number);
  }
  sigaction(SIGSEGV, &before_segv, nullptr);
  sigaction(SIGBUS, &before_bus, nullptr);
  walker = 0;
}

// Only calls that are safe in a signal handler: reading the current thread's state takes no lock.
void on_signal(int number) {
  // Asked again before it has answered: one answer serves both.
  if (is_walking.test_and_set()) {
    return;
  }
  const int saved = errno;
  const bool holds_gil = Py_IsInitialized() != 0 && PyGILState_Check() != 0;
  put(holds_gil ? "tpurun: GIL held\n" : "tpurun: GIL free\n");
  walk(number);
  put("tpurun: end\n");
  errno = saved;
  is_walking.clear();
}

PyObject* answer(PyObject*, PyObject* arguments) {
  int signal = 0;
  int fd = -1;
  if (PyArg_ParseTuple(arguments, "ii", &signal, &fd) == 0) {
    return nullptr;
  }
  struct sigaction action{};
  if (sigaction(signal, nullptr, &action) != 0 || (action.sa_flags & SA_SIGINFO) != 0 ||
      action.sa_handler == SIG_DFL || action.sa_handler == SIG_IGN) {
    PyErr_Format(PyExc_ValueError, "expected a signal that faulthandler is registered for, given %d", signal);
    return nullptr;
  }
  if (action.sa_handler != on_signal) {
    faulthandlers_own = action.sa_handler;
  }
  file = fd;
  action.sa_handler = on_signal;
  sigaction(signal, &action, nullptr);
  Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"answer", answer, METH_VARARGS,
     "answer(signal, fd)\n--\n\n"
     "Write all stacks to `fd` on a signal that faulthandler is registered for, without the risk of its "
     "walk."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_stacks", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__stacks() { return PyModule_Create(&definition); }
