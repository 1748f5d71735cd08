#include "program/run_pointwise.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>

#include "program/pointwise.h"

namespace py = pybind11;

namespace tpurun::program {
namespace {

// The arguments of a call, in the order of the schema, and what is known of the tensors among them.
struct Call {
  std::vector<c10::IValue> arguments;
  std::vector<int32_t> tensor_of_argument;
  std::vector<TensorType> types;
};

void add_argument(Call& call, c10::IValue value) {
  int32_t tensor = -1;
  if (value.isTensor()) {
    const at::Tensor& given = value.toTensor();
    TORCH_CHECK_VALUE(given.is_cpu() && given.is_contiguous(),
                      "run_pointwise expects contiguous CPU tensors");
    tensor = static_cast<int32_t>(call.types.size());
    call.types.push_back(
        {given.scalar_type(), given.dim(), given.unsafeGetTensorImpl()->is_wrapped_number(), given.numel()});
  }
  call.tensor_of_argument.push_back(tensor);
  call.arguments.push_back(std::move(value));
}

// A graph has a number where the schema has a tensor, for torch to wrap.
c10::IValue value_of(py::handle given, const c10::TypePtr& type) {
  if (PyFloat_Check(given.ptr())) return given.cast<double>();
  if (PyLong_CheckExact(given.ptr())) return given.cast<int64_t>();
  return torch::jit::toIValue(given, type);
}

Call read_arguments(const c10::FunctionSchema& schema, const py::list& given) {
  Call call;
  for (size_t index = 0; index < schema.arguments().size(); ++index) {
    const c10::Argument& argument = schema.arguments()[index];
    if (index < given.size()) {
      add_argument(call, value_of(given[index], argument.type()));
    } else {
      TORCH_CHECK_VALUE(argument.default_value().has_value(), "run_pointwise expects the argument ",
                        argument.name());
      add_argument(call, *argument.default_value());
    }
  }
  return call;
}

// A call of a kernel with everything that it needs.
struct Prepared {
  Pointwise made;
  std::vector<at::Tensor> operands;
  std::vector<int64_t> strides;  // in bytes; 0 for a tile that a number fills
  at::Tensor out;
};

at::Tensor tile_of(const Operand& operand, const Call& call, int64_t elements) {
  const auto options = at::TensorOptions().dtype(operand.dtype);
  if (operand.argument == Operand::kNumber) return at::full({elements}, operand.number, options);
  const at::Tensor& number = call.arguments[operand.argument].toTensor();
  return number.to(operand.dtype).expand({elements}).contiguous();
}

at::IntArrayRef sizes_of(const Call& call) {
  at::IntArrayRef sizes;
  for (const c10::IValue& argument : call.arguments) {
    if (argument.isTensor() && argument.toTensor().dim() > 0) sizes = argument.toTensor().sizes();
  }
  return sizes;
}

std::optional<Prepared> prepare(const std::string& name, const std::string& overload, const py::list& given,
                                int64_t tile_elements) {
  const c10::OperatorName op("aten::" + name, overload);
  const auto handle = c10::Dispatcher::singleton().findSchema(op);
  TORCH_CHECK_VALUE(handle.has_value(), "expected an operator of ATen, got ", name, ".", overload);
  const Call call = read_arguments(handle->schema(), given);
  auto made = pointwise(op, call.arguments, call.tensor_of_argument, call.types);
  if (!made) return std::nullopt;
  TORCH_CHECK_VALUE(tile_elements > 0 && tile_elements % made->step == 0, "expected tiles of a multiple of ",
                    made->step, " elements, got ", tile_elements);
  const at::IntArrayRef sizes = sizes_of(call);
  Prepared prepared{*made, {}, {}, at::empty(sizes, at::TensorOptions().dtype(made->result))};
  const bool is_in_place = name.back() == '_';
  if (is_in_place) prepared.out.copy_(call.arguments[0].toTensor());
  for (const Operand& operand : made->operands) {
    if (is_in_place && operand.argument == 0) {
      prepared.operands.push_back(prepared.out);
      prepared.strides.push_back(static_cast<int64_t>(prepared.out.element_size()));
      continue;
    }
    const bool is_tensor =
        operand.argument != Operand::kNumber && call.arguments[operand.argument].toTensor().sizes() == sizes;
    prepared.operands.push_back(is_tensor ? call.arguments[operand.argument].toTensor().to(operand.dtype)
                                          : tile_of(operand, call, tile_elements));
    prepared.strides.push_back(is_tensor ? static_cast<int64_t>(prepared.operands.back().element_size()) : 0);
  }
  return prepared;
}

void run_tile(const Prepared& prepared, int64_t begin, int64_t count, int64_t vector_count) {
  const void* data[3] = {};
  for (size_t i = 0; i < prepared.operands.size(); ++i) {
    data[i] = static_cast<const char*>(prepared.operands[i].const_data_ptr()) + begin * prepared.strides[i];
  }
  const int64_t bytes = static_cast<int64_t>(prepared.out.element_size());
  prepared.made.kernel(static_cast<char*>(prepared.out.mutable_data_ptr()) + begin * bytes, data[0], data[1],
                       data[2], prepared.made.numbers.data(), vector_count, count);
}

std::optional<at::Tensor> run_pointwise(const std::string& name, const std::string& overload,
                                        const py::list& given, int64_t tile_elements) {
  const auto prepared = prepare(name, overload, given, tile_elements);
  if (!prepared) return std::nullopt;
  const int64_t count = prepared->out.numel();
  const int64_t vector_count = count - count % prepared->made.step;
  for (int64_t begin = 0; begin < count; begin += tile_elements) {
    const int64_t piece = std::min(tile_elements, count - begin);
    run_tile(*prepared, begin, piece, std::clamp<int64_t>(vector_count - begin, 0, piece));
  }
  return prepared->out;
}

// Returns the nanoseconds of the fastest of `rounds` rounds of `calls` calls on the whole operands, for a
// call.
std::optional<double> time_pointwise(const std::string& name, const std::string& overload,
                                     const py::list& given, int64_t rounds, int64_t calls) {
  constexpr int64_t kAnyTile = 4096;
  const auto prepared = prepare(name, overload, given, kAnyTile);
  if (!prepared) return std::nullopt;
  const int64_t count = prepared->out.numel();
  const int64_t vector_count = count - count % prepared->made.step;
  double best = std::numeric_limits<double>::infinity();
  for (int64_t round = 0; round < rounds; ++round) {
    const auto start = std::chrono::steady_clock::now();
    for (int64_t call = 0; call < calls; ++call) run_tile(*prepared, 0, count, vector_count);
    const std::chrono::duration<double, std::nano> spent = std::chrono::steady_clock::now() - start;
    best = std::min(best, spent.count() / static_cast<double>(calls));
  }
  return best;
}

}  // namespace

void bind_pointwise(py::module_& module) {
  module.def(
      "run_pointwise", &run_pointwise, py::arg("name"), py::arg("overload"), py::arg("arguments"),
      py::arg("tile_elements"),
      "Computes an operation of ATen on CPU tensors of one shape in tiles; None when it has no kernel.");
  module.def("time_pointwise", &time_pointwise, py::arg("name"), py::arg("overload"), py::arg("arguments"),
             py::arg("rounds"), py::arg("calls"),
             "The nanoseconds of one call of a kernel; None without one.");
}

}  // namespace tpurun::program
