import importlib.metadata
import json
import os
import sys

answers = {"executable": sys.executable, "version": sys.version_info[:3]}


def version(module):
    try:
        __import__(module)
        return {"version": importlib.metadata.version(module)}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}".splitlines()[0]}


def threads():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("Threads:"))


def fork():
    import torch

    child = os.fork()
    if child == 0:
        total = -1.0
        try:
            total = torch.ones(1 << 16).sum().item()
        finally:
            os._exit(0 if total == 1 << 16 else 1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return "worked" if code == 0 else {"failed": f"exit code {code}" if code > 0 else f"signal {-code}"}


if sys.version_info >= (3, 11):
    # As in ranks, which import it first: it keeps Google's torch_tpu from loading where there are no chips.
    version("tpurun")
    answers["torch"] = version("torch")
    if "version" in answers["torch"]:
        answers["threads"] = threads()
        answers["fork"] = fork()
        answers["hash_seed"] = os.environ.get("PYTHONHASHSEED", "random")
        answers["tpurun"] = version("tpurun")
        if "version" in answers["tpurun"]:
            import torch.distributed

            answers["backend_is_registered"] = torch.distributed.is_backend_available("tpu_dist")
print(json.dumps(answers))
