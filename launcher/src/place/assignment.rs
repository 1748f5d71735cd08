//! The place in a job that a node is told by the command that has had it started by ssh.

use crate::place::cluster::{Cluster, Lookup};

/// The variable that says it; no rank inherits this.
pub(crate) const PLACE: &str = "TPURUN_PLACE";

/// The value of [`PLACE`].
pub(crate) fn text(node: u32, nodes: u32, ranks: u32, rendezvous: &str) -> String {
    format!("{node},{nodes},{ranks},{rendezvous}")
}

/// The place that this process was given.
///
/// # Errors
/// One line: a variable of somebody else.
pub(crate) fn read(lookup: Lookup<'_>) -> Result<Option<Cluster>, String> {
    let Some(text) = lookup(PLACE) else { return Ok(None) };
    let mut parts = text.splitn(4, ',');
    let mut number = || parts.next().and_then(|part| part.parse::<u32>().ok());
    let numbers = (number(), number(), number());
    let (Some(node), Some(nodes), Some(ranks @ 1..), Some(rendezvous)) =
        (numbers.0, numbers.1, numbers.2, parts.next())
    else {
        return Err(format!("{PLACE}: expected to be set by tpurun itself, given {text}"));
    };
    Ok(Some(Cluster {
        scheduler: "ssh",
        variable: None,
        nodes,
        node,
        rendezvous: rendezvous.to_owned(),
        tasks: 1,
        task: 0,
        ranks: Some(ranks),
        job: String::new(),
        token_file: None,
        is_one_terminal: true,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_knows_its_place() {
        let written = text(1, 3, 4, "[::1]:29400");
        let found = read(&|name| (name == PLACE).then(|| written.clone())).unwrap().unwrap();
        assert_eq!((found.node, found.nodes, found.ranks), (1, 3, Some(4)));
        assert_eq!(found.rendezvous, "[::1]:29400");
        assert_eq!(read(&|_| None), Ok(None));
        assert!(read(&|_| Some("1,2".into())).is_err());
    }
}
