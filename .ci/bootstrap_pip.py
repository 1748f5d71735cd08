"""Puts pip into the virtual environment that runs this, where the system's Python came without ensurepip.

Debian splits ensurepip off into python3-venv. Pip's wheel can run itself: that one file is enough.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import urllib.parse
import urllib.request
from pathlib import Path

WHEEL = "pip-26.3-py3-none-any.whl"
SHA256 = "f3b60b20ffaadd4415ed7957212a38ac63fa4c5fa375bd0f4a797777940fad13"
TIMEOUT_S = 60


def fetch(url: str, accept: str = "*/*") -> bytes:
    request = urllib.request.Request(url, headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
        return response.read()


def wheel_url(index: str) -> str:
    page = f"{index.rstrip('/')}/pip/"
    listing = json.loads(fetch(page, "application/vnd.pypi.simple.v1+json"))
    for file in listing["files"]:
        if file["filename"] == WHEEL:
            return urllib.parse.urljoin(page, file["url"])
    raise SystemExit(f"tpurun: expected {WHEEL} in {page}, found no such file")


def main() -> None:
    wheel = fetch(wheel_url(os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple")))
    digest = hashlib.sha256(wheel).hexdigest()
    if digest != SHA256:
        raise SystemExit(f"tpurun: expected {WHEEL} with sha256 {SHA256}, got {digest}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, WHEEL)
        path.write_bytes(wheel)
        command = [
            sys.executable,
            f"{path}/pip",
            "install",
            "--quiet",
            "--no-index",
            "--no-cache-dir",
            str(path),
        ]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
