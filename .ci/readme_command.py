"""Print one of the README's two set-up commands, so that CI runs what it says.

Usage: python .ci/readme_command.py example|tests
"""

import re
import sys
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def find_command(name: str) -> str:
    """Return the shell command below the README's marker of this name."""
    block = re.compile(rf"<!-- command: {name} -->\n+```sh\n(.+?)```", re.DOTALL)
    match = block.search(README.read_text())
    if match is None:
        raise SystemExit(f"README.md has no command {name!r}")
    return match[1].strip()


if __name__ == "__main__":
    print(find_command(sys.argv[1]))
