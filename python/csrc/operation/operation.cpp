#include "operation/operation.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include "device/order/streams.h"
#include "operation/dtype.h"
#include "operation/overlap.h"

namespace tpurun {

namespace {

// Memory is looked at past the dispatcher, so what is deferred comes first.
std::byte* address(const at::Tensor& tensor) {
  device::streams::run_deferred(device::streams::Cut::kOperation);
  return static_cast<std::byte*>(tensor.data_ptr());
}

TpurunSpan span_of(const at::Tensor& tensor) { return {address(tensor), tensor.nbytes()}; }

bool overlap(const TpurunSpan& a, const TpurunSpan& b) {
  const auto* a_begin = static_cast<const std::byte*>(a.data);
  const auto* b_begin = static_cast<const std::byte*>(b.data);
  return a.bytes != 0 && b.bytes != 0 && a_begin < b_begin + b.bytes && b_begin < a_begin + a.bytes;
}

TpurunSpan bounds(const std::vector<TpurunSpan>& spans) {
  auto lowest = std::numeric_limits<uintptr_t>::max();
  uintptr_t highest = 0;
  for (const auto& span : spans) {
    if (span.bytes != 0) {
      const auto begin = reinterpret_cast<uintptr_t>(span.data);
      lowest = std::min(lowest, begin);
      highest = std::max<uintptr_t>(highest, begin + span.bytes);
    }
  }
  return highest == 0 ? TpurunSpan{nullptr, 0}
                      : TpurunSpan{reinterpret_cast<void*>(lowest), highest - lowest};
}

// FNV-1a over the words; ranks compare the result, so it may not depend on the process.
void mix(uint64_t& hash, uint64_t word) {
  for (int byte = 0; byte < 8; ++byte) {
    hash = (hash ^ (word >> (8 * byte) & 0xff)) * 0x100000001b3;
  }
}

// Whether the bytes of memory are the elements in order. Lazily conjugated or negated views hold others.
bool is_plain(const at::Tensor& tensor) {
  return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

at::Tensor plain_copy(const at::Tensor& tensor) {
  return tensor.detach().resolve_conj().resolve_neg().contiguous();
}

void append_parts(std::vector<TpurunSpan>& spans, const std::vector<at::Tensor>& tensors, int parts) {
  for (int part = 0; part < parts; ++part) {
    for (const auto& tensor : tensors) {
      const size_t bytes = tensor.nbytes() / parts;
      spans.push_back({address(tensor) + bytes * part, bytes});
    }
  }
}

void append_rows(std::vector<TpurunSpan>& spans, const at::Tensor& tensor, const std::vector<int64_t>& rows) {
  const int64_t count = tensor.dim() == 0 ? 0 : tensor.size(0);
  const size_t row_bytes = count == 0 ? 0 : tensor.nbytes() / count;
  auto* next = address(tensor);
  for (const int64_t taken : rows) {
    spans.push_back({next, row_bytes * taken});
    next += row_bytes * taken;
  }
}

}  // namespace

Operation::Operation(TpurunCollective collective, c10d::OpType type, const char* title)
    : collective_(collective), type_(type), title_(title) {}

const char* Operation::name() const {
  const char* colon = std::strchr(title_, ':');
  return colon == nullptr ? title_ : colon + 1;
}

std::optional<c10::Device> Operation::device() const {
  for (const auto* tensors : {&profiled_, &results_}) {
    if (!tensors->empty() && tensors->front().device().is_privateuseone()) {
      return tensors->front().device();
    }
  }
  return std::nullopt;
}

void Operation::give_up() noexcept {
  const auto keep = [](const at::Tensor& tensor) {
    if (tensor.device().is_privateuseone()) {
      c10::raw::intrusive_ptr::incref(tensor.storage().unsafeGetStorageImpl());
    }
  };
  for (const auto* tensors : {&kept_, &profiled_, &results_}) {
    std::for_each(tensors->begin(), tensors->end(), keep);
  }
  for (const auto& staged : staged_) {
    keep(staged.copy);
  }
}

void Operation::check(const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(tensor.defined(), name(), ": expected a tensor, got an undefined one");
  TORCH_CHECK_VALUE(tensor.layout() == at::kStrided, name(), ": expected a dense tensor, got layout ",
                    tensor.layout());
  // Both are memory of this process.
  const bool is_reachable = tensor.device().is_cpu() || tensor.device().is_privateuseone();
  TORCH_CHECK_VALUE(is_reachable, name(), ": expected a tensor on cpu or tpu, got one on ", tensor.device());
  if (dtype_ == at::ScalarType::Undefined) {
    dtype_ = tensor.scalar_type();
  }
  TORCH_CHECK_TYPE(tensor.scalar_type() == dtype_, name(), ": expected all tensors to be of dtype ",
                   dtype_name(dtype_), ", got ", dtype_name(tensor.scalar_type()));
}

at::Tensor Operation::readable(const at::Tensor& tensor) {
  check(tensor);
  profiled_.push_back(tensor);
  if (is_plain(tensor)) {
    return tensor;
  }
  kept_.push_back(plain_copy(tensor));
  return kept_.back();
}

at::Tensor Operation::writable(const at::Tensor& tensor, Access access) {
  check(tensor);
  results_.push_back(tensor);
  if (is_plain(tensor)) {
    return tensor;
  }
  // Found here, before anybody takes part: the copy home would find it when all is done.
  TORCH_CHECK_VALUE(!share_bytes({tensor}), name(),
                    ": expected an output whose elements lie apart in memory, got strides ", tensor.strides(),
                    " for sizes ", tensor.sizes(), "; pass a clone() of it");
  auto copy = access == Access::kReadWrite ? plain_copy(tensor) : at::empty(tensor.sizes(), tensor.options());
  staged_.push_back({tensor, copy});
  return copy;
}

void Operation::input(const at::Tensor& tensor) {
  inputs_.spans.push_back(span_of(readable(tensor)));
  ++inputs_.count;
}

void Operation::output(const at::Tensor& tensor) {
  outputs_.spans.push_back(span_of(writable(tensor, Access::kWrite)));
  ++outputs_.count;
}

void Operation::inputs_each(const std::vector<at::Tensor>& tensors) {
  for (const auto& tensor : tensors) {
    input(tensor);
  }
}

void Operation::outputs_each(const std::vector<at::Tensor>& tensors) {
  for (const auto& tensor : tensors) {
    output(tensor);
  }
}

void Operation::in_place(const std::vector<at::Tensor>& tensors) {
  for (const auto& tensor : tensors) {
    inputs_.spans.push_back(span_of(writable(tensor, Access::kReadWrite)));
    profiled_.push_back(tensor);
  }
  outputs_.spans = inputs_.spans;
  inputs_.count = outputs_.count = 1;
  inputs_.per_chunk = outputs_.per_chunk = static_cast<uint32_t>(tensors.size());
}

void Operation::inputs(const std::vector<std::vector<at::Tensor>>& lists) {
  for (const auto& list : lists) {
    for (const auto& tensor : list) {
      inputs_.spans.push_back(span_of(readable(tensor)));
    }
  }
  inputs_.count = static_cast<uint32_t>(lists.size());
  inputs_.per_chunk = lists.empty() ? 1 : static_cast<uint32_t>(lists.front().size());
}

void Operation::outputs(const std::vector<std::vector<at::Tensor>>& lists) {
  for (const auto& list : lists) {
    for (const auto& tensor : list) {
      outputs_.spans.push_back(span_of(writable(tensor, Access::kWrite)));
    }
  }
  outputs_.count = static_cast<uint32_t>(lists.size());
  outputs_.per_chunk = lists.empty() ? 1 : static_cast<uint32_t>(lists.front().size());
}

void Operation::input_rows(const at::Tensor& tensor, const std::vector<int64_t>& rows) {
  append_rows(inputs_.spans, readable(tensor), rows);
  inputs_.count = static_cast<uint32_t>(rows.size());
}

void Operation::output_rows(const at::Tensor& tensor, const std::vector<int64_t>& rows) {
  append_rows(outputs_.spans, writable(tensor, Access::kWrite), rows);
  outputs_.count = static_cast<uint32_t>(rows.size());
}

void Operation::input_parts(const std::vector<at::Tensor>& tensors, int parts) {
  std::vector<at::Tensor> contiguous;
  for (const auto& tensor : tensors) {
    contiguous.push_back(readable(tensor));
  }
  append_parts(inputs_.spans, contiguous, parts);
  inputs_.count = static_cast<uint32_t>(parts);
  inputs_.per_chunk = static_cast<uint32_t>(tensors.size());
}

void Operation::output_parts(const std::vector<at::Tensor>& tensors, int parts) {
  std::vector<at::Tensor> contiguous;
  for (const auto& tensor : tensors) {
    contiguous.push_back(writable(tensor, Access::kWrite));
  }
  append_parts(outputs_.spans, contiguous, parts);
  outputs_.count = static_cast<uint32_t>(parts);
  outputs_.per_chunk = static_cast<uint32_t>(tensors.size());
}

void Operation::reduce_with(const c10d::ReduceOp& op) {
  reduces_ = true;
  scale_ = premul_factor(op);
  reduce_op_ = reduce_op(op, name());
}

void Operation::shape_of(const std::vector<at::Tensor>& tensors, Shapes rule) {
  shape_hash_ = 0xcbf29ce484222325;
  for (const auto& tensor : tensors) {
    check(tensor);
    mix(shape_hash_, static_cast<uint64_t>(tensor.dim()));
    for (const int64_t size : tensor.sizes()) {
      mix(shape_hash_, static_cast<uint64_t>(size));
    }
  }
  shape_ = tensors.front().sizes().vec();
  shape_rule_ = rule == Shapes::kMustMatch ? TPURUN_SHAPE_MATCH : TPURUN_SHAPE_SHOW;
}

// Whether the engine allows this output to be the very memory of this input.
bool Operation::may_share(size_t input, size_t output, int rank) const {
  const auto own = static_cast<size_t>(rank);
  switch (collective_) {
    case TPURUN_ALL_REDUCE:
    case TPURUN_REDUCE:
      return input == output;
    case TPURUN_ALL_GATHER:
      return output / outputs_.per_chunk == own && output % outputs_.per_chunk == input;
    case TPURUN_REDUCE_SCATTER:
      return input / inputs_.per_chunk == own && input % inputs_.per_chunk == output;
    default:
      return false;
  }
}

// The engine writes outputs while others still read inputs: an input that shares memory with an output, other
// than in place, is read from a copy.
void Operation::separate_overlaps(int rank) {
  if (!overlap(bounds(inputs_.spans), bounds(outputs_.spans))) {
    return;
  }
  for (size_t i = 0; i < inputs_.spans.size(); ++i) {
    auto& in = inputs_.spans[i];
    for (size_t o = 0; o < outputs_.spans.size(); ++o) {
      const auto& out = outputs_.spans[o];
      const bool in_place = in.data == out.data && in.bytes == out.bytes && may_share(i, o, rank);
      if (overlap(in, out) && !in_place) {
        auto copy = at::empty({static_cast<int64_t>(in.bytes)}, at::kByte);
        std::memcpy(copy.data_ptr(), in.data, in.bytes);
        in.data = copy.data_ptr();
        kept_.push_back(std::move(copy));
        break;
      }
    }
  }
}

// Two ranks' results for the same bytes: one of them would be lost, and which one is chance. Staged outputs
// have memory of their own until the copy home, so the tensors themselves are compared.
void Operation::refuse_shared_outputs() const {
  TORCH_CHECK_VALUE(!share_bytes(results_), name(), ": expected outputs that lie apart in memory, got ",
                    "two that share bytes; pass a tensor of its own for each");
}

TpurunOp Operation::record(int rank, const std::string& site, int64_t timeout_ms) {
  if (results_.size() > 1 && outputs_.count != 0) {
    refuse_shared_outputs();
  }
  separate_overlaps(rank);
  TpurunOp record{};
  record.collective = collective_;
  record.dtype = dtype_ == at::ScalarType::Undefined ? TPURUN_U8
                 : reduces_                          ? reducible_dtype(dtype_, name())
                                                     : movable_dtype(dtype_, name());
  record.reduce_op = reduce_op_;
  record.root = root_;
  record.tag = tag_;
  record.scale = scale_;
  record.inputs = inputs_.spans.data();
  record.input_chunks = inputs_.count;
  record.inputs_per_chunk = inputs_.per_chunk;
  record.outputs = outputs_.spans.data();
  record.output_chunks = outputs_.count;
  record.outputs_per_chunk = outputs_.per_chunk;
  record.shape = shape_.data();
  record.ndim = static_cast<uint32_t>(shape_.size());
  record.shape_rule = shape_rule_;
  record.shape_hash = shape_hash_;
  record.timeout_ms = timeout_ms;
  record.site = site.data();
  record.site_bytes = site.size();
  return record;
}

void Operation::copy_back() {
  // The stream waits for this very operation. To take that from it here would be to wait for oneself, for
  // ever on a callback thread, while the program reads what is not there yet.
  const device::streams::BringingHome bringing_home;
  // Like the engine's own writes: neither recorded by autograd nor refused for a leaf or an inference tensor.
  const at::NoGradGuard no_grad;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  for (const auto& staged : staged_) {
    staged.home.copy_(staged.copy);
  }
}

}  // namespace tpurun
