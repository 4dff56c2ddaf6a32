"""Logs that continue: one curve, however often the run was killed.

    python examples/resumed_logs.py runs/toy --tensorboard --wandb --steps 60
    python examples/resumed_logs.py runs/toy --tensorboard --wandb --steps 100

A run that restored step 40 computes step 41 again, though it had logged it before it
was killed. `Run` tells each of its `logs` where it goes on (`resume`), hands it every
row (`append`), and asks it to be durable before a checkpoint is written (`sync`).
`MetricsLog` is the record that has it right by itself. Below it, the same hook for

- TensorBoard: what the event files hold after the restored step is declared void, the
  way TensorBoard has for it. Tested with TensorBoard's own reader.
- Weights & Biases: the run is resumed by its id, and what a kill kept from being sent
  comes out of the CSV. Offline every start makes a log of its own (`wandb sync` sends
  it later), which so holds the whole curve: this is tested. What only the service does
  is not: to refuse an id it does not know (`resume="must"`), to say at which step it
  is, and to keep the first of two rows of a step. It cannot cut back: rows after the
  restored step stay as they were, which is right since the resumed run computes the
  same ones; after a `rollback` start a run of a new id (or see `resume_from=`).

A log of another run's id is refused by all three.
"""

import argparse
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from ajaxckpt import InvalidArgumentError, MetricsLog, Run, SaveEvery, read_metrics


def claim_directory(directory: Path, run_id: str) -> None:
    """Mark a log's directory as a run's own; refuse one that is another's."""
    directory.mkdir(parents=True, exist_ok=True)
    marker = directory / "run_id"
    owner = marker.read_text() if marker.exists() else ""
    if owner not in ("", run_id):
        problem = f"its log is of the run {owner!r}, not of {run_id!r}"
        hint = "log to another directory"
        raise InvalidArgumentError(problem, path=directory, hint=hint)
    marker.write_text(run_id)


class TensorBoardLog:
    """A `LogHook` that writes TensorBoard's event files (pip install tensorboardX).

    It writes them through `EventsWriter`: what `SummaryWriter` was given lies in a
    queue that its `flush` does not wait for, and a kill then leaves a gap.
    """

    def __init__(self, directory: Path) -> None:
        """Log to a directory that is given to TensorBoard."""
        self._directory = directory
        self._events: Any = None

    def resume(self, run_id: str, step: int | None) -> None:
        """Begin a new file that voids all older ones' later steps."""
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import SessionLog

        self.close()
        claim_directory(self._directory, run_id)
        # files are read by name, whose time has only seconds: the number breaks the tie
        number = len(list(self._directory.glob("events.*")))
        self._events = EventsWriter(str(self._directory / "events"), f".{number:06}")
        first = 0 if step is None else step + 1
        self._write(first, session_log=SessionLog(status=SessionLog.START))

    def append(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Log one point per metric that has a value."""
        from tensorboardX.proto.summary_pb2 import Summary

        points = [
            Summary.Value(tag=name, simple_value=float(value))
            for name, value in metrics.items()
            if value is not None
        ]
        self._write(step, summary=Summary(value=points))

    def _write(self, step: int, **content: Any) -> None:
        from tensorboardX.proto.event_pb2 import Event

        self._events.write_event(Event(wall_time=time.time(), step=step, **content))

    def sync(self) -> None:
        """Write and fsync the events."""
        if self._events is not None:
            self._events.flush()

    def close(self) -> None:
        """Write and fsync the events, and close the file."""
        if self._events is not None:
            self._events.close()
        self._events = None


class WandbLog:
    """A `LogHook` that logs to Weights & Biases (pip install wandb)."""

    def __init__(self, directory: Path, record: Path, **settings: Any) -> None:
        """Keep wandb's files in a directory.

        Args:
            directory: where they go.
            record: the CSV of the run's `MetricsLog`, to fill what wandb lost.
            settings: what `wandb.init` takes, such as ``project=``.
        """
        self._directory, self._record, self._settings = directory, record, settings
        self._run: Any = None

    def resume(self, run_id: str, step: int | None) -> None:
        """Open wandb's run of that id and log what it lacks up to a step."""
        import wandb

        self.close()
        claim_directory(self._directory, run_id)
        if wandb.run is not None:  # wandb.init might hand it out, whatever its id
            problem = f"wandb's run {wandb.run.id!r} is open, not {run_id!r}"
            hint = "call wandb.finish() first"
            raise InvalidArgumentError(problem, path=self._directory, hint=hint)
        self._run = wandb.init(
            id=run_id,
            resume="allow" if step is None else "must",
            dir=str(self._directory),
            **self._settings,
        )
        if step is not None and self._record.exists():
            for row in read_metrics(self._record):
                if self._run.starting_step <= row["step"] <= step:
                    del row["run_id"]
                    self.append(row.pop("step"), row)

    def append(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Log the metrics that have a value."""
        values = {name: value for name, value in metrics.items() if value is not None}
        self._run.log(values, step=step)

    def sync(self) -> None:
        """Do nothing: wandb cannot be asked; `resume` fills what a kill cost."""

    def close(self) -> None:
        """Hand over all rows; online, wait until they are sent."""
        if self._run is not None:
            self._run.finish()
        self._run = None


def init_state() -> dict[str, jax.Array]:
    """Return the two numbers that are trained."""
    return {"x": jnp.float32(0), "speed": jnp.float32(0)}


@jax.jit
def train(state: dict[str, jax.Array]) -> tuple[dict[str, jax.Array], jax.Array]:
    """Take one step down (x - 3)², with momentum; return the loss before it too."""
    gradient = 2 * (state["x"] - 3)
    speed = 0.9 * state["speed"] - 0.01 * gradient
    return {"x": state["x"] + speed, "speed": speed}, (state["x"] - 3) ** 2


def main(argv: Sequence[str] | None = None) -> int:
    """Train up to a step, from wherever the run directory has got to."""
    parser = argparse.ArgumentParser(description="Train a toy; its logs continue.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--run-id", default="toy")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--tensorboard", action="store_true")
    parser.add_argument("--wandb", action="store_true")
    args = parser.parse_args(argv)

    record = args.directory / "metrics.csv"
    logs: list[Any] = [MetricsLog(record)]
    if args.tensorboard:
        logs.append(TensorBoardLog(args.directory / "tensorboard"))
    if args.wandb:
        mode = os.environ.get("WANDB_MODE", "offline")  # "online" needs an account
        place = args.directory / "wandb"
        logs.append(WandbLog(place, record, project="resumed-logs", mode=mode))

    save = SaveEvery(steps=20)
    with Run(args.directory, run_id=args.run_id, save=save, logs=logs) as run:
        start = run.restore_or_init(init_state)
        state, first = start.state, (start.step or 0) + 1
        print(f"resuming at step {start.step}" if start.restored else "starting")
        for step in range(first, args.steps + 1):
            state, loss = train(state)
            run.log(step, {"loss": loss})  # before the save: no step goes missing
            run.step(state, step=step)
            if run.stop_requested:
                break
    print(f"x = {float(state['x']):.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
