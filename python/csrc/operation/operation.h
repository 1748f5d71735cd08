// One operation between torch and the engine: checked tensors, and the spans of memory cut from them.
//
// Tensors the engine can not use as they are (strided, overlapping) are replaced by contiguous
// copies here; `copy_back` brings the results of those home.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "abi/tpurun.h"

namespace tpurun {

enum class Shapes { kMayDiffer, kMustMatch };
enum class Access { kWrite, kReadWrite };

class Operation {
 public:
  // `title` is what profilers show; its part after "tpu_dist:" names the operation in messages.
  Operation(TpurunCollective collective, c10d::OpType type, const char* title);

  // One more chunk.
  void input(const at::Tensor& tensor);
  void output(const at::Tensor& tensor);
  // One chunk per tensor.
  void inputs_each(const std::vector<at::Tensor>& tensors);
  void outputs_each(const std::vector<at::Tensor>& tensors);
  // One chunk per list, of as many pieces as the lists are long.
  void inputs(const std::vector<std::vector<at::Tensor>>& lists);
  void outputs(const std::vector<std::vector<at::Tensor>>& lists);
  // Equal parts: chunk c is part c of every tensor.
  void input_parts(const std::vector<at::Tensor>& tensors, int parts);
  void output_parts(const std::vector<at::Tensor>& tensors, int parts);
  // The rows (dimension 0) of one tensor, dealt to one chunk per entry of `rows`.
  void input_rows(const at::Tensor& tensor, const std::vector<int64_t>& rows);
  void output_rows(const at::Tensor& tensor, const std::vector<int64_t>& rows);
  // One chunk of all these tensors, read and replaced in place.
  void in_place(const std::vector<at::Tensor>& tensors);
  // A tensor that the operation only reads here, and that is its result all the same.
  void result(const at::Tensor& tensor) { results_.push_back(tensor); }

  void reduce_with(const c10d::ReduceOp& op);
  void root(int64_t rank) { root_ = static_cast<int32_t>(rank); }
  void tag(int value) { tag_ = value; }
  // The shape shown in messages, and whether every rank must have the same.
  void shape_of(const std::vector<at::Tensor>& tensors, Shapes rule);

  // The record the engine reads; valid as long as this object and `site` are.
  TpurunOp record(int rank, const std::string& site, int64_t timeout_ms);

  bool copies_back() const { return !staged_.empty(); }
  void copy_back();

  const char* name() const;
  const char* title() const { return title_; }
  c10d::OpType type() const { return type_; }
  const std::vector<at::Tensor>& profiled() const { return profiled_; }
  const std::vector<at::Tensor>& results() const { return results_; }

  // Where its tensors are, when that is not the host.
  std::optional<c10::Device> device() const;

  // To be called when it failed: ranks that use tensors of the device in place may not have noticed yet, so
  // their memory is never used for anything else.
  void give_up() noexcept;

 private:
  struct Chunks {
    std::vector<TpurunSpan> spans;
    uint32_t count = 0;
    uint32_t per_chunk = 1;
  };
  struct Staged {
    at::Tensor home;
    at::Tensor copy;
  };

  void check(const at::Tensor& tensor);
  at::Tensor readable(const at::Tensor& tensor);
  at::Tensor writable(const at::Tensor& tensor, Access access);
  void separate_overlaps(int rank);
  void refuse_shared_outputs() const;
  bool may_share(size_t input, size_t output, int rank) const;

  TpurunCollective collective_;
  c10d::OpType type_;
  const char* title_;
  at::ScalarType dtype_ = at::ScalarType::Undefined;
  TpurunReduceOp reduce_op_ = TPURUN_SUM;
  double scale_ = 1.0;
  bool reduces_ = false;
  int32_t root_ = -1;
  int32_t tag_ = 0;
  Chunks inputs_;
  Chunks outputs_;
  std::vector<int64_t> shape_;
  uint32_t shape_rule_ = TPURUN_SHAPE_SHOW;
  uint64_t shape_hash_ = 0;
  std::vector<at::Tensor> kept_;
  std::vector<Staged> staged_;
  std::vector<at::Tensor> profiled_;
  std::vector<at::Tensor> results_;
};

}  // namespace tpurun
