"""Calls that TorchTPU refuses on chips are refused while its rules are on, with the reason, and allowed
otherwise."""

import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ranks
from interpreters import python
from tpurun._chip_rules import LEGACY, RULES, VARIABLE

SIZE = 4
DOCUMENT = Path(__file__).parents[2] / "docs" / "torchtpu.md"


def tpu(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, device="tpu")


def several(*shape: int) -> list[torch.Tensor]:
    return [tpu(*shape) for _ in range(SIZE)]


def recv_from_any() -> None:
    sent = dist.isend(tpu(2), (dist.get_rank() + 1) % SIZE)
    dist.recv(tpu(2))
    sent.wait()


def barrier_with_timeout() -> None:
    options = dist.BarrierOptions()
    options.timeout = timedelta(seconds=20)
    dist.group.WORLD.barrier(options).wait()


def all_reduce_in(*members: int) -> None:
    group = dist.new_group([*members])
    if dist.get_rank() in members:
        dist.all_reduce(tpu(2), group=group)


# The calls that are refused, by rule. Without the rules all of it works, when all ranks do it.
REFUSED: dict[str, list[Callable[[], Any]]] = {
    "set-device-argument": [lambda: torch.tpu.set_device(1.0), lambda: torch.tpu.set_device(None)],
    "one-device": [
        lambda: torch.tpu.set_device(1),
        lambda: torch.tpu.set_device("tpu:1"),
        lambda: torch.tpu.device(1),
        lambda: torch.tpu.get_rng_state(1),
        lambda: torch.tpu.set_rng_state(torch.zeros(16, dtype=torch.uint8), torch.device("tpu", 1)),
    ],
    "framework-function": [
        lambda: torch.tpu.is_available(),
        lambda: torch.tpu.device_count(),
        lambda: torch.tpu.set_device(0),
        lambda: torch.tpu.current_device(),
        lambda: torch.tpu.synchronize(),
        lambda: torch.tpu.current_stream(),
        lambda: torch.tpu.set_stream(torch.tpu.default_stream()),
        lambda: torch.tpu.initial_seed(),
        lambda: torch.tpu.get_rng_state(),
        lambda: torch.tpu.device(0),
    ],
    "absent-name": [
        lambda: torch.tpu.memory_allocated(),
        lambda: torch.tpu.empty_cache(),
        lambda: torch.tpu.check_replicas,
    ],
    "stream-query": [lambda: torch.tpu.Stream().query(), lambda: torch.tpu.default_stream().query()],
    "group-size": [lambda: dist.new_group([0, 1, 2])],
    "group-partition": [lambda: all_reduce_in(0, 1)],
    "split": [lambda: dist.split_group(split_ranks=[[0, 1], [2, 3]])],
    "cpu-tensor": [
        lambda: dist.all_reduce(torch.ones(2)),
        lambda: dist.all_gather_into_tensor(torch.ones(4 * SIZE), torch.ones(4)),
        lambda: dist.broadcast(torch.ones(2), 0),
    ],
    "sparse": [lambda: dist.all_reduce(torch.eye(3).to_sparse().to("tpu"))],
    "unsupported": [
        lambda: dist.reduce(tpu(2), 0),
        lambda: dist.group.WORLD.allreduce_coalesced([tpu(2), tpu(3)]).wait(),
        recv_from_any,
    ],
    "reduce-op": [lambda: dist.all_reduce(tpu(2), dist._make_nccl_premul_sum(2.0))],
    "uneven-list": [
        lambda: dist.all_gather(several(2, 2), tpu(4)),
        lambda: dist.all_gather([tpu(of + 1) for of in range(SIZE)], tpu(dist.get_rank() + 1)),
        lambda: dist.reduce_scatter(tpu(4), several(2, 2)),
        lambda: dist.reduce_scatter(tpu(dist.get_rank() + 1), [tpu(of + 1) for of in range(SIZE)]),
    ],
    "all-gather-shape": [
        lambda: dist.all_gather_into_tensor(tpu(4 * SIZE), tpu(2, 2)),
        lambda: dist.all_gather_into_tensor(tpu(2, 2 * SIZE), tpu(2, 2)),
        lambda: dist.all_gather_into_tensor(tpu(4 * SIZE), tpu(2, 2), async_op=True).wait(),
    ],
    "reduce-scatter-shape": [
        lambda: dist.reduce_scatter_tensor(tpu(2, 2), tpu(4 * SIZE)),
        lambda: dist.reduce_scatter_tensor(tpu(4), tpu(2, 2 * SIZE)),
    ],
    "all-to-all-shape": [
        lambda: dist.all_to_all_single(tpu(SIZE, 4), tpu(2 * SIZE, 2)),
        lambda: dist.all_to_all(several(2, 3), several(3, 2)),
    ],
    "barrier-device": [lambda: dist.barrier(device_ids=[1])],
    "barrier-timeout": [barrier_with_timeout],
}


def text_of(action: Callable[[], Any], rule: str) -> str:
    with pytest.raises(RULES[rule].error) as caught:
        action()
    return str(caught.value)


def check(text: str, rule: str) -> None:
    assert text.startswith("tpurun: ")
    assert "\n" not in text
    assert f"; TorchTPU 0.2.0 refuses it: {RULES[rule].reason}; {RULES[rule].instead} (" in text
    assert f"(chip rule {rule}; {VARIABLE}=0 allows it here)" in text


def has_several_devices() -> None:
    os.environ["LOCAL_WORLD_SIZE"] = str(SIZE)
    os.environ.pop("WORLD_SIZE", None)
    torch.tpu.init()


def test_every_rule_refuses_while_it_is_on_and_only_then() -> None:
    assert {*REFUSED, "first-group", "shrink"} == {*RULES}

    def is_met(rule: str) -> bool:
        members = {"group-size": 3, "group-partition": 2}
        return dist.get_rank() < members.get(rule, SIZE)

    def body() -> list[tuple[str, str]]:
        told = []
        for rule, actions in REFUSED.items():
            for action in actions:
                action()
                with torch.tpu.strict_chip_rules():
                    if is_met(rule):
                        told.append((rule, text_of(action, rule)))
                    else:
                        action()
                assert not torch.tpu.strict_chip_rules
        return told

    for told in ranks.run(SIZE, body, prepare=has_several_devices):
        for rule, text in told:
            check(text, rule)


def test_groups_have_each_rank_once_on_chips_and_are_not_shrunk() -> None:
    def body() -> list[str]:
        torch.tpu.strict_chip_rules = True
        rank = dist.get_rank()

        def reduce(*groups: Any) -> None:
            for group in groups:
                if group is not dist.GroupMember.NON_GROUP_MEMBER:
                    dist.all_reduce(tpu(2), group=group)

        if rank < 3:
            check(text_of(lambda: dist.shrink_group([3]), "shrink"), "shrink")
        reduce(dist.new_group([0, 1]), dist.new_group([2, 3]))
        lone = dist.new_group([0, 1])
        texts = [text_of(lambda: reduce(lone), "group-partition")] if rank < 2 else []
        reduce(dist.new_group([2, 3]), lone)  # now it is not alone
        crossed = dist.new_group([0, 2]), dist.new_group([1, 2])
        return [*texts, text_of(lambda: reduce(*crossed), "group-partition")] if rank < 3 else texts

    told = ranks.run(SIZE, body, prepare=has_several_devices)
    assert [len(texts) for texts in told] == [2, 2, 1, 0]
    assert "that have each rank once, given [0, 1], and none with rank 2, 3; " in told[0][0]
    assert "given [0, 2], [1, 2], and none with rank 3; " in told[1][1]


def test_lists_of_the_root_are_refused_on_the_root() -> None:
    def body() -> list[str]:
        torch.tpu.strict_chip_rules = True
        if dist.get_rank() != 0:
            return []
        return [
            text_of(lambda: dist.gather(tpu(4), [tpu(2, 2), tpu(2, 2)]), "uneven-list"),
            text_of(lambda: dist.scatter(tpu(4), [tpu(2, 2), tpu(2, 2)]), "uneven-list"),
        ]

    for text in ranks.run(2, body, prepare=has_several_devices)[0]:
        check(text, "uneven-list")


def test_what_chips_take_is_taken() -> None:
    # Once, before ranks are forked.
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    def body() -> list[Any]:
        torch.tpu.strict_chip_rules = True
        mesh = init_device_mesh("tpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        for wrap in (nn.parallel.DistributedDataParallel, lambda model: fully_shard(model, mesh=mesh)):
            model = wrap(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to("tpu"))
            optimizer = torch.optim.Adam(model.parameters())
            model(torch.randn(3, 4, device="tpu")).sum().backward()
            optimizer.step()
        gathered: list[Any] = [None] * SIZE
        dist.all_gather_object(gathered, dist.get_rank())
        whole = tpu(2 * SIZE, 2)
        dist.all_gather_into_tensor(whole, tpu(2, 2))
        dist.reduce_scatter_tensor(tpu(2), tpu(SIZE, 2))
        dist.all_to_all_single(tpu(SIZE, 3), tpu(SIZE, 3))
        dist.barrier(device_ids=[0])
        spread = distribute_tensor(torch.arange(9.0, device="tpu").view(3, 3), mesh, [Replicate(), Shard(0)])
        return [gathered, spread.full_tensor().sum().item()]

    assert ranks.run(SIZE, body, prepare=has_several_devices) == [[[0, 1, 2, 3], 36.0]] * SIZE


def test_collectives_are_still_known_by_their_lines() -> None:
    def body() -> str:
        torch.tpu.strict_chip_rules = True
        with pytest.raises(RuntimeError) as caught:
            dist.all_reduce(tpu(2 + dist.get_rank()))
        return str(caught.value)

    for text in ranks.run(2, body, prepare=has_several_devices):
        assert text.count("at test_chip_rules.py:") == 2
        assert ", by " not in text


def test_the_switch_is_a_value_a_function_and_a_block() -> None:
    def body() -> None:
        rules = torch.tpu.strict_chip_rules
        assert not rules
        with rules:
            assert rules
            with rules(False):
                assert not rules
                torch.tpu.memory_allocated()
            assert rules
        assert not rules
        rules(True)
        assert torch.tpu.strict_chip_rules
        assert not hasattr(torch.tpu, "memory_allocated")
        torch.tpu.strict_chip_rules = False
        assert torch.tpu.memory_allocated() == 0
        with pytest.raises(TypeError, match="expected True or False, given 'on'"):
            torch.tpu.strict_chip_rules = "on"

    ranks.run(1, body, prepare=has_several_devices)


TELL = """
import os, torch, torch.distributed as dist
def tell(action):
    try:
        action()
        print("taken")
    except Exception as error:
        print(str(error).rpartition("(chip rule ")[2].partition(";")[0] or error)
"""
WITH_VARIABLE = """
tell(lambda: torch.tpu.is_available())
tell(lambda: torch.tpu.memory_allocated())
tell(lambda: torch.tpu.set_device(1.0))
tell(lambda: torch.zeros(2, device="tpu:1"))
make = lambda: dist.init_process_group("tpu_dist", store=dist.HashStore(), rank=0, world_size=1)
tell(make)
"""


def test_the_variable_turns_the_rules_on_from_the_start() -> None:
    said = python(TELL + WITH_VARIABLE, **{VARIABLE: "1"}, LOCAL_WORLD_SIZE="2", WORLD_SIZE="2")
    refused = ["framework-function", "absent-name", "set-device-argument"]
    index = "expected a tpu device from 0 to 0 (LOCAL_WORLD_SIZE), got tpu:1"
    assert said.splitlines() == [*refused, index, "first-group"]
    said = python(TELL + WITH_VARIABLE, **{VARIABLE: "0"}, LOCAL_WORLD_SIZE="2", WORLD_SIZE="2")
    assert said.splitlines() == ["taken"] * 5


def test_programs_of_cpu_tensors_are_refused_with_the_variable() -> None:
    def body() -> str:
        gathered: list[Any] = [None]
        dist.all_gather_object(gathered, 1)
        dist.barrier()
        assert "tpurun.tpu" not in sys.modules  # nobody has the device
        return text_of(lambda: dist.all_reduce(torch.ones(2)), "cpu-tensor")

    text = ranks.run(1, body, prepare=lambda: os.environ.update({VARIABLE: "1"}))[0]
    check(text, "cpu-tensor")


def test_torchtpus_own_variable_allows_functions_of_the_framework() -> None:
    def body() -> str:
        os.environ.update({VARIABLE: "1", LEGACY: "1"})
        torch.tpu.set_device(0)
        assert torch.tpu.is_available()
        return text_of(lambda: torch.tpu.device(1), "one-device")

    check(ranks.run(1, body)[0], "one-device")


def test_the_document_lists_every_rule() -> None:
    rows = [f"| `{rule.name}` | {rule.refused} | {rule.reason} |" for rule in RULES.values()]
    text = DOCUMENT.read_text()
    assert "\n".join(rows) in text
    assert text.count("\n| `") == len(rows)
