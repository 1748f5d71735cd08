"""One program on both devices."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from random import Random

import torch

from .steps import DTYPES, STEPS, Step

Tensor = torch.Tensor
MODES = ("DEFER_NEVER", "DEFER_NEVER_AND_LAUNCH_BLOCKING")
SIZES = (0, 1, 2, 3, 5)
KEPT = 8
LARGEST = 4096


@dataclass
class Pair:
    """Two tensors that should be the same."""

    cpu: Tensor
    tpu: Tensor

    def difference(self) -> str:
        """Returns what is not the same, or an empty text."""
        ours, wanted = self.tpu, self.cpu
        if ours.device.type != "tpu":
            return f"it is on {ours.device}"
        for name in ("dtype", "shape", "is_conj", "is_neg", "requires_grad"):
            one, other = getattr(ours, name), getattr(wanted, name)
            one, other = (one(), other()) if callable(one) else (one, other)
            if one != other:
                return f"{name}: expected {other}, got {one}"
        if ours.stride() != wanted.stride() or ours.storage_offset() != wanted.storage_offset():
            expected, given = ((one.stride(), one.storage_offset()) for one in (wanted, ours))
            return f"expected strides {expected[0]} from {expected[1]}, got {given[0]} from {given[1]}"
        if not torch.equal(bits(ours.cpu()), bits(wanted)):
            return f"expected {wanted}, got {ours.cpu()}"
        return ""


def bits(tensor: Tensor) -> Tensor:
    # A copy, because tensors of one element may have any stride.
    flat = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach()).reshape(-1)
    if flat.is_floating_point() or flat.is_complex():
        parts = torch.view_as_real(flat) if flat.is_complex() else flat
        # One NaN is as good as another.
        flat = torch.where(parts.isnan(), torch.full_like(parts, float("nan")), parts)
    return flat.view(torch.uint8)


class Wrong(AssertionError):
    """The device did something else than the CPU."""


def run(seed: int, length: int = 12) -> None:
    """Raises `Wrong` at the first step after which both sides differ."""
    random = Random(seed)
    with warnings.catch_warnings(), torch.tpu.set_eager_mode(random.choice(MODES)):
        warnings.simplefilter("ignore")
        pairs = [made(random) for _ in range(3)]
        done: list[str] = []
        for _ in range(length):
            step = random.choices([*STEPS], weights=STEPS.values())[0]
            taken = [random.randrange(len(pairs)) for _ in range(2)]
            key = random.randrange(1 << 32)
            done.append(f"{step.__name__}({', '.join(map(str, taken))}; {key})")
            results = both(step, [pairs[index] for index in taken], key, done)
            for index, pair in enumerate(pairs + results):
                if problem := pair.difference():
                    raise Wrong(f"after {', '.join(done)}: tensor {index}: {problem}")
            pairs += [pair for pair in results if pair.cpu.numel() <= LARGEST]
            pairs = pairs[-KEPT:]


def made(random: Random) -> Pair:
    shape = [random.choice(SIZES) for _ in range(random.randrange(4))]
    dtype = random.choice(DTYPES)
    generator = torch.Generator().manual_seed(random.randrange(1 << 32))
    values = torch.randn(shape, generator=generator) * 2
    if random.random() < 0.1:
        values[values > 2] = float("nan")
    cpu = values.to(torch.float32 if dtype.is_floating_point else torch.int16).to(dtype)
    if dtype.is_floating_point or dtype.is_complex:
        cpu = values.to(dtype)
    return Pair(cpu, cpu.to("tpu"))


def both(step: Step, pairs: list[Pair], key: int, done: list[str]) -> list[Pair]:
    """Takes a step on either side; errors must be of one kind."""
    wanted, refused = attempt(step, [pair.cpu for pair in pairs], key)
    given, failed = attempt(step, [pair.tpu for pair in pairs], key)
    if type(refused) is not type(failed):
        raise Wrong(f"after {', '.join(done)}: expected {refused!r}, got {failed!r}") from failed
    if len(wanted) != len(given):
        raise Wrong(f"after {', '.join(done)}: expected {len(wanted)} results, got {len(given)}")
    return [Pair(cpu, tpu) for cpu, tpu in zip(wanted, given, strict=True)]


def attempt(step: Step, tensors: list[Tensor], key: int) -> tuple[list[Tensor], Exception | None]:
    torch.manual_seed(key)
    try:
        result = step(Random(key), tensors)
    except (RuntimeError, IndexError, TypeError, ValueError, NotImplementedError) as error:
        return [], error
    results = result if isinstance(result, (list, tuple)) else [result]
    return [one for one in results if isinstance(one, Tensor)], None
