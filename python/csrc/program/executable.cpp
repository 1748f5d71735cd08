#include "program/executable.h"

#include <algorithm>
#include <chrono>
#include <map>
#include <optional>
#include <utility>

#include <ATen/ScalarOps.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/List.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>

#include "device/memory/memory.h"
#include "device/memory/twin.h"
#include "device/order/streams.h"
#include "interpreter/call_site.h"

namespace tpurun::program {

namespace {

using device::FromArena;

// Values of as many bytes hold memory only as long as they are needed. A recurrent network of many small
// values is 8 % slower where each of them is allocated, and holds a few KiB less.
constexpr int64_t kOwnFrom = 32 << 10;

constexpr c10::DispatchKeySet kOnCpu(c10::DispatchKey::CPU);

// While one lives, CPU memory comes from the arena if a value on the device is to have it.
class MemoryOf {
 public:
  explicit MemoryOf(bool is_on_device) {
    if (is_on_device) {
      arena_.emplace();
    }
  }

 private:
  std::optional<FromArena> arena_;
};

c10::intrusive_ptr<c10::StorageImpl> storage_over(char* first, int64_t bytes) {
  return c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), static_cast<std::size_t>(bytes),
      c10::DataPtr(first, c10::Device(c10::DeviceType::CPU)), nullptr,
      /*resizable=*/false);
}

void set_pointer(c10::StorageImpl& storage, char* first) {
  storage.set_data_ptr_noswap(c10::DataPtr(first, c10::Device(c10::DeviceType::CPU)));
}

// Strides of dimensions with one element do not matter.
bool lie_alike(at::IntArrayRef sizes, at::IntArrayRef strides, at::IntArrayRef others) {
  for (std::size_t at = 0; at < sizes.size(); ++at) {
    if (sizes[at] != 1 && strides[at] != others[at]) {
      return false;
    }
  }
  return true;
}

// A number as torch hands it to a kernel that takes a tensor.
at::Tensor wrapped(const at::Scalar& number) {
  at::Tensor tensor = c10::scalar_to_tensor(number);
  tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
  return tensor;
}

c10::IValue number(const at::Scalar& number, const device::Argument& declared) {
  return declared.kind == device::Argument::Kind::kTensor ? c10::IValue(wrapped(number))
                                                          : c10::IValue(number);
}

bool is_tpu(const Value& value) { return value.device.type() == c10::DeviceType::PrivateUse1; }

}  // namespace

Executable::Executable(const Recording& recording, const Checked& checked, std::vector<int64_t> sizes)
    : recording_(recording), sizes_(std::move(sizes)), plan_(checked.plan(sizes_, kOwnFrom)) {
  make_tensors();
  make_groups();
  make_calls();
  find_lines();
  relate_outputs();
  find_private();
  sort_roots();
}

void Executable::make_groups() {
  for (const Group& group : plan_.groups) {
    groups_.emplace_back(group, recording_);
  }
  for (std::size_t group = 0; group < groups_.size(); ++group) {
    for (std::size_t access = 0; access < groups_[group].accesses(); ++access) {
      const ValueId value = groups_[group].value(access);
      roots_[owner(recording_.values()[value].root)].accesses.emplace_back(group, access);
    }
  }
}

void Executable::find_lines() {
  int64_t largest = -1;
  for (const Operation& operation : recording_.operations()) {
    for (const ValueId made : operation.results) {
      if (made == kNoValue) {
        continue;
      }
      roots_[made].line = &operation.line;
      if (plan_.places[made].kind == ValueMemory::Kind::kWorkspace && roots_[made].bytes > largest) {
        largest = roots_[made].bytes;
        largest_line_ = operation.line;
      }
    }
  }
}

void Executable::relate_outputs() {
  std::map<ValueId, std::vector<std::size_t>> by_root;
  std::map<ValueId, std::size_t> first;
  for (std::size_t at = 0; at < recording_.outputs().size(); ++at) {
    const ValueId output = recording_.outputs()[at];
    first_of_.push_back(first.emplace(output, at).first->second);
    const ValueId root = recording_.values()[output].root;
    if (recording_.values()[root].source != Source::kInput) {
      by_root[root].push_back(at);
    }
  }
  for (auto& [root, related] : by_root) {
    if (related.size() > 1) {
      related_.push_back(std::move(related));
    }
  }
}

void Executable::find_private() {
  const auto& values = recording_.values();
  for (ValueId id = 0; id < values.size(); ++id) {
    roots_[id].is_private = plan_.places[id].kind == ValueMemory::Kind::kOwn;
  }
  const auto is_seen = [&](ValueId value) {
    if (value != kNoValue) {
      roots_[owner(values[value].root)].is_private = false;
    }
  };
  std::for_each(recording_.outputs().begin(), recording_.outputs().end(), is_seen);
  for (const Operation& operation : recording_.operations()) {
    if (operation.call_kind == CallKind::kOutside) {
      std::for_each(operation.results.begin(), operation.results.end(), is_seen);
      for (const Argument& argument : operation.arguments) {
        std::for_each(argument.tensors.begin(), argument.tensors.end(), is_seen);
      }
    }
  }
}

void Executable::sort_roots() {
  for (ValueId id = 0; id < roots_.size(); ++id) {
    const auto kind = plan_.places[id].kind;
    if (recording_.values()[id].root != id || owner(id) != id) {
      continue;
    }
    if (kind == ValueMemory::Kind::kWorkspace && !roots_[id].accesses.empty()) {
      in_workspace_.push_back(id);
    } else if (kind == ValueMemory::Kind::kOwn || kind == ValueMemory::Kind::kKernel) {
      passing_.push_back(id);
    }
  }
}

std::vector<int64_t> Executable::numbers(const Sizes& sizes) const {
  std::vector<int64_t> numbers;
  for (const Size& size : sizes) {
    numbers.push_back(size.in(sizes_));
  }
  return numbers;
}

int64_t Executable::bytes_of(const Value& value) const {
  int64_t extent = 1;
  for (std::size_t at = 0; at < value.sizes.size(); ++at) {
    const int64_t size = value.sizes[at].in(sizes_);
    if (size == 0) {
      return 0;
    }
    extent += (size - 1) * value.strides[at].in(sizes_);
  }
  return extent * static_cast<int64_t>(c10::elementSize(value.dtype));
}

void Executable::make_tensors() {
  const auto& values = recording_.values();
  roots_.resize(values.size());
  storages_.resize(values.size());
  inputs_.resize(recording_.inputs());
  workspace_ = storage_over(nullptr, plan_.workspace);
  for (ValueId id = 0; id < values.size(); ++id) {
    const Value& value = values[id];
    is_on_device_ |= is_tpu(value);
    Root& root = roots_[owner(value.root)];
    const ValueMemory& place = plan_.places[value.root];
    const auto item = static_cast<int64_t>(c10::elementSize(value.dtype));
    int64_t offset = value.offset.in(sizes_);
    if (id == owner(value.root)) {
      root.bytes = bytes_of(value);
      if (value.source == Source::kInput) {
        inputs_[value.of].root = id;
      }
      root.storage =
          place.kind == ValueMemory::Kind::kWorkspace ? workspace_ : storage_over(nullptr, root.bytes);
    }
    if (place.kind == ValueMemory::Kind::kWorkspace) {
      offset += place.at / item;
    }
    auto tensor = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(root.storage), kOnCpu,
                                                           c10::scalarTypeToTypeMeta(value.dtype));
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(numbers(value.sizes), numbers(value.strides), offset);
    tensors_.push_back(std::move(tensor));
    root.tensors.push_back(id);
  }
}

void Executable::make_calls() {
  for (const Operation& operation : recording_.operations()) {
    calls_.push_back(call(operation));
  }
}

Executable::Call Executable::call(const Operation& operation) const {
  Call call;
  call.operation = &operation;
  call.is_told = operation.call_kind == CallKind::kTold;
  for (const ValueId made : operation.results) {
    call.is_on_device |= made != kNoValue && is_tpu(recording_.values()[made]);
  }
  const bool is_outside = operation.call_kind == CallKind::kOutside;
  for (std::size_t at = 0; at < operation.arguments.size(); ++at) {
    const Argument& argument = operation.arguments[at];
    const device::Argument& declared = operation.schema.arguments[at];
    switch (argument.kind) {
      case Argument::Kind::kTensor:
        call.stack.emplace_back(is_outside ? c10::IValue() : c10::IValue(tensors_[argument.tensors.front()]));
        if (is_outside) {
          call.slots.push_back({at, argument.tensors.front()});
        }
        break;
      case Argument::Kind::kTensors:
        call.stack.emplace_back();
        call.lists.push_back(at);
        break;
      case Argument::Kind::kSize:
        call.stack.push_back(number(argument.sizes.front().in(sizes_), declared));
        break;
      case Argument::Kind::kSizes:
        call.stack.emplace_back(numbers(argument.sizes));
        break;
      case Argument::Kind::kConstant: {
        if (argument.constant.isScalar()) {
          call.stack.push_back(number(argument.constant.toScalar(), declared));
          break;
        }
        const bool is_device = argument.constant.isDevice() && !is_outside;
        call.stack.push_back(is_device ? c10::IValue(c10::Device(c10::DeviceType::CPU)) : argument.constant);
      }
    }
  }
  if (call.is_told) {
    for (const ValueId result : operation.results) {
      call.stack.emplace_back(tensors_[result]);
    }
    call.product = Product::of(operation.told->operator_name(), call.stack);
  }
  return call;
}

void Executable::set_address(ValueId root, char* first) {
  const auto& values = recording_.values();
  for (const auto& [group, access] : roots_[root].accesses) {
    const Value& value = values[groups_[group].value(access)];
    const auto item = static_cast<int64_t>(c10::elementSize(value.dtype));
    groups_[group].set(access, first + value.offset.in(sizes_) * item);
  }
}

// A kernel may leave out a result that a trace has a shape for: evaluation of a batch norm has no statistics.
bool Executable::may_be_left_out(ValueId root) const {
  return roots_[root].accesses.empty() && roots_[root].tensors.size() == 1;
}

void Executable::check_input(ValueId root, const at::Tensor& tensor) {
  const Value& value = recording_.values()[root];
  const auto sizes = numbers(value.sizes);
  const auto strides = numbers(value.strides);
  const bool is_left_out = tensor.numel() == 0 && may_be_left_out(root);
  TORCH_CHECK(
      (tensor.sizes() == at::IntArrayRef(sizes) || is_left_out) && tensor.scalar_type() == value.dtype,
      "expected argument ", value.of, " of a compiled program to have shape ", at::IntArrayRef(sizes),
      " and type ", value.dtype, ", for which it was planned, got ", tensor.sizes(), " and ",
      tensor.scalar_type());
  TORCH_CHECK(tensor.numel() == 0 || lie_alike(tensor.sizes(), tensor.strides(), strides),
              "expected argument ", value.of, " of a compiled program to have strides ",
              at::IntArrayRef(strides), ", for which it was planned, got ", tensor.strides());
  tensors_[root].unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides());
}

// Most arguments are where they were in the last run, as parameters are.
void Executable::set_input(Input& input) {
  const c10::TensorImpl& given = *input.tensor->unsafeGetTensorImpl();
  const c10::TensorImpl& planned = *tensors_[input.root].unsafeGetTensorImpl();
  if (C10_UNLIKELY(given.sizes() != planned.sizes() || given.strides() != planned.strides() ||
                   given.dtype() != planned.dtype())) {
    check_input(input.root, *input.tensor);
  }
  auto& storage = *given.unsafe_storage().unsafeGetStorageImpl();
  auto* begin = static_cast<char*>(storage._mutable_data_ptr_no_checks().get());
  const int64_t offset = given.storage_offset();
  if (begin == input.begin && offset == input.offset && input.is_known) {
    return;
  }
  input.begin = begin;
  input.offset = offset;
  input.is_known = true;
  set_pointer(*roots_[input.root].storage, begin);
  roots_[input.root].storage->set_nbytes(storage.nbytes());
  const auto item = static_cast<int64_t>(given.itemsize());
  place(input.root, offset * item);
  set_address(input.root, begin == nullptr ? nullptr : begin + offset * item);
}

// The root begins at these bytes of its storage.
void Executable::place(ValueId root, int64_t offset_bytes) {
  for (const ValueId id : roots_[root].tensors) {
    const Value& value = recording_.values()[id];
    const auto item = static_cast<int64_t>(c10::elementSize(value.dtype));
    const int64_t before = value.is_absolute ? 0 : offset_bytes / item;
    tensors_[id].unsafeGetTensorImpl()->set_storage_offset(before + value.offset.in(sizes_));
  }
}

// The root whose memory a root is in.
ValueId Executable::owner(ValueId root) const {
  const ValueMemory& place = plan_.places[root];
  return place.kind == ValueMemory::Kind::kOwn ? static_cast<ValueId>(place.at) : root;
}

// All tensors over a root now are over this storage, in which it begins at `offset_bytes`.
void Executable::own(ValueId root, const c10::Storage& storage, int64_t offset_bytes) {
  for (const ValueId id : roots_[root].tensors) {
    tensors_[id].unsafeGetTensorImpl()->set_storage_keep_dtype(storage);
  }
  place(root, offset_bytes);
  auto* first = static_cast<char*>(storage.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get());
  set_address(root, first == nullptr ? nullptr : first + offset_bytes);
}

void Executable::make(ValueId root) {
  const Value& value = recording_.values()[root];
  const MemoryOf memory(is_tpu(value));
  const FromLine from(*roots_[root].line);
  auto* allocator = c10::GetCPUAllocator();
  const auto bytes = static_cast<std::size_t>(roots_[root].bytes);
  if (roots_[root].is_private) {
    c10::DataPtr data = allocator->allocate(bytes);
    auto* first = static_cast<char*>(data.get());
    roots_[root].storage->set_data_ptr_noswap(std::move(data));
    return set_address(root, first);
  }
  own(root,
      c10::Storage(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes,
                                                         allocator->allocate(bytes), allocator, true)),
      0);
}

void Executable::free(ValueId root) {
  const Value& value = recording_.values()[root];
  if (value.source == Source::kInput) {
    inputs_[value.of].own = at::Tensor();
    return;
  }
  if (roots_[root].is_private) {
    return set_pointer(*roots_[root].storage, nullptr);
  }
  c10::Storage nothing(roots_[root].storage);
  if (tensors_[root].storage().unsafeGetStorageImpl() != nothing.unsafeGetStorageImpl()) {
    own(root, nothing, 0);
  }
  for (const ValueId id : roots_[root].tensors) {
    storages_[id] = c10::Storage();
  }
}

// The tensor of the device, or of the CPU, that has the elements of a value.
at::Tensor Executable::on_its_device(ValueId id) {
  const Value& value = recording_.values()[id];
  const Value& root = recording_.values()[value.root];
  const bool is_of_input = root.source == Source::kInput;
  if (is_of_input && id == value.root) {
    return *inputs_[root.of].tensor;
  }
  const c10::TensorImpl& like = *tensors_[id].unsafeGetTensorImpl();
  const auto key = is_tpu(root) ? c10::DispatchKey::PrivateUse1 : c10::DispatchKey::CPU;
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(is_of_input ? inputs_[root.of].tensor->storage() : storage_of(value.root)),
      c10::DispatchKeySet(key), like.dtype());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return tensor;
}

// One storage for all tensors over what this program has made.
const c10::Storage& Executable::storage_of(ValueId root) {
  c10::Storage& storage = storages_[root];
  if (!storage) {
    const c10::Storage& cpu = tensors_[root].storage();
    const Value& value = recording_.values()[root];
    storage = is_tpu(value) ? device::storage_over(cpu, value.device) : cpu;
  }
  return storage;
}

// The tensor that a kernel is given for a value.
at::Tensor Executable::given(const Operation& operation, ValueId value) {
  return operation.call_kind == CallKind::kOutside ? on_its_device(value) : tensors_[value];
}

void Executable::fill_lists(const Call& call, torch::jit::Stack& stack) {
  const Operation& operation = *call.operation;
  for (const std::size_t at : call.lists) {
    const Argument& argument = operation.arguments[at];
    if (operation.schema.arguments[at].kind == device::Argument::Kind::kOptionalTensors) {
      c10::List<std::optional<at::Tensor>> list;
      for (const ValueId value : argument.tensors) {
        list.push_back(value == kNoValue ? std::nullopt : std::optional(given(operation, value)));
      }
      stack[at] = std::move(list);
    } else {
      c10::List<at::Tensor> list;
      for (const ValueId value : argument.tensors) {
        list.push_back(given(operation, value));
      }
      stack[at] = std::move(list);
    }
  }
}

void Executable::run_call(Call& call) {
  if (call.product && call.product->run()) {
    return;
  }
  const Operation& operation = *call.operation;
  torch::jit::Stack stack(call.stack);
  for (const Slot& slot : call.slots) {
    stack[slot.argument] = given(operation, slot.value);
  }
  fill_lists(call, stack);
  if (operation.call_kind == CallKind::kOutside) {
    operation.op.callBoxed(&stack);
    look_again(operation);
  } else {
    const MemoryOf memory(call.is_on_device);
    (call.is_told ? *operation.told : operation.op).redispatchBoxed(kOnCpu, &stack);
  }
  if (!call.is_told) {
    take_results(operation, stack);
  }
}

// An operation may have given an argument of the program other memory, as FSDP does.
void Executable::look_again(const Operation& operation) {
  for (const ValueId written : operation.writes) {
    const Value& root = recording_.values()[recording_.values()[written].root];
    if (root.source == Source::kInput) {
      set_input(inputs_[root.of]);
    }
  }
}

// A kernel may return what it was given although its schema does not say so.
bool Executable::shares_memory(const Operation& operation, const at::Tensor& made) const {
  const void* bytes = made.storage().data_ptr().get();
  const auto is_of = [&](ValueId value) {
    return value != kNoValue && bytes != nullptr && tensors_[value].storage().data_ptr().get() == bytes;
  };
  return std::any_of(operation.arguments.begin(), operation.arguments.end(), [&](const Argument& argument) {
    return std::any_of(argument.tensors.begin(), argument.tensors.end(), is_of);
  });
}

void Executable::take_results(const Operation& operation, torch::jit::Stack& stack) {
  const auto& returns = operation.op.schema().returns();
  std::size_t next = 0;
  const auto take = [&](at::Tensor made) {
    const ValueId result = next < operation.results.size() ? operation.results[next] : kNoValue;
    ++next;
    if (result != kNoValue && made.defined()) {
      take_result(result, shares_memory(operation, made) ? made.clone() : std::move(made));
    }
  };
  for (std::size_t at = 0; at < stack.size(); ++at) {
    // An argument that comes back as it was given is known.
    const auto* alias = returns[at].alias_info();
    if (alias != nullptr && alias->isWrite()) {
      continue;
    }
    if (stack[at].isTensor()) {
      take(std::move(stack[at]).toTensor());
    } else if (stack[at].isTensorList()) {
      for (at::Tensor& one : stack[at].toTensorVector()) {
        take(std::move(one));
      }
    }
  }
}

// ATen's kernels may lay out a result otherwise than was said of it when the program was traced.
at::Tensor Executable::as_predicted(ValueId result, at::Tensor made) const {
  const auto sizes = numbers(recording_.values()[result].sizes);
  const auto strides = numbers(recording_.values()[result].strides);
  if (made.sizes() != at::IntArrayRef(sizes)) {
    TORCH_CHECK(made.numel() == 0 && may_be_left_out(result), "expected a result of shape ",
                at::IntArrayRef(sizes), ", for which the compiled program was planned, got ", made.sizes());
    return made;
  }
  if (made.numel() == 0 || lie_alike(sizes, made.strides(), strides)) {
    return made;
  }
  at::Tensor planned = at::empty_strided(sizes, strides, made.options());
  planned.copy_(made);
  return planned;
}

void Executable::take_result(ValueId result, at::Tensor made) {
  made = as_predicted(result, std::move(made));
  const bool is_ours = device::is_ours(made);
  if (is_ours) {
    storages_[result] = made.storage();
  }
  at::Tensor cpu = is_ours ? device::as_cpu(made) : made;
  // A loss may come in the memory of all that it is the mean of.
  if (!is_ours && cpu.storage().nbytes() >= cpu.nbytes() + static_cast<std::size_t>(kOwnFrom)) {
    cpu = cpu.clone();
  }
  own(result, cpu.storage(), cpu.storage_offset() * static_cast<int64_t>(cpu.itemsize()));
  auto& impl = *tensors_[result].unsafeGetTensorImpl();
  if (impl.sizes() != cpu.sizes()) {
    impl.set_sizes_and_strides(cpu.sizes(), cpu.strides(), impl.storage_offset());
  }
}

const std::string& Executable::line_of(const Step& step) const {
  static const std::string nowhere;
  switch (step.kind) {
    case Step::Kind::kMake:
      return *roots_[step.of].line;
    case Step::Kind::kRun:
      return recording_.operations()[step.of].line;
    case Step::Kind::kTiles:
      return recording_.operations()[plan_.groups[step.of].instructions.front().operation].line;
    default:
      return nowhere;
  }
}

void Executable::step(const Step& step) {
  switch (step.kind) {
    case Step::Kind::kMake:
      return make(step.of);
    case Step::Kind::kRun: {
      device::streams::settle();
      const FromLine from(recording_.operations()[step.of].line);
      return run_call(calls_[step.of]);
    }
    case Step::Kind::kTiles:
      device::streams::settle();
      return groups_[step.of].run();
    case Step::Kind::kFree:
      return free(step.of);
  }
}

void Executable::timed_step(const Step& step) {
  const auto before = std::chrono::steady_clock::now();
  this->step(step);
  const auto took = std::chrono::steady_clock::now() - before;
  (*times_)[static_cast<std::size_t>(&step - plan_.steps.data())] +=
      std::chrono::duration_cast<std::chrono::nanoseconds>(took).count();
}

void Executable::begin() {
  for (Input& input : inputs_) {
    set_input(input);
  }
  if (plan_.workspace != 0) {
    const MemoryOf memory(is_on_device_);
    const FromLine from(largest_line_);
    workspace_->set_data_ptr_noswap(
        c10::GetCPUAllocator()->allocate(static_cast<std::size_t>(plan_.workspace)));
    auto* first = static_cast<char*>(workspace_->_mutable_data_ptr_no_checks().get());
    for (const ValueId root : in_workspace_) {
      set_address(root, first + plan_.places[root].at);
    }
  }
}

std::vector<at::Tensor> Executable::outputs() {
  std::vector<at::Tensor> outputs;
  outputs.reserve(recording_.outputs().size());
  for (const ValueId output : recording_.outputs()) {
    outputs.push_back(on_its_device(output));
  }
  return outputs;
}

// Results that share memory are views of one tensor, as they would be had they been made one after the other:
// whoever traces a function that changes one of them has to know.
void Executable::relate(std::vector<at::Tensor>& outputs) const {
  const at::NoGradGuard no_grad;
  for (const std::vector<std::size_t>& related : related_) {
    const ValueId root = recording_.values()[recording_.outputs()[related.front()]].root;
    const auto is_root = [&](std::size_t at) { return recording_.outputs()[at] == root; };
    const auto whole = std::find_if(related.begin(), related.end(), is_root);
    const at::Tensor base =
        whole == related.end() ? tensor_over(root, outputs[related.front()].storage()) : outputs[*whole];
    for (const std::size_t at : related) {
      // One value that is returned twice is one tensor.
      if (is_root(at)) {
        outputs[at] = base;
      } else if (first_of_[at] < at) {
        outputs[at] = outputs[first_of_[at]];
      } else if (outputs[at].dtype() == base.dtype()) {
        outputs[at] =
            base.as_strided(outputs[at].sizes(), outputs[at].strides(), outputs[at].storage_offset());
      }
    }
  }
}

at::Tensor Executable::tensor_over(ValueId root, const c10::Storage& storage) const {
  const Value& value = recording_.values()[root];
  const auto key = is_tpu(value) ? c10::DispatchKey::PrivateUse1 : c10::DispatchKey::CPU;
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), c10::DispatchKeySet(key),
                                                         c10::scalarTypeToTypeMeta(value.dtype));
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(numbers(value.sizes), numbers(value.strides));
  return tensor;
}

// Lets go of everything that the run held.
void Executable::end() {
  for (Input& input : inputs_) {
    if (input.own.defined()) {
      input.own = at::Tensor();
    }
  }
  set_pointer(*workspace_, nullptr);
  for (const ValueId root : passing_) {
    free(root);
  }
}

std::vector<at::Tensor> Executable::run() {
  std::vector<at::Tensor> outputs = run_steps();
  relate(outputs);
  return outputs;
}

std::vector<at::Tensor> Executable::run_steps() {
  const at::AutoDispatchBelowADInplaceOrView below;
  // A mode of Python sees the program's call as a whole, not what its kernels call.
  const c10::impl::ExcludeDispatchKeyGuard no_modes(
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot}));
  struct Ending {
    Executable& executable;
    ~Ending() { executable.end(); }
  } ending{*this};
  begin();
  const Step* now = nullptr;
  try {
    for (const Step& step : plan_.steps) {
      now = &step;
      if (C10_UNLIKELY(times_ != nullptr)) {
        timed_step(step);
      } else {
        this->step(step);
      }
    }
  } catch (c10::Error& error) {
    const std::string& line = now == nullptr ? std::string() : line_of(*now);
    if (!line.empty()) {
      error.add_context("in a compiled program, asked for at " + line);
    }
    throw;
  }
  return outputs();
}

}  // namespace tpurun::program
