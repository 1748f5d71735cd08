"""Messages between two ranks: order, tags, any source, batches."""

import pytest
import torch
import torch.distributed as dist

import ranks


def filled(value: float, count: int = 5) -> torch.Tensor:
    return torch.full((count,), float(value))


def send_and_receive() -> None:
    me, size = dist.get_rank(), dist.get_world_size()
    if me == 0:
        for peer in range(1, size):
            dist.send(filled(peer), peer)
            reply = filled(0)
            assert dist.recv(reply, peer) == peer
            assert torch.equal(reply, filled(10 * peer))
    else:
        question = filled(0)
        dist.recv(question, 0)
        dist.send(question * 10, 0)


def strided_messages() -> None:
    wide = torch.arange(12.0).reshape(6, 2)
    if dist.get_rank() == 0:
        dist.send(wide[:, 1], 1)
    elif dist.get_rank() == 1:
        target = torch.zeros(6, 2)
        dist.recv(target[:, 0], 0)
        assert torch.equal(target[:, 0], wide[:, 1])
        assert torch.equal(target[:, 1], torch.zeros(6))


def tags_out_of_order() -> None:
    if dist.get_rank() == 0:
        works = [dist.isend(filled(tag), 1, tag=tag) for tag in (3, 1, 2)]
    elif dist.get_rank() == 1:
        buffers = {tag: filled(0) for tag in (1, 2, 3)}
        works = [dist.irecv(buffer, 0, tag=tag) for tag, buffer in buffers.items()]
    else:
        works = []
    for work in works:
        work.wait()
    if dist.get_rank() == 1:
        assert all(torch.equal(buffer, filled(tag)) for tag, buffer in buffers.items())


def any_source() -> None:
    me, size = dist.get_rank(), dist.get_world_size()
    if me == 0:
        seen = set()
        for _ in range(size - 1):
            buffer = filled(0)
            source = dist.recv(buffer)
            assert torch.equal(buffer, filled(source))
            seen.add(source)
        assert seen == set(range(1, size))
    else:
        dist.send(filled(me), 0)


def ring_in_a_batch() -> None:
    me, size = dist.get_rank(), dist.get_world_size()
    for _ in range(3):
        received = filled(0)
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, filled(me), (me + 1) % size),
                dist.P2POp(dist.irecv, received, (me - 1) % size),
            ]
        )
        for work in works:
            work.wait()
        assert torch.equal(received, filled((me - 1) % size))


def everybody_to_everybody() -> None:
    me, size = dist.get_rank(), dist.get_world_size()
    others = [rank for rank in range(size) if rank != me]
    received = {rank: filled(0) for rank in others}
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.irecv, received[rank], rank) for rank in others]
        + [dist.P2POp(dist.isend, filled(me), rank) for rank in others]
    )
    for work in works:
        work.wait()
    assert all(torch.equal(buffer, filled(rank)) for rank, buffer in received.items())


def messages_in_a_subgroup() -> None:
    size = dist.get_world_size()
    group = dist.new_group([0, size - 1])
    if dist.get_rank() == 0:
        dist.send(filled(7), size - 1, group=group)
    elif dist.get_rank() == size - 1:
        buffer = filled(0)
        assert dist.recv(buffer, group=group) == 0
        assert torch.equal(buffer, filled(7))


def large_messages() -> None:
    count = 3_000_001
    if dist.get_rank() == 0:
        dist.send(torch.arange(count), 1)
    elif dist.get_rank() == 1:
        buffer = torch.zeros(count, dtype=torch.int64)
        dist.recv(buffer, 0)
        assert torch.equal(buffer, torch.arange(count))


BODIES = [
    any_source,
    everybody_to_everybody,
    large_messages,
    messages_in_a_subgroup,
    ring_in_a_batch,
    send_and_receive,
    strided_messages,
    tags_out_of_order,
]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_messages(body, size: int) -> None:
    ranks.run(size, body)
