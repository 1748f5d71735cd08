"""Programs as people write them compute what one process computes; `make programs` runs them anywhere."""

import pytest

from programs.case import FAMILIES, Program
from programs.start import LAUNCHERS, Verdict, all_programs, run, run_beside_strict
from tools.slices import FULL, some

PROGRAMS = {program.name: program for program in all_programs()}
ON_TPU = {program.name: program for program in all_programs(device="tpu")}


@pytest.fixture(scope="module")
def verdicts(selected) -> dict[str, Verdict]:
    """Runs all programs in one job, because starting a job takes longer than most of the programs."""
    names = selected("test_it_computes_what_one_process_computes", "name")
    return {verdict.program.name: verdict for verdict in run([PROGRAMS[name] for name in names])}


@pytest.mark.parametrize("name", PROGRAMS)
def test_it_computes_what_one_process_computes(verdicts: dict[str, Verdict], name: str):
    problems = verdicts[name].problems
    assert not problems, "\n".join(problems)


@pytest.fixture(scope="module")
def verdicts_on_tpu(selected) -> dict[str, Verdict]:
    names = selected("test_it_does_on_device_tpu", "name")
    found = run([ON_TPU[name] for name in names], device="tpu")
    return {verdict.program.name: verdict for verdict in found}


@pytest.mark.parametrize("name", ON_TPU)
def test_it_does_on_device_tpu(verdicts_on_tpu: dict[str, Verdict], name: str):
    problems = verdicts_on_tpu[name].problems
    assert not problems, "\n".join(problems)


# Where a mistake about the index of a device has shown: microbatches, buckets.
OF_INDICES = ("pipeline/gpipe", "ddp/plain")
# FSDP2 refuses DTensors on another device than the current one, as on every accelerator.
NEEDS_SET_DEVICE = "tensor_parallel/transformer_and_fsdp"


@pytest.mark.parametrize("device", ["tpu:rank", "tpu:rank+set"])
def test_it_does_on_the_device_of_its_rank(device: str):
    """Without and with `torch.tpu.set_device`."""
    chosen = [one for name, one in ON_TPU.items() if FULL or name in OF_INDICES]
    if device == "tpu:rank":
        chosen = [one for one in chosen if one.name != NEEDS_SET_DEVICE]
    found = run(chosen, device=device)
    problems = [f"{one.program.name}: {problem}" for one in found for problem in one.problems]
    assert not problems, "\n".join(problems)


def test_debug_finds_nothing_wrong_with_them(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TORCH_TPU_LAUNCH_BLOCKING", "1")
    found = run(some([*ON_TPU.values()], 6), device="tpu")
    assert not [problem for verdict in found for problem in verdict.problems]


# The programs with trainings that torch.compile traces; `make programs ARGS="--way compiled"` runs all.
TRAININGS = ("ddp/", "zero_redundancy/", "fsdp2/", "fsdp2_gradients/", "tensor_parallel/", "join/")


def in_way(programs: list[Program], way: str) -> list[Verdict]:
    found = run_beside_strict(programs, way)
    problems = [f"{one.program.name}: {problem}" for one in found for problem in one.problems]
    assert not problems, "\n".join(problems)
    return found


def test_compiled_trainings_have_the_bits_of_strict_ones():
    chosen = some([one for name, one in ON_TPU.items() if name.startswith(TRAININGS)], 6)
    found = in_way(chosen, "compiled")
    assert sum(one.graphs for one in found) > 0, "nothing was compiled"


def test_fused_programs_have_the_bits_of_strict_ones():
    in_way(some([*ON_TPU.values()], 3), "fused")


# Launchers differ in how ranks start, meet and leave; `make programs` runs everything under each of them.
# The one that needs network namespaces is in test_nodes_programs.py.
UNDER_ANY_LAUNCHER = ("ddp/plain", "fsdp2/plain", "elastic_store/everybody_learns_all")


@pytest.mark.slice(3)
@pytest.mark.parametrize("launcher", sorted({*LAUNCHERS} - {"tpurun", "nodes"}))
def test_it_does_under_other_launchers(launcher: str):
    found = run([PROGRAMS[name] for name in UNDER_ANY_LAUNCHER], launcher=launcher)
    problems = [problem for verdict in found for problem in verdict.problems]
    assert not problems, "\n".join(problems)


def test_no_family_is_empty():
    assert {name.partition("/")[0] for name in PROGRAMS} == {*FAMILIES}
