#include "process_group/shortcut.h"

#include <algorithm>
#include <array>
#include <optional>
#include <string_view>
#include <typeinfo>
#include <utility>
#include <vector>

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "process_group/process_group.h"

namespace py = pybind11;

namespace tpurun {

namespace {

constexpr size_t kMostParameters = 6;
// Borrowed; null where nothing was given.
using Values = std::array<PyObject*, kMostParameters>;

PyObject* interned(const char* text) {
  PyObject* name = PyUnicode_InternFromString(text);
  if (name == nullptr) {
    throw py::error_already_set();
  }
  return name;
}

// The parts of torch.distributed that each call looks at. Never destroyed, because at exit there is no
// interpreter left to release it.
struct Torch {
  py::module_ c10d = py::module_::import("torch.distributed.distributed_c10d");
  py::object process_group = c10d.attr("ProcessGroup");
  PyObject* world = interned("_world");
  PyObject* default_pg = interned("_default_pg");
  // Groups whose calls are collected until they are posted together; torch never has another dictionary.
  py::object coalesced = c10d.attr("_world").attr("_pg_coalesce_state");
  std::vector<std::pair<py::object, c10d::ReduceOp::RedOpType>> reduce_ops;

  Torch() {
    using Op = c10d::ReduceOp;
    const std::pair<const char*, Op::RedOpType> known[] = {
        {"SUM", Op::SUM}, {"AVG", Op::AVG},   {"PRODUCT", Op::PRODUCT}, {"MIN", Op::MIN},
        {"MAX", Op::MAX}, {"BAND", Op::BAND}, {"BOR", Op::BOR},         {"BXOR", Op::BXOR}};
    for (const auto& [name, op] : known) {
      reduce_ops.emplace_back(c10d.attr("ReduceOp").attr(name), op);
    }
  }
};

const Torch& torch_names() {
  static const auto* names = new Torch();
  return *names;
}

bool is_given(PyObject* value) { return value != nullptr && value != Py_None; }

bool is_blocking(PyObject* async_op) { return async_op == nullptr || async_op == Py_False; }

// A CPU tensor that nobody watches: no subclass, no mode, no profiler, no gradient. Else null.
const at::Tensor* plain(PyObject* object) {
  if (object == nullptr || !THPVariable_CheckExact(object)) {
    return nullptr;
  }
  using c10::DispatchKey;
  // For a collective only the last of these keys does anything: its kernel calls the backend.
  constexpr c10::DispatchKeySet kPlain({DispatchKey::BackendSelect, DispatchKey::ADInplaceOrView,
                                        DispatchKey::AutocastCPU, DispatchKey::AutogradCPU,
                                        DispatchKey::CPU});
  const at::Tensor& tensor = THPVariable_Unpack(object);
  const auto local = c10::impl::tls_local_dispatch_key_set();
  const auto keys = (tensor.key_set() | local.included_) - local.excluded_;
  // Torch hands on complex tensors as pairs, and some of 8 bits as bytes.
  const bool is_as_it_is = !tensor.is_complex() && !c10::isFloat8Type(tensor.scalar_type());
  return kPlain.has_all(keys) && is_as_it_is && !tensor.requires_grad() ? &tensor : nullptr;
}

std::optional<c10d::ReduceOp> reduce_op(PyObject* op) {
  if (op == nullptr) {
    return c10d::ReduceOp::SUM;
  }
  for (const auto& [object, known] : torch_names().reduce_ops) {
    if (object.ptr() == op) {
      return known;
    }
  }
  return std::nullopt;
}

// The group that torch takes where none is given; null if there is none.
py::object default_group() {
  const auto& names = torch_names();
  PyObject* world = PyDict_GetItemWithError(PyModule_GetDict(names.c10d.ptr()), names.world);
  auto group = py::reinterpret_steal<py::object>(world ? PyObject_GetAttr(world, names.default_pg) : nullptr);
  if (!group && PyErr_Occurred() != nullptr) {
    // It is a property, so that Ctrl-C may be raised in it.
    if (PyErr_ExceptionMatches(PyExc_Exception) == 0) {
      throw py::error_already_set();
    }
    PyErr_Clear();
  }
  return group;
}

// Hooks around every collective of a group, which torch's own kernels call; 2.15 has them.
template <class Group>
struct Hooks : Group {
  static bool any(const Group& group) {
    if constexpr (requires { &Hooks::preHooks_; }) {
      return !(group.*&Hooks::preHooks_).empty() || !(group.*&Hooks::postHooks_).empty();
    }
    return false;
  }
};

// The backend of a group for CPU tensors, if that is ours and torch would call it now; else null.
c10::intrusive_ptr<ProcessGroup> backend_of(PyObject* group) {
  if (at::impl::torch_function_mode_enabled() || at::hasCallbacks()) {
    return {};
  }
  const auto& names = torch_names();
  if (!PyDict_CheckExact(names.coalesced.ptr()) || PyDict_GET_SIZE(names.coalesced.ptr()) != 0) {
    return {};
  }
  py::object of_world;
  if (!is_given(group)) {
    of_world = default_group();
    group = of_world.ptr();
  }
  // Not a subclass, which may do anything.
  if (group == nullptr || Py_TYPE(group) != reinterpret_cast<PyTypeObject*>(names.process_group.ptr())) {
    return {};
  }
  auto* found =
      reinterpret_cast<py::detail::instance*>(group)->get_value_and_holder().value_ptr<c10d::ProcessGroup>();
  if (found == nullptr || Hooks<c10d::ProcessGroup>::any(*found)) {
    return {};
  }
  c10::intrusive_ptr<c10d::Backend> backend;
  try {
    backend = found->getBackend(at::kCPU);
  } catch (const c10::Error&) {
    return {};
  }
  if (!backend || typeid(*backend) != typeid(ProcessGroup)) {
    return {};
  }
  auto ours = c10::static_intrusive_pointer_cast<ProcessGroup>(std::move(backend));
  return ours->needs_works() ? nullptr : ours;
}

// Each posts what these arguments, in the order of the parameters below, ask for, and says whether it did:
// false leaves everything as it was.

bool all_reduce(const Values& values) {
  const auto [tensor, op, group, async_op, none, none_too] = values;
  const auto* given = plain(tensor);
  const auto reduction = reduce_op(op);
  const auto backend = given && reduction && is_blocking(async_op) ? backend_of(group) : nullptr;
  if (!backend) {
    return false;
  }
  backend->run(backend->all_reduce_of(Tensors(1, *given), *reduction));
  return true;
}

bool broadcast(const Values& values) {
  const auto [tensor, src, group, async_op, group_src, none] = values;
  // Ranks of the world are those of the group only where that is the world.
  PyObject* root = is_given(group_src) ? group_src : src;
  const bool is_of_group = is_given(group_src) ? !is_given(src) : is_given(src) && !is_given(group);
  if (!is_of_group || !PyLong_CheckExact(root)) {
    return false;
  }
  const auto* given = plain(tensor);
  const auto backend = given && is_blocking(async_op) ? backend_of(group) : nullptr;
  int overflow = 0;
  const long rank = PyLong_AsLongAndOverflow(root, &overflow);
  if (!backend || overflow != 0 || rank < 0 || rank >= backend->getSize()) {
    return false;
  }
  backend->run(backend->broadcast_of(Tensors(1, *given), rank));
  return true;
}

bool all_gather(const Values& values) {
  const auto [output, input, group, async_op, none, none_too] = values;
  const auto *to = plain(output), *from = plain(input);
  const auto backend = to && from && is_blocking(async_op) ? backend_of(group) : nullptr;
  if (!backend) {
    return false;
  }
  backend->run(backend->all_gather_of(*to, *from));
  return true;
}

bool reduce_scatter(const Values& values) {
  const auto [output, input, op, group, async_op, none] = values;
  const auto *to = plain(output), *from = plain(input);
  const auto reduction = reduce_op(op);
  const auto backend = to && from && reduction && is_blocking(async_op) ? backend_of(group) : nullptr;
  if (!backend) {
    return false;
  }
  backend->run(backend->reduce_scatter_of(*to, *from, *reduction));
  return true;
}

bool all_to_all(const Values& values) {
  const auto [output, input, output_splits, input_splits, group, async_op] = values;
  const auto *to = plain(output), *from = plain(input);
  const bool is_even = !is_given(output_splits) && !is_given(input_splits);
  const bool is_one_dtype = to && from && to->scalar_type() == from->scalar_type();
  const auto backend = is_one_dtype && is_even && is_blocking(async_op) ? backend_of(group) : nullptr;
  if (!backend) {
    return false;
  }
  backend->run(backend->all_to_all_of(*to, *from, {}, {}));
  return true;
}

bool barrier(const Values& values) {
  const auto [group, async_op, device_ids, timeout, none, none_too] = values;
  const bool is_plain = is_blocking(async_op) && !is_given(device_ids) && !is_given(timeout);
  const auto backend = is_plain ? backend_of(group) : nullptr;
  if (!backend) {
    return false;
  }
  backend->run(ProcessGroup::barrier_of());
  return true;
}

// One function of torch.distributed.
struct Collective {
  const char* name;
  std::vector<const char*> parameters;
  bool (*post)(const Values&);
};

const std::vector<Collective>& collectives() {
  static const std::vector<Collective> all{
      {"all_reduce", {"tensor", "op", "group", "async_op"}, all_reduce},
      {"broadcast", {"tensor", "src", "group", "async_op", "group_src"}, broadcast},
      {"all_gather_into_tensor", {"output_tensor", "input_tensor", "group", "async_op"}, all_gather},
      {"all_gather_single", {"output_tensor", "input_tensor", "group", "async_op"}, all_gather},
      {"reduce_scatter_tensor", {"output", "input", "op", "group", "async_op"}, reduce_scatter},
      {"reduce_scatter_single", {"output", "input", "op", "group", "async_op"}, reduce_scatter},
      {"all_to_all_single",
       {"output", "input", "output_split_sizes", "input_split_sizes", "group", "async_op"},
       all_to_all},
      {"barrier", {"group", "async_op", "device_ids", "timeout"}, barrier},
  };
  return all;
}

// The Python object.
struct Shortcut {
  PyObject ob_base;
  const Collective* collective;
  PyObject* original;
  std::array<PyObject*, kMostParameters> names;
};

Shortcut* as_shortcut(PyObject* self) { return reinterpret_cast<Shortcut*>(self); }

// False where only the original can say what is wrong with the arguments.
bool bind(const Shortcut& self, PyObject* args, PyObject* kwargs, Values& values) {
  const size_t count = self.collective->parameters.size();
  const auto given = static_cast<size_t>(PyTuple_GET_SIZE(args));
  if (given > count) {
    return false;
  }
  for (size_t i = 0; i < given; ++i) {
    values[i] = PyTuple_GET_ITEM(args, i);
  }
  if (kwargs == nullptr) {
    return true;
  }
  PyObject* name = nullptr;
  PyObject* value = nullptr;
  for (Py_ssize_t at = 0; PyDict_Next(kwargs, &at, &name, &value) != 0;) {
    // Names in a call are interned.
    const auto known = std::find(self.names.begin() + given, self.names.begin() + count, name);
    if (known == self.names.begin() + count) {
      return false;
    }
    values[known - self.names.begin()] = value;
  }
  return true;
}

PyObject* call(PyObject* object, PyObject* args, PyObject* kwargs) {
  const auto& self = *as_shortcut(object);
  Values values{};
  try {
    if (bind(self, args, kwargs, values) && self.collective->post(values)) {
      Py_RETURN_NONE;
    }
  } catch (...) {
    torch::translate_exception_to_python(std::current_exception());
    return nullptr;
  }
  return PyObject_Call(self.original, args, kwargs);
}

// An attribute that the shortcut does not have, such as a name, is that of the original.
PyObject* attribute_of(PyObject* object, PyObject* name) {
  PyObject* own = PyObject_GenericGetAttr(object, name);
  if (own != nullptr || PyErr_ExceptionMatches(PyExc_AttributeError) == 0) {
    return own;
  }
  PyErr_Clear();
  return PyObject_GetAttr(as_shortcut(object)->original, name);
}

PyObject* make(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  const char* name = nullptr;
  PyObject* original = nullptr;
  static const char* keywords[] = {"name", "original", nullptr};
  if (PyArg_ParseTupleAndKeywords(args, kwargs, "sO", const_cast<char**>(keywords), &name, &original) == 0) {
    return nullptr;
  }
  const auto& all = collectives();
  const auto found = std::find_if(all.begin(), all.end(),
                                  [name](const auto& each) { return std::string_view(each.name) == name; });
  if (found == all.end()) {
    return PyErr_Format(PyExc_ValueError, "Shortcut: expected a name of PARAMETERS, got %s", name);
  }
  try {
    torch_names();  // what is missing is missed here, and not in a call
  } catch (...) {
    torch::translate_exception_to_python(std::current_exception());
    return nullptr;
  }
  PyObject* object = type->tp_alloc(type, 0);
  if (object == nullptr) {
    return nullptr;
  }
  auto* self = as_shortcut(object);
  self->collective = &*found;
  self->original = Py_NewRef(original);
  for (size_t i = 0; i < found->parameters.size(); ++i) {
    self->names[i] = PyUnicode_InternFromString(found->parameters[i]);
    if (self->names[i] == nullptr) {
      Py_DECREF(object);
      return nullptr;
    }
  }
  return object;
}

void forget(PyObject* object) {
  auto* self = as_shortcut(object);
  auto* type = Py_TYPE(object);
  Py_XDECREF(self->original);
  for (PyObject* name : self->names) {
    Py_XDECREF(name);
  }
  type->tp_free(object);
  Py_DECREF(type);
}

py::dict parameters() {
  py::dict all;
  for (const auto& each : collectives()) {
    py::tuple names(each.parameters.size());
    for (size_t i = 0; i < each.parameters.size(); ++i) {
      names[i] = py::str(each.parameters[i]);
    }
    all[each.name] = std::move(names);
  }
  return all;
}

}  // namespace

void bind_shortcuts(py::module_& module) {
  PyType_Slot slots[] = {
      {Py_tp_new, reinterpret_cast<void*>(make)},
      {Py_tp_dealloc, reinterpret_cast<void*>(forget)},
      {Py_tp_call, reinterpret_cast<void*>(call)},
      {Py_tp_getattro, reinterpret_cast<void*>(attribute_of)},
      {0, nullptr},
  };
  PyType_Spec spec{"tpurun._C.Shortcut", sizeof(Shortcut), 0, Py_TPFLAGS_DEFAULT, slots};
  const auto type = py::reinterpret_steal<py::object>(PyType_FromSpec(&spec));
  if (!type) {
    throw py::error_already_set();
  }
  type.attr("PARAMETERS") = parameters();
  module.attr("Shortcut") = type;
}

}  // namespace tpurun
