"""These tests show what in a program's text, arguments and environment is a use of device ``tpu``."""

import time
from textwrap import dedent

import pytest

from tpurun.device import _device
from tpurun.device._uses import QUESTIONS, Program

OPTIONS = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--device", default="{default}", choices=["cpu", "tpu"])
parser.add_argument("--use-tpu", action="store_true")
args = parser.parse_args()
"""


def uses(*texts: str, arguments: str = "", **environment: str) -> bool:
    program = Program(arguments.split(), environment)
    found = [program.says_device(), *(program.add(dedent(text).encode()) for text in texts)]
    return any(found)


@pytest.mark.parametrize(
    "text",
    [
        'x.to("tpu")',
        'x.to(f"tpu:{rank}")',
        'x.to("tpu:%d" % rank)',
        'x.to("tpu:" + str(rank))',
        'x.to("tpu:{}".format(rank))',
        'torch.ones(3, device="tpu:0")',
        'torch.device("tpu", 0)',
        'torch.device(type="tpu") or torch.set_default_device("tpu")',
        'init_device_mesh("tpu", (8,))',
        'torch.load(path, map_location="tpu")',
        'torch.load(path, "tpu")',
        'with torch.autocast("tpu"): pass',
        "torch.tpu.set_device(0)",
        "model.tpu()",
        "from torch.tpu import Stream",
        'DEVICE = "tpu"',
        'class Settings:\n    device: str = "tpu"',
        'options = {"device": "tpu"}',
        'kind = "tpu"\nx.to(kind)',
        'where = {"kind": "tpu"}\nx.to(where["kind"])',
        'def run(kind):\n    x.to(kind)\nrun("tpu")',
        'def run(kind="tpu"):\n    x.to(kind)',
        'def kind():\n    return "tpu"\nx.to(kind())',
        'for kind in ["cpu", "tpu"]:\n    x.to(kind)',
        'KINDS = "cpu", "tpu"\nfor kind in KINDS:\n    torch.ones(1, device=kind)',
        'torch.device("tpu" if torch.tpu.is_available() else "cpu")',
        'kind = "tpu" if hasattr(torch, "tpu") and torch.tpu.is_available() else "cpu"\nx.to(kind)',
        'HAS = getattr(torch, "tpu", None) is not None\nif HAS:\n    x.to("tpu")',
        'x.to("tpu" if not torch.cuda.is_available() else "cuda")',
        'if torch.tpu.device_count() > 0:\n    x.to("tpu")',
        'use_tpu = True\nif use_tpu:\n    x.to("tpu")',
        'dist.is_backend_available("tpu") and x.to("tpu")',
        'kind = "tpu"\nif kind.startswith("tpu"):\n    x.to(kind)',
        'kind = "tpu"\nmatch kind:\n    case "tpu":\n        x.to(kind)',
        OPTIONS.format(default="tpu"),
        'auto = "auto"\nif auto == "auto":\n    args.device = "tpu"',
    ],
)
def test_a_device_by_name(text: str) -> None:
    assert uses(text)


@pytest.mark.parametrize(
    "text",
    [
        "# on a tpu",
        '"""A program for cpu or tpu."""',
        'print("tpu")',
        'raise ValueError("tpu")',
        'DEVICES = ["cpu", "tpu"]',
        'device_names = ("cpu", "tpu")\nif name not in device_names:\n    raise ValueError',
        'if device == "tpu":\n    x.to("tpu")',
        'if device.type == "tpu":\n    torch.tpu.set_device(0)',
        'def run(device="cpu"):\n    if device in ("tpu",):\n        x.to("tpu")',
        'match device:\n    case "tpu":\n        x.to("tpu")',
        'x.to("cpu" if device != "tpu" else "tpu")',
        'torch.device("tpu" if arguments.tpu else "cpu")',
        'if "tpu" in name:\n    x.to("tpu")',
        "torch.tpu.is_available()",
        'getattr(torch, "tpu", None) is not None and torch.tpu.is_available()',
        "from torch.tpu import is_available",
        'dist.init_process_group("tpu")',
        'dist.init_process_group(backend="tpu", rank=0)',
        'device = "cpu"\nSIZES = {"cpu": 1, "tpu": 2}[device]',
        'device_to_backend = {"cpu": "gloo", "tpu": "tpu_dist"}',
        'if False:\n    x.to("tpu")',
        OPTIONS.format(default="cpu"),
        'os.environ["XLA"] = "tpu"',
        '"tpu" is no Python',
    ],
)
def test_a_name_that_is_no_use(text: str) -> None:
    assert not uses(text)


def test_options_count_with_the_value_that_they_have() -> None:
    program = OPTIONS.format(default="cpu") + 'if args.device == "tpu":\n    x.to(args.device)\n'
    assert not uses(program) and not uses(program, arguments="--device cpu")
    assert uses(program, arguments="--device tpu") and uses(program, arguments="--device=tpu:1")
    of_default = OPTIONS.format(default="tpu") + "x.to(args.device)\n"
    assert uses(of_default) and not uses(of_default, arguments="--device cpu")
    switch = OPTIONS.format(default="cpu") + 'x.to("tpu" if args.use_tpu else "cpu")\n'
    assert not uses(switch) and uses(switch, arguments="--use-tpu")
    auto = OPTIONS.format(default="auto") + 'if args.device == "auto":\n    args.device = "tpu"\n'
    assert uses(auto) and not uses(auto, arguments="--device cpu")


def test_operands_after_one_that_decides_are_no_values() -> None:
    program = """
        parser.add_argument("--backend")
        backend = parser.parse_args().backend or "tpu_dist"
        device = "tpu" if backend != "gloo" and torch.tpu.is_available() else "cpu"
        x.to(device)
    """
    assert uses(program) and not uses(program, arguments="--backend gloo")


def test_arguments_that_no_text_explains() -> None:
    assert uses("", arguments="trainer.device=tpu") and uses("", arguments="--accelerator tpu:0")
    assert not uses("", arguments="--backend tpu") and not uses("", arguments="dist.backend=tpu")
    assert not uses("", arguments="--name tpu_run output-tpu")


def test_variables_of_the_environment() -> None:
    program = 'import os\nx.to(os.environ.get("WHERE", "cpu"))\n'
    assert uses(program, WHERE="tpu") and not uses(program) and not uses(program, WHERE="cpu", OTHER="tpu")
    assert uses('x.to(os.environ["WHERE"])', WHERE="tpu:0")
    assert uses('x.to(os.getenv("WHERE", "tpu"))') and not uses(
        'x.to(os.getenv("WHERE", "tpu"))', WHERE="cpu"
    )
    switch = 'if os.environ.get("USE_TPU", "0") == "1":\n    x.to("tpu")\n'
    assert uses(switch, USE_TPU="1") and not uses(switch)
    switch = 'x.to("tpu" if int(os.environ.get("USE_TPU", "0")) else "cpu")\n'
    assert uses(switch, USE_TPU="1") and not uses(switch)


def test_modules_of_the_program_are_read_together() -> None:
    settings, model = 'KIND = "tpu"\n', "def build(kind):\n    return torch.nn.Linear(1, 1).to(kind)\n"
    assert not uses(settings) and not uses(model)
    assert uses("import settings\nx.to(settings.KIND)\n", settings)
    assert uses('import model\nmodel.build("tpu")\n', model)
    assert not uses('import model\nmodel.build("cpu")\nKINDS = ["cpu", "tpu"]\n', model)


def test_odd_calls_are_no_uses() -> None:
    odd = ["os.getenv()", "os.environ.get()", "x.to()", "getattr()", "device(*a, **k)", "1 < a < 2", "-a"]
    assert not uses("KINDS = ['tpu']\n" + "\n".join(f"if {call}:\n    x.to({call})" for call in odd))


def test_values_that_are_made_of_each_other_come_to_an_end() -> None:
    assert not uses('a = b\nb = a\nif "tpu" == a:\n    x.to(a)\n')
    assert not uses("x.to(" + "-" * 5000 + '"tpu")')


def test_questions_are_those_that_are_answered() -> None:
    assert frozenset(_device._ANSWERS) == QUESTIONS


def test_large_programs_take_no_long_time() -> None:
    names = [f"n{index}" for index in range(60)]
    text = "".join(f"{name} = {' or '.join(names)}\n" for name in names) + "x.to(n0)\nKINDS = ['tpu']\n"
    program = Program([], {})
    started = time.process_time()
    assert not program.add(text.encode())
    # Without a bound nobody would see the end of it.
    assert time.process_time() - started < 20
    assert program.add(b"def f(kind): x.to(kind)\nf(KIND)\nKIND = 'tpu'\n")
