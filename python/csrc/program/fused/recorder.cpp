#include "program/fused/recorder.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include <pthread.h>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/SmallVector.h>

#include "device/dispatch/recorder.h"
#include "device/memory/memory.h"
#include "device/memory/twin.h"
#include "device/order/streams.h"
#include "interpreter/call_site.h"
#include "interpreter/gil.h"
#include "program/fused/layout.h"
#include "program/fused/plans.h"
#include "program/fused/records.h"
#include "program/pointwise.h"

namespace tpurun::program::fused {

namespace {

using c10::TensorImpl;
using device::Asked;
using device::streams::Cut;

constexpr std::size_t kMostArguments = 8;
// Results of one flush. More would hold memory for long, and gain nothing: caches are smaller.
constexpr int64_t kMostBytes = int64_t{256} << 20;

// The part of an argument that decides how an operation is computed: its type, or the number that it is.
struct Trait {
  uint64_t kind = 0;
  uint64_t number = 0;
  bool operator==(const Trait& other) const { return kind == other.kind && number == other.number; }
};
using Traits = std::array<Trait, kMostArguments>;

// An operation of the table, with how it was computed for the arguments that it had lately.
class Known final : public device::Recordable {
 public:
  Known(const c10::OperatorHandle& op, const device::Schema& schema) : op_(op) {
    is_in_place = schema.writes;
    const auto& name = op.operator_name().name;
    keeps_strides = name == "aten::clone" || name == "aten::_to_copy" || name == "aten::full_like";
  }

  bool is_in_place;
  bool keeps_strides;  // of its argument, where ATen's iterator would lay out the result anew

  template <class Make>
  const std::optional<Pointwise>& pointwise(const Traits& traits, const Make& make) {
    for (const Variant& variant : variants_) {
      if (variant.is_used && variant.traits == traits) {
        return variant.pointwise;
      }
    }
    Variant& variant = variants_[oldest_];
    oldest_ = (oldest_ + 1) % kVariants;
    variant = {traits, make(op_.operator_name()), true};
    return variant.pointwise;
  }
  const c10::OperatorHandle& op() const { return op_; }

 private:
  static constexpr std::size_t kVariants = 8;
  struct Variant {
    Traits traits;
    std::optional<Pointwise> pointwise;
    bool is_used = false;
  };

  c10::OperatorHandle op_;
  std::array<Variant, kVariants> variants_;
  std::size_t oldest_ = 0;
};

// Tensors that are more, or less, than elements in memory.
constexpr c10::DispatchKeySet kNotPlain({c10::DispatchKey::Conjugate, c10::DispatchKey::Negative,
                                         c10::DispatchKey::ZeroTensor, c10::DispatchKey::Python,
                                         c10::DispatchKey::FuncTorchBatched});

bool is_plain(const TensorImpl& tensor) {
  return tensor.layout() == at::kStrided && !tensor.key_set().has_any(kNotPlain) &&
         !tensor.key_set().has(c10::DispatchKey::NestedTensor) && tensor.has_storage() &&
         !tensor.has_symbolic_sizes_strides() && static_cast<std::size_t>(tensor.dim()) <= kMostDimensions;
}

// A number of Python that torch has wrapped; as it was before.
bool unwrap(const at::Tensor& tensor, Asked& number) {
  if (!tensor.is_cpu() || tensor.dim() != 0 || !tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    return false;
  }
  switch (tensor.scalar_type()) {
    case at::kDouble:
      number = Asked(*static_cast<const double*>(tensor.const_data_ptr()));
      return true;
    case at::kLong:
      number = Asked(*static_cast<const int64_t*>(tensor.const_data_ptr()));
      return true;
    case at::kBool:
      number = Asked(*static_cast<const bool*>(tensor.const_data_ptr()));
      return true;
    default:
      return false;
  }
}

// The arguments of an operation, looked at.
struct Call {
  c10::SmallVector<Asked, kMostArguments> arguments;
  Traits traits{};
  c10::SmallVector<const TensorImpl*, 4> tensors;

  // False when an argument is of a kind that is not recorded.
  bool look_at(c10::ArrayRef<Asked> asked) {
    if (asked.size() > kMostArguments) {
      return false;
    }
    for (const Asked& one : asked) {
      arguments.push_back(one);
      if (!look_at(arguments.back(), traits[arguments.size() - 1])) {
        return false;
      }
    }
    return !tensors.empty();
  }

  std::optional<Pointwise> pointwise(const c10::OperatorName& op) const;

 private:
  bool look_at(Asked& argument, Trait& trait) {
    using Kind = Asked::Kind;
    if (argument.kind == Kind::kTensor && !device::is_ours(*argument.tensor)) {
      const at::Tensor& tensor = *argument.tensor;
      if (!unwrap(tensor, argument)) {
        return false;
      }
    }
    trait.kind = static_cast<uint64_t>(argument.kind) + 1;
    switch (argument.kind) {
      case Kind::kTensor: {
        const TensorImpl& tensor = *argument.tensor->unsafeGetTensorImpl();
        if (!is_plain(tensor)) {
          return false;
        }
        tensors.push_back(&tensor);
        const auto dtype = static_cast<uint64_t>(c10::typeMetaToScalarType(tensor.dtype()));
        trait.kind |=
            dtype << 8 | uint64_t{tensor.dim() != 0} << 16 | uint64_t{tensor.is_wrapped_number()} << 17;
        return true;
      }
      case Kind::kText:
        trait.number = c10::get_hash(argument.text);
        return true;
      case Kind::kOther:
        return false;
      default:
        std::memcpy(&trait.number, &argument.integer, sizeof trait.number);
        return true;
    }
  }
};

c10::IValue value_of(const Asked& argument) {
  switch (argument.kind) {
    case Asked::Kind::kInt:
      return argument.integer;
    case Asked::Kind::kBool:
      return argument.integer != 0;
    case Asked::Kind::kDouble:
      return argument.number;
    case Asked::Kind::kText:
      return std::string(argument.text);
    default:
      return {};
  }
}

std::optional<Pointwise> Call::pointwise(const c10::OperatorName& op) const {
  c10::SmallVector<c10::IValue, kMostArguments> values;
  c10::SmallVector<int32_t, kMostArguments> tensor_of_argument;
  c10::SmallVector<TensorType, kMostArguments> types;
  for (const Asked& argument : arguments) {
    const bool is_tensor = argument.kind == Asked::Kind::kTensor;
    values.push_back(value_of(argument));
    tensor_of_argument.push_back(is_tensor ? static_cast<int32_t>(types.size()) : -1);
    if (is_tensor) {
      const TensorImpl& tensor = *argument.tensor->unsafeGetTensorImpl();
      types.push_back(
          {c10::typeMetaToScalarType(tensor.dtype()), tensor.dim(), tensor.is_wrapped_number(), 0});
    }
  }
  return program::pointwise(op, values, tensor_of_argument, types);
}

c10::StorageImpl& storage_of(const TensorImpl& tensor) {
  return *tensor.unsafe_storage().unsafeGetStorageImpl();
}

// Returns the key of a tensor's memory; null where others may have the same memory in another storage.
const void* memory_of(const TensorImpl& tensor) {
  c10::StorageImpl& storage = storage_of(tensor);
  return device::is_for_later(storage) ? static_cast<const void*>(&storage) : device::twin_in_block(storage);
}

// The shape of a result, and whether all tensors are seen as one row of elements: in the order of memory,
// which is not that of their dimensions.
struct Geometry {
  c10::DimVector sizes;
  int64_t elements = 1;
  bool is_row = false;

  Lies of(const TensorImpl& tensor) const {
    static constexpr int64_t kOne = 1;
    const auto dtype = c10::typeMetaToScalarType(tensor.dtype());
    return is_row ? Lies{dtype, tensor.storage_offset(), elements, kOne}
                  : Lies{dtype, tensor.storage_offset(), tensor.sizes(), tensor.strides()};
  }
};

bool lie_alike(const TensorImpl& one, const TensorImpl& other) {
  return one.storage_offset() == other.storage_offset() && one.sizes() == other.sizes() &&
         one.strides() == other.strides() && one.dtype() == other.dtype();
}

// Whether its last two dimensions are swapped in memory.
bool is_transposed(const TensorImpl& tensor) {
  if (tensor.dim() < 2) {
    return false;
  }
  const auto last = static_cast<std::size_t>(tensor.dim()) - 1;
  const auto sizes = tensor.sizes();
  return sizes[last] > 1 && sizes[last - 1] > 1 && tensor.strides()[last] > tensor.strides()[last - 1];
}

// Whether operands lie in different orders, or a copy is to lie in another one. Most operations that can not
// be recorded are such, and this is soon seen.
bool changes_order(const Known& known, const Call& call) {
  const auto is_swapped = [](const TensorImpl* tensor) { return is_transposed(*tensor); };
  const auto is_not = [](const TensorImpl* tensor) {
    return tensor->dim() >= 2 && tensor->numel() > 1 && !is_transposed(*tensor);
  };
  const bool has_swapped = std::any_of(call.tensors.begin(), call.tensors.end(), is_swapped);
  return has_swapped &&
         (known.keeps_strides || std::any_of(call.tensors.begin(), call.tensors.end(), is_not));
}

// Whether each row of the result reads one element of an operand.
bool has_column(const Call& call) {
  int64_t row = 1;
  for (const TensorImpl* tensor : call.tensors) {
    row = tensor->dim() == 0 ? row : std::max(row, tensor->sizes().back());
  }
  return row > 1 && std::any_of(call.tensors.begin(), call.tensors.end(), [](const TensorImpl* tensor) {
           const bool has_rows = tensor->dim() != 0 && tensor->numel() > 1;
           return has_rows && (tensor->sizes().back() == 1 || tensor->strides().back() == 0);
         });
}

class Fuser final : public device::Recorder, public device::streams::Deferred {
 public:
  device::Recordable* find(const c10::OperatorHandle& op, const device::Schema& schema) override {
    const bool makes_one = schema.results == 1;
    return makes_one && is_pointwise(op.operator_name()) ? new Known(op, schema) : nullptr;
  }

  bool record(const c10::OperatorHandle& op, device::Recordable& recordable, c10::ArrayRef<Asked> arguments,
              at::Tensor& made) override;
  void run(Cut why) override;
  Counts counts();

  std::size_t count() override {
    lock();
    const std::unique_lock<std::mutex> held(mutex_, std::adopt_lock);
    return records_.operations();
  }

  void before_fork();
  void after_fork() { mutex_.unlock(); }

 private:
  using Released = std::vector<c10::intrusive_ptr<c10::StorageImpl>>;

  void lock();
  static bool fits(const Known& known, const Call& call, Geometry& geometry);
  bool is_better_alone(const Call& call) const;
  static bool fit(const Call& call, const Pointwise& pointwise, const Geometry& geometry);
  static bool are_apart(const Known& known, const Call& call);
  uint16_t value_of(const at::Tensor& tensor, const Geometry& geometry);
  uint16_t write(const at::Tensor& target, uint16_t value, const Geometry& geometry);
  at::Tensor make(const Call& call, c10::ScalarType dtype, const Geometry& geometry, uint16_t& value);
  void run_all(Cut why, Released& released);
  void run_planned();

  std::mutex mutex_;
  Records records_;
  Plans plans_;
  Counts counts_;
  std::thread::id owner_;
  std::vector<char*> bases_;
};

// A thread that waits for another one's operations lets go of Python's lock, which they may need.
void Fuser::lock() {
  if (!mutex_.try_lock()) {
    without_gil([&] { mutex_.lock(); });
  }
}

// Whether the result of a call lies as the recorder can say.
bool Fuser::fits(const Known& known, const Call& call, Geometry& geometry) {
  const auto& tensors = call.tensors;
  const TensorImpl& first = *tensors.front();
  if (!broadcast(tensors, geometry.sizes)) {
    return false;
  }
  geometry.elements = c10::multiply_integers(geometry.sizes);
  if (geometry.elements == 0 || (known.is_in_place && first.sizes() != geometry.sizes)) {
    return false;
  }
  const bool keeps_strides = known.is_in_place || known.keeps_strides;
  if (keeps_strides ? has_plain_strides(first) : makes_plain_strides(tensors, geometry.sizes)) {
    return true;
  }
  geometry.is_row = lie_in_one_order(tensors);
  return geometry.is_row && !known.keeps_strides;
}

// In tiles, a column costs a pass more than in ATen's loops. That is worth it where something else is saved.
bool Fuser::is_better_alone(const Call& call) const {
  const auto is_recorded = [&](const TensorImpl* tensor) {
    const uint16_t root = records_.root_of(memory_of(*tensor));
    return root != kNone && !records_.roots()[root].is_input();
  };
  return has_column(call) && std::none_of(call.tensors.begin(), call.tensors.end(), is_recorded);
}

// Whether the operands are what the kernel reads.
bool Fuser::fit(const Call& call, const Pointwise& pointwise, const Geometry& geometry) {
  return std::all_of(pointwise.operands.begin(), pointwise.operands.end(), [&](const Operand& operand) {
    if (operand.argument == Operand::kNumber) {
      return true;
    }
    const TensorImpl& tensor =
        *call.arguments[static_cast<std::size_t>(operand.argument)].tensor->unsafeGetTensorImpl();
    const bool is_as_read = c10::typeMetaToScalarType(tensor.dtype()) == operand.dtype;
    // Where the bits depend on where ATen's loops end, these are loops over all elements as they lie.
    const bool is_all = geometry.is_row || (tensor.sizes() == geometry.sizes && has_plain_strides(tensor));
    return (is_as_read || (tensor.dim() == 0 && geometry.elements > 1)) &&
           (pointwise.loops == Loops::kAlike || is_all);
  });
}

// Whether it is known of all tensors what memory they are in. A tensor that is read while a part of it is
// written is torch's to judge.
bool Fuser::are_apart(const Known& known, const Call& call) {
  const TensorImpl& first = *call.tensors.front();
  const void* target = memory_of(first);
  return std::all_of(call.tensors.begin(), call.tensors.end(), [&](const TensorImpl* tensor) {
    const void* memory = memory_of(*tensor);
    return memory != nullptr && tensor->device() == first.device() &&
           !(known.is_in_place && memory == target && !lie_alike(*tensor, first));
  });
}

uint16_t Fuser::value_of(const at::Tensor& tensor, const Geometry& geometry) {
  const TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  const void* memory = memory_of(impl);
  uint16_t root = records_.root_of(memory);
  if (root == kNone) {
    root = records_.input(memory, *device::twin_in_block(storage_of(impl)));
  }
  return records_.value(root, geometry.of(impl));
}

// The value that an operation in place makes: a new one where it writes to all of a result.
uint16_t Fuser::write(const at::Tensor& target, uint16_t value, const Geometry& geometry) {
  Root& root = records_.roots()[records_.values()[value].root];
  if (root.is_input() || root.first != value) {
    return value;
  }
  const TensorImpl& impl = *target.unsafeGetTensorImpl();
  records_.next().site = records_.operation(root.operation).site;
  auto storage = std::move(*root.made);
  root.made.reset();
  return records_.result(memory_of(impl), std::move(storage), root.bytes, geometry.of(impl));
}

at::Tensor Fuser::make(const Call& call, c10::ScalarType dtype, const Geometry& geometry, uint16_t& value) {
  const TensorImpl& first = *call.tensors.front();
  const std::size_t bytes = static_cast<std::size_t>(geometry.elements) * c10::elementSize(dtype);
  auto storage = device::storage_for_later(bytes, first.device());
  c10::weak_intrusive_ptr<c10::StorageImpl> weak(storage);
  const void* memory = storage.get();
  auto tensor = at::detail::make_tensor<TensorImpl>(c10::Storage(std::move(storage)),
                                                    c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                                    c10::scalarTypeToTypeMeta(dtype));
  TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  if (geometry.is_row) {
    impl.set_sizes_and_strides(geometry.sizes, first.strides());
  } else {
    impl.set_sizes_contiguous(geometry.sizes);
  }
  value = records_.result(memory, std::move(weak), static_cast<int64_t>(bytes), geometry.of(impl));
  if (bytes >= device::kLargeBlock) {
    records_.next().site = call_site();
  }
  return tensor;
}

bool Fuser::record(const c10::OperatorHandle& /*op*/, device::Recordable& recordable,
                   c10::ArrayRef<Asked> arguments, at::Tensor& made) {
  auto& known = static_cast<Known&>(recordable);
  Call call;
  if (!call.look_at(arguments) || changes_order(known, call)) {
    return false;
  }
  // As before each operation.
  device::streams::settle_begun();
  Released released;
  lock();
  const std::unique_lock<std::mutex> held(mutex_, std::adopt_lock);
  if (is_better_alone(call)) {
    return false;
  }
  const auto& pointwise =
      known.pointwise(call.traits, [&](const c10::OperatorName& name) { return call.pointwise(name); });
  Geometry geometry;
  if (!pointwise || !fits(known, call, geometry) || !fit(call, *pointwise, geometry) ||
      !are_apart(known, call)) {
    return false;
  }
  const auto me = std::this_thread::get_id();
  const bool is_elsewhere = owner_ != me;
  if (!records_.is_empty() && (is_elsewhere || records_.is_full() || records_.bytes() >= kMostBytes)) {
    run_all(is_elsewhere ? Cut::kThread : Cut::kBound, released);
  }
  owner_ = me;
  Record& record = records_.next();
  record.op = &known.op();
  record.pointwise = *pointwise;
  record.site.clear();
  std::size_t next = 0;
  for (const Operand& operand : pointwise->operands) {
    if (operand.argument != Operand::kNumber) {
      record.operands[next++] =
          value_of(*call.arguments[static_cast<std::size_t>(operand.argument)].tensor, geometry);
    }
  }
  if (known.is_in_place) {
    const at::Tensor& target = *call.arguments.front().tensor;
    const uint16_t old = value_of(target, geometry);
    record.target = write(target, old, geometry);
    record.is_written = record.target == old;
  } else {
    made = make(call, pointwise->result, geometry, record.target);
    record.is_written = false;
  }
  records_.add();
  device::streams::note_deferred(true);
  return true;
}

void Fuser::run(Cut why) {
  Released released;
  lock();
  const std::unique_lock<std::mutex> held(mutex_, std::adopt_lock);
  if (!records_.is_empty()) {
    run_all(why, released);
  }
}

Counts Fuser::counts() {
  lock();
  const std::unique_lock<std::mutex> held(mutex_, std::adopt_lock);
  Counts counts = counts_;
  counts.plans = plans_.made();
  return counts;
}

void Fuser::run_all(Cut why, Released& released) {
  try {
    run_planned();
  } catch (...) {
    records_.let_go(released);
    throw;
  }
  ++counts_.stretches;
  ++counts_.cuts[static_cast<std::size_t>(why)];
  counts_.operations += records_.operations();
  records_.clear(released);
  device::streams::note_deferred(false);
}

// Memory comes first, for all that needs some: where there is not enough, nothing has happened.
void Fuser::run_planned() {
  StretchPlan& plan = plans_.of(records_);
  auto& roots = records_.roots();
  c10::SmallVector<std::pair<std::size_t, c10::DataPtr>, 16> made;
  bases_.assign(roots.size(), nullptr);
  for (std::size_t at = 0; at < roots.size(); ++at) {
    Root& root = roots[at];
    if (root.is_input()) {
      bases_[at] = static_cast<char*>(root.storage->_mutable_data_ptr_no_checks().get());
    } else if (root.is_needed()) {
      made.emplace_back(at, device::allocate_block(static_cast<std::size_t>(root.bytes),
                                                   records_.operation(root.operation).site));
      bases_[at] = static_cast<char*>(made.back().second.get());
    }
  }
  c10::DataPtr workspace;
  if (plan.workspace() != 0) {
    workspace =
        device::allocate_block(static_cast<std::size_t>(plan.workspace()), records_.operation(0).site);
  }
  plan.run(records_, bases_, static_cast<char*>(workspace.get()));
  counts_.together += plan.together();
  for (auto& [at, bytes] : made) {
    device::bring(*roots[at].storage, std::move(bytes));
  }
}

// The child has no thread that could hold the lock, and finds everything done.
void Fuser::before_fork() {
  try {
    run(Cut::kFork);
  } catch (const std::exception&) {
    // The next operation says so.
  }
  lock();
}

Fuser& fuser() {
  static auto* made = new Fuser();
  return *made;
}

}  // namespace

Counts counts() { return fuser().counts(); }

void install() {
  device::set_recorder(fuser());
  device::streams::set_deferred(fuser());
  pthread_atfork([] { fuser().before_fork(); }, [] { fuser().after_fork(); }, [] { fuser().after_fork(); });
}

}  // namespace tpurun::program::fused
