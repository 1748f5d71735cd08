//! The order of one tpurun to another one: a line of JSON, then a line with the number of each signal.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// The first line.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Order {
    /// Version of tpurun, which must be the same on all hosts.
    pub(super) version: String,
    pub(super) cwd: PathBuf,
    /// All words of the command line but the first.
    pub(super) args: Vec<String>,
    /// Variables beside those that the host has by itself.
    pub(super) env: BTreeMap<String, String>,
}

impl Order {
    pub(super) fn to_line(&self) -> Result<Vec<u8>, String> {
        let mut line = serde_json::to_vec(self).map_err(|error| error.to_string())?;
        line.push(b'\n');
        Ok(line)
    }

    /// # Errors
    /// One line that says what it is instead.
    pub(super) fn read(line: &str) -> Result<Order, String> {
        let version: Version =
            serde_json::from_str(line).map_err(|_| "expected to be started by tpurun itself")?;
        if version.version != VERSION {
            return Err(format!(
                "expected tpurun {}, as where it was started, this is {VERSION}",
                version.version
            ));
        }
        serde_json::from_str(line).map_err(|error| error.to_string())
    }
}

/// The part of an order that all versions have; they may differ in all the rest.
#[derive(Deserialize)]
struct Version {
    version: String,
}

/// Returns the variables of this process that mean the same on another host: all but those of a login and of a
/// machine.
pub(super) fn portable_environment() -> BTreeMap<String, String> {
    // A value that is no text can not be sent, and nobody would miss it.
    let texts = std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)));
    texts.filter(|(name, _)| is_portable(name)).collect()
}

fn is_portable(name: &str) -> bool {
    !OF_A_LOGIN.contains(&name) && !OF_A_SESSION.iter().any(|prefix| name.starts_with(prefix))
}

const OF_A_LOGIN: [&str; 17] = [
    "HOME",
    "USER",
    "LOGNAME",
    "SHELL",
    "HOSTNAME",
    "PWD",
    "OLDPWD",
    "SHLVL",
    "_",
    "MAIL",
    "TMPDIR",
    "TERM",
    "DISPLAY",
    "WAYLAND_DISPLAY",
    "XAUTHORITY",
    "TPURUN_HOST",
    "TPURUN_ADDRESS",
];
const OF_A_SESSION: [&str; 3] = ["SSH_", "XDG_", "DBUS_"];
pub(super) const VERSION: &str = env!("CARGO_PKG_VERSION");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_order_arrives_as_it_was_given() {
        let order = Order {
            version: VERSION.into(),
            cwd: "/home/me/a b".into(),
            args: vec!["-n".into(), "4".into(), "tr\n\"ain.py".into()],
            env: [("LR".to_owned(), "0.1\n".to_owned())].into(),
        };
        let line = String::from_utf8(order.to_line().unwrap()).unwrap();
        assert_eq!(line.matches('\n').count(), 1);
        assert_eq!(Order::read(&line), Ok(order));
    }

    #[test]
    fn what_is_no_order_is_refused() {
        assert_eq!(Order::read("x").unwrap_err(), "expected to be started by tpurun itself");
        let other = Order::read(r#"{"version": "0.0.0", "what": 1}"#).unwrap_err();
        assert_eq!(other, format!("expected tpurun 0.0.0, as where it was started, this is {VERSION}"));
    }

    #[test]
    fn what_belongs_to_a_machine_stays_there() {
        for name in ["HOME", "SSH_AUTH_SOCK", "XDG_RUNTIME_DIR", "TPURUN_HOST"] {
            assert!(!is_portable(name), "{name}");
        }
        for name in ["PATH", "PYTHONPATH", "OMP_NUM_THREADS", "WANDB_API_KEY", "TPURUN_VERIFY_RESULTS"] {
            assert!(is_portable(name), "{name}");
        }
    }
}
