// Where in the user's Python program an operation was asked for.
#pragma once

#include <cstdint>
#include <string>

namespace tpurun {

struct Caller {
  std::string site;             // as call_site()
  uint32_t python_threads = 0;  // as python_threads()
};

// Both, for one turn of the interpreter's lock: that is much of what they take.
Caller caller();

// When the module is imported: to find out where torch is runs code of Python.
void prepare_call_sites();

// "train.py:28" of the innermost frame of this thread outside torch, or empty on a thread without Python.
std::string call_site();

// While one lives, this thread runs a part of a compiled program, and the line that the part comes from is
// where its operations were asked for.
class FromLine {
 public:
  explicit FromLine(const std::string& line);
  ~FromLine();
  FromLine(const FromLine&) = delete;
  FromLine& operator=(const FromLine&) = delete;

  static thread_local const std::string* current;  // null: whatever Python's frames say

 private:
  const std::string* before_;
};

}  // namespace tpurun
