"""A plan is what one job runs. It is kept in a file for the ranks to read, and they answer with outcomes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

BACKEND = "tpu_dist"

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"


@dataclass(frozen=True)
class Plan:
    """Tests of one suite on one number of ranks."""

    folder: Path
    """Where the plan lies, the ranks meet and the outcomes are written."""
    suite: str
    ranks: int
    tests: list[str]
    debug: str = "OFF"
    """TORCH_DISTRIBUTED_DEBUG."""

    @property
    def path(self) -> Path:
        return self.folder / "plan.json"

    @property
    def outcomes(self) -> Path:
        return self.folder / "outcomes.jsonl"

    def write(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(asdict(self) | {"folder": str(self.folder)}))

    @staticmethod
    def read(path: Path) -> Plan:
        plan = json.loads(path.read_text())
        return Plan(Path(plan.pop("folder")), **plan)

    def environment(self) -> dict[str, str]:
        """Returns the variables that the suites read while they are imported, with the values that PyTorch's
        own runs set."""
        return {
            "BACKEND": BACKEND,
            "WORLD_SIZE": str(self.ranks),
            "INIT_METHOD": f"file://{self.folder}/reinit",
            "TEMP_DIR": str(self.folder / "temporary"),
            "TORCH_DISTRIBUTED_DEBUG": self.debug,
            # Tensors of other devices are not the subject; a GPU that happens to be here changes nothing.
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
        }


@dataclass(frozen=True)
class Outcome:
    """The outcome of a test on one rank, or on all of them."""

    test: str
    kind: str
    text: str = ""
    """Why it was skipped, or how it failed."""
    seconds: float = 0.0
    ends: bool = False
    """The test ended its process, which is to run no other one."""

    def line(self) -> str:
        return json.dumps(asdict(self)) + "\n"

    @staticmethod
    def read(line: str | bytes) -> Outcome:
        return Outcome(**json.loads(line))


def read_outcomes(path: Path) -> list[Outcome]:
    """Those of a job so far; the last line may be half written."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [Outcome.read(line) for line in lines if line.endswith("\n")]


def together(test: str, ranks: Sequence[Outcome]) -> Outcome:
    """One outcome from that of every rank: all must have passed, or all have skipped it."""
    seconds, ends = max(one.seconds for one in ranks), any(one.ends for one in ranks)
    failed = [f"rank {rank}: {one.text}" for rank, one in enumerate(ranks) if one.kind == FAILED]
    if failed:
        return Outcome(test, FAILED, "\n".join(failed), seconds, ends)
    kinds = {one.kind for one in ranks}
    if len(kinds) > 1:
        told = ", ".join(f"rank {rank} {one.kind}" for rank, one in enumerate(ranks))
        return Outcome(test, FAILED, f"expected the same on all ranks, got {told}", seconds, ends)
    return Outcome(test, ranks[0].kind, ranks[0].text, seconds, ends)
