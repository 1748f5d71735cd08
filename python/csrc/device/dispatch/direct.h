// CPU kernels in the name of device `tpu` for operations that are called most: with their arguments as they
// are, where `Call` puts them on a stack and takes them off again. Their results share no bytes with their
// arguments, except those that they are told to write.
#pragma once

#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/IListRef.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/SmallVector.h>
#include <torch/library.h>

#include "device/dispatch/recorder.h"
#include "device/dispatch/schema.h"
#include "device/dispatch/stands.h"
#include "device/memory/memory.h"
#include "device/order/streams.h"

namespace tpurun::device {

// An argument as the CPU's kernel gets it: what is no tensor, as it is.
template <class T>
class Given {
 public:
  Given(Stands& /*stands*/, const T& value, bool /*is_written*/) : value_(value) {}
  const T& get() { return value_; }

 private:
  const T& value_;
};

template <>
class Given<const at::Scalar&> {
 public:
  Given(Stands& stands, const at::Scalar& value, bool /*is_written*/) : value_(value) { stands.heed(value); }
  const at::Scalar& get() { return value_; }

 private:
  const at::Scalar& value_;
};

class GivenTensor {
 public:
  GivenTensor(Stands& stands, const at::Tensor& tensor, bool is_written)
      : cpu_(stands.of(tensor, is_written)) {}
  at::Tensor& get() { return cpu_; }

 private:
  at::Tensor cpu_;
};
template <>
class Given<const at::Tensor&> : public GivenTensor {
 public:
  using GivenTensor::GivenTensor;
};
template <>
class Given<at::Tensor&> : public GivenTensor {
 public:
  using GivenTensor::GivenTensor;
};

template <>
class Given<const std::optional<at::Tensor>&> {
 public:
  Given(Stands& stands, const std::optional<at::Tensor>& tensor, bool is_written)
      : cpu_(tensor ? std::optional(stands.of(*tensor, is_written)) : std::nullopt) {}
  const std::optional<at::Tensor>& get() { return cpu_; }

 private:
  std::optional<at::Tensor> cpu_;
};

template <class List>
class GivenTensors {
 public:
  GivenTensors(Stands& stands, const List& list, bool is_written) {
    for (const at::Tensor& tensor : list) {
      cpus_.push_back(stands.new_of(tensor, is_written));
    }
  }
  at::TensorList get() { return cpus_; }

 private:
  c10::SmallVector<at::Tensor, 4> cpus_;
};
template <>
class Given<at::TensorList> : public GivenTensors<at::TensorList> {
 public:
  using GivenTensors::GivenTensors;
};
template <>
class Given<const at::ITensorListRef&> : public GivenTensors<at::ITensorListRef> {
 public:
  using GivenTensors::GivenTensors;
};

inline at::Tensor taken(const Stands& stands, at::Tensor result) {
  return stands.new_result(std::move(result));
}

template <class... T>
std::tuple<T...> taken(const Stands& stands, std::tuple<T...> results) {
  return std::apply([&](auto&... result) { return std::tuple<T...>(taken(stands, std::move(result))...); },
                    results);
}

inline std::vector<at::Tensor> taken(const Stands& stands, std::vector<at::Tensor> results) {
  for (at::Tensor& result : results) {
    result = stands.new_result(std::move(result));
  }
  return results;
}

// Returns the argument that an operation has written to, which is its first reference to a tensor.
template <class First, class... Rest>
at::Tensor& written(First&& first, Rest&&... rest) {
  if constexpr (std::is_same_v<First, at::Tensor&>) {
    return first;
  } else {
    return written(std::forward<Rest>(rest)...);
  }
}

struct Known {
  Known(const char* name, const char* overload)
      : op(c10::Dispatcher::singleton().findSchemaOrThrow(name, overload)), schema(op.schema()) {}
  c10::OperatorHandle op;
  Schema schema;
};

// One of `at::_ops`.
template <class Op, class Signature = typename Op::schema>
struct Direct;

template <class Op, class Result, class... Arguments>
struct Direct<Op, Result(Arguments...)> {
  static Result call(Arguments... arguments) {
    if constexpr (kMakesOne) {
      if (C10_UNLIKELY(is_fused())) {
        at::Tensor made;
        if (is_recorded(made, arguments...)) {
          if constexpr (std::is_same_v<Result, at::Tensor>) {
            return made;
          } else {
            return written(static_cast<Arguments>(arguments)...);
          }
        }
      }
    }
    return on_cpu(std::index_sequence_for<Arguments...>(), arguments...);
  }

  static void add_to(torch::Library& aten) {
    std::string name(Op::name);
    if (Op::overload_name[0] != '\0') {
      name.append(".").append(Op::overload_name);
    }
    aten.impl(name.c_str(), TORCH_FN(call));
  }

 private:
  static constexpr bool kMakesOne = std::is_same_v<Result, at::Tensor> || std::is_same_v<Result, at::Tensor&>;

  static const Known& known() {
    static const Known known(Op::name, Op::overload_name);
    return known;
  }

  static C10_NOINLINE bool is_recorded(at::Tensor& made, Arguments... arguments) {
    Recordable* recordable = device::recordable(known().op, known().schema);
    if (recordable == nullptr) {
      return false;
    }
    const Asked asked[] = {Asked::of(arguments)...};
    return recorder().record(known().op, *recordable, asked, made);
  }

  template <std::size_t... At>
  static Result on_cpu(std::index_sequence<At...> /*places*/, Arguments... arguments) {
    const Known& known = Direct::known();
    streams::settle();
    Stands stands(known.op, known.schema);
    // Braces, for arguments in their order.
    std::tuple<Given<Arguments>...> given{
        Given<Arguments>(stands, arguments, known.schema.arguments[At].is_written)...};
    constexpr c10::DispatchKeySet keys(c10::DispatchKey::CPU);
    const auto run = [&]() -> decltype(auto) {
      const FromArena arena;
      return Op::redispatch(keys, std::get<At>(given).get()...);
    };
    if constexpr (std::is_same_v<Result, at::Tensor&>) {
      run();
      stands.follow();
      return written(static_cast<Arguments>(arguments)...);
    } else if constexpr (std::is_void_v<Result>) {
      run();
      stands.follow();
    } else {
      Result result = run();
      stands.follow();
      return taken(stands, std::move(result));
    }
  }
};

// Registers them for dense tensors.
void register_direct(torch::Library& aten);

}  // namespace tpurun::device
