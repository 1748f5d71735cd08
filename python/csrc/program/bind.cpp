#include "program/bind.h"

#include <algorithm>
#include <exception>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>

#include "abi/tpurun.h"
#include "program/executable.h"
#include "program/keeps_size.h"
#include "program/plan.h"
#include "program/recording.h"

namespace py = pybind11;

namespace tpurun::program {

namespace {

struct Ref {
  ValueId value;
};

struct Unknown {
  int64_t number;
};

Size size_of(const py::handle& given) {
  if (py::isinstance<Unknown>(given)) {
    return {given.cast<Unknown>().number, true};
  }
  return {given.cast<int64_t>(), false};
}

Sizes sizes_of(const py::sequence& given) {
  Sizes sizes;
  for (const auto& one : given) {
    sizes.push_back(size_of(one));
  }
  return sizes;
}

template <class T>
bool any_is(const py::sequence& list) {
  for (const auto& one : list) {
    if (py::isinstance<T>(one)) {
      return true;
    }
  }
  return false;
}

bool is_list(const py::handle& given) {
  return py::isinstance<py::list>(given) || py::isinstance<py::tuple>(given);
}

using Kind = device::Argument::Kind;

// A graph has a number where the schema has a tensor, for torch to wrap.
c10::IValue constant_of(const py::handle& given, const c10::TypePtr& type, Kind kind) {
  if (PyBool_Check(given.ptr()) != 0) {
    return kind == Kind::kTensor ? c10::IValue(given.cast<bool>()) : torch::jit::toIValue(given, type);
  }
  if (PyFloat_Check(given.ptr()) != 0) {
    return given.cast<double>();
  }
  if (PyComplex_Check(given.ptr()) != 0 && kind == Kind::kTensor) {
    return given.cast<c10::complex<double>>();
  }
  return PyLong_CheckExact(given.ptr()) != 0 ? c10::IValue(given.cast<int64_t>())
                                             : torch::jit::toIValue(given, type);
}

Argument argument_of(const py::handle& given, const c10::TypePtr& type, Kind kind) {
  Argument argument;
  if (py::isinstance<Ref>(given)) {
    argument.kind = Argument::Kind::kTensor;
    argument.tensors = {given.cast<Ref>().value};
  } else if (py::isinstance<Unknown>(given)) {
    argument.kind = Argument::Kind::kSize;
    argument.sizes = {size_of(given)};
  } else if (is_list(given) && (kind == Kind::kTensors || kind == Kind::kOptionalTensors)) {
    argument.kind = Argument::Kind::kTensors;
    for (const auto& one : given.cast<py::sequence>()) {
      argument.tensors.push_back(one.is_none() ? kNoValue : one.cast<Ref>().value);
    }
  } else if (is_list(given) && any_is<Unknown>(given.cast<py::sequence>())) {
    argument.kind = Argument::Kind::kSizes;
    argument.sizes = sizes_of(given.cast<py::sequence>());
  } else {
    argument.constant = constant_of(given, type, kind);
  }
  return argument;
}

// A run of a program, in the flight recorder of the rank while it lives.
class Recorded {
 public:
  Recorded(uint64_t program, const Recording& recording, const std::string& line)
      : run_(tpurun_program_run_begun(program, recording.operations().size(), line.data(), line.size())),
        exceptions_(std::uncaught_exceptions()) {}
  ~Recorded() { tpurun_program_run_ended(run_, std::uncaught_exceptions() == exceptions_ ? 1 : 0); }
  Recorded(const Recorded&) = delete;
  Recorded& operator=(const Recorded&) = delete;

 private:
  uint64_t run_;
  int exceptions_;
};

// A program that Python writes down and runs. The lock of the interpreter guards everything but a run itself.
class Program {
 public:
  ValueId input(c10::ScalarType dtype, const c10::Device& device, const py::sequence& sizes,
                const py::sequence& strides) {
    return recording_.input(dtype, device, sizes_of(sizes), sizes_of(strides));
  }

  ValueId result(c10::ScalarType dtype, const c10::Device& device, const py::sequence& sizes,
                 const py::sequence& strides) {
    return recording_.result(dtype, device, sizes_of(sizes), sizes_of(strides));
  }

  ValueId view(ValueId of, c10::ScalarType dtype, const py::sequence& sizes, const py::sequence& strides,
               const py::object& offset, bool is_absolute) {
    return recording_.view(of, dtype, sizes_of(sizes), sizes_of(strides), size_of(offset), is_absolute);
  }

  void operation(const std::string& name, const std::string& overload, const std::optional<std::string>& told,
                 const py::sequence& arguments, const std::vector<std::optional<ValueId>>& results,
                 std::string line) {
    const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str());
    const auto& declared = op.schema().arguments();
    TORCH_CHECK_VALUE(arguments.size() == declared.size(), name, ": expected ", declared.size(),
                      " arguments, got ", arguments.size());
    device::Schema schema(op.schema());
    std::vector<Argument> all;
    for (std::size_t at = 0; at < declared.size(); ++at) {
      all.push_back(argument_of(arguments[at], declared[at].type(), schema.arguments[at].kind));
    }
    std::vector<ValueId> made;
    for (const auto& result : results) {
      made.push_back(result.value_or(kNoValue));
    }
    std::optional<c10::OperatorName> told_name;
    if (told) {
      told_name.emplace(name, *told);
    }
    recording_.operation(op, std::move(schema), std::move(told_name), std::move(all), std::move(made),
                         std::move(line));
  }

  void output(ValueId value) { recording_.output(value); }

  void time(bool is_on) { is_timed_ = is_on; }

  uint64_t runs() const { return runs_; }

  void finish() {
    checked_.emplace(recording_);
    fingerprint_ = checked_->fingerprint();
    const auto& operations = recording_.operations();
    const auto has_line = [](const Operation& operation) { return !operation.line.empty(); };
    const auto first = std::find_if(operations.begin(), operations.end(), has_line);
    line_ = first == operations.end() ? std::string() : first->line;
  }

  const Checked& checked() const {
    TORCH_CHECK(checked_.has_value(), "expected a program to be finished before it is used");
    return *checked_;
  }

  // Takes the arguments out of the list. One that nobody but the list holds is let go when it is not needed
  // any more, in the middle of the run.
  py::list run(const py::list& given, std::vector<int64_t> sizes) {
    const std::size_t count = given.size();
    TORCH_CHECK(count == recording_.inputs(), "expected ", recording_.inputs(),
                " tensors for a compiled program, got ", count);
    for (std::size_t at = 0; at < count; ++at) {
      PyObject* one = PyList_GET_ITEM(given.ptr(), static_cast<Py_ssize_t>(at));
      TORCH_CHECK_TYPE(THPVariable_Check(one), "expected tensors for a compiled program, got ",
                       Py_TYPE(one)->tp_name);
    }
    ++runs_;
    if (sizes_ != sizes) {
      sizes_ = sizes;
      times_.clear();
    }
    std::vector<at::Tensor> outputs;
    {
      const Borrowed executable(*this, std::move(sizes));
      for (std::size_t at = 0; at < count; ++at) {
        PyObject* one = PyList_GET_ITEM(given.ptr(), static_cast<Py_ssize_t>(at));
        if (Py_REFCNT(one) > 1) {
          executable->lend(at, THPVariable_Unpack(one));
          continue;
        }
        executable->give(at, THPVariable_Unpack(one));
        PyList_SetItem(given.ptr(), static_cast<Py_ssize_t>(at), py::none().release().ptr());
      }
      if (is_timed_) {
        times_.resize(executable->plan().steps.size());
      }
      executable->time(is_timed_ ? &times_ : nullptr);
      const py::gil_scoped_release released;
      const Recorded recorded(fingerprint_, recording_, line_);
      outputs = executable->run();
    }
    PyList_SetSlice(given.ptr(), 0, PyList_GET_SIZE(given.ptr()), nullptr);
    py::list list(outputs.size());
    for (std::size_t at = 0; at < outputs.size(); ++at) {
      PyList_SET_ITEM(list.ptr(), static_cast<Py_ssize_t>(at), THPVariable_Wrap(std::move(outputs[at])));
    }
    return list;
  }

  // The steps of the last run's plan with what they run, and the nanoseconds that each has taken while `time`
  // was on.
  py::dict plan() {
    const Borrowed executable(*this, sizes_);
    const Plan& plan = executable->plan();
    const auto name = [&](uint32_t operation) {
      const auto& of = recording_.operations()[operation].op.operator_name();
      return of.overload_name.empty() ? of.name : of.name + "." + of.overload_name;
    };
    py::list steps;
    for (std::size_t at = 0; at < plan.steps.size(); ++at) {
      const Step& step = plan.steps[at];
      std::vector<std::string> names;
      std::string line;
      if (step.kind == Step::Kind::kRun) {
        names.push_back(name(step.of));
        line = recording_.operations()[step.of].line;
      } else if (step.kind == Step::Kind::kTiles) {
        for (const Instruction& instruction : plan.groups[step.of].instructions) {
          names.push_back(name(instruction.operation));
        }
        line = recording_.operations()[plan.groups[step.of].instructions.front().operation].line;
      }
      static constexpr const char* kKinds[] = {"make", "run", "tiles", "free"};
      const int64_t took = at < times_.size() ? times_[at] : 0;
      steps.append(py::make_tuple(kKinds[static_cast<std::size_t>(step.kind)], names, line, took));
    }
    py::dict made;
    made["workspace"] = plan.workspace;
    made["steps"] = steps;
    return made;
  }

 private:
  using Pool = std::vector<std::unique_ptr<Executable>>;
  static constexpr std::size_t kMostSizes = 64;

  // An executable that nobody else runs.
  class Borrowed {
   public:
    Borrowed(Program& program, std::vector<int64_t> sizes) : program_(program) {
      Pool& pool = program.pool_of(sizes);
      if (pool.empty()) {
        executable_ = std::make_unique<Executable>(program.recording_, program.checked(), std::move(sizes));
      } else {
        executable_ = std::move(pool.back());
        pool.pop_back();
      }
    }
    ~Borrowed() { program_.pool_of(executable_->sizes()).push_back(std::move(executable_)); }
    Borrowed(const Borrowed&) = delete;
    Borrowed& operator=(const Borrowed&) = delete;
    Executable* operator->() const { return executable_.get(); }

   private:
    Program& program_;
    std::unique_ptr<Executable> executable_;
  };

  // A program that meets ever new sizes does not keep what it has made for all of them.
  Pool& pool_of(const std::vector<int64_t>& sizes) {
    if (pools_.size() >= kMostSizes && pools_.find(sizes) == pools_.end()) {
      pools_.clear();
    }
    return pools_[sizes];
  }

  Recording recording_;
  std::optional<Checked> checked_;
  uint64_t fingerprint_ = 0;
  std::string line_;  // the first that an operation comes from
  std::vector<int64_t> times_;
  bool is_timed_ = false;
  uint64_t runs_ = 0;
  std::vector<int64_t> sizes_;  // of the last run
  std::map<std::vector<int64_t>, Pool> pools_;
};

}  // namespace

void bind(py::module_& module) {
  py::class_<Ref>(module, "Ref", "A tensor of a program, as the argument of an operation.")
      .def(py::init<ValueId>(), py::arg("value"))
      .def_readonly("value", &Ref::value);
  py::class_<Unknown>(module, "Unknown", "A size that each run of a program is given.")
      .def(py::init<int64_t>(), py::arg("number"))
      .def_readonly("number", &Unknown::number);
  py::class_<Program>(module, "Program", "A stream of operations that is written down once and run often.")
      .def(py::init<>())
      .def("input", &Program::input, py::arg("dtype"), py::arg("device"), py::arg("sizes"),
           py::arg("strides"))
      .def("result", &Program::result, py::arg("dtype"), py::arg("device"), py::arg("sizes"),
           py::arg("strides"))
      .def("view", &Program::view, py::arg("of"), py::arg("dtype"), py::arg("sizes"), py::arg("strides"),
           py::arg("offset"), py::arg("is_absolute"))
      .def("operation", &Program::operation, py::arg("name"), py::arg("overload"), py::arg("told"),
           py::arg("arguments"), py::arg("results"), py::arg("line"))
      .def("output", &Program::output, py::arg("value"))
      .def("runs", &Program::runs)
      .def("finish", &Program::finish)
      .def("time", &Program::time, py::arg("is_on"))
      .def("fingerprint", [](const Program& self) { return self.checked().fingerprint(); })
      .def("text", [](const Program& self) { return self.checked().text(); })
      .def("plan", &Program::plan)
      .def("run", &Program::run, py::arg("inputs"), py::arg("sizes") = std::vector<int64_t>());
  module.def(
      "overwriting",
      [] {
        py::dict found;
        for (const Overwriting& one : all_overwriting()) {
          py::list operands;
          for (const int8_t at : one.operands) {
            if (at >= 0) {
              operands.append(static_cast<int>(at));
            }
          }
          found[py::str(std::string(one.name))] = operands;
        }
        return found;
      },
      "Operations that may put their result where one of these arguments is.");
}

}  // namespace tpurun::program
