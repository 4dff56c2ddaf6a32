"""Run an example and die by SIGKILL inside its n-th save, at a chosen moment.

python _killed_example.py N after-first-write|before-rename|before-removal EXAMPLE …

Saves happen in the background; the thread that carries out the n-th is the one that
ends the process, while the loop goes on.
"""

import os
import runpy
import signal
import sys
import threading
from typing import Any

from ajaxckpt import _files, _run_files


def main() -> None:
    saves, moment, example, *arguments = sys.argv[1:]
    countdown, doomed = int(saves), 0
    write_some, replace = _files._write_some, _files._replace
    publish, remove = _files._publish, _run_files.remove_files

    def die_at(reached: str) -> None:
        if moment == reached and threading.get_ident() == doomed:
            os.kill(os.getpid(), signal.SIGKILL)

    def counting_publish(target: str, *args: Any) -> None:
        nonlocal countdown, doomed
        if target.endswith(".safetensors"):  # not the record of metrics
            countdown -= 1
            if countdown == 0:
                doomed = threading.get_ident()
        publish(target, *args)

    def write_then_die(*args: Any) -> int:
        done = write_some(*args)
        die_at("after-first-write")
        return done

    def die_then_replace(*args: Any) -> None:
        die_at("before-rename")
        replace(*args)

    def die_then_remove(*args: Any) -> None:
        die_at("before-removal")
        remove(*args)

    _files._publish = counting_publish
    _files._write_some = write_then_die
    _files._replace = die_then_replace
    _run_files.remove_files = die_then_remove
    sys.argv = [example, *arguments]
    runpy.run_path(example, run_name="__main__")


main()
