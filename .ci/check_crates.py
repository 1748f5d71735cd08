"""Holds the crates of Cargo.lock to deny.toml: their licences, where they come from, and one version of each.

The part of cargo-deny that needs no advisory database, for machines without it (building it takes longer
than all other checks together). Reads the crates that cargo has already fetched.
"""

import json
import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from pathlib import Path

CRATES_IO = "registry+https://github.com/rust-lang/crates.io-index"


def metadata() -> dict:
    command = ["cargo", "metadata", "--locked", "--format-version", "1"]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


def allows(expression: str, allowed: set[str]) -> bool:
    """Whether an SPDX expression can be met: OR is a choice, AND is both, the old "/" is OR."""
    words = re.findall(r"[()]|[^\s()]+(?:\s+WITH\s+[^\s()]+)?", expression.replace("/", " OR "))

    def term() -> bool:
        word = words.pop(0)
        if word != "(":
            return word in allowed
        value = either()
        words.pop(0)  # its ")"
        return value

    def both() -> bool:
        value = term()
        while words[:1] == ["AND"]:
            words.pop(0)
            value = term() and value
        return value

    def either() -> bool:
        value = both()
        while words[:1] == ["OR"]:
            words.pop(0)
            value = both() or value
        return value

    return either()


def problems(crates: list[dict], policy: dict) -> list[str]:
    allowed = set(policy["licenses"]["allow"])
    skipped = {entry["crate"].split("@")[0] for entry in policy["bans"]["skip"]}
    found = []
    versions = defaultdict(set)
    for crate in crates:
        name = f"{crate['name']} {crate['version']}"
        versions[crate["name"]].add(crate["version"])
        if not crate["license"] or not allows(crate["license"], allowed):
            found.append(f"{name}: licence {crate['license']} is not allowed")
        if crate["source"] not in (None, CRATES_IO):
            found.append(f"{name}: comes from {crate['source']}, expected crates.io or this workspace")
    found += [
        f"{name}: in versions {', '.join(sorted(several))}, expected one"
        for name, several in versions.items()
        if len(several) > 1 and name not in skipped
    ]
    return found


def main() -> int:
    policy = tomllib.loads(Path("deny.toml").read_text())
    crates = metadata()["packages"]
    found = problems(crates, policy)
    for problem in found:
        print(f"deny.toml: {problem}", file=sys.stderr)
    if not found:
        print(f"deny.toml: {len(crates)} crates are as it says")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
