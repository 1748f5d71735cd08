//! The verdicts on operations that do not fit together: one text for all ranks that names every class of
//! them with host, pid and line, and the guilty as data.

use tpurun_memory::failure::FailureKind;
use tpurun_protocol::match_key::{Difference, KeyClass};
use tpurun_protocol::segment::{Segment, Verdict};

/// Lines that a text lists before it only counts.
const SHOWN: usize = 8;

/// The ranks posted different operations.
pub(crate) fn mismatch(segment: &Segment, seq: u64, difference: &Difference) -> Verdict {
    let group = segment.members().title();
    let fields = &difference.fields;
    let head = format!("collective mismatch in {group}, operation {seq}: the ranks differ in {fields}");
    of_classes(segment, head, "posted ", "kinds of operation", &difference.classes)
}

/// `head`, and a line for each class with what its ranks `did`; `classes` have the largest one first.
pub(crate) fn of_classes(
    segment: &Segment,
    head: String,
    did: &str,
    kinds: &str,
    classes: &[KeyClass],
) -> Verdict {
    let guilty = minority(classes);
    let mut lines = vec![];
    for (index, class) in classes.iter().enumerate() {
        let side = match (guilty.is_empty(), index) {
            (true, _) => "",
            (false, 0) => "majority: ",
            (false, _) => "minority: ",
        };
        let mut texts: Vec<_> = class.iter().collect();
        texts.sort_by_key(|(ranks, _)| (usize::MAX - ranks.len(), ranks.first()));
        let line = |(ranks, text): &(Vec<u32>, String)| {
            format!("{side}{} {did}{text}", segment.roster().describe(ranks))
        };
        lines.extend(texts.into_iter().map(line));
    }
    Verdict::new(FailureKind::Mismatch, listed(head, &lines, kinds)).blaming(guilty)
}

/// `head`, the first of the lines, and how many more there are of what `kinds` names.
pub(crate) fn listed(mut head: String, lines: &[String], kinds: &str) -> String {
    for line in lines.iter().take(SHOWN) {
        head += "\n  ";
        head += line;
    }
    if lines.len() > SHOWN {
        head += &format!("\n  and {} more {kinds}", lines.len() - SHOWN);
    }
    head
}

/// All ranks but those of the largest class; nobody when no class is larger than all others.
fn minority(classes: &[KeyClass]) -> Vec<u32> {
    let mut ranks: Vec<Vec<u32>> = classes
        .iter()
        .map(|class| class.iter().flat_map(|(ranks, _)| ranks.iter().copied()).collect())
        .collect();
    ranks.sort_by_key(|ranks| usize::MAX - ranks.len());
    match ranks.as_slice() {
        [first, second, ..] if first.len() > second.len() => ranks[1..].concat(),
        _ => vec![],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn classes(ranks: &[&[u32]]) -> Vec<KeyClass> {
        ranks.iter().map(|ranks| vec![(ranks.to_vec(), String::new())]).collect()
    }

    #[test]
    fn a_majority_is_one_class_alone() {
        assert_eq!(minority(&classes(&[&[0, 1, 3], &[2]])), [2]);
        assert_eq!(minority(&classes(&[&[0, 1, 3], &[2], &[4, 5]])), [4, 5, 2]);
        assert_eq!(minority(&classes(&[&[0, 3], &[1, 2]])), Vec::<u32>::new());
        assert_eq!(minority(&classes(&[&[0], &[1], &[2]])), Vec::<u32>::new());
        let several_lines =
            vec![vec![(vec![0], "a".into()), (vec![1], "b".into())], classes(&[&[2]]).remove(0)];
        assert_eq!(minority(&several_lines), [2]);
    }

    #[test]
    fn a_long_list_is_counted() {
        let lines: Vec<String> = (0..11).map(|line| line.to_string()).collect();
        let text = listed("head".to_owned(), &lines, "lines");
        assert_eq!(text, "head\n  0\n  1\n  2\n  3\n  4\n  5\n  6\n  7\n  and 3 more lines");
    }
}
