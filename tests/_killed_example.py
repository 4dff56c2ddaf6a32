"""Run an example and die by SIGKILL inside its n-th save, at a chosen moment.

python _killed_example.py N after-first-write|before-rename EXAMPLE ARGUMENTS…
"""

import os
import runpy
import signal
import sys
from typing import Any

from ajaxckpt import _files


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    saves, moment, example, *arguments = sys.argv[1:]
    countdown = int(saves)
    write_some, replace = _files._write_some, _files._replace
    publish = _files._publish

    def counting_publish(*args: Any) -> None:
        nonlocal countdown
        countdown -= 1
        publish(*args)

    def write_then_die(*args: Any) -> int:
        done = write_some(*args)
        if countdown == 0 and moment == "after-first-write":
            die()
        return done

    def die_then_replace(*args: Any) -> None:
        if countdown == 0 and moment == "before-rename":
            die()
        replace(*args)

    _files._publish = counting_publish
    _files._write_some = write_then_die
    _files._replace = die_then_replace
    sys.argv = [example, *arguments]
    runpy.run_path(example, run_name="__main__")


main()
