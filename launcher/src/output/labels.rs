//! How a rank is called where people read of it: by its number, and by its program if the job has several.

use std::ops::Range;

use crate::job::program::Programs;

/// The names of the programs; none when there is only one.
#[derive(Clone, Debug, Default)]
pub(crate) struct Labels(Vec<(Range<u32>, String)>);

impl Labels {
    pub(crate) fn new(programs: &Programs) -> Labels {
        let named = programs.iter().map(|program| (program.range(), program.name.clone()));
        Labels(if programs.are_several() { named.collect() } else { Vec::new() })
    }

    /// The program of a rank.
    pub(crate) fn program(&self, rank: u32) -> Option<&str> {
        let after = self.0.partition_point(|(ranks, _)| ranks.start <= rank);
        let (ranks, name) = self.0.get(after.checked_sub(1)?)?;
        ranks.contains(&rank).then_some(name)
    }

    /// The one program of all these ranks, in as many characters as the start of a line can spare.
    pub(crate) fn short(&self, ranks: &[u32]) -> Option<String> {
        let name = self.program(*ranks.first()?)?;
        ranks.iter().all(|rank| self.program(*rank) == Some(name)).then(|| shorten(name))
    }

    /// The width of the longest of the short names and the space behind it; 0 when there are none.
    pub(crate) fn width(&self) -> usize {
        self.0.iter().map(|(_, name)| name.len().min(MAX_SHORT_CHARS) + 1).max().unwrap_or(0)
    }

    /// `rank-0003.log`, or `rank-0003-train.log`.
    pub(crate) fn log_name(&self, rank: u32) -> String {
        match self.program(rank) {
            Some(name) => format!("rank-{rank:04}-{name}.log"),
            None => format!("rank-{rank:04}.log"),
        }
    }
}

fn shorten(name: &str) -> String {
    match name.char_indices().nth(MAX_SHORT_CHARS) {
        None => name.into(),
        // The difference of similar names stands at their ends.
        Some(_) => {
            let tail = name.len() - (MAX_SHORT_CHARS - HEAD_CHARS - 1);
            format!("{}~{}", &name[..HEAD_CHARS], &name[tail..])
        }
    }
}

const MAX_SHORT_CHARS: usize = 12;
const HEAD_CHARS: usize = 7;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::program::{GivenProgram, Start};

    fn labels(programs: &[(&str, u32)]) -> Labels {
        let given = |(role, ranks): &(&str, u32)| GivenProgram {
            role: Some(role.to_string()),
            ranks: Some(*ranks),
            words: vec!["true".into()],
            ..GivenProgram::default()
        };
        Labels::new(&Programs::new(programs.iter().map(given).collect(), Start::Spawn).unwrap())
    }

    #[test]
    fn several_programs_have_names() {
        let labels = labels(&[("eval", 1), ("train", 7)]);
        assert_eq!((labels.program(0), labels.program(7)), (Some("eval"), Some("train")));
        assert_eq!(labels.program(8), None);
        assert_eq!(labels.short(&[1, 5]).as_deref(), Some("train"));
        assert_eq!(labels.short(&[0, 5]), None);
        assert_eq!((labels.width(), labels.log_name(3).as_str()), (6, "rank-0003-train.log"));
    }

    #[test]
    fn a_single_program_needs_none() {
        let labels = labels(&[("train", 7)]);
        assert_eq!((labels.program(0), labels.width()), (None, 0));
        assert_eq!(labels.log_name(3), "rank-0003.log");
    }

    #[test]
    fn long_names_are_cut_in_the_middle() {
        let labels = labels(&[("reinforcement-learner-7", 1), ("learner", 1)]);
        assert_eq!(labels.short(&[0]).as_deref(), Some("reinfor~er-7"));
        assert_eq!(labels.width(), MAX_SHORT_CHARS + 1);
    }
}
