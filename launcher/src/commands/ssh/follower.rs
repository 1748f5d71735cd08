//! The end of `--hosts` that ssh starts on a host: it runs the order that it gets, and passes on the signals after it.

use std::io::{self, BufRead, Read};
use std::process::Stdio;

use rustix::process::{Pid, Signal, kill_process};
use tokio::process::{Child, Command};
use tokio::sync::mpsc;

use super::exit_code;
use super::order::Order;
use crate::base::signals::Signals;
use crate::place::hosts::own_name;

/// Runs the order that comes over the standard input.
///
/// # Errors
/// One line: no order, or one that can not be carried out here.
pub(crate) fn follow() -> Result<i32, String> {
    let host = own_name();
    let order =
        read_order().and_then(|line| Order::read(&line)).map_err(|error| format!("host {host}: {error}"))?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| error.to_string())?;
    runtime.block_on(carry_out(&order)).map_err(|error| format!("host {host}: {error}"))
}

fn read_order() -> Result<String, String> {
    let mut line = String::new();
    let read = io::stdin().lock().take(MOST_BYTES).read_line(&mut line);
    match read {
        Ok(bytes) if bytes > 0 && line.ends_with('\n') => Ok(line),
        Ok(_) => Err("expected an order of tpurun, given none".into()),
        Err(error) => Err(error.to_string()),
    }
}

async fn carry_out(order: &Order) -> Result<i32, String> {
    if !order.cwd.is_dir() {
        return Err(format!(
            "expected the directory {}, as where tpurun was started, given none",
            order.cwd.display()
        ));
    }
    let own = [Signal::INT, Signal::TERM, Signal::HUP, Signal::QUIT];
    let mut asked = Signals::new(own.map(|signal| (signal, signal))).map_err(|error| error.to_string())?;
    let child = Command::new("/proc/self/exe")
        .arg0("tpurun")
        .args(&order.args)
        .envs(&order.env)
        .current_dir(&order.cwd)
        .stdin(Stdio::null())
        .process_group(0)
        .spawn();
    let mut child = child.map_err(|error| format!("cannot run tpurun: {error}"))?;
    let (words_tx, mut words) = mpsc::channel(1);
    // Reading cannot be given up; the thread ends with the process.
    std::thread::spawn(move || read_signals(&words_tx));
    loop {
        tokio::select! {
            ended = child.wait() => return ended.map(exit_code).map_err(|error| error.to_string()),
            signal = asked.next() => pass_on(&child, signal),
            Some(signal) = words.recv() => pass_on(&child, signal),
        }
    }
}

/// Each line is a signal; the end of all lines, when nobody is there any more who could send one, asks for the end.
fn read_signals(words: &mpsc::Sender<Signal>) {
    let number = |line: String| Signal::from_named_raw(line.trim().parse().ok()?);
    let lines = io::stdin().lines().map_while(Result::ok).filter_map(number);
    for signal in lines.chain([Signal::TERM]) {
        if words.blocking_send(signal).is_err() {
            return;
        }
    }
}

fn pass_on(child: &Child, signal: Signal) {
    if let Some(pid) = child.id().and_then(|pid| Pid::from_raw(pid as i32)) {
        let _ = kill_process(pid, signal);
    }
}

/// Bytes of the largest order: an environment has its limits, too.
const MOST_BYTES: u64 = 16 << 20;
