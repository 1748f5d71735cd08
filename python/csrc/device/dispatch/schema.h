// A `Schema` says what to do with the arguments and results of one operation. It is read off torch's schema
// once.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include <ATen/core/function_schema.h>

namespace tpurun::device {

class Recordable;

struct Argument {
  enum class Kind : uint8_t { kOther, kTensor, kTensors, kOptionalTensors, kDevice, kGenerator };
  Kind kind = Kind::kOther;
  bool is_written = false;
};

// The place where a recorder keeps its knowledge of an operation. Each copy of a schema asks anew.
struct Recorded {
  Recorded() = default;
  Recorded(const Recorded& /*other*/) noexcept {}
  Recorded& operator=(const Recorded&) = delete;
  ~Recorded() = default;

  std::atomic<Recordable*> known{nullptr};  // lives as long as the process
  std::atomic<bool> is_asked{false};
};

struct Schema {
  explicit Schema(const c10::FunctionSchema& schema);

  std::vector<Argument> arguments;
  std::size_t results = 0;
  bool writes = false;        // any of its arguments
  bool copies = false;        // from one device to another
  bool derives = false;       // its kernel asks whether gradients are wanted
  bool leaves_bytes = false;  // as they are, or as memory comes
  mutable Recorded recorded;  // in the mode that records operations
};

}  // namespace tpurun::device
