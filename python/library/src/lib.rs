//! The engine and the runtime in one library: the extension links this crate alone, and calls the two `ffi` modules.

pub use tpurun_engine as engine;
pub use tpurun_runtime as runtime;
