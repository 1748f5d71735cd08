//! How models run: every interleaving under loom, many real ones as a plain test.

#[cfg(tpurun_loom)]
pub(crate) use loom::{sync::Arc, thread::spawn};
#[cfg(not(tpurun_loom))]
pub(crate) use std::{sync::Arc, thread::spawn};

/// Runs a model.
pub(crate) fn model(body: impl Fn() + Sync + Send + 'static) {
    model_within(usize::MAX, body);
}

/// Runs a model with at most so many preemptions: with three threads that do much, more take minutes.
pub(crate) fn model_within(preemptions: usize, body: impl Fn() + Sync + Send + 'static) {
    #[cfg(tpurun_loom)]
    {
        let mut builder = loom::model::Builder::new();
        let bound = builder.preemption_bound.unwrap_or(2).min(preemptions);
        builder.preemption_bound = Some(bound);
        // A thread that waits for a writer looks again and again.
        builder.max_branches = 10_000;
        builder.check(body);
    }
    #[cfg(not(tpurun_loom))]
    let _ = preemptions;
    #[cfg(not(tpurun_loom))]
    for _ in 0..200 {
        body();
    }
}

/// Bytes that only the protocol keeps apart: a model fails when one side may read what the other writes.
#[derive(Debug, Default)]
pub(crate) struct Bytes(#[cfg(tpurun_loom)] loom::cell::UnsafeCell<()>);

// SAFETY: there is nothing inside; loom only notes who is here.
#[cfg(tpurun_loom)]
#[allow(unsafe_code)]
unsafe impl Sync for Bytes {}

impl Bytes {
    pub(crate) fn read(&self) {
        #[cfg(tpurun_loom)]
        self.0.with(|_| ());
    }

    pub(crate) fn write(&self) {
        #[cfg(tpurun_loom)]
        self.0.with_mut(|_| ());
    }
}
