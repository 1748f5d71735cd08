"""Device tpu in one process: ordinary tensors, with the results of the CPU.

Every test runs in a process of its own: who has claimed the device has it for good."""

import copy
import io
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ranks
from interpreters import python

on_device = ranks.on_device("256MiB")


def message_of(kind: type[BaseException], body: Callable[[], Any]) -> str:
    with pytest.raises(kind) as caught:
        body()
    return str(caught.value)


@on_device
def test_results_are_those_of_the_cpu() -> None:
    x, y = torch.randn(4, 5), torch.randn(5, 3)
    a, b = x.to("tpu"), y.tpu()
    assert a.is_tpu and a.device == torch.device("tpu:0")
    assert torch.equal((a @ b).cpu(), x @ y)
    assert torch.equal((a + 1).relu().sum(0).cpu(), (x + 1).relu().sum(0))
    assert (a.mul_(2) is a) and torch.equal(a.cpu(), x * 2)
    out = torch.empty(0, device="tpu")
    assert torch.add(a, 1, out=out) is out
    assert out.shape == (4, 5) and torch.equal(out.cpu(), x * 2 + 1)
    assert "device='tpu:0'" in repr(a)
    assert a.sum().item() == pytest.approx((x * 2).sum().item())


@on_device
def test_views_share_their_base() -> None:
    base = torch.arange(12, device="tpu").view(3, 4)
    views = [base[1], base.t(), base[:, ::2], base.view(4, 3), base.unfold(1, 2, 1), base.narrow(0, 1, 2)]
    assert all(view._is_view() and view.untyped_storage().data_ptr() == base.data_ptr() for view in views)
    base[1, 2] = 100
    assert views[0][2].item() == 100 and views[1][2, 1].item() == 100
    views[1].zero_()
    assert base.sum().item() == 0
    parts = torch.randn(6, device="tpu").chunk(3)
    parts[0].fill_(7)
    assert parts[0]._base[:2].tolist() == [7, 7]
    number = torch.view_as_real(torch.ones(2, dtype=torch.complex64, device="tpu"))
    assert number.tolist() == [[1, 0], [1, 0]]


@on_device
def test_gradients_are_those_of_the_cpu() -> None:
    model = nn.Sequential(nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4), nn.GELU(), nn.Flatten(), nn.Linear(24, 2))
    twin = copy.deepcopy(model).to("tpu")
    optimizers = [torch.optim.AdamW(some.parameters(), lr=0.1) for some in (model, twin)]
    batch = torch.randn(5, 3, 8)
    for _ in range(3):
        for some, data, optimizer in zip((model, twin), (batch, batch.tpu()), optimizers, strict=True):
            optimizer.zero_grad()
            some(data).square().mean().backward()
            optimizer.step()
    for expected, given in zip(model.parameters(), twin.parameters(), strict=True):
        assert given.device.type == "tpu"
        torch.testing.assert_close(given.detach().cpu(), expected.detach())


@on_device
def test_to_keeps_parameters() -> None:
    model = nn.Linear(2, 2)
    weight = model.weight
    model.tpu()
    assert model.weight is weight and weight.device.type == "tpu"


@on_device
def test_random_numbers_follow_seed_and_offset() -> None:
    torch.manual_seed(3)
    state = torch.tpu.get_rng_state()
    assert state.dtype == torch.uint8 and state.numel() == 16
    first, second = torch.rand(4, device="tpu"), torch.rand(4, device="tpu")
    assert not torch.equal(first, second)
    torch.tpu.set_rng_state(state)
    assert torch.equal(first, torch.rand(4, device="tpu"))
    torch.manual_seed(3)
    assert torch.equal(first, torch.rand(4, device="tpu"))
    generator = torch.Generator("tpu").manual_seed(5)
    assert (
        torch.equal(torch.rand(3, generator=generator, device="tpu"), _rand(5))
        and generator.initial_seed() == 5
    )
    wrong = torch.Generator()
    assert "generator" in message_of(RuntimeError, lambda: torch.rand(3, device="tpu", generator=wrong))


def _rand(seed: int) -> torch.Tensor:
    return torch.rand(3, device="tpu", generator=torch.Generator("tpu").manual_seed(seed))


@on_device
def test_saving_and_loading() -> None:
    file = io.BytesIO()
    tensor = torch.randn(3, device="tpu:1")
    torch.save({"x": tensor, "view": tensor[1:]}, file)
    for where, kind in ((None, "tpu:1"), ("cpu", "cpu"), ("tpu:0", "tpu:0")):
        file.seek(0)
        loaded = torch.load(file, map_location=where)
        assert loaded["x"].device == torch.device(kind)
        assert torch.equal(loaded["x"].cpu(), tensor.cpu())
        assert loaded["view"].untyped_storage().data_ptr() == loaded["x"].untyped_storage().data_ptr()
    copied = copy.deepcopy(tensor)
    assert copied.device == tensor.device and torch.equal(copied.cpu(), tensor.cpu())


@on_device
def test_pinned_memory() -> None:
    plain = torch.ones(1000)
    pinned = plain.pin_memory()
    assert pinned.is_pinned() and not plain.is_pinned() and pinned[10:].is_pinned()
    assert torch.equal(pinned.to("tpu", non_blocking=True).cpu(), plain)
    loader = torch.utils.data.DataLoader(list(range(6)), batch_size=3, pin_memory=True)
    assert all(batch.is_pinned() for batch in loader)


@on_device
def test_autocast() -> None:
    model = nn.Linear(4, 4).tpu()
    with torch.autocast("tpu", dtype=torch.bfloat16):
        out = model(torch.randn(2, 4, device="tpu"))
        assert out.dtype == torch.bfloat16
        assert out.softmax(-1).dtype == torch.float32
    scaler = torch.amp.GradScaler("tpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler.scale(model(torch.randn(2, 4, device="tpu")).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 65536.0


@on_device
def test_streams_and_events() -> None:
    stream = torch.tpu.Stream()
    before = torch.tpu.current_stream()
    assert before == torch.tpu.default_stream()
    with torch.tpu.stream(stream):
        assert torch.tpu.current_stream() == stream
        start, end = torch.tpu.Event(enable_timing=True), torch.tpu.Event(enable_timing=True)
        start.record()
        torch.randn(100, 100, device="tpu") @ torch.randn(100, 100, device="tpu")
        end.record()
    assert torch.tpu.current_stream() == before
    end.synchronize()
    assert isinstance(end, torch.tpu.Event) and not isinstance(torch.Event("cpu"), torch.tpu.Event)
    assert end.query() and start.elapsed_time(end) >= 0
    before.wait_stream(stream)
    before.wait_event(end)
    stream.synchronize()
    torch.tpu.synchronize(device=0)
    torch.accelerator.synchronize()


@on_device
def test_memory_is_counted() -> None:
    held = torch.tpu.memory_allocated()
    tensor = torch.empty(1 << 20, device="tpu")
    assert torch.tpu.memory_allocated() - held == 4 << 20
    assert torch.accelerator.memory_allocated() == torch.tpu.memory_allocated()
    results = tensor.exp()
    assert torch.tpu.memory_allocated() - held == 8 << 20, "what CPU kernels make is on the device, too"
    peak = torch.tpu.max_memory_allocated()
    del tensor, results
    assert torch.tpu.memory_allocated() == held and torch.tpu.max_memory_allocated() == peak
    torch.tpu.reset_peak_memory_stats()
    assert torch.tpu.max_memory_allocated() == held
    torch.tpu.empty_cache()
    free, limit = torch.tpu.mem_get_info()
    assert (limit, free) == (256 << 20, (256 << 20) - held)


@on_device
def test_running_out_of_memory_says_who_holds_it() -> None:
    hold = torch.empty(50 << 18, device="tpu")
    text = message_of(torch.OutOfMemoryError, lambda: torch.empty(60 << 20, device="tpu"))
    assert "asked 240.00 MiB" in text and "test_device.py" in text, text
    assert hold.numel() and torch.zeros(4, device="tpu").sum().item() == 0


@on_device
def test_wrong_devices_are_named() -> None:
    text = message_of(IndexError, lambda: torch.ones(1, device="tpu:2"))
    assert text.startswith("expected a tpu device from 0 to 1")
    a = torch.ones(2, device="tpu")
    text = message_of(RuntimeError, lambda: a + torch.ones(2))
    assert "two devices, tpu:0 and cpu" in text
    assert torch.equal((a + torch.tensor(1.0)).cpu(), torch.full((2,), 2.0)), "a number may be on the host"
    assert a[torch.tensor([1])].tolist() == [1.0], "an index, too"
    message_of(TypeError, a.numpy)
    text = message_of(NotImplementedError, lambda: torch.quantize_per_tensor(a, 0.1, 0, torch.qint8))
    assert "no quantized tensors" in text


@on_device
def test_storages_are_resized() -> None:
    tensor = torch.arange(4.0, device="tpu")
    storage = tensor.untyped_storage()
    size = storage.size()
    storage.resize_(0)
    assert storage.size() == 0
    storage.resize_(size)
    tensor.copy_(torch.arange(4.0))
    assert tensor.tolist() == [0, 1, 2, 3]
    assert tensor.resize_(6).shape == (6,)
    assert tensor[:4].tolist() == [0, 1, 2, 3]


@on_device
def test_a_fork_is_told_so() -> None:
    tensor = torch.ones(4, device="tpu")
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        tensor.fill_(2)
        try:
            torch.empty(1 << 20, device="tpu")
        except RuntimeError as error:
            os.write(write, str(error).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    os.close(write)
    assert "fork" in os.read(read, 1000).decode()
    assert tensor.tolist() == [1, 1, 1, 1], "what the child writes is its own"


@on_device
def test_a_fork_from_before_the_first_tensor_has_the_device() -> None:
    # As workers of a pool have that is made when a program begins.
    assert torch.tpu.is_available() and torch.tpu.mem_get_info()[1] > 0
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            os.write(write, str(torch.arange(4, device="tpu").sum().item()).encode())
        except RuntimeError as error:
            os.write(write, str(error).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    os.close(write)
    assert os.read(read, 1000) == b"6"
    assert torch.arange(5, device="tpu").sum().item() == 10


def test_a_program_that_never_names_the_device_does_not_get_it() -> None:
    code = """
        import torch
        print(torch.accelerator.current_accelerator(), torch._C._get_privateuse1_backend_name())
    """
    without = python(code, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert python(code) == without and without.endswith(" privateuseone")


@pytest.mark.parametrize(
    "code",
    [
        'torch.device("tpu")',
        "torch.tpu.init()",
        'torch.ones(1, device="tpu").device',
        "torch.tpu.eager_mode = 1; assert torch.tpu.eager_mode == 1",
    ],
)
def test_a_program_that_names_the_device_gets_it(code: str) -> None:
    assert python(f"import torch; {code}; print(torch.accelerator.current_accelerator())") == "tpu"


def test_the_switch_decides() -> None:
    code = """
        import torch
        print(torch.accelerator.current_accelerator())
        try:
            torch.tpu.init()
        except RuntimeError as error:
            print(error)
    """
    first, second = python(code, TPURUN_DEVICE="0").splitlines()
    assert first != "tpu" and second.startswith("tpurun: device tpu is switched off by TPURUN_DEVICE=0")
    assert python("import torch; print(torch.accelerator.current_accelerator())", TPURUN_DEVICE="1") == "tpu"


@on_device
def test_sparse_tensors_are_made_of_strided_ones() -> None:
    dense = torch.tensor([[0.0, 1.0], [2.0, 0.0]])
    listed, rows = dense.tpu().to_sparse(), dense.tpu().to_sparse_csr()
    for sparse in (listed, rows, dense.to_sparse().to("tpu"), dense.to_sparse_csr().to("tpu")):
        assert sparse.device.type == "tpu" and sparse.values().device.type == "tpu"
        assert torch.equal((sparse @ dense.tpu()).cpu(), dense @ dense)
        assert torch.equal(sparse.cpu().to_dense(), dense)
    listed.mul_(3)
    assert torch.equal(listed.to_dense().cpu(), dense * 3)
    listed._values().zero_()
    assert listed.to_dense().sum().item() == 0, "the values are no copy"


@on_device
def test_recurrent_networks_have_the_gradients_of_the_cpu() -> None:
    model = nn.LSTM(3, 4, num_layers=2)
    twin = copy.deepcopy(model).tpu()
    batch = torch.randn(5, 2, 3)
    for some, data in ((model, batch), (twin, batch.tpu())):
        some(data)[0].square().sum().backward()
    for expected, given in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(given.grad.cpu(), expected.grad)
    weight = twin.weight_hh_l0
    out = twin(batch.tpu())[0].sum()
    with torch.no_grad():
        weight.zero_()
    assert "modified by an inplace operation" in message_of(RuntimeError, out.backward)
    for network in (nn.LSTM(3, 4), nn.GRU(3, 4)):
        values = {name: value.detach() for name, value in network.named_parameters()}

        def loss(values: dict[str, torch.Tensor], network: nn.Module = network) -> torch.Tensor:
            data = batch.to(values["weight_hh_l0"].device)
            return torch.func.functional_call(network, values, (data,))[0].square().sum()

        expected = torch.func.grad(loss)(values)
        given = torch.func.grad(loss)({name: value.tpu() for name, value in values.items()})
        torch.testing.assert_close({name: value.cpu() for name, value in given.items()}, expected)

    def cast(network: nn.Module, data: torch.Tensor) -> torch.dtype | str:
        with torch.autocast(data.device.type, dtype=torch.bfloat16):
            try:
                return network(data)[0].dtype
            except RuntimeError as error:
                return str(error)

    # Some CPUs have no such layers, and say so.
    expected = cast(model, batch)
    assert expected == torch.bfloat16 or "primitive" in expected
    assert cast(twin, batch.tpu()) == expected


@on_device
def test_dropout_draws_from_the_generator_of_the_device() -> None:
    x = torch.ones(100, device="tpu")
    network = nn.LSTM(3, 4, num_layers=2, dropout=0.5).tpu()
    for draw in (
        lambda: nn.functional.dropout(x),
        lambda: network(torch.ones(2, 3, device="tpu"))[0].detach(),
    ):
        host, device = torch.get_rng_state(), torch.tpu.get_rng_state()
        first = draw()
        assert torch.equal(torch.get_rng_state(), host) and not torch.equal(torch.tpu.get_rng_state(), device)
        assert not torch.equal(draw(), first)
        torch.tpu.set_rng_state(device)
        assert torch.equal(draw(), first)


@on_device
def test_conjugate_views_are_copied() -> None:
    x = torch.randn(3, dtype=torch.complex64)
    assert torch.equal(x.tpu().conj().clone().cpu(), x.conj())
    assert torch.equal(x.conj().tpu().cpu(), x.conj())
    assert torch.equal(x.tpu().conj().imag.clone().cpu(), -x.imag), "which is a negative view"


@on_device
def test_nested_tensors_lie_in_one_storage() -> None:
    parts = [torch.ones(2, 3), torch.full((4, 3), 2.0)]
    nested = torch.nested.nested_tensor(parts, device="tpu")
    assert nested.device.type == "tpu" and nested.is_nested
    assert (nested * 2).unbind()[1].sum().item() == 48
    assert nested.cpu().to("tpu").mul_(3)[0].tolist() == [[3.0] * 3] * 2
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model, batch = nn.TransformerEncoder(layer, 1).eval(), torch.randn(2, 5, 8)
    padding = torch.zeros(2, 5, dtype=torch.bool)
    padding[0, 3:] = True
    with torch.inference_mode():
        expected = model(batch, src_key_padding_mask=padding)
        assert torch.equal(model.tpu()(batch.tpu(), src_key_padding_mask=padding.tpu()).cpu(), expected)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_draws_the_same_numbers_again(reentrant: bool) -> None:
    @on_device
    def check() -> None:
        x = torch.randn(16, 16, device="tpu", requires_grad=True)

        def gradient(function: Callable[..., torch.Tensor]) -> torch.Tensor:
            torch.manual_seed(3)
            x.grad = None
            function(x).sum().backward()
            assert x.grad is not None
            return x.grad.clone()

        def inner(x: torch.Tensor) -> torch.Tensor:
            return nn.functional.dropout(x.sin(), 0.5)

        def again(x: torch.Tensor) -> torch.Tensor:
            return torch.utils.checkpoint.checkpoint(inner, x, use_reentrant=reentrant)

        assert torch.equal(gradient(again), gradient(inner))

    check()
