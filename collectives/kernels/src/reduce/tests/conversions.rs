//! The small floats, pinned to what torch 2.15 does with the same numbers.

use crate::reduce::format::*;

const NUMBERS: [f32; 28] = [
    0.0,
    -0.0,
    1.0,
    -1.5,
    1.0625,
    1.1875,
    448.0,
    464.0,
    465.0,
    480.0,
    -1e9,
    240.0,
    248.0,
    249.0,
    57344.0,
    61439.0,
    61440.0,
    65504.0,
    65520.0,
    f32::INFINITY,
    f32::NAN,
    1.0 / 512.0,
    1.0 / 1024.0,
    3.0 / 2048.0,
    -1.0 / 2048.0,
    1.0 / 131072.0,
    1.0 / 262144.0,
    1e-30,
];

fn narrowed<F: Format<Wide = f32>>() -> Vec<F::Raw> {
    NUMBERS.into_iter().map(F::narrow).collect()
}

#[test]
fn eight_bits_are_torchs() {
    let e4m3fn = [
        0x00, 0x80, 0x38, 0xbc, 0x38, 0x3a, 0x7e, 0x7e, 0x7e, 0x7e, 0xfe, 0x77, 0x78, 0x78, 0x7e, 0x7e, 0x7e,
        0x7e, 0x7e, 0x7e, 0x7f, 0x01, 0x00, 0x01, 0x80, 0x00, 0x00, 0x00,
    ];
    let e5m2 = [
        0x00, 0x80, 0x3c, 0xbe, 0x3c, 0x3d, 0x5f, 0x5f, 0x5f, 0x60, 0xfc, 0x5c, 0x5c, 0x5c, 0x7b, 0x7b, 0x7c,
        0x7c, 0x7c, 0x7c, 0x7f, 0x18, 0x14, 0x16, 0x90, 0x00, 0x00, 0x00,
    ];
    let e4m3fnuz = [
        0x00, 0x00, 0x40, 0xc4, 0x40, 0x42, 0x80, 0x80, 0x80, 0x80, 0x80, 0x7f, 0x80, 0x80, 0x80, 0x80, 0x80,
        0x80, 0x80, 0x80, 0x80, 0x02, 0x01, 0x02, 0x00, 0x00, 0x00, 0x00,
    ];
    let e5m2fnuz = [
        0x00, 0x00, 0x40, 0xc2, 0x40, 0x41, 0x63, 0x63, 0x63, 0x64, 0x80, 0x60, 0x60, 0x60, 0x7f, 0x7f, 0x80,
        0x80, 0x80, 0x80, 0x80, 0x1c, 0x18, 0x1a, 0x94, 0x01, 0x00, 0x00,
    ];
    assert_eq!(narrowed::<F8E4M3Fn>(), e4m3fn);
    assert_eq!(narrowed::<F8E5M2>(), e5m2);
    assert_eq!(narrowed::<F8E4M3Fnuz>(), e4m3fnuz);
    assert_eq!(narrowed::<F8E5M2Fnuz>(), e5m2fnuz);
}

#[test]
fn sixteen_bits_are_torchs() {
    let f16 = [
        0, 0x8000, 15360, 0xbe00, 15424, 15552, 24320, 24384, 24388, 24448, 0xfc00, 23424, 23488, 23496,
        31488, 31616, 31616, 31743, 31744, 31744, 32256, 6144, 5120, 5632, 0x9000, 128, 64, 0,
    ];
    assert_eq!(narrowed::<F16>(), f16);
}

#[test]
fn every_code_survives() {
    fn check<F: Format<Wide = f32>>(codes: impl Iterator<Item = F::Raw>)
    where
        F::Raw: PartialEq + std::fmt::Debug,
    {
        let canonical = F::narrow(f32::NAN);
        for code in codes {
            let value = F::widen(code);
            let expected = if value.is_nan() { canonical } else { code };
            assert_eq!(F::narrow(value), expected, "{value}");
        }
    }
    let step = if cfg!(miri) { 1021 } else { 1 };
    check::<F16>((0..=u16::MAX).step_by(step));
    check::<Bf16>((0..=u16::MAX).step_by(step));
    check::<F8E4M3Fn>(0..=u8::MAX);
    check::<F8E5M2>(0..=u8::MAX);
    check::<F8E4M3Fnuz>(0..=u8::MAX);
    check::<F8E5M2Fnuz>(0..=u8::MAX);
}
