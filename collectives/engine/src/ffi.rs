#![allow(unsafe_code)]
//! The C ABI, see `python/csrc/abi/tpurun.h`: with its rooms the only `extern "C"` of the engine.
//!
//! Validates, converts, forwards. A panic is a bug and becomes `TPURUN_INTERNAL`, never an unwind into C++.

pub mod program_runs;

use std::ffi::{c_char, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use crate::communicator::sentinel::Sentinel;
use crate::communicator::{Communicator, Mode};
use crate::hosts::network::Network;
use crate::join::Bootstrap;
use crate::join::bootstrap::{self, ControlBootstrap, Store, StoreBootstrap};
use crate::queue::work::{OnDone, Outcome, Work};
use tpurun_kernels::dtype::{Dtype, ReduceOp};
use tpurun_kernels::reduce::{self, Copying};
use tpurun_memory::buffer::Spans;
use tpurun_memory::failure::{Failure, FailureKind, bug};
use tpurun_memory::ffi::CError;
use tpurun_memory::invalid_usage;
use tpurun_memory::process::Owner;
use tpurun_memory::sync::interrupt;
use tpurun_memory::traffic::Traffic;
use tpurun_protocol::board::{Board, RankWriter};
use tpurun_protocol::config::Config;
use tpurun_protocol::control::ControlClient;
use tpurun_protocol::membership::Membership;
use tpurun_protocol::op::{Op, OpKind, Shape};
use tpurun_protocol::site::Site;

/// `TPURUN_ABI_VERSION`: what the shim was compiled for and what it is linked with are of one build.
const ABI_VERSION: u32 = 1;
/// A word for each of some ten thousand ranks.
const STORE_VALUE_BYTES: usize = 64 << 10;
const OK: i32 = 0;
const ASYNC: u32 = 1;
const LAZY: u32 = 2;
const SHAPE_MATCH: u32 = 1;

/// `TpurunSpan`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CSpan {
    data: *mut u8,
    bytes: u64,
}

/// `TpurunStore`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CStore {
    ctx: *mut c_void,
    set: unsafe extern "C" fn(*mut c_void, *const u8, u64, *const u8, u64) -> i32,
    get: unsafe extern "C" fn(*mut c_void, *const u8, u64, *mut u8, u64, *mut u64) -> i32,
    add: unsafe extern "C" fn(*mut c_void, *const u8, u64, i64, *mut i64) -> i32,
}

/// `TpurunCommConfig`.
#[repr(C)]
#[derive(Debug)]
pub struct CConfig {
    name: *const u8,
    name_bytes: u64,
    rank: i32,
    size: i32,
    global_ranks: *const i32,
    timeout_ms: i64,
    store: CStore,
    python_threads: u32,
    epoch: u32,
    beyond_job: u32,
    reserved: u32,
}

/// `TpurunMembers`.
#[repr(C)]
#[derive(Debug)]
pub struct CMembers {
    name: *const u8,
    name_bytes: u64,
    rank: u32,
    size: u32,
    global_ranks: *const u32,
    epoch: u32,
    beyond_job: u32,
}

type CDone = unsafe extern "C" fn(*mut c_void, *const CError, i32);

/// `TpurunOp`.
#[repr(C)]
#[derive(Debug)]
pub struct COp {
    collective: u32,
    dtype: u32,
    reduce_op: u32,
    flags: u32,
    root: i32,
    tag: i32,
    scale: f64,
    inputs: *const CSpan,
    input_chunks: u32,
    inputs_per_chunk: u32,
    outputs: *const CSpan,
    output_chunks: u32,
    outputs_per_chunk: u32,
    shape: *const i64,
    ndim: u32,
    shape_rule: u32,
    shape_hash: u64,
    timeout_ms: i64,
    site: *const u8,
    site_bytes: u64,
    done: Option<CDone>,
    done_ctx: *mut c_void,
    python_threads: u32,
    reserved: u32,
}

// The header asserts the same numbers, and a test below that they are.
const _: () = assert!(size_of::<CError>() == 12288);
const _: () = assert!(size_of::<CSpan>() == 16);
const _: () = assert!(size_of::<CStore>() == 32);
const _: () = assert!(size_of::<CConfig>() == 88);
const _: () = assert!(size_of::<CMembers>() == 40);
const _: () = assert!(size_of::<COp>() == 136);
const _: () = assert!(size_of::<CCheck>() == 16);
const _: () = assert!(size_of::<Traffic>() == 24);

/// `TpurunWork`: keeps its communicator, which a waiting thread may have to drive.
#[derive(Debug)]
pub struct CWork {
    communicator: Arc<Communicator>,
    work: Arc<Work>,
}

/// The parts that a process inherits from the launcher, at most once.
struct Inherited {
    board: Option<Board>,
    /// The place on it of this process, for what is of no group.
    rank: Option<RankWriter>,
    control: Option<ControlClient>,
    /// Where no agent watches.
    sentinel: Sentinel,
    /// To other hosts.
    network: Network,
}

/// That of this process, once somebody has asked, or of the one it was forked from.
static INHERITED: AtomicPtr<(Owner, OnceLock<Inherited>)> = AtomicPtr::new(std::ptr::null_mut());

fn inherited() -> &'static Inherited {
    let known = INHERITED.load(Ordering::Acquire);
    // SAFETY: what was put there is never freed.
    if let Some((owner, inherited)) = unsafe { known.as_ref() }
        && owner.is_here()
    {
        return inherited.get_or_init(inherit);
    }
    let made = Box::into_raw(Box::new((Owner::here(), OnceLock::new())));
    let kept = match INHERITED.compare_exchange(known, made, Ordering::AcqRel, Ordering::Acquire) {
        Ok(_) => made,
        Err(of_another_thread) => {
            // SAFETY: made above, and nobody else has it.
            drop(unsafe { Box::from_raw(made) });
            of_another_thread
        }
    };
    // SAFETY: as above.
    unsafe { &*kept }.1.get_or_init(inherit)
}

fn inherit() -> Inherited {
    // A process that a rank forked has the same descriptors, but is not the rank.
    let rank_pid = std::env::var("TPURUN_RANK_PID").ok().and_then(|pid| pid.parse::<u32>().ok());
    if rank_pid.is_some_and(|pid| pid != std::process::id()) {
        let (sentinel, network) = (Sentinel::new(), Network::new());
        return Inherited { board: None, rank: None, control: None, sentinel, network };
    }
    let board = Board::from_env();
    let number = std::env::var("RANK").ok().and_then(|rank| rank.parse::<u32>().ok());
    let own = board.as_ref().zip(number).filter(|(board, rank)| *rank < board.world());
    Inherited {
        rank: own.map(|(board, rank)| board.rank(rank)),
        board,
        control: ControlClient::from_env(),
        sentinel: Sentinel::new(),
        network: Network::new(),
    }
}

/// # Safety
/// `tpurun.h`: all pointers are valid for the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tpurun_comm_create(
    config: *const CConfig,
    communicator: *mut *mut Arc<Communicator>,
    error: *mut CError,
) -> i32 {
    guarded(error, || {
        // SAFETY: the caller's promise.
        let config = unsafe { &*config };
        let created = Arc::new(create(config)?);
        let handle = Box::into_raw(Box::new(created));
        // SAFETY: the caller's promise.
        unsafe { *communicator = handle };
        Ok(())
    })
}

fn create(config: &CConfig) -> Result<Communicator, Failure> {
    let size = u32::try_from(config.size).ok().filter(|size| (1..=65_536).contains(size));
    let size =
        size.ok_or_else(|| invalid_usage!("expected a group of 1 to 65536 ranks, given {}", config.size))?;
    let rank = u32::try_from(config.rank).ok().filter(|rank| *rank < size);
    let rank = rank.ok_or_else(|| {
        invalid_usage!(
            "expected this process's rank in a group of {size}, given {}: it is not in the group",
            config.rank
        )
    })?;
    // SAFETY: the header promises `name_bytes` bytes.
    let name = unsafe { text(config.name, config.name_bytes) };
    // SAFETY: the header promises `size` entries.
    let world_ranks = unsafe { slice(config.global_ranks, size as usize) };
    let world_ranks = world_ranks.iter().map(|rank| {
        u32::try_from(*rank)
            .map_err(|_| invalid_usage!("expected ranks of the world from 0 on, given {rank}"))
    });
    let world_ranks = world_ranks.collect::<Result<_, _>>()?;
    let members = Membership { name, rank, world_ranks, epoch: config.epoch };
    let timeout = u64::try_from(config.timeout_ms).ok().filter(|ms| *ms > 0);
    let timeout = timeout
        .ok_or_else(|| invalid_usage!("expected a timeout above 0 ms, given {}", config.timeout_ms))
        .map(Duration::from_millis)?;
    let inherited = inherited();
    let by_store = || StoreBootstrap::new(config.store, rank, &inherited.network);
    // The launcher of this process knows nothing of the ranks of another one.
    let is_of_job = config.beyond_job == 0;
    let control = inherited.control.as_ref().filter(|_| is_of_job);
    let bootstrap: Box<dyn Bootstrap> = match control {
        Some(client) if bootstrap::is_of_several_hosts() => Box::new(by_store()?.under(client, &members)),
        Some(client) => Box::new(ControlBootstrap::new(client, &members)),
        None => Box::new(by_store()?),
    };
    let board = inherited.board.as_ref().filter(|_| is_of_job);
    let threads = config.python_threads;
    let created = Communicator::create(members, timeout, Config::from_env()?, &*bootstrap, board, threads)?;
    Ok(if control.is_none() { created.watched_by(&inherited.sentinel) } else { created })
}

/// # Safety
/// `tpurun.h`: all pointers are valid for the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tpurun_comm_shrink(
    communicator: *const Arc<Communicator>,
    lost: *const u32,
    lost_count: u64,
    timeout_ms: i64,
    python_threads: u32,
    survivors: *mut *mut Arc<Communicator>,
    error: *mut CError,
) -> i32 {
    guarded(error, || {
        // SAFETY: the caller's promise.
        let communicator = unsafe { &*communicator };
        // SAFETY: the caller's promise.
        let lost = unsafe { slice(lost, lost_count as usize) };
        let timeout = Duration::from_millis(timeout_ms.max(1) as u64);
        let Inherited { board, control, sentinel, .. } = inherited();
        // A group that no agent watches is of no job, or of several.
        let (board, control) = match communicator.has_agent() {
            true => (board.as_ref(), control.as_ref()),
            false => (None, None),
        };
        let shrunk =
            communicator.shrink(lost, timeout, &Config::from_env()?, control, board, python_threads)?;
        let shrunk = if control.is_none() { shrunk.watched_by(sentinel) } else { shrunk };
        let handle = Box::into_raw(Box::new(Arc::new(shrunk)));
        // SAFETY: the caller's promise.
        unsafe { *survivors = handle };
        Ok(())
    })
}

/// # Safety
/// `tpurun.h`: all pointers are valid for the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tpurun_comm_members(communicator: *const Arc<Communicator>, members: *mut CMembers) {
    // SAFETY: the caller's promise.
    let group = unsafe { &*communicator };
    let own = group.members();
    let filled = CMembers {
        name: own.name.as_ptr(),
        name_bytes: own.name.len() as u64,
        rank: own.rank,
        size: own.size(),
        global_ranks: own.world_ranks.as_ptr(),
        epoch: own.epoch,
        beyond_job: u32::from(!group.has_agent()),
    };
    // SAFETY: the caller's promise; it may be uninitialised, so it is only written.
    unsafe { members.write(filled) };
}

/// # Safety
/// `tpurun.h`: all pointers are valid for the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tpurun_comm_traffic(communicator: *const Arc<Communicator>, traffic: *mut Traffic) {
    // SAFETY: the caller's promise.
    let moved = unsafe { &*communicator }.traffic();
    // SAFETY: the caller's promise; it may be uninitialised, so it is only written.
    unsafe { traffic.write(moved) };
}

/// # Safety
/// `tpurun.h`: `from` is readable and `to` writable for `bytes` bytes, and they are apart.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tpurun_stream_copy(to: *mut u8, from: *const u8, bytes: u64) {
    let bytes = usize::try_from(bytes).expect("memory is not larger than addresses");
    // SAFETY: the caller's promise.
    unsafe { reduce::copy(Copying::Streaming, from, to, bytes) };
}

/// # Safety
/// `tpurun.h`: all pointers are valid for the call, spans and `done_ctx` of an asynchronous op until `done`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tpurun_post(
    communicator: *const Arc<Communicator>,
    op: *const COp,
    work: *mut *mut CWork,
    error: *mut CError,
) -> i32 {
    guarded(error, || {
        // SAFETY: the caller's promise.
        unsafe { *work = std::ptr::null_mut() };
        // SAFETY: the caller's promise.
        let communicator = unsafe { &*communicator };
        // SAFETY: the caller's promise.
        let c_op = unsafe { &*op };
        // SAFETY: the caller's promise about spans is what `convert` asks for.
        let op = unsafe { convert(c_op) }?;
        let mode = match (c_op.flags & ASYNC, c_op.flags & LAZY) {
            (0, _) => Mode::Blocking,
            (_, 0) => Mode::Async(on_done(c_op)),
            _ => Mode::Lazy(on_done(c_op)),
        };
        if let Some(posted) = communicator.post(op, mode)? {
            let handle = Box::into_raw(Box::new(CWork { communicator: communicator.clone(), work: posted }));
            // SAFETY: the caller's promise.
            unsafe { *work = handle };
        }
        Ok(())
    })
}

/// # Safety
/// The spans stay valid until the returned op is dropped.
unsafe fn convert(op: &COp) -> Result<Op, Failure> {
    let kind = OpKind::from_code(op.collective);
    let kind = kind.ok_or_else(|| invalid_usage!("{} is not a collective", op.collective))?;
    let dtype = Dtype::try_from(op.dtype).map_err(|error| invalid_usage!("{kind}: {error}"))?;
    let reduce_op = ReduceOp::try_from(op.reduce_op).map_err(|error| invalid_usage!("{kind}: {error}"))?;
    // SAFETY: the header promises this many entries.
    let shape = Shape::new(unsafe { slice(op.shape, op.ndim as usize) });
    Ok(Op {
        kind,
        dtype,
        reduce_op,
        scale: op.scale,
        root: u32::try_from(op.root).ok(),
        tag: op.tag,
        // SAFETY: the caller's promise.
        inputs: unsafe { spans(op.inputs, op.input_chunks, op.inputs_per_chunk) },
        // SAFETY: the caller's promise.
        outputs: unsafe { spans(op.outputs, op.output_chunks, op.outputs_per_chunk) },
        shape,
        shape_hash: (op.shape_rule == SHAPE_MATCH).then_some(op.shape_hash),
        timeout: u64::try_from(op.timeout_ms).ok().filter(|ms| *ms > 0).map(Duration::from_millis),
        // SAFETY: the header promises `site_bytes` bytes.
        site: Site::from_bytes(unsafe { slice(op.site, op.site_bytes as usize) }),
        python_threads: op.python_threads,
    })
}

/// # Safety
/// As for `Spans::new`, and `chunks * per_chunk` entries are readable.
unsafe fn spans(spans: *const CSpan, chunks: u32, per_chunk: u32) -> Spans {
    if chunks == 0 {
        return Spans::empty();
    }
    // A chunk of no tensors is an empty one.
    if per_chunk == 0 {
        let nothing = std::iter::repeat_n((std::ptr::NonNull::dangling().as_ptr(), 0), chunks as usize);
        // SAFETY: no bytes.
        return unsafe { Spans::new(nothing, 1) };
    }
    // SAFETY: the caller's promise.
    let pieces = unsafe { slice(spans, chunks as usize * per_chunk as usize) };
    let pieces = pieces.iter().map(|span| (span.data, span.bytes as usize));
    // SAFETY: the caller's promise.
    unsafe { Spans::new(pieces, per_chunk as usize) }
}

/// The C callback with its context.
struct Callback {
    done: CDone,
    ctx: *mut c_void,
}

// SAFETY: `tpurun.h` (`TpurunDone`): `done` is called with `done_ctx` on whichever thread ends the operation, so the caller
// has promised that both may be used there. `call` takes `self`, so they are used once, by one thread.
unsafe impl Send for Callback {}

impl Callback {
    fn call(self, outcome: &Outcome) {
        let (error, source) = match outcome {
            Ok(source) => (None, source.map_or(-1, |source| source as i32)),
            Err(failure) => (Some(Box::new(CError::of(failure))), -1),
        };
        let error = error.as_deref().map_or(std::ptr::null(), std::ptr::from_ref);
        // SAFETY: a valid function and its own context, until this one call, which the error outlives.
        unsafe { (self.done)(self.ctx, error, source) };
    }
}

fn on_done(op: &COp) -> Option<OnDone> {
    let callback = Callback { done: op.done?, ctx: op.done_ctx };
    Some(Box::new(move |outcome| callback.call(outcome)))
}

/// # Safety
/// `tpurun.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tpurun_work_wait(
    work: *const CWork,
    timeout_ms: i64,
    python_threads: u32,
    error: *mut CError,
) -> i32 {
    guarded(error, || {
        // SAFETY: the caller's promise.
        let work = unsafe { &*work };
        let timeout = u64::try_from(timeout_ms).ok().filter(|ms| *ms > 0).map(Duration::from_millis);
        let deadline = timeout.map(|timeout| Instant::now() + timeout);
        match work.communicator.wait(&work.work, deadline, python_threads) {
            Some(outcome) => outcome.map(drop),
            None => {
                let waited = timeout.expect("only a wait with a deadline ends without an outcome");
                let name = work.communicator.members().title();
                let text =
                    format!("Timed out after {waited:?} waiting for operation {} of {name}", work.work.seq());
                Err(Failure::new(FailureKind::Timeout, text))
            }
        }
    })
}

/// # Safety
/// `tpurun.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tpurun_work_abort(work: *const CWork, reason: *const u8, bytes: u64) {
    // SAFETY: the caller's promise.
    let work = unsafe { &*work };
    // SAFETY: the caller's promise.
    let reason = unsafe { text(reason, bytes) };
    guarded_void(|| work.communicator.abort(&reason));
}

/// `TpurunCheck`: the check of one thread.
#[repr(C)]
pub struct CCheck {
    function: Option<extern "C" fn(*mut c_void)>,
    argument: *mut c_void,
}

/// `tpurun.h`: both stay valid until the thread sets another one.
#[unsafe(no_mangle)]
pub extern "C" fn tpurun_check_while_waiting(check: CCheck) -> CCheck {
    let before = interrupt::set(check.function.map(|function| (function, check.argument)));
    let (function, argument) =
        before.map_or((None, std::ptr::null_mut()), |(function, argument)| (Some(function), argument));
    CCheck { function, argument }
}

/// `tpurun.h`.
#[unsafe(no_mangle)]
pub extern "C" fn tpurun_stop_waiting() {
    interrupt::stop();
}

/// `tpurun.h`.
#[unsafe(no_mangle)]
pub extern "C" fn tpurun_look_while_waiting() -> i32 {
    if !interrupt::is_set() {
        return -1;
    }
    interrupt::check();
    i32::from(interrupt::is_stopped())
}

/// # Safety
/// `tpurun.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tpurun_work_is_done(work: *const CWork) -> i32 {
    // SAFETY: the caller's promise.
    let CWork { communicator, work } = unsafe { &*work };
    // In a fork of the rank it never ends, and a caller that waits for it gets an error.
    i32::from(work.is_done() || !communicator.is_own())
}

/// # Safety
/// `tpurun.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tpurun_work_attend(work: *const CWork) {
    // SAFETY: the caller's promise.
    let CWork { communicator, work } = unsafe { &*work };
    guarded_void(|| communicator.attend(work));
}

/// # Safety
/// `tpurun.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tpurun_work_seq(work: *const CWork) -> u64 {
    // SAFETY: the caller's promise.
    unsafe { &*work }.work.seq()
}

/// # Safety
/// `tpurun.h`; `work` is not used afterwards.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tpurun_work_free(work: *mut CWork) {
    if !work.is_null() {
        // SAFETY: made by `tpurun_post`, given up by the caller.
        let work = unsafe { Box::from_raw(work) };
        if !work.communicator.is_own() {
            std::mem::forget(work);
            return;
        }
        guarded_void(|| work.communicator.attend(&work.work));
        guarded_void(|| drop(work));
    }
}

/// # Safety
/// `tpurun.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tpurun_comm_abort(
    communicator: *const Arc<Communicator>,
    reason: *const u8,
    bytes: u64,
) {
    // SAFETY: the caller's promise.
    let communicator = unsafe { &*communicator };
    // SAFETY: the caller's promise.
    let reason = unsafe { text(reason, bytes) };
    guarded_void(|| communicator.abort(&reason));
}

/// # Safety
/// `tpurun.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tpurun_comm_shutdown(communicator: *const Arc<Communicator>) {
    // SAFETY: the caller's promise.
    let communicator = unsafe { &*communicator };
    guarded_void(|| communicator.shutdown());
}

/// # Safety
/// `tpurun.h`; `communicator` is not used afterwards, though its works may be.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tpurun_comm_free(communicator: *mut Arc<Communicator>) {
    if !communicator.is_null() {
        // SAFETY: made by `tpurun_comm_create`, given up by the caller.
        let communicator = unsafe { Box::from_raw(communicator) };
        // Its threads are those of the rank that this process is a fork of.
        if !communicator.is_own() {
            std::mem::forget(communicator);
            return;
        }
        guarded_void(|| {
            communicator.shutdown();
            drop(communicator);
        });
    }
}

/// # Safety
/// `tpurun.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tpurun_comm_set_timeout(communicator: *const Arc<Communicator>, timeout_ms: i64) {
    // SAFETY: the caller's promise.
    let communicator = unsafe { &*communicator };
    communicator.set_timeout(Duration::from_millis(timeout_ms.max(1) as u64));
}

/// # Safety
/// `tpurun.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tpurun_comm_timeout(communicator: *const Arc<Communicator>) -> i64 {
    // SAFETY: the caller's promise.
    let timeout = unsafe { &*communicator }.timeout();
    i64::try_from(timeout.as_millis()).unwrap_or(i64::MAX)
}

/// # Safety
/// `tpurun.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tpurun_comm_seq(communicator: *const Arc<Communicator>) -> u64 {
    // SAFETY: the caller's promise.
    unsafe { &*communicator }.seq()
}

/// # Safety
/// `tpurun.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tpurun_comm_failure(
    communicator: *const Arc<Communicator>,
    error: *mut CError,
) -> i32 {
    // SAFETY: the caller's promise.
    let communicator = unsafe { &*communicator };
    guarded(error, || communicator.failure().map_or(Ok(()), Err))
}

/// # Safety
/// `tpurun.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tpurun_comm_check_process(
    communicator: *const Arc<Communicator>,
    error: *mut CError,
) -> i32 {
    // SAFETY: the caller's promise.
    let communicator = unsafe { &*communicator };
    guarded(error, || communicator.check_process(&"a use"))
}

/// The version of this build.
#[unsafe(no_mangle)]
pub extern "C" fn tpurun_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}

/// `tpurun.h`: the version of the interface that this build has.
#[unsafe(no_mangle)]
pub extern "C" fn tpurun_abi_version() -> u32 {
    ABI_VERSION
}

impl Store for CStore {
    fn set(&self, key: &str, value: &str) -> Result<(), Failure> {
        // SAFETY: the header's contract; both strings live through the call.
        let status = unsafe {
            (self.set)(self.ctx, key.as_ptr(), key.len() as u64, value.as_ptr(), value.len() as u64)
        };
        answered(status, "set", key)
    }

    fn get(&self, key: &str) -> Result<String, Failure> {
        let mut value = vec![0; STORE_VALUE_BYTES];
        let mut bytes = 0;
        // SAFETY: the header's contract; `value` has the capacity that is said.
        let status = unsafe {
            (self.get)(
                self.ctx,
                key.as_ptr(),
                key.len() as u64,
                value.as_mut_ptr(),
                value.len() as u64,
                &mut bytes,
            )
        };
        answered(status, "get", key)?;
        value.truncate(bytes as usize);
        Ok(String::from_utf8_lossy(&value).into_owned())
    }

    fn add(&self, key: &str, delta: i64) -> Result<i64, Failure> {
        let mut sum = 0;
        // SAFETY: the header's contract.
        let status = unsafe { (self.add)(self.ctx, key.as_ptr(), key.len() as u64, delta, &mut sum) };
        answered(status, "add", key).map(|()| sum)
    }
}

fn answered(status: i32, verb: &str, key: &str) -> Result<(), Failure> {
    if status == 0 {
        return Ok(());
    }
    let text = format!("the process group's store did not answer ({verb} {key}): is its rank 0 still there?");
    Err(Failure::new(FailureKind::Transport, text))
}

/// Runs `body` and writes its failure to `error`.
fn guarded(error: *mut CError, body: impl FnOnce() -> Result<(), Failure>) -> i32 {
    let outcome =
        catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|panic| Err(Failure::of_panic(&*panic)));
    let Err(failure) = outcome else { return OK };
    let status = failure.kind() as i32;
    if !error.is_null() {
        // SAFETY: `tpurun.h`: valid for writes; it may be uninitialised.
        unsafe { CError::write(error, status, failure.text(), failure.ranks()) };
    }
    status
}

fn guarded_void(body: impl FnOnce()) {
    if let Err(panic) = catch_unwind(AssertUnwindSafe(body)) {
        tracing::error!(failure = %bug(&*panic), "an operation without a status failed");
    }
}

/// # Safety
/// `len` entries are readable for `'a`, or `len` is 0.
unsafe fn slice<'a, T>(data: *const T, len: usize) -> &'a [T] {
    if len == 0 {
        return &[];
    }
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts(data, len) }
}

/// # Safety
/// `bytes` bytes are readable, or `bytes` is 0.
unsafe fn text(data: *const u8, bytes: u64) -> String {
    // SAFETY: the caller's promise.
    String::from_utf8_lossy(unsafe { slice(data, bytes as usize) }).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEADER: &str = include_str!("../../../python/csrc/abi/tpurun.h");

    /// The number behind `before`, which stands in the header once.
    fn number(before: &str) -> usize {
        let (_, rest) = HEADER.split_once(before).unwrap_or_else(|| panic!("the header has no {before:?}"));
        let digits: String = rest.chars().take_while(char::is_ascii_digit).collect();
        digits.parse().unwrap_or_else(|_| panic!("no number stands behind {before:?}"))
    }

    #[test]
    fn the_header_is_of_this_version() {
        assert_eq!(number("#define TPURUN_ABI_VERSION "), tpurun_abi_version() as usize);
    }

    #[test]
    fn the_header_has_these_sizes() {
        let sizes = [
            ("TpurunSpan", size_of::<CSpan>()),
            ("TpurunStore", size_of::<CStore>()),
            ("TpurunCommConfig", size_of::<CConfig>()),
            ("TpurunError", size_of::<CError>()),
            ("TpurunMembers", size_of::<CMembers>()),
            ("TpurunOp", size_of::<COp>()),
            ("TpurunCheck", size_of::<CCheck>()),
            ("TpurunTraffic", size_of::<Traffic>()),
        ];
        for (name, size) in sizes {
            assert_eq!(number(&format!("static_assert(sizeof({name}) == ")), size, "{name}");
        }
        assert_eq!(HEADER.matches("static_assert(sizeof(").count(), sizes.len());
    }
}
