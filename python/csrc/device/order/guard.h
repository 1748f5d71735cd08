// The current device and its streams.
#pragma once

#include <c10/core/Device.h>

namespace tpurun::device {

// The current device is a setting of the calling thread.
c10::Device current_device();
void set_current_device(c10::DeviceIndex index);  // IndexError beyond device_count()

// Names of one and the same memory: a rank may say tpu:LOCAL_RANK, as scripts do, or just tpu.
c10::DeviceIndex device_count();

// Whether a thread beside the main one has had a device, as autograd's have from the first backward pass on.
bool threads_have_devices();

// Autograd starts a thread for each.
c10::DeviceIndex devices_of_autograd();

// Makes the guard known to torch; `count` is what device_count() is from now on.
void install_guard(c10::DeviceIndex count);

}  // namespace tpurun::device
