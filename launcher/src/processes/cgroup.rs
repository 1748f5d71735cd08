//! A control group of the job, where the host lets us make one: one write then kills all of it at once, and
//! tells nobody else's processes from ours by guessing.
//!
//! The agent removes it when the job has ended, and its front does where the agent could not. A group whose job is
//! gone, because both were killed, is removed by the next job that begins beside it.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::processes::Process;

/// The job's own group in the cgroup v2 tree.
#[derive(Debug)]
pub(crate) struct JobCgroup {
    path: PathBuf,
    /// Where the agent was, and returns to.
    home: PathBuf,
    is_usable: bool,
}

impl JobCgroup {
    /// Makes the group of the job whose front process is `front`, where this process may.
    pub(crate) fn create(front: i32) -> Option<JobCgroup> {
        let home = own_group()?;
        remove_stale(&home, front);
        let path = home.join(group_name(front));
        fs::create_dir(&path).ok()?;
        // Before Linux 5.14 there is no such file; then the group is of no use.
        let is_usable = path.join("cgroup.kill").exists();
        let mut group = JobCgroup { path, home, is_usable };
        group.enclose(|| ());
        group.is_usable.then_some(group)
    }

    /// Runs `start` inside the group, so that every process it starts is born there.
    pub(crate) fn enclose<T>(&mut self, start: impl FnOnce() -> T) -> T {
        self.is_usable &= move_self(&self.path).is_ok();
        let started = start();
        // Whoever is in the group is killed with it.
        self.is_usable &= move_self(&self.home).is_ok();
        started
    }

    /// Takes in a process that was born elsewhere.
    pub(crate) fn admit(&mut self, pid: i32) {
        self.is_usable &= fs::write(self.path.join("cgroup.procs"), pid.to_string()).is_ok();
    }

    /// Kills every process of the group, all at once.
    pub(crate) fn kill(&self) {
        if self.is_usable {
            let _ = fs::write(self.path.join("cgroup.kill"), "1");
        }
    }

    /// Whether a process of the group has not ended yet, whoever its parent is.
    pub(crate) fn has_processes(&self) -> bool {
        let events = fs::read_to_string(self.path.join("cgroup.events")).unwrap_or_default();
        self.is_usable && events.lines().any(|line| line == "populated 1")
    }
}

impl Drop for JobCgroup {
    fn drop(&mut self) {
        remove(&self.path, REMOVAL);
    }
}

/// Ends what is left of the group of a job whose agent has ended.
pub(crate) fn kill_left_over(front: i32) {
    if let Some(path) = own_group().map(|home| home.join(group_name(front))).filter(|path| path.exists()) {
        let _ = fs::write(path.join("cgroup.kill"), "1");
    }
}

/// Removes it once its processes are gone, or leaves it to the next job when they are not after `patience`.
pub(crate) fn remove_left_over(front: i32, patience: Duration) {
    if let Some(path) = own_group().map(|home| home.join(group_name(front))) {
        remove(&path, patience);
    }
}

/// Removes the groups beside `home` of jobs whose front is gone, and one that had the number of our own front. The
/// kernel refuses where processes are left.
fn remove_stale(home: &Path, front: i32) {
    let is_stale = |group: &PathBuf| {
        let number = group.file_name().and_then(|name| name.to_str()?.strip_prefix(PREFIX)?.parse().ok());
        let is_gone = |number| Process::read(number).is_none_or(|process| process.is_zombie());
        number.is_some_and(|number: i32| number == front || is_gone(number))
    };
    groups_in(home).filter(is_stale).for_each(|group| drop(remove_whole(&group)));
}

/// A process that was reaped leaves its group only when its processor turns to something else, which takes long where
/// many processes end.
fn remove(path: &Path, patience: Duration) {
    let deadline = Instant::now() + patience;
    while remove_whole(path).is_err_and(|error| error.kind() == io::ErrorKind::ResourceBusy) {
        if Instant::now() >= deadline {
            return;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Removes a group with those in it, which jobs have made that ranks had started, and that ended with these.
fn remove_whole(path: &Path) -> io::Result<()> {
    groups_in(path).try_for_each(|group| remove_whole(&group))?;
    fs::remove_dir(path)
}

fn groups_in(path: &Path) -> impl Iterator<Item = PathBuf> {
    let entries = fs::read_dir(path).into_iter().flatten().flatten();
    entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir())).map(|entry| entry.path())
}

/// How often the kernel has killed a process for want of memory, here or in a group around us.
pub(crate) fn oom_kills() -> u64 {
    let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let events = own_group().map(|group| group.join("memory.events"));
    let v1 = v1_memory_group(&mounts, &own).map(|group| group.join("memory.oom_control"));
    let counts = events.into_iter().chain(v1).chain([PathBuf::from("/proc/vmstat")]);
    counts.filter_map(|path| oom_kill_line(&fs::read_to_string(path).ok()?)).sum()
}

fn oom_kill_line(text: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse().ok())
}

fn own_group() -> Option<PathBuf> {
    let mounts = fs::read_to_string("/proc/self/mountinfo").ok()?;
    let own = fs::read_to_string("/proc/self/cgroup").ok()?;
    v2_group(&mounts, &own)
}

/// The directory of this process's group in the v2 tree, wherever that is mounted.
fn v2_group(mounts: &str, own: &str) -> Option<PathBuf> {
    let group = own.lines().find_map(|line| line.strip_prefix("0::"))?;
    let (root, mount_point) = mounts.lines().find_map(|line| mount_of(line, |kind, _| kind == "cgroup2"))?;
    beneath(&mount_point, &root, group)
}

fn v1_memory_group(mounts: &str, own: &str) -> Option<PathBuf> {
    let has_memory = |names: &str| names.split(',').any(|name| name == "memory");
    let group = own.lines().find_map(|line| {
        let mut fields = line.splitn(3, ':').skip(1);
        has_memory(fields.next()?).then(|| fields.next())?
    })?;
    let is_memory = |kind: &str, options: &str| kind == "cgroup" && has_memory(options);
    let (root, mount_point) = mounts.lines().find_map(|line| mount_of(line, is_memory))?;
    beneath(&mount_point, &root, group)
}

/// `36 35 98:0 /root /mount/point rw,noatime master:1 - type source options`.
fn mount_of(line: &str, accept: impl Fn(&str, &str) -> bool) -> Option<(String, PathBuf)> {
    let (mount, filesystem) = line.split_once(" - ")?;
    let mut filesystem = filesystem.split(' ');
    let (kind, _source, options) = (filesystem.next()?, filesystem.next()?, filesystem.next()?);
    let mut mount = mount.split(' ').skip(3);
    let (root, point) = (mount.next()?, mount.next()?);
    accept(kind, options).then(|| (root.to_owned(), PathBuf::from(point)))
}

/// In a container the mount may show only a part of the tree that `group` is written from.
fn beneath(mount_point: &Path, root: &str, group: &str) -> Option<PathBuf> {
    let inside = Path::new(group).strip_prefix(root).ok()?;
    Some(mount_point.join(inside))
}

fn move_self(group: &Path) -> io::Result<()> {
    fs::write(group.join("cgroup.procs"), "0")
}

fn group_name(front: i32) -> String {
    format!("{PREFIX}{front}")
}

const PREFIX: &str = "tpurun-";
/// Time for which the agent tries to remove its group; the front of the job tries it again, and for longer.
const REMOVAL: Duration = Duration::from_millis(300);

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNTS: &str = "\
25 30 0:23 / /proc rw,nosuid - proc proc rw
41 32 0:35 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
42 32 0:36 / /sys/fs/cgroup/unified rw,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate
";

    #[test]
    fn groups_are_found_where_they_are_mounted() {
        let own = "9:name=systemd:/\n4:memory:/job/7\n0::/user.slice/me\n";
        assert_eq!(v2_group(MOUNTS, own).unwrap(), Path::new("/sys/fs/cgroup/unified/user.slice/me"));
        assert_eq!(v1_memory_group(MOUNTS, own).unwrap(), Path::new("/sys/fs/cgroup/memory/job/7"));
        let container = "1 2 0:1 /docker/abc /sys/fs/cgroup ro - cgroup2 cgroup rw\n";
        assert_eq!(v2_group(container, "0::/docker/abc/x\n").unwrap(), Path::new("/sys/fs/cgroup/x"));
        assert_eq!(v2_group(container, "0::/elsewhere\n"), None);
        assert_eq!(v2_group("", own), None);
    }

    /// Folders alone: the kernel takes them for groups, and lets nobody remove one that has processes.
    #[test]
    fn groups_of_dead_jobs_are_removed_by_the_next_one() {
        let home = tempfile::tempdir().unwrap();
        let (own, living) = (std::process::id(), std::os::unix::process::parent_id());
        let others = ["other-1".to_owned(), "tpurun-x".to_owned(), format!("tpurun-{living}")];
        let stale = [format!("tpurun-{own}"), format!("tpurun-{}", i32::MAX)];
        for name in others.iter().chain(&stale) {
            // A job that a rank of that job had started has a group in it.
            fs::create_dir_all(home.path().join(name).join("tpurun-7")).unwrap();
        }
        remove_stale(home.path(), own as i32);
        let left = |names: &[String]| names.iter().filter(|name| home.path().join(name).exists()).count();
        assert_eq!((left(&others), left(&stale)), (3, 0));
    }

    #[test]
    fn oom_kills_are_counted_by_their_line() {
        assert_eq!(oom_kill_line("low 0\noom 3\noom_kill 2\noom_group_kill 9\n"), Some(2));
        assert_eq!(oom_kill_line("oom_kill_disable 0\nunder_oom 0\n"), None);
    }
}
