//! Files and directories of this user alone. Nothing here follows a link that somebody may have put in the way, waits
//! at a pipe, or uses what another user owns.

use std::fs::{self, DirBuilder, File, Metadata, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;

/// The users that may own a directory that was there before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AllowedOwner {
    /// This user.
    User,
    /// This user; root, too, where nobody else can take away what this user makes in it (`/tmp`).
    UserOrRoot,
}

/// A new file in the place of whatever has that name; of a link, the link is replaced.
pub(crate) fn file(path: &Path) -> io::Result<File> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)
}

/// A file to append to, which may be there.
///
/// # Errors
/// Also when it is a link, a pipe, a file of another user, or one that has another name, too.
pub(crate) fn appended(path: &Path) -> io::Result<File> {
    opened(path, OpenOptions::new().append(true).create(true))
}

/// As [`appended`], read and written from the start.
pub(crate) fn shared(path: &Path) -> io::Result<File> {
    opened(path, OpenOptions::new().read(true).write(true).create(true))
}

/// As [`shared`], one that is there.
pub(crate) fn existing(path: &Path) -> io::Result<File> {
    opened(path, OpenOptions::new().read(true).write(true))
}

fn opened(path: &Path, options: &mut OpenOptions) -> io::Result<File> {
    // A pipe that nobody reads is an error at once.
    let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits();
    let file = options.mode(0o600).custom_flags(flags as i32).open(path).map_err(|error| {
        let is_link = path.symlink_metadata().is_ok_and(|found| found.is_symlink());
        if is_link { expected("a file of our own", "a link", path) } else { error }
    })?;
    let found = file.metadata()?;
    if !found.is_file() || found.nlink() > 1 {
        return Err(expected("a file of our own", "something else", path));
    }
    if !is_own(&found)
        && path.parent().and_then(|dir| dir.metadata().ok()).map(|dir| dir.uid()) != Some(found.uid())
    {
        return Err(expected("a file of our own", &format!("one of uid {}", found.uid()), path));
    }
    Ok(file)
}

/// Makes a directory, and those above it, unless it is there and fit to be used.
///
/// # Errors
/// Also when it is a link, is no directory, or belongs to somebody else.
pub(crate) fn directory(path: &Path, owner: AllowedOwner) -> io::Result<()> {
    // Without a slash at the end, which would follow a link.
    let whole: PathBuf = std::path::absolute(path)?.components().collect();
    check_way(&whole)?;
    if let Some(parent) = whole.parent() {
        DirBuilder::new().recursive(true).mode(0o700).create(parent)?;
    }
    match DirBuilder::new().mode(0o700).create(&whole) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => check_directory(&whole, owner),
        made => made,
    }
}

/// A folder inside of a directory of ours.
pub(crate) fn folder(path: &Path) -> io::Result<()> {
    match DirBuilder::new().mode(0o700).create(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            let found = path.symlink_metadata()?;
            let parent = path.parent().unwrap_or(path).symlink_metadata()?;
            match found.is_dir() && (is_own(&found) || found.uid() == parent.uid()) {
                true => Ok(()),
                false => Err(expected("a directory of our own", "something else", path)),
            }
        }
        made => made,
    }
}

/// On the way to it may be links of this user or of the machine; it is none itself.
fn check_way(path: &Path) -> io::Result<()> {
    let above = path.ancestors().skip(1).filter_map(|part| Some((part, part.symlink_metadata().ok()?)));
    for (part, found) in above.filter(|(_, found)| found.is_symlink()) {
        if !is_own(&found) && found.uid() != 0 {
            let text = format!("{} is a link of another user (uid {})", part.display(), found.uid());
            return Err(io::Error::other(text));
        }
    }
    Ok(())
}

fn check_directory(path: &Path, owner: AllowedOwner) -> io::Result<()> {
    let found = path.symlink_metadata()?;
    let own = rustix::process::geteuid().as_raw();
    let wanted = format!("a directory of this user (uid {own})");
    if found.is_symlink() {
        let target = fs::read_link(path).unwrap_or_default();
        return Err(expected(&wanted, &format!("a link to {}", target.display()), path));
    }
    if !found.is_dir() {
        return Err(io::ErrorKind::NotADirectory.into());
    }
    // Others can rename what is in a directory that all may write to, unless it is sticky.
    let keeps = found.mode() & 0o1002 != 0o0002;
    let may_be = is_own(&found) || owner == AllowedOwner::UserOrRoot && found.uid() == 0 && keeps;
    if may_be || is_own_there(path, &found) {
        return Ok(());
    }
    Err(expected(&wanted, &format!("one of uid {}", found.uid()), path))
}

fn is_own(found: &Metadata) -> bool {
    found.uid() == rustix::process::geteuid().as_raw()
}

/// Whether the file system shows what this user makes as somebody else's, as NFS does with what root makes.
fn is_own_there(path: &Path, found: &Metadata) -> bool {
    let probe = path.join(format!(".tpurun-probe-{}", std::process::id()));
    let made = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&probe);
    let owner = made.and_then(|file| file.metadata()).map(|made| made.uid());
    if owner.is_ok() {
        let _ = fs::remove_file(&probe);
    }
    owner.is_ok_and(|owner| owner == found.uid())
}

fn expected(what: &str, given: &str, path: &Path) -> io::Error {
    io::Error::other(format!("expected {what}, given {given}: {}", path.display()))
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn a_link_in_the_way_is_replaced_or_refused_and_never_followed() {
        let dir = tempfile::tempdir().unwrap();
        let (victim, link) = (dir.path().join("victim"), dir.path().join("link"));
        fs::write(&victim, "precious").unwrap();
        symlink(&victim, &link).unwrap();
        let refused = appended(&link).unwrap_err().to_string();
        assert_eq!(refused, format!("expected a file of our own, given a link: {}", link.display()));
        assert!(existing(&link).is_err() && shared(&link).is_err());
        file(&link).unwrap().write_all(b"new").unwrap();
        assert_eq!(fs::read_to_string(&victim).unwrap(), "precious");
        assert_eq!(fs::read_to_string(&link).unwrap(), "new");
        assert_eq!(fs::symlink_metadata(&link).unwrap().mode() & 0o777, 0o600);
        // A link to nothing would make a file elsewhere.
        let nothing = dir.path().join("nothing");
        symlink(dir.path().join("made"), &nothing).unwrap();
        assert!(appended(&nothing).is_err() && shared(&nothing).is_err());
        assert!(!dir.path().join("made").exists());
    }

    #[test]
    fn a_second_name_and_a_pipe_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let (victim, name, pipe) =
            (dir.path().join("victim"), dir.path().join("name"), dir.path().join("pipe"));
        fs::write(&victim, "precious").unwrap();
        fs::hard_link(&victim, &name).unwrap();
        assert!(appended(&name).unwrap_err().to_string().contains("given something else"));
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
        // It would wait for a reader.
        assert!(appended(&pipe).is_err() && existing(&pipe).is_err());
    }

    #[test]
    fn a_directory_is_made_or_is_ours() {
        let dir = tempfile::tempdir().unwrap();
        let (real, link) = (dir.path().join("a/b"), dir.path().join("link"));
        directory(&real, AllowedOwner::User).unwrap();
        directory(&real, AllowedOwner::User).unwrap();
        assert_eq!(real.metadata().unwrap().mode() & 0o777, 0o700);
        symlink(&real, &link).unwrap();
        for given in [link.clone(), dir.path().join("link/"), dir.path().join("link/.")] {
            let refused = directory(&given, AllowedOwner::User).unwrap_err().to_string();
            assert!(refused.contains(&format!("given a link to {}", real.display())), "{refused}");
        }
        assert!(folder(&link).is_err());
        // A link of one's own on the way is one's own decision.
        directory(&link.join("c"), AllowedOwner::User).unwrap();
        fs::write(dir.path().join("file"), "").unwrap();
        assert!(directory(&dir.path().join("file"), AllowedOwner::User).is_err());
        let nothing = dir.path().join("nothing");
        symlink(dir.path().join("made"), &nothing).unwrap();
        assert!(directory(&nothing, AllowedOwner::User).is_err() && !dir.path().join("made").exists());
    }

    #[test]
    fn what_belongs_to_others_is_refused() {
        let root = Path::new("/proc/self");
        if rustix::process::geteuid().is_root() {
            let dir = tempfile::tempdir().unwrap();
            let (theirs, link) = (dir.path().join("theirs"), dir.path().join("link"));
            fs::create_dir(&theirs).unwrap();
            symlink(&theirs, &link).unwrap();
            std::os::unix::fs::chown(&theirs, Some(12345), None).unwrap();
            std::os::unix::fs::lchown(&link, Some(12345), None).unwrap();
            let refused = directory(&theirs, AllowedOwner::UserOrRoot).unwrap_err().to_string();
            assert!(
                refused.starts_with("expected a directory of this user (uid 0), given one of uid 12345: ")
            );
            assert_eq!(fs::read_dir(&theirs).unwrap().count(), 0);
            let refused = directory(&link.join("mine"), AllowedOwner::User).unwrap_err().to_string();
            assert!(refused.ends_with("link is a link of another user (uid 12345)"), "{refused}");
            fs::write(dir.path().join("log"), "").unwrap();
            std::os::unix::fs::chown(dir.path().join("log"), Some(12345), None).unwrap();
            let refused = appended(&dir.path().join("log")).unwrap_err().to_string();
            assert!(refused.starts_with("expected a file of our own, given one of uid 12345: "), "{refused}");
        } else {
            assert!(
                directory(Path::new("/usr"), AllowedOwner::User)
                    .unwrap_err()
                    .to_string()
                    .contains("of uid 0")
            );
        }
        assert!(directory(root, AllowedOwner::User).is_err());
    }
}
