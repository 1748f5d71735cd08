"""How many threads a forked rank computes with: torch was imported where the environment says 1."""

from __future__ import annotations

import ctypes
import os
import sys


def use_threads_of_environment(threads: int | None = None) -> None:
    """Sets the number of threads by a call, because the libraries have read the server's environment, which
    says 1."""
    threads = threads or threads_in("OMP_NUM_THREADS")
    torch = sys.modules["torch"]
    if threads is not None and torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
    blas_threads = threads_in("OPENBLAS_NUM_THREADS") or threads
    if blas_threads is not None and blas_threads != 1:
        for library in openblas_libraries():
            set_openblas_threads(library, blas_threads)


def threads_in(variable: str) -> int | None:
    """A number of threads, when the variable holds one."""
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() and int(text) > 0 else None


def openblas_libraries() -> set[str]:
    """The copies of OpenBLAS that this process has loaded; wheels bring their own."""
    with open("/proc/self/maps", encoding="utf-8") as maps:
        paths = {line.split(maxsplit=5)[5].strip() for line in maps if "openblas" in line}
    return {path for path in paths if os.path.exists(path)}


def set_openblas_threads(path: str, threads: int) -> None:
    """The name of the function depends on who has built it."""
    library = ctypes.CDLL(path)
    for name in (
        "scipy_openblas_set_num_threads64_",
        "scipy_openblas_set_num_threads",
        "openblas_set_num_threads64_",
        "openblas_set_num_threads",
    ):
        if (function := getattr(library, name, None)) is not None:
            function(threads)
            return
