// Random numbers of device `tpu`: a seed and an offset, as every accelerator has them.
#pragma once

#include <cstdint>

#include <ATen/core/Generator.h>

namespace tpurun::device {

// Its whole state is (seed, offset), 16 bytes: DTensor sets the offset of a shard by itself. Each random
// operation draws from an engine of its own that the two determine, and moves the offset on.
class Generator final : public c10::GeneratorImpl {
 public:
  explicit Generator(c10::DeviceIndex index);

  // A CPU generator for one operation.
  at::Generator next();

  void set_current_seed(uint64_t seed) override;
  void set_offset(uint64_t offset) override;
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override;
  void set_state(const c10::TensorImpl& state) override;
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override;

  static c10::DeviceType device_type() { return c10::DeviceType::PrivateUse1; }

 private:
  Generator* clone_impl() const override;

  uint64_t seed_ = c10::default_rng_seed_val;
  uint64_t offset_ = 0;
};

// The generator that random operations use unless given one; -1 is the current device.
const at::Generator& default_generator(c10::DeviceIndex index);

}  // namespace tpurun::device
