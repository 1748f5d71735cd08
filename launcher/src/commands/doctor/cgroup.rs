//! Limits that control groups, v1 and v2, set for this process: the smallest limit on the way up to the root counts.

use std::fs;
use std::path::{Path, PathBuf};

/// The folders of the groups that this process is in.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Cgroups {
    hierarchies: Vec<Hierarchy>,
}

#[derive(Debug, PartialEq, Eq)]
struct Hierarchy {
    /// Empty for v2.
    controllers: Vec<String>,
    mount: PathBuf,
    /// Below `mount`.
    group: PathBuf,
}

impl Cgroups {
    /// Finds them; none where the process may not know.
    pub(super) fn of_this_process() -> Self {
        let read = |path| fs::read_to_string(path).unwrap_or_default();
        Self::parse(&read("/proc/self/mountinfo"), &read("/proc/self/cgroup"))
    }

    fn parse(mountinfo: &str, membership: &str) -> Self {
        let hierarchies = mountinfo.lines().filter_map(|line| parse_mount(line, membership)).collect();
        Self { hierarchies }
    }

    /// The folder of this process's v2 group.
    pub(super) fn v2_folder(&self) -> Option<PathBuf> {
        let v2 = self.hierarchies.iter().find(|hierarchy| hierarchy.controllers.is_empty())?;
        // Through components, because joining the empty path of the root leaves a slash at the end.
        Some(v2.mount.join(&v2.group).components().collect())
    }

    /// CPUs' worth of time per second.
    pub(super) fn cpu_quota(&self) -> Option<f64> {
        self.limits("cpu", |folder| {
            parse_cpu_max(&read(folder, "cpu.max")?).or_else(|| {
                parse_cfs(&read(folder, "cpu.cfs_quota_us")?, &read(folder, "cpu.cfs_period_us")?)
            })
        })
        .into_iter()
        .reduce(f64::min)
    }

    /// Bytes that may still be used before the group's limit.
    pub(super) fn memory_left(&self) -> Option<u64> {
        let v2 = self.limits("memory", |folder| left(folder, "memory.max", "memory.current"));
        let v1 =
            self.limits("memory", |folder| left(folder, "memory.limit_in_bytes", "memory.usage_in_bytes"));
        v2.into_iter().chain(v1).min()
    }

    /// Processes and threads that may still be started.
    pub(super) fn pids_left(&self) -> Option<u64> {
        self.limits("pids", |folder| left(folder, "pids.max", "pids.current")).into_iter().min()
    }

    /// Collects the limits that `limit` finds in the folders from this process's group up to the root.
    fn limits<T>(&self, controller: &str, limit: impl Fn(&Path) -> Option<T>) -> Vec<T> {
        let governs = |hierarchy: &&Hierarchy| {
            hierarchy.controllers.is_empty() || hierarchy.controllers.iter().any(|name| name == controller)
        };
        self.hierarchies
            .iter()
            .filter(governs)
            .flat_map(|hierarchy| hierarchy.group.ancestors().map(|group| hierarchy.mount.join(group)))
            .filter_map(|folder| limit(&folder))
            .collect()
    }
}

/// One line of `/proc/self/mountinfo`: `31 23 0:28 / /sys/fs/cgroup rw,relatime - cgroup2 cgroup2 rw`.
fn parse_mount(line: &str, membership: &str) -> Option<Hierarchy> {
    let (place, kind) = line.split_once(" - ")?;
    let mut place = place.split(' ').skip(3);
    let (root, mount) = (place.next()?, place.next()?);
    let mut kind = kind.split(' ');
    let (fs_type, options) = (kind.next()?, kind.nth(1)?);
    let of_mount = |names: &str| match fs_type {
        "cgroup2" => names.is_empty(),
        "cgroup" => !names.is_empty() && names.split(',').all(|name| options.split(',').any(|o| o == name)),
        _ => false,
    };
    // `4:memory:/group`, and for v2 `0::/group`.
    let (controllers, group) = membership.lines().find_map(|line| {
        let (names, group) = line.split_once(':')?.1.split_once(':')?;
        of_mount(names).then_some((names, group))
    })?;
    let below_mount = Path::new(group).strip_prefix(root).unwrap_or(Path::new(""));
    Some(Hierarchy {
        controllers: controllers.split(',').filter(|name| !name.is_empty()).map(str::to_owned).collect(),
        mount: PathBuf::from(mount),
        group: below_mount.to_path_buf(),
    })
}

/// v2: `150000 100000` is 1.5 CPUs, `max 100000` is no limit.
fn parse_cpu_max(text: &str) -> Option<f64> {
    let (quota, period) = text.trim().split_once(' ')?;
    parse_cfs(quota, period)
}

/// v1: a quota of -1 is no limit.
fn parse_cfs(quota: &str, period: &str) -> Option<f64> {
    let quota: u64 = quota.trim().parse().ok()?;
    let period: u64 = period.trim().parse().ok()?;
    (period > 0).then(|| quota as f64 / period as f64)
}

fn left(folder: &Path, limit: &str, used: &str) -> Option<u64> {
    let limit: u64 = read(folder, limit)?.trim().parse().ok()?;
    let used: u64 = read(folder, used)?.trim().parse().ok()?;
    Some(limit.saturating_sub(used))
}

fn read(folder: &Path, file: &str) -> Option<String> {
    fs::read_to_string(folder.join(file)).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_quotas_of_both_versions() {
        assert_eq!(parse_cpu_max("150000 100000\n"), Some(1.5));
        assert_eq!(parse_cpu_max("max 100000\n"), None);
        assert_eq!(parse_cpu_max(""), None);
        assert_eq!(parse_cfs("50000\n", "100000\n"), Some(0.5));
        assert_eq!(parse_cfs("-1\n", "100000\n"), None);
        assert_eq!(parse_cfs("1\n", "0\n"), None);
    }

    #[test]
    fn groups_are_found_in_both_versions() {
        let mountinfo = "\
            23 1 0:21 / / rw - ext4 /dev/sda1 rw\n\
            32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu,cpuacct\n\
            41 31 0:38 /pod /sys/fs/cgroup/unified rw shared:7 - cgroup2 cgroup2 rw\n";
        let membership = "4:cpu,cpuacct:/jobs/a\n3:memory:/elsewhere\n0::/pod/job\n";
        let cgroups = Cgroups::parse(mountinfo, membership);
        let expected = [
            Hierarchy {
                controllers: vec!["cpu".into(), "cpuacct".into()],
                mount: "/sys/fs/cgroup/cpu".into(),
                group: "jobs/a".into(),
            },
            Hierarchy { controllers: vec![], mount: "/sys/fs/cgroup/unified".into(), group: "job".into() },
        ];
        assert_eq!(cgroups.hierarchies, expected);
        assert_eq!(cgroups.v2_folder(), Some(PathBuf::from("/sys/fs/cgroup/unified/job")));
    }

    #[test]
    fn the_smallest_limit_on_the_way_up_counts() {
        let mount = tempfile::tempdir().unwrap();
        let group = mount.path().join("outer/inner");
        fs::create_dir_all(&group).unwrap();
        let write = |folder: &Path, file: &str, text: &str| fs::write(folder.join(file), text).unwrap();
        write(&group, "cpu.max", "max 100000\n");
        write(&mount.path().join("outer"), "cpu.max", "250000 100000\n");
        write(&group, "memory.max", "1000\n");
        write(&group, "memory.current", "300\n");
        write(mount.path(), "memory.max", "900\n");
        write(mount.path(), "memory.current", "400\n");
        write(&group, "pids.max", "max\n");
        write(&group, "pids.current", "5\n");
        let hierarchy =
            Hierarchy { controllers: vec![], mount: mount.path().into(), group: "outer/inner".into() };
        let cgroups = Cgroups { hierarchies: vec![hierarchy] };
        assert_eq!(cgroups.cpu_quota(), Some(2.5));
        assert_eq!(cgroups.memory_left(), Some(500));
        assert_eq!(cgroups.pids_left(), None);
    }
}
