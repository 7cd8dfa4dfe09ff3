"""`python -m mlx_dllm_plugin.compat WHEEL...` adds the hashes of released wheels to known.json (in a checkout)."""

import hashlib
import json
import sys
import zipfile
from pathlib import Path

from ..patches import _TARGETS
from . import known


def record(wheel: Path) -> None:
    """Add the patched modules of one wheel, named `<host>-<version>-....whl`."""
    host, version = wheel.name.split("-")[:2]
    with zipfile.ZipFile(wheel) as archive:
        for target in _TARGETS:
            file = target.replace(".", "/") + ".py"
            if target.partition(".")[0] == host and file in archive.namelist():
                known().setdefault(target, {})[version] = hashlib.sha256(archive.read(file)).hexdigest()


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        record(Path(argument))
    Path(__file__).with_name("known.json").write_text(json.dumps(known(), indent=1) + "\n")
