"""These tests show which programs get device ``tpu``, and what programs are told that only ask for it."""

import json
import textwrap
from pathlib import Path

import pytest

from interpreters import interpreter, python
from tpurun import run_rank
from tpurun.device import _device

ASK = "print(torch._C._get_privateuse1_backend_name())"


def test_questions_claim_nothing() -> None:
    code = f"""
        import torch
        before = torch.accelerator.current_accelerator()
        assert getattr(torch, "tpu", None) is not None and torch.tpu.is_available()
        assert torch.tpu.device_count() == 3 and torch.tpu.current_device() == 0
        assert torch.tpu.is_bf16_supported() and not torch.tpu.is_initialized()
        torch.tpu.synchronize(); torch.tpu.empty_cache(); torch.tpu.manual_seed_all(0)
        assert torch.accelerator.current_accelerator() == before
        {ASK}
        count = torch.tpu.device_count
        getattr(torch, 't' + 'pu').init()
        assert count() == torch.accelerator.device_count() == 3
        {ASK}
    """
    assert python(code, TPURUN_DEVICES="3").splitlines() == ["privateuseone", "tpu"]


def test_answers_are_those_of_a_claim() -> None:
    code = "import torch; print(torch.tpu.is_available(), torch.tpu.device_count())"
    assert python(code) == "True 1"
    assert python(code, LOCAL_WORLD_SIZE="4", TPURUN_DEVICES="2") == "True 4"
    assert python(code, TPURUN_DEVICE="0") == "False 0"
    assert python(f"import torch; torch.utils.rename_privateuse1_backend('npu'); {code}") == "False 0"


@pytest.mark.parametrize("given", ["all", "0", "128", "-1", "²"])
def test_a_number_of_devices_is_one(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setenv("TPURUN_DEVICES", given)
    with pytest.raises(RuntimeError, match=f"a number from 1 to 127, got {given!r}"):
        _device._devices()


@pytest.mark.parametrize("seeded", ["torch.manual_seed(5)", "torch.tpu.manual_seed(5)"])
def test_seeds_from_before_the_claim_count(seeded: str) -> None:
    code = f"""
        import torch
        {seeded}
        torch.tpu.init()
        name = "t" + "pu"
        first = torch.rand(8, device=name)
        torch.manual_seed(5)
        assert torch.equal(first, torch.rand(8, device=name))
        print("right")
    """
    assert python(code) == "right"


def test_a_refused_name_says_how_to_have_it(tmp_path: Path) -> None:
    program, path = tmp_path / "program.py", tmp_path / "error.json"
    program.write_text(
        textwrap.dedent("""
            import torch
            try:
                torch.ones(1, device="t" + "pu")
            except RuntimeError as error:
                raise ValueError("no model") from error
        """)
    )
    code = f"""
        import sys
        from tpurun import run_rank
        sys.stderr = sys.stdout
        print(run_rank.run({str(program)!r}, [], is_module=False))
    """
    lines = python(code, TORCHELASTIC_ERROR_FILE=str(path)).splitlines()
    assert lines[-2].startswith("tpurun: nothing in the program showed that it uses device tpu; start it")
    assert "--device tpu" in lines[-2] and lines[-1] == "1"
    message = json.loads(path.read_text())["exception"]["message"]
    assert message == f"no model\n{lines[-2]}"


def test_other_errors_get_no_note() -> None:
    assert run_rank.note_on(RuntimeError("Expected one of cpu, cuda device type at start: mps")) is None
    refused = RuntimeError("Expected one of cpu, cuda device type at start of device string: tpuv4")
    assert run_rank.note_on(refused) is None


def test_modules_of_the_program_claim_the_device(tmp_path: Path) -> None:
    (tmp_path / "settings.py").write_text('KIND = "tpu"\n')
    (tmp_path / "program.py").write_text(
        "import torch\n"
        "print(torch._C._get_privateuse1_backend_name())\n"
        "import settings\n"
        "print(torch.ones(1, device=settings.KIND).device)\n"
    )
    assert interpreter(str(tmp_path / "program.py")).splitlines() == ["privateuseone", "tpu:0"]


def test_modules_from_before_torch_do_too(tmp_path: Path) -> None:
    (tmp_path / "settings.py").write_text('DEVICE = "tpu"\n')
    (tmp_path / "program.py").write_text("import settings, torch\nprint(torch.device(settings.DEVICE))\n")
    assert interpreter(str(tmp_path / "program.py")) == "tpu"


def test_choices_and_comparisons_do_not(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "import argparse, torch\n"
        "parser = argparse.ArgumentParser()\n"
        'parser.add_argument("--device", choices=["cpu", "tpu"], default="cpu")\n'
        "device = parser.parse_args().device\n"
        'if device == "tpu":\n'
        '    print(torch.ones(1, device="tpu").device)\n'
        "print(torch._C._get_privateuse1_backend_name())\n"
    )
    assert interpreter(str(tmp_path / "program.py")) == "privateuseone"
    assert interpreter(str(tmp_path / "program.py"), "--device", "tpu").splitlines() == ["tpu:0", "tpu"]


def test_a_device_of_the_environment(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        'import os, torch\nprint(torch.ones(1, device=os.environ.get("WHERE", "cpu")).device)\n'
    )
    assert interpreter(str(tmp_path / "program.py")) == "cpu"
    assert interpreter(str(tmp_path / "program.py"), WHERE="tpu") == "tpu:0"


def test_processes_that_the_program_spawns(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        textwrap.dedent("""
            import torch

            def main(rank):
                print(torch.ones(1, device=f"tpu:{rank}").device, flush=True)

            if __name__ == "__main__":
                torch.multiprocessing.spawn(main, nprocs=torch.tpu.device_count())
        """)
    )
    printed = interpreter(str(tmp_path / "program.py"), TPURUN_DEVICES="2")
    assert sorted(printed.splitlines()) == ["tpu:0", "tpu:1"]


def test_autograds_threads_do_not_abort_the_end() -> None:
    code = """
        import torch
        x = torch.ones(4, device="tpu", requires_grad=True)
        (x * 2).sum().backward()
        print(x.grad.sum().item())
    """
    assert [python(code, TPURUN_DEVICES="8") for _ in range(3)] == ["8.0"] * 3
