//! The words about ranks that all ended well and of which none made a process group.

use std::collections::BTreeSet;

/// Libraries that distribute on CPUs only when they are told to, and what tells them.
const SWITCHES: [(&str, &str); 4] = [
    ("accelerate", "ACCELERATE_USE_CPU=true for accelerate"),
    ("lightning", "accelerator=\"cpu\" for lightning"),
    ("pytorch_lightning", "accelerator=\"cpu\" for pytorch_lightning"),
    ("transformers", "use_cpu=True for transformers"),
];

/// The one line for all ranks, with the switches of the libraries that any of them imported.
pub(crate) fn line(ranks: u32, libraries: &[String]) -> String {
    let text = format!("all {ranks} ranks ended well, but none made a process group: each ran alone");
    let seen: BTreeSet<&str> = libraries.iter().map(String::as_str).collect();
    let switches: Vec<&str> =
        SWITCHES.iter().filter(|(library, _)| seen.contains(library)).map(|(_, switch)| *switch).collect();
    if switches.is_empty() { text } else { format!("{text}; missing: {}", switches.join(", ")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_switches_of_the_libraries_are_named_once() {
        let of = |libraries: &[&str]| {
            line(4, &libraries.iter().map(|&library| library.to_owned()).collect::<Vec<_>>())
        };
        let alone = "all 4 ranks ended well, but none made a process group: each ran alone";
        assert_eq!(of(&[]), alone);
        assert_eq!(
            of(&["transformers", "accelerate", "transformers", "unknown"]),
            format!(
                "{alone}; missing: ACCELERATE_USE_CPU=true for accelerate, use_cpu=True for transformers"
            )
        );
        assert_eq!(of(&["lightning"]), format!("{alone}; missing: accelerator=\"cpu\" for lightning"));
    }
}
