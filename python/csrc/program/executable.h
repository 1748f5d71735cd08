// A program with the sizes of one run, ready to be run many times: tensors over planned memory, the arguments
// of every kernel, and where each result goes. A run allocates what the program returns, large values, one
// workspace for the others, and what ATen's kernels allocate themselves.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>
#include <c10/core/StorageImpl.h>

#include "program/group.h"
#include "program/plan.h"
#include "program/product.h"
#include "program/recording.h"

namespace tpurun::program {

class Executable {
 public:
  // `recording` outlives it.
  Executable(const Recording& recording, const Checked& checked, std::vector<int64_t> sizes);

  // An argument of the next run, by its number. The caller holds a tensor that it lends until that is
  // over, and lets go of one that it gives.
  void lend(std::size_t input, const at::Tensor& tensor) { inputs_[input].tensor = &tensor; }
  void give(std::size_t input, const at::Tensor& tensor) {
    inputs_[input].own = tensor;
    inputs_[input].tensor = &inputs_[input].own;
  }

  // One run after the other: two at a time need two executables.
  std::vector<at::Tensor> run();

  // Has the next runs add the nanoseconds of each step to this list, which has one entry a step; null: none.
  void time(std::vector<int64_t>* of_steps) { times_ = of_steps; }

  const std::vector<int64_t>& sizes() const { return sizes_; }
  const Plan& plan() const { return plan_; }

 private:
  // The memory of a root, and all tensors over it: also those of roots that take it over.
  struct Root {
    c10::intrusive_ptr<c10::StorageImpl> storage;  // of what is not allocated anew
    std::vector<ValueId> tensors;
    std::vector<std::pair<std::size_t, std::size_t>>
        accesses;  // of a group: its number, and that of the access
    int64_t bytes = 0;
    // Nobody but kernels that are told where to put results sees it, so its storage stays from run to run.
    bool is_private = false;
    const std::string* line = nullptr;  // of the operation that makes it
  };

  // An argument of a run.
  struct Input {
    ValueId root = 0;
    const at::Tensor* tensor = nullptr;
    at::Tensor own;         // let go when it is not needed any more
    char* begin = nullptr;  // of its storage in the last run
    int64_t offset = 0;     // of its first element in that
    bool is_known = false;  // whether there was a last run
  };

  // How an argument of a call is found.
  struct Slot {
    std::size_t argument;
    ValueId value;
  };

  struct Call {
    const Operation* operation = nullptr;
    std::vector<c10::IValue> stack;  // with all arguments that do not change
    std::vector<Slot> slots;         // single tensors that are not in `stack`, as they are others in each run
    std::vector<std::size_t> lists;  // arguments that are lists of tensors
    std::optional<Product> product;
    bool is_told = false;
    bool is_on_device = false;  // something that it makes
  };

  void make_tensors();
  void make_groups();
  void make_calls();
  void find_lines();
  void relate_outputs();
  void find_private();
  void sort_roots();
  Call call(const Operation& operation) const;
  std::vector<int64_t> numbers(const Sizes& sizes) const;
  int64_t bytes_of(const Value& value) const;

  void begin();
  bool may_be_left_out(ValueId root) const;
  void set_input(Input& input);
  void check_input(ValueId root, const at::Tensor& tensor);
  void set_address(ValueId root, char* first);
  ValueId owner(ValueId root) const;
  void place(ValueId root, int64_t offset_bytes);
  void own(ValueId root, const c10::Storage& storage, int64_t offset_bytes);
  void make(ValueId root);
  void run_call(Call& call);
  void look_again(const Operation& operation);
  void fill_lists(const Call& call, torch::jit::Stack& stack);
  void take_results(const Operation& operation, torch::jit::Stack& stack);
  bool shares_memory(const Operation& operation, const at::Tensor& made) const;
  void take_result(ValueId result, at::Tensor made);
  at::Tensor given(const Operation& operation, ValueId value);
  at::Tensor as_predicted(ValueId result, at::Tensor made) const;
  void free(ValueId root);
  void step(const Step& step);
  void timed_step(const Step& step);
  const std::string& line_of(const Step& step) const;
  at::Tensor on_its_device(ValueId value);
  const c10::Storage& storage_of(ValueId root);
  std::vector<at::Tensor> run_steps();
  std::vector<at::Tensor> outputs();
  void relate(std::vector<at::Tensor>& outputs) const;
  at::Tensor tensor_over(ValueId root, const c10::Storage& storage) const;
  void end();

  const Recording& recording_;
  std::vector<int64_t> sizes_;
  Plan plan_;
  std::vector<Root> roots_;             // by the number of the value
  std::vector<at::Tensor> tensors_;     // on the CPU, by the number of the value
  std::vector<c10::Storage> storages_;  // of roots on the device, where they have been asked for
  std::vector<Input> inputs_;
  std::vector<ValueId> in_workspace_;  // roots that groups look at there
  std::vector<ValueId> passing_;       // roots whose memory is another one in each run
  c10::intrusive_ptr<c10::StorageImpl> workspace_;
  std::vector<TiledGroup> groups_;
  std::vector<Call> calls_;                        // by the number of the operation
  std::vector<std::vector<std::size_t>> related_;  // outputs that share memory with each other
  std::vector<std::size_t> first_of_;              // for each output, the first one of the same value
  std::vector<int64_t>* times_ = nullptr;
  std::string largest_line_;  // that asks for the largest value of the workspace
  bool is_on_device_ = false;
};

}  // namespace tpurun::program
