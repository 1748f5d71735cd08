//! Tensors for tests: in pieces, with guards around them that nothing may touch.
#![allow(unsafe_code)]

use tpurun_kernels::dtype::Dtype;
use tpurun_kernels::reduce::{self, Reduction};
use tpurun_memory::buffer::Spans;

/// Chunks of memory, each in two pieces.
pub(super) struct Tensor {
    /// With guards around each piece.
    pieces: Vec<Vec<u8>>,
}

const GUARD: [u8; 32] = [0xee; 32];

impl Tensor {
    pub(super) fn new(chunks: &[Vec<u8>], element_bytes: usize) -> Self {
        let halves = chunks.iter().flat_map(|chunk| {
            let half = chunk.len() / element_bytes / 2 * element_bytes;
            [&chunk[..half], &chunk[half..]]
        });
        Self { pieces: halves.map(|half| [&GUARD, half, &GUARD].concat()).collect() }
    }

    /// To be dropped before the tensor is looked at.
    pub(super) fn spans(&mut self) -> Spans {
        let pieces = self.pieces.iter_mut().map(|piece| {
            let inner = GUARD.len()..piece.len() - GUARD.len();
            let inner = &mut piece[inner];
            (inner.as_mut_ptr(), inner.len())
        });
        // SAFETY: the worlds keep tensors as long as executions, and look at them afterwards only.
        unsafe { Spans::new(pieces.collect::<Vec<_>>(), 2) }
    }

    pub(super) fn chunks(&self) -> Vec<Vec<u8>> {
        let inner = |piece: &Vec<u8>| {
            assert_eq!(piece[..GUARD.len()], GUARD, "written before a piece");
            assert_eq!(piece[piece.len() - GUARD.len()..], GUARD, "written after a piece");
            piece[GUARD.len()..piece.len() - GUARD.len()].to_vec()
        };
        self.pieces.chunks(2).map(|halves| [inner(&halves[0]), inner(&halves[1])].concat()).collect()
    }
}

/// Small numbers, whose sums and products are exact in any order.
pub(super) fn number(dtype: Dtype, number: i8) -> Vec<u8> {
    let float = f32::from(number);
    match dtype {
        Dtype::Bool => vec![u8::from(number > 0)],
        Dtype::F32 => float.to_le_bytes().to_vec(),
        Dtype::F64 => f64::from(number).to_le_bytes().to_vec(),
        Dtype::C64 => [float.to_le_bytes(), (1.0 - float).to_le_bytes()].concat(),
        Dtype::F16 | Dtype::Bf16 | Dtype::F8E4M3Fn => {
            let mut bytes = vec![0; dtype.size()];
            let from = float.to_le_bytes();
            // SAFETY: one element in each layout.
            unsafe { reduce::finish(Reduction::none(dtype), from.as_ptr(), bytes.as_mut_ptr(), 1) };
            bytes
        }
        _ => i64::from(number).to_le_bytes()[..dtype.size()].to_vec(),
    }
}

/// Returns the reduction of `sources`.
pub(super) fn fold(reduction: Reduction, sources: &[Vec<u8>]) -> Vec<u8> {
    let pointers: Vec<_> = sources.iter().map(|source| source.as_ptr()).collect();
    let mut out = vec![0; sources[0].len()];
    let count = out.len() / reduction.dtype().size();
    // SAFETY: all have `count` elements.
    unsafe { reduce::fold(reduction, &pointers, out.as_mut_ptr(), count) };
    out
}
