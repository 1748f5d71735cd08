//! The variables of schedulers for their tasks: how many nodes a job has, and which one this is.

use std::path::PathBuf;

use crate::nodes::random_id;
use crate::place::assignment;
use crate::place::cluster::{Cluster, GKE, Lookup};

/// The scheduler that has started this process on one of several nodes, or as one of several tasks.
///
/// # Errors
/// One line: a variable that is not as its scheduler writes it.
pub(crate) fn detect(lookup: Lookup<'_>) -> Result<Option<Cluster>, String> {
    let found = match assignment::read(lookup)? {
        // In an allocation, too.
        Some(cluster) => return Ok(Some(cluster)),
        None => slurm(lookup)?,
    };
    let found = match found {
        Some(cluster) => Some(cluster),
        None => gke(lookup)?,
    };
    Ok(found.filter(|cluster| cluster.nodes > 1 || cluster.tasks > 1))
}

/// Which node this is, where only the number of nodes is given, and which variable says so: as Kubernetes numbers the
/// pods of an Indexed Job.
pub(crate) fn node_rank(lookup: Lookup<'_>) -> Option<(&'static str, String)> {
    ["JOB_COMPLETION_INDEX", "TPU_WORKER_ID"].into_iter().find_map(|name| Some((name, lookup(name)?)))
}

/// The name that a scheduler has for this host, which may be one of several on a machine.
pub(crate) fn host_name(lookup: Lookup<'_>) -> Option<String> {
    lookup("SLURMD_NODENAME")
}

/// One for node 0, where nobody says which; two jobs on the same host rarely want the same.
pub(crate) fn any_port() -> u16 {
    FIRST_PORT + (random_id() % u64::from(PORTS)) as u16
}

/// The words that start this command on every node of an allocation of Slurm, of which it is no task itself: in a batch
/// script, or in a shell of salloc.
pub(crate) fn srun(lookup: Lookup<'_>, gives_ranks: bool) -> Option<Vec<String>> {
    let nodes: u32 = lookup("SLURM_JOB_NUM_NODES")?.parse().ok().filter(|nodes| *nodes > 1)?;
    if lookup("SLURM_STEP_NODELIST").is_some() {
        return None;
    }
    // The first failure is told by every node, which takes a moment.
    let mut words = vec!["srun".to_owned(), "--kill-on-bad-exit=0".into()];
    if gives_ranks {
        // Else as many tasks as the allocation says; here each node has ranks of its own.
        words.extend([format!("--nodes={nodes}"), format!("--ntasks={nodes}"), "--ntasks-per-node=1".into()]);
    }
    Some(words)
}

/// A task of `srun`.
fn slurm(lookup: Lookup<'_>) -> Result<Option<Cluster>, String> {
    let (Some(nodes), Some(list)) = (lookup("SLURM_STEP_NUM_NODES"), lookup("SLURM_STEP_NODELIST")) else {
        return Ok(None);
    };
    let node = number("SLURM_NODEID", lookup)?;
    let counts = lookup("SLURM_STEP_TASKS_PER_NODE").unwrap_or_else(|| "1".into());
    let tasks = tasks_on(&counts, node);
    let tasks =
        tasks.ok_or_else(|| expected("SLURM_STEP_TASKS_PER_NODE", "numbers such as 4(x2),3", &counts))?;
    let head =
        first_host(&list).ok_or_else(|| expected("SLURM_STEP_NODELIST", "hosts such as n[0-3]", &list))?;
    let (job, step) = (number("SLURM_JOB_ID", lookup)?, number("SLURM_STEP_ID", lookup)?);
    let port = FIRST_PORT + (job.wrapping_mul(31).wrapping_add(step) % PORTS) as u16;
    let home = lookup("HOME").map(PathBuf::from);
    Ok(Some(Cluster {
        scheduler: "Slurm",
        variable: Some("SLURM_STEP_NUM_NODES"),
        nodes: nodes.parse().map_err(|_| expected("SLURM_STEP_NUM_NODES", "a number", &nodes))?,
        node,
        rendezvous: format!("{head}:{port}"),
        tasks,
        task: number("SLURM_LOCALID", lookup)?,
        ranks: None,
        job: format!("slurm-{job}.{step}"),
        token_file: home.map(|home| home.join(".tpurun").join(format!("slurm-{job}.{step}.token"))),
        is_one_terminal: true,
    }))
}

/// A worker of a TPU slice on GKE.
fn gke(lookup: Lookup<'_>) -> Result<Option<Cluster>, String> {
    let (Some(names), Some(_)) = (lookup("TPU_WORKER_HOSTNAMES"), lookup("TPU_WORKER_ID")) else {
        return Ok(None);
    };
    let names: Vec<&str> = names.split(',').map(str::trim).filter(|name| !name.is_empty()).collect();
    let Some(head) = names.first() else { return Ok(None) };
    Ok(Some(Cluster {
        scheduler: GKE,
        variable: Some("TPU_WORKER_HOSTNAMES"),
        nodes: names.len() as u32,
        node: number("TPU_WORKER_ID", lookup)?,
        rendezvous: format!("{head}:{GKE_PORT}"),
        tasks: 1,
        task: 0,
        ranks: None,
        job: "gke".into(),
        token_file: None,
        is_one_terminal: false,
    }))
}

fn number(name: &str, lookup: Lookup<'_>) -> Result<u32, String> {
    let text = lookup(name).ok_or_else(|| format!("{name}: expected a number, given none{OTHERWISE}"))?;
    text.parse().map_err(|_| expected(name, "a number", &text))
}

fn expected(name: &str, what: &str, given: &str) -> String {
    format!("{name}: expected {what}, given {given}{OTHERWISE}")
}

/// The number of tasks on a node: `4(x2),3` says that node 2 has 3.
fn tasks_on(counts: &str, node: u32) -> Option<u32> {
    let mut before = 0_u32;
    for part in counts.split(',') {
        let (tasks, times) = match part.split_once("(x") {
            None => (part, 1),
            Some((tasks, times)) => (tasks, times.strip_suffix(')')?.parse().ok()?),
        };
        before = before.checked_add(times)?;
        if node < before {
            return tasks.parse().ok().filter(|tasks| *tasks > 0);
        }
    }
    None
}

/// The first host of a list: `rack03n1` in `rack[03-07,9]n1,m5`.
fn first_host(list: &str) -> Option<String> {
    let Some((prefix, rest)) = list.split_once('[').filter(|(prefix, _)| !prefix.contains(',')) else {
        return list.split(',').next().filter(|host| is_host(host)).map(str::to_owned);
    };
    let (numbers, rest) = rest.split_once(']')?;
    let number =
        numbers.split(['-', ',']).next().filter(|number| number.bytes().all(|b| b.is_ascii_digit()))?;
    let suffix = rest.split(',').next().unwrap_or_default();
    let suffix = if suffix.contains('[') { first_host(suffix)? } else { suffix.to_owned() };
    Some(format!("{prefix}{number}{suffix}")).filter(|host| is_host(host))
}

fn is_host(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b".-_".contains(&byte))
}

/// Two jobs on the same first node rarely want the same one; below what systems give out by themselves.
const FIRST_PORT: u16 = 20_000;
const PORTS: u32 = 10_000;
/// The advice for a person who did not mean the scheduler's nodes.
pub(crate) const OTHERWISE: &str = " (--standalone: this host alone)";
const GKE_PORT: u16 = 29_400;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn lookup<'a>(variables: &'a [(&'a str, &'a str)]) -> impl Fn(&str) -> Option<String> + 'a {
        |name| variables.iter().find(|(own, _)| *own == name).map(|(_, value)| (*value).to_owned())
    }

    const STEP: [(&str, &str); 9] = [
        ("SLURM_JOB_ID", "7"),
        ("SLURM_STEP_ID", "2"),
        ("SLURM_STEP_NUM_NODES", "3"),
        ("SLURM_STEP_NODELIST", "n[03-04],m1"),
        ("SLURM_STEP_TASKS_PER_NODE", "4(x2),3"),
        ("SLURM_NODEID", "2"),
        ("SLURM_LOCALID", "1"),
        ("SLURM_PROCID", "9"),
        ("HOME", "/home/me"),
    ];

    #[test]
    fn ranks_of_all_nodes_are_shared_where_nobody_counts_tasks() {
        let gke = |node: &str| {
            let variables = [("TPU_WORKER_HOSTNAMES", "a,b,c"), ("TPU_WORKER_ID", node)];
            gke(&lookup(&variables)).unwrap().unwrap().own_ranks(8)
        };
        assert_eq!(["0", "1", "2"].map(gke), [3, 3, 2]);
        let srun = detect(&lookup(&STEP)).unwrap().unwrap();
        assert_eq!(srun.own_ranks(8), 3);
        assert_eq!(Cluster { ranks: Some(5), ..srun }.own_ranks(8), 5);
    }

    #[test]
    fn a_task_of_srun_knows_its_place() {
        let expected = Cluster {
            scheduler: "Slurm",
            variable: Some("SLURM_STEP_NUM_NODES"),
            nodes: 3,
            node: 2,
            rendezvous: "n03:20219".into(),
            tasks: 3,
            task: 1,
            ranks: None,
            job: "slurm-7.2".into(),
            token_file: Some("/home/me/.tpurun/slurm-7.2.token".into()),
            is_one_terminal: true,
        };
        assert_eq!(detect(&lookup(&STEP)), Ok(Some(expected)));
        // A batch script is no task of a step; a step of one task needs nothing of this.
        assert_eq!(detect(&lookup(&[("SLURM_JOB_ID", "7"), ("SLURM_NNODES", "2")])), Ok(None));
        let alone = STEP.map(|(name, value)| match name {
            "SLURM_STEP_NUM_NODES" | "SLURM_STEP_TASKS_PER_NODE" => (name, "1"),
            "SLURM_NODEID" | "SLURM_LOCALID" => (name, "0"),
            _ => (name, value),
        });
        assert_eq!(detect(&lookup(&alone)), Ok(None));
    }

    #[test]
    fn a_batch_script_starts_its_nodes_by_srun() {
        let batch = [("SLURM_JOB_NUM_NODES", "2")];
        let words = |gives_ranks| srun(&lookup(&batch), gives_ranks).map(|words| words.join(" "));
        assert_eq!(words(false).as_deref(), Some("srun --kill-on-bad-exit=0"));
        assert!(words(true).unwrap().ends_with(" --nodes=2 --ntasks=2 --ntasks-per-node=1"));
        assert_eq!(srun(&lookup(&[("SLURM_JOB_NUM_NODES", "1")]), false), None);
        let task = [("SLURM_JOB_NUM_NODES", "2"), ("SLURM_STEP_NODELIST", "n[0-1]")];
        assert_eq!(srun(&lookup(&task), false), None);
    }

    #[test]
    fn what_no_scheduler_writes_is_refused_in_one_line() {
        for (name, value, error) in [
            ("SLURM_NODEID", "x", "SLURM_NODEID: expected a number, given x"),
            (
                "SLURM_NODEID",
                "3",
                "SLURM_STEP_TASKS_PER_NODE: expected numbers such as 4(x2),3, given 4(x2),3",
            ),
            ("SLURM_STEP_NODELIST", "n[", "SLURM_STEP_NODELIST: expected hosts such as n[0-3], given n["),
        ] {
            let wrong = STEP.map(|(own, before)| (own, if own == name { value } else { before }));
            assert_eq!(detect(&lookup(&wrong)).unwrap_err(), format!("{error}{OTHERWISE}"));
        }
    }

    #[test]
    fn a_worker_of_gke_knows_its_place() {
        let found = detect(&lookup(&[("TPU_WORKER_ID", "1"), ("TPU_WORKER_HOSTNAMES", "t-0.svc,t-1.svc")]));
        let found = found.unwrap().unwrap();
        assert_eq!((found.nodes, found.node, found.rendezvous.as_str()), (2, 1, "t-0.svc:29400"));
        let index = node_rank(&lookup(&[("JOB_COMPLETION_INDEX", "4")]));
        assert_eq!(index, Some(("JOB_COMPLETION_INDEX", "4".to_owned())));
    }

    #[test]
    fn the_first_host_of_a_list() {
        for (list, first) in [
            ("n0", Some("n0")),
            ("n[0-1]", Some("n0")),
            ("n[007,9-10],m", Some("n007")),
            ("m,n[0-1]", Some("m")),
            ("rack[3-4]n[1-2]", Some("rack3n1")),
            ("a[1", None),
            ("", None),
            ("x y", None),
        ] {
            assert_eq!(first_host(list).as_deref(), first, "{list}");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn any_text_is_a_host_or_none(list in "[n0-9,\\[\\]-]{0,12}", counts in "[0-9(x),]{0,9}", node in 0..9_u32) {
            prop_assert!(first_host(&list).is_none_or(|host| is_host(&host)));
            prop_assert!(tasks_on(&counts, node).is_none_or(|tasks| tasks > 0));
        }
    }
}
