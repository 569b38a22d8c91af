"""The README's tables are what the code and the measurements say."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_tables_are_up_to_date() -> None:
    command = [sys.executable, str(ROOT / "tools" / "readme_tables.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
