"""Makes the installed Python modules links to those of this checkout, so that an edit needs no installation.

``python .ci/link_package.py``, with the interpreter that tpurun is installed for.
"""

import sysconfig
from pathlib import Path

SOURCES = Path(__file__).resolve().parents[1] / "python" / "tpurun"


def main() -> None:
    installed = Path(sysconfig.get_path("purelib")) / "tpurun"
    for source in SOURCES.rglob("*"):
        if source.is_dir() or source.suffix == ".pyc":
            continue
        path = installed / source.relative_to(SOURCES)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.symlink_to(source)
    # Links to files that are gone are taken away.
    for path in installed.rglob("*"):
        if path.is_symlink() and not path.exists():
            path.unlink()


if __name__ == "__main__":
    main()
