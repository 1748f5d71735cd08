"""Trains a small byte-level GPT on the sources of the Python standard library, data-parallel.

    tpurun -n 64 examples/train.py
    tpurun -n 64 examples/train.py --compile
    torchrun --nproc-per-node 4 examples/train.py --backend gloo

An ordinary PyTorch program: nothing in it knows which launcher started it or which backend joins its ranks.
The same seed and the same global batch (ranks x batch size) give the same loss curve on every backend.
Rank 0 alone logs, evaluates in the middle of training and samples at the end, while the others go on.
"""

import argparse
import math
import os
import sysconfig
import time
import zlib
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

VOCABULARY = 256  # bytes


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--device", choices=["auto", "cpu", "tpu"], default="auto", help="default: tpu if there"
    )
    parser.add_argument("--backend", help="default: tpu_dist where it is installed, else gloo")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch-size", type=int, default=4, help="windows per rank and step (default: 4)")
    parser.add_argument("--context", type=int, default=64, help="bytes per window (default: 64)")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument(
        "--compile", action="store_true", help="torch.compile the network, and the step of the optimizer"
    )
    parser.add_argument("--lr", type=float, default=6e-3, help="peak learning rate (default: 6e-3)")
    parser.add_argument("--log-every", type=int, default=10, metavar="STEPS")
    parser.add_argument("--eval-every", type=int, default=40, metavar="STEPS")
    parser.add_argument("--sample-bytes", type=int, default=240)
    args = parser.parse_args()
    for name in ("steps", "batch_size", "context", "layers", "width", "heads", "log_every", "eval_every"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    if args.width % args.heads:
        parser.error(f"--width {args.width} is not a multiple of --heads {args.heads}")
    return args


# --- Data ---------------------------------------------------------------------------------------------------


class Corpus:
    """The standard library's sources as two byte strings: one to train on, one of held-out files.

    Which files are read and which are held out depends on their names alone, so that all ranks agree without
    a word. A rank reads a few megabytes once and keeps nothing else.
    """

    TRAIN_BYTES = 4 << 20
    HELD_OUT_BYTES = 256 << 10
    SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "__pycache__"})

    def __init__(self) -> None:
        root = Path(sysconfig.get_path("stdlib"))
        files = sorted(self._sources(root), key=lambda path: zlib.crc32(path.as_posix().encode()))
        parts: dict[bool, bytearray] = {True: bytearray(), False: bytearray()}
        for path in files:
            is_held_out = zlib.crc32(path.name.encode()) % 16 == 0
            limit = self.HELD_OUT_BYTES if is_held_out else self.TRAIN_BYTES
            part = parts[is_held_out]
            if len(part) < limit:
                part += (root / path).read_bytes()[: limit - len(part)]
        if not parts[True] or not parts[False]:
            raise SystemExit(f"train.py: no Python sources to train on in {root}")
        self.train = torch.frombuffer(parts[False], dtype=torch.uint8)
        self.held_out = torch.frombuffer(parts[True], dtype=torch.uint8)

    def _sources(self, root: Path):
        for folder, subfolders, names in os.walk(root):
            subfolders[:] = [name for name in subfolders if name not in self.SKIPPED_FOLDERS]
            yield from (Path(folder, name).relative_to(root) for name in names if name.endswith(".py"))


def windows(text: torch.Tensor, starts: torch.Tensor, context: int) -> tuple[torch.Tensor, torch.Tensor]:
    """For each start, `context` bytes and the bytes that follow each of them."""
    rows = text[starts[:, None] + torch.arange(context + 1)].long()
    return rows[:, :-1], rows[:, 1:]


def training_batch(corpus: Corpus, args: argparse.Namespace, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's part of the global batch, which depends on the seed and the step alone."""
    random = torch.Generator().manual_seed(args.seed * 1_000_003 + step)
    global_batch = dist.get_world_size() * args.batch_size
    starts = torch.randint(len(corpus.train) - args.context, (global_batch,), generator=random)
    first = dist.get_rank() * args.batch_size
    return windows(corpus.train, starts[first : first + args.batch_size], args.context)


# --- Model --------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.bytes = nn.Embedding(VOCABULARY, args.width)
        self.positions = nn.Embedding(args.context, args.width)
        self.blocks = nn.Sequential(*(Block(args.width, args.heads) for _ in range(args.layers)))
        self.norm = nn.LayerNorm(args.width)
        self.head = nn.Linear(args.width, VOCABULARY, bias=False)
        # Small scores at first: every byte is equally likely, the loss starts at ln 256 = 5.55.
        for layer in (self.bytes, self.positions, self.head):
            nn.init.normal_(layer.weight, std=0.02)

    def forward(self, text: torch.Tensor, following: torch.Tensor | None = None) -> torch.Tensor:
        """The scores of each next byte, or their loss where the bytes that follow are given."""
        positions = torch.arange(text.shape[1], device=text.device)
        scores = self.head(self.norm(self.blocks(self.bytes(text) + self.positions(positions))))
        return scores if following is None else F.cross_entropy(scores.flatten(0, 1), following.flatten())


@torch.no_grad()
def evaluate(model: GPT, corpus: Corpus, context: int, device: torch.device) -> float:
    """The mean loss on windows spread evenly over the held-out files."""
    starts = torch.linspace(0, len(corpus.held_out) - context - 1, 256).long()
    losses = []
    for part in starts.split(32):
        text, following = windows(corpus.held_out, part, context)
        losses.append(model(text.to(device), following.to(device)).item())
    return sum(losses) / len(losses)


@torch.no_grad()
def sample(model: GPT, prompt: bytes, args: argparse.Namespace, device: torch.device) -> str:
    random = torch.Generator().manual_seed(args.seed)
    text = list(prompt)
    for _ in range(args.sample_bytes):
        scores = model(torch.tensor([text[-args.context :]], device=device))[0, -1].cpu()
        text.append(int(torch.multinomial(F.softmax(scores / 0.8, dim=0), 1, generator=random)))
    return bytes(text).decode(errors="ignore")


# --- Training -----------------------------------------------------------------------------------------------


class CommunicationClock:
    """Measures the part of each step that communication adds to it, on any backend.

    The clock runs from the moment DDP hands the last gradients of this rank over to be reduced until
    `backward` returns, which is when all reduced gradients are back: communication that hides behind the
    computation costs nothing. Most of that time may be waiting for ranks that still compute; the rank that
    comes last waits for nobody, so the least time of all ranks is the communication itself.
    """

    def __init__(self) -> None:
        self.handed_over = 0.0
        self.seconds: list[float] = []

    def all_reduce(self, group: dist.ProcessGroup | None, bucket: dist.GradBucket):
        """Does what DDP does by default with a bucket of gradients, and notes when."""
        self.handed_over = time.perf_counter()
        return allreduce_hook(group, bucket)

    def backward_returned(self) -> None:
        self.seconds.append(time.perf_counter() - self.handed_over)

    def take(self, device: torch.device) -> float:
        """The seconds of communication since the last call. All ranks call this together."""
        least = torch.tensor(self.seconds, device=device)
        dist.all_reduce(least, op=dist.ReduceOp.MIN)
        self.seconds.clear()
        return least.sum().item()


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """Linear warm-up over the first tenth, then a cosine down to a tenth of the peak."""
    warmup = max(1, args.steps // 10)
    if step < warmup:
        return args.lr * (step + 1) / warmup
    progress = (step - warmup) / max(1, args.steps - warmup)
    return args.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


def mean_over_ranks(value: torch.Tensor) -> float:
    total = value.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def train(args: argparse.Namespace, device: torch.device) -> None:
    is_first = dist.get_rank() == 0
    corpus = Corpus()
    torch.manual_seed(args.seed)
    gpt = GPT(args).to(device)
    model = DistributedDataParallel(gpt)
    clock = CommunicationClock()
    model.register_comm_hook(None, clock.all_reduce)
    # As a tensor, another rate needs no other program.
    rate = torch.tensor(args.lr, device=device) if args.compile else args.lr
    is_fused = device.type == "cpu" and not args.compile
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), fused=is_fused)

    def update() -> None:
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    forward = torch.compile(model) if args.compile else model
    update = torch.compile(update) if args.compile else update
    ranks = dist.get_world_size()
    step_tokens = ranks * args.batch_size * args.context
    if is_first:
        count = sum(parameter.numel() for parameter in gpt.parameters())
        print(
            f"{ranks} ranks, backend {dist.get_backend()}, device {device}: {count:,} parameters, "
            f"{len(corpus.train):,} bytes of source, {step_tokens:,} bytes a step",
            flush=True,
        )

    logged_at, logged_step = time.perf_counter(), 0
    for step in range(args.steps):
        for group in optimizer.param_groups:
            if args.compile:
                group["lr"].fill_(learning_rate(step, args))
            else:
                group["lr"] = learning_rate(step, args)
        text, following = training_batch(corpus, args, step)
        loss = forward(text.to(device), following.to(device))
        loss.backward()
        clock.backward_returned()
        update()
        optimizer.zero_grad()

        done = step + 1
        if step == 0 or done % args.log_every == 0 or done == args.steps:
            mean_loss, communication = mean_over_ranks(loss), clock.take(device)
            now = time.perf_counter()
            if is_first:
                seconds = now - logged_at
                print(
                    f"step {done:4}/{args.steps}  loss {mean_loss:.3f}  "
                    f"{(done - logged_step) * step_tokens / seconds:8,.0f} tokens/s  "
                    f"communication {100 * communication / seconds:4.1f} %",
                    flush=True,
                )
            logged_at, logged_step = now, done
        # Only this rank stops to look; the others meet it again in the next all-reduce.
        if is_first and done % args.eval_every == 0 and done < args.steps:
            held_out_loss = evaluate(gpt, corpus, args.context, device)
            print(f"step {done:4}/{args.steps}  held-out loss {held_out_loss:.3f}", flush=True)

    if is_first:
        print(f"val loss {evaluate(gpt, corpus, args.context, device):.2f}")
        print(sample(gpt, b"def ", args, device), flush=True)
    dist.barrier()  # nobody leaves while another may still need it


def main() -> None:
    args = parse_args()
    backend = args.backend or ("tpu_dist" if dist.is_backend_available("tpu_dist") else "gloo")
    if args.device == "auto":
        has_tpu = backend != "gloo" and hasattr(torch, "tpu") and torch.tpu.is_available()
        args.device = "tpu" if has_tpu else "cpu"
    device = torch.device(args.device)
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:  # started without a launcher: a world of one
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        train(args, device)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
