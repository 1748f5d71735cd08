//! How models run: every interleaving under loom, many real ones as a plain test.

#[cfg(tpurun_loom)]
pub(crate) use loom::{sync::Arc, thread::spawn};
#[cfg(not(tpurun_loom))]
pub(crate) use std::{sync::Arc, thread::spawn};

/// Runs a model.
pub(crate) fn model(body: impl Fn() + Sync + Send + 'static) {
    #[cfg(tpurun_loom)]
    {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound.get_or_insert(2);
        builder.check(body);
    }
    #[cfg(not(tpurun_loom))]
    for _ in 0..200 {
        body();
    }
}
