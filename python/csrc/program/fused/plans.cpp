#include "program/fused/plans.h"

#include <algorithm>
#include <limits>
#include <utility>

#include <c10/util/Exception.h>

#include "program/plan.h"
#include "program/recording.h"

namespace tpurun::program::fused {

namespace {

const c10::Device kDevice(c10::DeviceType::PrivateUse1, 0);

Sizes known(c10::IntArrayRef numbers) {
  Sizes sizes;
  for (const int64_t number : numbers) {
    sizes.push_back({number, false});
  }
  return sizes;
}

// The records as a program, and what it calls them.
struct Written {
  Recording recording;
  std::vector<ValueId> roots;
  std::vector<ValueId> values;
};

void write_values(const Records& records, Written& written) {
  for (const Root& root : records.roots()) {
    if (root.is_input()) {
      written.roots.push_back(
          written.recording.input(c10::ScalarType::Byte, kDevice, known({root.bytes}), known({1})));
    } else {
      const Value& all = records.values()[root.first];
      written.roots.push_back(
          written.recording.result(all.dtype, kDevice, known(all.shape()), known(all.steps())));
    }
  }
  for (std::size_t at = 0; at < records.values().size(); ++at) {
    const Value& value = records.values()[at];
    const Root& root = records.roots()[value.root];
    const bool is_all = !root.is_input() && root.first == at;
    written.values.push_back(is_all ? written.roots[value.root]
                                    : written.recording.view(written.roots[value.root], value.dtype,
                                                             known(value.shape()), known(value.steps()),
                                                             {value.offset, false}, /*is_absolute=*/false));
  }
}

void write_operations(const Records& records, Written& written) {
  for (std::size_t at = 0; at < records.operations(); ++at) {
    const Record& record = records.operation(at);
    std::vector<ValueId> operands;
    for (const Operand& operand : record.pointwise.operands) {
      if (operand.argument != Operand::kNumber) {
        operands.push_back(written.values[record.operands[operands.size()]]);
      }
    }
    written.recording.tiled(*record.op, record.pointwise, operands, written.values[record.target],
                            record.is_written ? Recording::Target::kWritten : Recording::Target::kMade);
  }
  for (std::size_t at = 0; at < written.roots.size(); ++at) {
    if (records.roots()[at].is_needed()) {
      written.recording.output(written.roots[at]);
    }
  }
}

}  // namespace

StretchPlan::StretchPlan(const Records& records) {
  Written written;
  write_values(records, written);
  write_operations(records, written);
  const Plan plan = Checked(written.recording).plan({}, std::numeric_limits<int64_t>::max());
  workspace_ = plan.workspace;
  for (const Step& step : plan.steps) {
    TORCH_INTERNAL_ASSERT(step.kind != Step::Kind::kRun, "an operation that was recorded is not in tiles");
  }
  for (std::size_t at = 0; at < written.roots.size(); ++at) {
    const ValueMemory& place = plan.places[written.roots[at]];
    if (place.kind == ValueMemory::Kind::kWorkspace) {
      placed_.push_back({static_cast<uint16_t>(at), place.at});
    }
  }
  for (const Group& group : plan.groups) {
    groups_.emplace_back(group, written.recording);
    operations_.emplace_back();
    together_ += group.instructions.size() > 1 ? group.instructions.size() : 0;
    for (const Instruction& instruction : group.instructions) {
      operations_.back().push_back(instruction.operation);
    }
    for (std::size_t access = 0; access < groups_.back().accesses(); ++access) {
      const auto found =
          std::find(written.values.begin(), written.values.end(), groups_.back().value(access));
      const Value& value = records.values()[static_cast<std::size_t>(found - written.values.begin())];
      accesses_.push_back({groups_.size() - 1, access, value.root,
                           value.offset * static_cast<int64_t>(c10::elementSize(value.dtype))});
    }
  }
}

void StretchPlan::run(const Records& records, std::vector<char*>& bases, char* workspace) {
  for (const Placed& placed : placed_) {
    bases[placed.root] = workspace + placed.at;
  }
  for (const Access& access : accesses_) {
    groups_[access.group].set(access.access, bases[access.root] + access.offset);
  }
  for (std::size_t group = 0; group < groups_.size(); ++group) {
    for (std::size_t call = 0; call < operations_[group].size(); ++call) {
      groups_[group].set_numbers(call, records.operation(operations_[group][call]).pointwise);
    }
    groups_[group].run();
  }
}

StretchPlan& Plans::of(Records& records) {
  const auto& key = records.key_of_now();
  const uint64_t hash = records.hash_of_now();
  const auto found = known_.find(hash);
  if (found != known_.end() && found->second.key == key) {
    found->second.used = ++uses_;
    return *found->second.plan;
  }
  auto plan = std::make_unique<StretchPlan>(records);
  ++made_;
  if (known_.size() >= kMost) {
    forget_oldest();
  }
  Known& made = known_[hash];
  made = {key, std::move(plan), ++uses_};
  return *made.plan;
}

void Plans::forget_oldest() {
  known_.erase(std::min_element(known_.begin(), known_.end(), [](const auto& one, const auto& other) {
    return one.second.used < other.second.used;
  }));
}

}  // namespace tpurun::program::fused
