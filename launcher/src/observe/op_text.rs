//! How an operation on the board reads in a message: `all_reduce#11 (f32[1024], SUM)`.

use tpurun_protocol::board::OpView;

/// The codes come from shared memory that any rank may have scribbled on.
pub(crate) fn describe(op: &OpView) -> String {
    let name = name(&COLLECTIVES, op.collective);
    let seq = if is_point_to_point(op) { String::new() } else { format!("#{}", op.seq) };
    let details = details(op);
    if details.is_empty() { format!("{name}{seq}") } else { format!("{name}{seq} ({details})") }
}

/// The same of a collective, without its details: `all_reduce#11`.
pub(crate) fn short(op: &OpView) -> String {
    format!("{}#{}", name(&COLLECTIVES, op.collective), op.seq)
}

/// A send or receive: its peer is `root`, and it has no number of its own.
pub(crate) fn is_point_to_point(op: &OpView) -> bool {
    matches!(op.collective, SEND | RECV)
}

/// As in the name of the torch function.
pub(crate) fn collective(code: u8) -> &'static str {
    name(&COLLECTIVES, code)
}

/// `f32`, `bf16`, ..
pub(crate) fn dtype(code: u8) -> &'static str {
    name(&DTYPES, code)
}

/// `SUM`, ..; None where nothing is reduced.
pub(crate) fn reduce_op(op: &OpView) -> Option<&'static str> {
    matches!(op.collective, ALL_REDUCE | REDUCE_SCATTER | REDUCE).then(|| name(&REDUCE_OPS, op.reduce_op))
}

fn details(op: &OpView) -> String {
    let mut parts = Vec::new();
    if op.collective != BARRIER {
        let shape: Vec<String> = op.shape.iter().map(ToString::to_string).collect();
        let shape = if shape.is_empty() { op.count.to_string() } else { shape.join("x") };
        parts.push(format!("{}[{shape}]", name(&DTYPES, op.dtype)));
    }
    parts.extend(reduce_op(op).map(str::to_owned));
    match (op.collective, op.root) {
        (_, root) if root < 0 => {}
        (SEND, peer) => parts.push(format!("to {peer}, tag {}", op.tag)),
        (RECV, peer) => parts.push(format!("from {peer}, tag {}", op.tag)),
        (_, root) => parts.push(format!("root {root}")),
    }
    parts.join(", ")
}

fn name(names: &'static [&'static str], code: u8) -> &'static str {
    names.get(usize::from(code)).copied().unwrap_or("?")
}

// In the order of the codes of the C ABI.
const COLLECTIVES: [&str; 11] = [
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "all_to_all",
    "reduce",
    "gather",
    "scatter",
    "barrier",
    "send",
    "recv",
];
const DTYPES: [&str; 19] = [
    "bool",
    "u8",
    "i8",
    "u16",
    "i16",
    "u32",
    "i32",
    "u64",
    "i64",
    "f16",
    "bf16",
    "f32",
    "f64",
    "f8e4m3fn",
    "f8e5m2",
    "f8e4m3fnuz",
    "f8e5m2fnuz",
    "c64",
    "c128",
];
const REDUCE_OPS: [&str; 9] = ["SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM"];
const ALL_REDUCE: u8 = 0;
const REDUCE_SCATTER: u8 = 2;
const REDUCE: u8 = 5;
const BARRIER: u8 = 8;
const SEND: u8 = 9;
const RECV: u8 = 10;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operations_read_like_the_call() {
        let op = |collective, root, shape: &[i64]| OpView {
            seq: 11,
            collective,
            dtype: 11,
            reduce_op: 0,
            root,
            tag: 5,
            count: 1024,
            shape: shape.to_vec(),
            site: String::new(),
            ..OpView::default()
        };
        assert_eq!(describe(&op(ALL_REDUCE, -1, &[1024])), "all_reduce#11 (f32[1024], SUM)");
        assert_eq!(describe(&op(3, 2, &[32, 32])), "broadcast#11 (f32[32x32], root 2)");
        assert_eq!(describe(&op(BARRIER, -1, &[])), "barrier#11");
        assert_eq!(describe(&op(RECV, 3, &[])), "recv (f32[1024], from 3, tag 5)");
        assert_eq!(short(&op(ALL_REDUCE, -1, &[1024])), "all_reduce#11");
        assert_eq!(describe(&op(200, -1, &[])), "?#11 (f32[1024])");
    }
}
