//! How the loss of a rank reads to the others.

use crate::judge::report;
use crate::judge::verdict::Cause;

/// Everything known of a rank that will not come any more.
pub(crate) struct Loss<'a> {
    pub(crate) rank: u32,
    pub(crate) host: &'a str,
    pub(crate) pid: Option<i32>,
    pub(crate) cause: &'a Cause,
    /// The last line that it wrote.
    pub(crate) last_line: Option<&'a str>,
}

/// One text for all: who, how, where, and its last words.
pub(crate) fn describe(loss: &Loss<'_>) -> String {
    let pid = loss.pid.map(|pid| format!(", pid {pid}")).unwrap_or_default();
    let mut text = format!("rank {} (host {}{pid}) {}", loss.rank, loss.host, how(loss.cause));
    if let Some(line) = loss.last_line.filter(|line| !line.is_empty()) {
        text += &format!("\n  last output: {}", line.chars().take(MAX_CHARS).collect::<String>());
    }
    text
}

/// The same in the words of one communicator.
pub(crate) fn in_group(text: &str, group: &str) -> String {
    let (first, rest) = text.split_once('\n').unwrap_or((text, ""));
    let rest = if rest.is_empty() { String::new() } else { format!("\n{rest}") };
    format!("{first}: group {group} can not go on without it{rest}")
}

fn how(cause: &Cause) -> String {
    match cause {
        Cause::Ended { ending, error } => report::in_one_line(*ending, error.as_ref()),
        Cause::Stopped(since) => {
            format!("has been stopped (SIGSTOP) for {:.1} s while others wait for it", since.as_secs_f64())
        }
        _ => "is gone".into(),
    }
}

const MAX_CHARS: usize = 240;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observe::run_dir::ErrorRecord;
    use crate::ranks::Ending;

    fn text(cause: &Cause, last_line: Option<&str>) -> String {
        let loss = Loss { rank: 2, host: "n0", pid: Some(7), cause, last_line };
        in_group(&describe(&loss), "dp0")
    }

    #[test]
    fn a_loss_says_who_how_and_its_last_words() {
        let killed = Cause::Ended { ending: Ending::Signal(9), error: None };
        assert_eq!(
            text(&killed, Some("step 9 loss nan")),
            "rank 2 (host n0, pid 7) was killed by SIGKILL (signal 9): group dp0 can not go on without it\n  \
             last output: step 9 loss nan"
        );
        let error = ErrorRecord {
            kind: "ValueError".into(),
            message: "loss is NaN\nmore".into(),
            file: "train.py".into(),
            line: 28,
            ..ErrorRecord::default()
        };
        let raised = Cause::Ended { ending: Ending::Exit(1), error: Some(error) };
        assert_eq!(
            text(&raised, None),
            "rank 2 (host n0, pid 7) raised ValueError: loss is NaN (train.py:28): group dp0 can not go on \
             without it"
        );
        assert!(
            text(&Cause::Ended { ending: Ending::Exit(3), error: None }, None).contains("exited with code 3")
        );
    }
}
