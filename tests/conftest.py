import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing here is looked up on the hub

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "tiny")]


@pytest.fixture
def run_stage(monkeypatch, capsys) -> Callable:
    """run_stage(script, main, *args, code=None): a stage in this process, as each start of Python costs seconds. It must
    leave with `code`; returns what it wrote to stdout and stderr."""
    import common

    def run_stage(script: str, main: Callable[[], None], *args: object, code: int | None = None) -> tuple[str, str]:
        monkeypatch.setattr(sys, "argv", [script, *map(str, args)])
        capsys.readouterr()
        try:
            common.run_main(main)
        except SystemExit as e:
            assert e.code == code
        else:
            assert code is None
        return capsys.readouterr()

    return run_stage
