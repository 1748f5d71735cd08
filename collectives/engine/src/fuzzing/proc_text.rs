//! Text that other processes decide: a line of /proc/PID/stat (its name may hold anything), and where the
//! store says that a segment is found.

use super::Target;
use crate::join::bootstrap;
use tpurun_memory::process;

pub(super) const TARGET: Target = Target { name: "proc_text", run, seeds };

fn run(bytes: &[u8]) {
    process::survives(bytes);
    bootstrap::survives(&String::from_utf8_lossy(bytes));
}

fn seeds() -> Vec<Vec<u8>> {
    vec![
        b"7 (a) b) (c) S 1 7 7 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 4242 0 0".to_vec(),
        b"host/0f3c-11aa/pid:[4026531836] 4711 12".to_vec(),
    ]
}
