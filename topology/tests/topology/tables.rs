//! Small schedules, pinned as they are printed.

use expect_test::{Expect, expect};
use tpurun_topology::{Algorithm, Collective, Placement, Table};

use crate::{all_ranks, placed};

fn check(algorithm: Algorithm, collective: Collective, placement: &Placement, expect: Expect) {
    expect.assert_eq(&Table(&all_ranks(algorithm, collective, placement)).to_string());
}

#[test]
fn ring_all_reduce_of_4() {
    check(
        Algorithm::Ring,
        Collective::AllReduce,
        &Placement::ring(4),
        expect![[r#"
            all_reduce, ring, ranks 4, parts 2
            channel 0, part 0
               0 | 3>1  2<3+  2>1  1<3+  1>1  0<3+  0>1  3<3=  3>1  2<3=  2>1  1<3=
               1 | 0>2  3<0+  3>2  2<0+  2>2  1<0+  1>2  0<0=  0>2  3<0=  3>2  2<0=
               2 | 1>3  0<1+  0>3  3<1+  3>3  2<1+  2>3  1<1=  1>3  0<1=  0>3  3<1=
               3 | 2>0  1<2+  1>0  0<2+  0>0  3<2+  3>0  2<2=  2>0  1<2=  1>0  0<2=
            channel 1, part 1
               0 | 1>3  2<1+  2>3  3<1+  3>3  0<1+  0>3  1<1=  1>3  2<1=  2>3  3<1=
               1 | 2>0  3<2+  3>0  0<2+  0>0  1<2+  1>0  2<2=  2>0  3<2=  3>0  0<2=
               2 | 3>1  0<3+  0>1  1<3+  1>1  2<3+  2>1  3<3=  3>1  0<3=  0>1  1<3=
               3 | 0>2  1<0+  1>2  2<0+  2>2  3<0+  3>2  0<0=  0>2  1<0=  1>2  2<0=
        "#]],
    );
}

#[test]
fn ring_broadcast_of_3() {
    check(
        Algorithm::Ring,
        Collective::Broadcast { root: 1 },
        &Placement::ring(3),
        expect![[r#"
            broadcast from 1, ring, ranks 3, parts 2
            channel 0, part 0
               0 | 0<2=  1<2=  2<2=
               1 | 0>2   1>2   2>2
               2 | 0<1=  0>0   1<1=  1>0  2<1=  2>0
            channel 1, part 1
               0 | 0<1=  0>2   1<1=  1>2  2<1=  2>2
               1 | 0>0   1>0   2>0
               2 | 0<0=  1<0=  2<0=
        "#]],
    );
}

#[test]
fn ring_all_to_all_of_4() {
    check(
        Algorithm::Ring,
        Collective::AllToAll,
        &Placement::ring(4),
        expect![[r#"
            all_to_all, ring, ranks 4, parts 1
            channel 0, part 0
               0 | 1>1   12<3=  2>2   8<2=   3>3   4<1=
               1 | 6>2   1<0=   7>3   13<3=  4>0   9<2=
               2 | 11>3  6<1=   8>0   2<0=   9>1   14<3=
               3 | 12>0  11<2=  13>1  7<1=   14>2  3<0=
        "#]],
    );
}

#[test]
fn bucket_all_reduce_of_2x2() {
    check(
        Algorithm::Bucket,
        Collective::AllReduce,
        &placed("2x2"),
        expect![[r#"
            all_reduce, bucket, ranks 4, parts 2
            channel 0, part 0
               0 | 2>2  0<2+  3>2  1<2+  1>1  0<1+  0>1  1<1=  0>2  2<2=  1>2  3<2=
               1 | 2>3  0<3+  3>3  1<3+  0>0  1<0+  1>0  0<0=  0>3  2<3=  1>3  3<3=
               2 | 0>0  2<0+  1>0  3<0+  3>3  2<3+  2>3  3<3=  2>0  0<0=  3>0  1<0=
               3 | 0>1  2<1+  1>1  3<1+  2>2  3<2+  3>2  2<2=  2>1  0<1=  3>1  1<1=
            channel 1, part 1
               0 | 1>1  0<1+  3>1  2<1+  2>2  0<2+  0>2  2<2=  0>1  1<1=  2>1  3<1=
               1 | 0>0  1<0+  2>0  3<0+  3>3  1<3+  1>3  3<3=  1>0  0<0=  3>0  2<0=
               2 | 1>3  0<3+  3>3  2<3+  0>0  2<0+  2>0  0<0=  0>3  1<3=  2>3  3<3=
               3 | 0>2  1<2+  2>2  3<2+  1>1  3<1+  3>1  1<1=  1>2  0<2=  3>2  2<2=
        "#]],
    );
}

#[test]
fn bucket_reduce_scatter_of_3x3() {
    check(
        Algorithm::Bucket,
        Collective::ReduceScatter,
        &placed("3x3"),
        expect![[r#"
            reduce_scatter, bucket, ranks 9, parts 4
            channel 0, part 0
               0 | 6>3  3<6+  7>3  4<6+  8>3  5<6+  3>3  0<6+  4>3  1<6+  5>3  2<6+  2>1  1<2+  1>1  0<2+
               1 | 6>4  3<7+  7>4  4<7+  8>4  5<7+  3>4  0<7+  4>4  1<7+  5>4  2<7+  0>2  2<0+  2>2  1<0+
               2 | 6>5  3<8+  7>5  4<8+  8>5  5<8+  3>5  0<8+  4>5  1<8+  5>5  2<8+  1>0  0<1+  0>0  2<1+
               3 | 0>6  6<0+  1>6  7<0+  2>6  8<0+  6>6  3<0+  7>6  4<0+  8>6  5<0+  5>4  4<5+  4>4  3<5+
               4 | 0>7  6<1+  1>7  7<1+  2>7  8<1+  6>7  3<1+  7>7  4<1+  8>7  5<1+  3>5  5<3+  5>5  4<3+
               5 | 0>8  6<2+  1>8  7<2+  2>8  8<2+  6>8  3<2+  7>8  4<2+  8>8  5<2+  4>3  3<4+  3>3  5<4+
               6 | 3>0  0<3+  4>0  1<3+  5>0  2<3+  0>0  6<3+  1>0  7<3+  2>0  8<3+  8>7  7<8+  7>7  6<8+
               7 | 3>1  0<4+  4>1  1<4+  5>1  2<4+  0>1  6<4+  1>1  7<4+  2>1  8<4+  6>8  8<6+  8>8  7<6+
               8 | 3>2  0<5+  4>2  1<5+  5>2  2<5+  0>2  6<5+  1>2  7<5+  2>2  8<5+  7>6  6<7+  6>6  8<7+
            channel 1, part 1
               0 | 3>6  6<3+  4>6  7<3+  5>6  8<3+  6>6  0<3+  7>6  1<3+  8>6  2<3+  1>2  2<1+  2>2  0<1+
               1 | 3>7  6<4+  4>7  7<4+  5>7  8<4+  6>7  0<4+  7>7  1<4+  8>7  2<4+  2>0  0<2+  0>0  1<2+
               2 | 3>8  6<5+  4>8  7<5+  5>8  8<5+  6>8  0<5+  7>8  1<5+  8>8  2<5+  0>1  1<0+  1>1  2<0+
               3 | 6>0  0<6+  7>0  1<6+  8>0  2<6+  0>0  3<6+  1>0  4<6+  2>0  5<6+  4>5  5<4+  5>5  3<4+
               4 | 6>1  0<7+  7>1  1<7+  8>1  2<7+  0>1  3<7+  1>1  4<7+  2>1  5<7+  5>3  3<5+  3>3  4<5+
               5 | 6>2  0<8+  7>2  1<8+  8>2  2<8+  0>2  3<8+  1>2  4<8+  2>2  5<8+  3>4  4<3+  4>4  5<3+
               6 | 0>3  3<0+  1>3  4<0+  2>3  5<0+  3>3  6<0+  4>3  7<0+  5>3  8<0+  7>8  8<7+  8>8  6<7+
               7 | 0>4  3<1+  1>4  4<1+  2>4  5<1+  3>4  6<1+  4>4  7<1+  5>4  8<1+  8>6  6<8+  6>6  7<8+
               8 | 0>5  3<2+  1>5  4<2+  2>5  5<2+  3>5  6<2+  4>5  7<2+  5>5  8<2+  6>7  7<6+  7>7  8<6+
            channel 2, part 2
               0 | 2>1  1<2+  5>1  4<2+  8>1  7<2+  1>1  0<2+  4>1  3<2+  7>1  6<2+  6>3  3<6+  3>3  0<6+
               1 | 0>2  2<0+  3>2  5<0+  6>2  8<0+  2>2  1<0+  5>2  4<0+  8>2  7<0+  7>4  4<7+  4>4  1<7+
               2 | 1>0  0<1+  4>0  3<1+  7>0  6<1+  0>0  2<1+  3>0  5<1+  6>0  8<1+  8>5  5<8+  5>5  2<8+
               3 | 2>4  1<5+  5>4  4<5+  8>4  7<5+  1>4  0<5+  4>4  3<5+  7>4  6<5+  0>6  6<0+  6>6  3<0+
               4 | 0>5  2<3+  3>5  5<3+  6>5  8<3+  2>5  1<3+  5>5  4<3+  8>5  7<3+  1>7  7<1+  7>7  4<1+
               5 | 1>3  0<4+  4>3  3<4+  7>3  6<4+  0>3  2<4+  3>3  5<4+  6>3  8<4+  2>8  8<2+  8>8  5<2+
               6 | 2>7  1<8+  5>7  4<8+  8>7  7<8+  1>7  0<8+  4>7  3<8+  7>7  6<8+  3>0  0<3+  0>0  6<3+
               7 | 0>8  2<6+  3>8  5<6+  6>8  8<6+  2>8  1<6+  5>8  4<6+  8>8  7<6+  4>1  1<4+  1>1  7<4+
               8 | 1>6  0<7+  4>6  3<7+  7>6  6<7+  0>6  2<7+  3>6  5<7+  6>6  8<7+  5>2  2<5+  2>2  8<5+
            channel 3, part 3
               0 | 1>2  2<1+  4>2  5<1+  7>2  8<1+  2>2  0<1+  5>2  3<1+  8>2  6<1+  3>6  6<3+  6>6  0<3+
               1 | 2>0  0<2+  5>0  3<2+  8>0  6<2+  0>0  1<2+  3>0  4<2+  6>0  7<2+  4>7  7<4+  7>7  1<4+
               2 | 0>1  1<0+  3>1  4<0+  6>1  7<0+  1>1  2<0+  4>1  5<0+  7>1  8<0+  5>8  8<5+  8>8  2<5+
               3 | 1>5  2<4+  4>5  5<4+  7>5  8<4+  2>5  0<4+  5>5  3<4+  8>5  6<4+  6>0  0<6+  0>0  3<6+
               4 | 2>3  0<5+  5>3  3<5+  8>3  6<5+  0>3  1<5+  3>3  4<5+  6>3  7<5+  7>1  1<7+  1>1  4<7+
               5 | 0>4  1<3+  3>4  4<3+  6>4  7<3+  1>4  2<3+  4>4  5<3+  7>4  8<3+  8>2  2<8+  2>2  5<8+
               6 | 1>8  2<7+  4>8  5<7+  7>8  8<7+  2>8  0<7+  5>8  3<7+  8>8  6<7+  0>3  3<0+  3>3  6<0+
               7 | 2>6  0<8+  5>6  3<8+  8>6  6<8+  0>6  1<8+  3>6  4<8+  6>6  7<8+  1>4  4<1+  4>4  7<1+
               8 | 0>7  1<6+  3>7  4<6+  6>7  7<6+  1>7  2<6+  4>7  5<6+  7>7  8<6+  2>5  5<2+  5>5  8<2+
        "#]],
    );
}

#[test]
fn bucket_reduce_scatter_of_a_line_of_4() {
    check(
        Algorithm::Bucket,
        Collective::ReduceScatter,
        &placed("4o"),
        expect![[r#"
            reduce_scatter, bucket, ranks 4, parts 1
            channel 0, part 0
               0 | 3>1   2>1  1>1   0<1+
               1 | 3<0+  3>2  2<0+  0<2+  2>2  0>0  1<0+  1<2+
               2 | 0<3+  0>1  3<1+  1<3+  3>3  1>1  2<1+  2<3+
               3 | 0>2   1>2  2>2   3<2+
        "#]],
    );
}

#[test]
fn bucket_all_gather_of_a_line_of_4() {
    check(
        Algorithm::Bucket,
        Collective::AllGather,
        &placed("4o"),
        expect![[r#"
            all_gather, bucket, ranks 4, parts 1
            channel 0, part 0
               0 | 0>1  1<1=  2<1=  3<1=
               1 | 1>2  1>0   0<0=  2<2=  0>2  2>0  3<2=  3>0
               2 | 2>3  2>1   1<1=  3<3=  1>3  3>1  0<1=  0>3
               3 | 3>2  2<2=  1<2=  0<2=
        "#]],
    );
}

#[test]
fn flat_all_reduce_of_2() {
    check(
        Algorithm::Flat,
        Collective::AllReduce,
        &Placement::ring(2),
        expect![[r#"
            all_reduce, flat, ranks 2, parts 1
            channel 0, part 0
               0 | 0^  ||  0@0=  0@1+
               1 | 0^  ||  0@0=  0@1+
        "#]],
    );
}

#[test]
fn flat_all_reduce_of_3() {
    check(
        Algorithm::Flat,
        Collective::AllReduce,
        &Placement::ring(3),
        expect![[r#"
            all_reduce, flat, ranks 3, parts 1
            channel 0, part 0
               0 | 0^  |0|  0@*=
               1 | 0^  |0|  0@*=
               2 | 0^  |0|  0@*=
        "#]],
    );
}

#[test]
fn flat_reduce_scatter_of_3() {
    check(
        Algorithm::Flat,
        Collective::ReduceScatter,
        &Placement::ring(3),
        expect![[r#"
            reduce_scatter, flat, ranks 3, parts 1
            channel 0, part 0
               0 | 0^  1^  2^  ||  0@0=  0@1+  0@2+
               1 | 0^  1^  2^  ||  1@0=  1@1+  1@2+
               2 | 0^  1^  2^  ||  2@0=  2@1+  2@2+
        "#]],
    );
}

#[test]
fn flat_all_gather_of_3() {
    check(
        Algorithm::Flat,
        Collective::AllGather,
        &Placement::ring(3),
        expect![[r#"
            all_gather, flat, ranks 3, parts 1
            channel 0, part 0
               0 | 0^  ||  1@1=  2@2=
               1 | 1^  ||  0@0=  2@2=
               2 | 2^  ||  0@0=  1@1=
        "#]],
    );
}

#[test]
fn flat_broadcast_of_3() {
    check(
        Algorithm::Flat,
        Collective::Broadcast { root: 2 },
        &Placement::ring(3),
        expect![[r#"
            broadcast from 2, flat, ranks 3, parts 1
            channel 0, part 0
               0 | ||  0@2=
               1 | ||  0@2=
               2 | 0^  ||
        "#]],
    );
}

#[test]
fn flat_all_to_all_of_3() {
    check(
        Algorithm::Flat,
        Collective::AllToAll,
        &Placement::ring(3),
        expect![[r#"
            all_to_all, flat, ranks 3, parts 1
            channel 0, part 0
               0 | 1^  2^  ||  3@1=  6@2=
               1 | 3^  5^  ||  1@0=  7@2=
               2 | 6^  7^  ||  2@0=  5@1=
        "#]],
    );
}

#[test]
fn one_rank_does_nothing() {
    check(
        Algorithm::Bucket,
        Collective::AllReduce,
        &placed("1x1x1"),
        expect![[r#"
            all_reduce, bucket, ranks 1, parts 1
        "#]],
    );
}

#[test]
fn one_rank_prints_its_own_row() {
    let schedules = all_ranks(Algorithm::Flat, Collective::Broadcast { root: 0 }, &Placement::ring(2));
    expect![[r#"
        broadcast from 0, flat, ranks 2, parts 1
        channel 0, part 0
           1 | ||  0@0=
    "#]]
    .assert_eq(&schedules[1].to_string());
}
