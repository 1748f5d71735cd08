// Ctrl-C in the main thread while the engine waits: Python's handler runs then and there, and what it raises
// ends the wait. The group cannot go on, because this rank leaves an operation that the others are in: it is
// aborted.
#pragma once

#include <optional>

#include <torch/csrc/Exceptions.h>

#include "abi/tpurun.h"

namespace tpurun {

// Covers one wait on the thread that makes it; does nothing on other threads than the main one.
class Interruptible {
 public:
  using Abort = void (*)(void* waited, const char* reason, uint64_t bytes);

  // `abort` ends the wait for `waited`.
  Interruptible(void* waited, Abort abort);
  ~Interruptible();
  Interruptible(const Interruptible&) = delete;
  Interruptible& operator=(const Interruptible&) = delete;

  // Throws what a handler has raised. After a failure a Ctrl-C of this rank is looked for, too, and where
  // another rank was interrupted, it is waited for a moment: KeyboardInterrupt is what the program expects
  // then.
  void rethrow(TpurunStatus status, const TpurunError& error);

 private:
  static void check(void* self);
  bool has_raised();

  void* waited_;
  Abort abort_;
  bool is_active_;
  TpurunCheck before_{};
  std::optional<python_error> raised_;
};

}  // namespace tpurun
