"""Operations on tensors of known content, so that every byte can be judged afterwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from .programs import Call

ELEMENTS = 24
UNTOUCHED = -77


@dataclass(frozen=True)
class Team:
    """A process group, its ranks by their number in the world, and this rank's place among them."""

    group: dist.ProcessGroup
    ranks: Sequence[int]
    place: int


@dataclass
class Part:
    """One posted operation, and what its tensors hold before it and after it."""

    post: Callable[[bool], dist.Work | None]
    tensors: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    work: dist.Work | None = None
    is_done: bool = False
    is_send: bool = False


@dataclass
class Operation:
    """A call with its tensors: one part, or for an exchange of messages two."""

    call: Call
    parts: list[Part] = field(default_factory=list)

    def run(self) -> None:
        """Blocking; but a send only from when the message that is received meanwhile has come."""
        for part in self.parts:
            part.work = part.post(part.is_send)
            part.is_done = not part.is_send
        self.wait()

    def post(self) -> None:
        for part in self.parts:
            part.work = part.post(True)

    def wait(self) -> None:
        for part in self.parts:
            if part.work is not None and not part.is_done:
                part.work.wait()
                part.is_done = True

    def problem(self) -> str:
        """Returns what is wrong with the tensors. Completed ones must hold the result, all others what they
        held before."""
        for part in self.parts:
            for tensor, before, after in part.tensors:
                wanted = after if part.is_done else before
                if not torch.equal(tensor, wanted):
                    state = "completed" if part.is_done else "failed"
                    return (
                        f"{self.call.op} {state} and left {tensor.tolist()[:4]}.. for {wanted.tolist()[:4]}.."
                    )
        return ""


def operation(call: Call, team: Team) -> Operation:
    """The call on this team with fresh tensors."""
    return Operation(call, BUILDERS[call.op](call, team))


def operand(call: Call, place: int, count: int) -> torch.Tensor:
    """Returns what the rank in this place contributes: small whole numbers, so that every sum is exact."""
    values = place + 1 + torch.arange(count) % 7
    return values.to(getattr(torch, call.dtype))


def untouched(call: Call, count: int) -> torch.Tensor:
    return torch.full((count,), UNTOUCHED, dtype=getattr(torch, call.dtype))


def kept(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A tensor that no operation may change."""
    return tensor, tensor.clone(), tensor.clone()


def written(tensor: torch.Tensor, after: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return tensor, tensor.clone(), after


def reduced(call: Call, operands: list[torch.Tensor]) -> torch.Tensor:
    stack = torch.stack(operands)
    return stack.sum(0).to(stack.dtype) if call.reduce_op == "SUM" else stack.amax(0)


def all_reduce(call: Call, team: Team) -> list[Part]:
    count = ELEMENTS * call.scale
    tensor = operand(call, team.place, count)
    after = reduced(call, [operand(call, place, count) for place in range(len(team.ranks))])
    op = getattr(dist.ReduceOp, call.reduce_op)
    return [
        Part(
            lambda is_async: dist.all_reduce(tensor, op, group=team.group, async_op=is_async),
            [written(tensor, after)],
        )
    ]


def all_gather(call: Call, team: Team) -> list[Part]:
    count = ELEMENTS * call.scale
    source, whole = operand(call, team.place, count), untouched(call, count * len(team.ranks))
    after = torch.cat([operand(call, place, count) for place in range(len(team.ranks))])
    return [
        Part(
            lambda is_async: dist.all_gather_into_tensor(whole, source, group=team.group, async_op=is_async),
            [kept(source), written(whole, after)],
        )
    ]


def reduce_scatter(call: Call, team: Team) -> list[Part]:
    count, ranks = ELEMENTS * call.scale, len(team.ranks)
    whole, share = operand(call, team.place, count * ranks), untouched(call, count)
    sums = reduced(call, [operand(call, place, count * ranks) for place in range(ranks)])
    op = getattr(dist.ReduceOp, call.reduce_op)
    return [
        Part(
            lambda is_async: dist.reduce_scatter_tensor(
                share, whole, op, group=team.group, async_op=is_async
            ),
            [kept(whole), written(share, sums[team.place * count :][:count])],
        )
    ]


def broadcast(call: Call, team: Team) -> list[Part]:
    count = ELEMENTS * call.scale
    tensor, root = operand(call, team.place, count), team.ranks[call.root]
    return [
        Part(
            lambda is_async: dist.broadcast(tensor, root, group=team.group, async_op=is_async),
            [written(tensor, operand(call, call.root, count))],
        )
    ]


def all_to_all(call: Call, team: Team) -> list[Part]:
    count, ranks = ELEMENTS * call.scale, len(team.ranks)
    source, target = operand(call, team.place, count * ranks), untouched(call, count * ranks)
    mine = slice(team.place * count, (team.place + 1) * count)
    after = torch.cat([operand(call, place, count * ranks)[mine] for place in range(ranks)])
    return [
        Part(
            lambda is_async: dist.all_to_all_single(target, source, group=team.group, async_op=is_async),
            [kept(source), written(target, after)],
        )
    ]


def send_recv(call: Call, team: Team) -> list[Part]:
    """Around the ring of ranks: a message to a rank ahead, then one from the rank behind."""
    count, ranks = ELEMENTS * call.scale, len(team.ranks)
    sent, received = operand(call, team.place, count), untouched(call, count)
    to, place = team.ranks[(team.place + call.ahead) % ranks], (team.place - 1) % ranks
    source = team.ranks[place]

    def send(_is_async: bool) -> dist.Work | None:
        return dist.isend(sent, to, group=team.group)

    def receive(is_async: bool) -> dist.Work | None:
        if is_async:
            return dist.irecv(received, source, group=team.group)
        dist.recv(received, source, group=team.group)
        return None

    return [
        Part(send, [kept(sent)], is_send=True),
        Part(receive, [written(received, operand(call, place, count))]),
    ]


def barrier(_call: Call, team: Team) -> list[Part]:
    return [Part(lambda is_async: dist.barrier(group=team.group, async_op=is_async), [])]


BUILDERS: dict[str, Callable[[Call, Team], list[Part]]] = {
    "all_reduce": all_reduce,
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "broadcast": broadcast,
    "all_to_all": all_to_all,
    "send_recv": send_recv,
    "barrier": barrier,
}
