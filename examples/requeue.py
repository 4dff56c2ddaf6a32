"""A job that is preempted again and again, and ends as if it never had been.

    python examples/requeue.py

`supervise` plays the scheduler: it starts the job, takes the machine away from it at
random moments, by SIGTERM with time to leave, by SIGTERM with too little of it, and by
SIGKILL at once, and starts it again while its exit code asks for that. In the end it
compares the digest with that of a job left alone.

The job is `work`, a toy with the loop of any training script. For SLURM, a script like
this starts it, submitted once by `sbatch`:

    #!/bin/bash
    #SBATCH --time=04:00:00
    #SBATCH --signal=USR1@120     # 120 s before the time is up
    #SBATCH --requeue             # after a preemption and after a node's failure
    #SBATCH --open-mode=append    # one log over all starts
    srun python train.py "runs/$SLURM_JOB_ID"
    code=$?
    if [ $code -eq 75 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
    exit $code

- `--signal` is for the time limit: `Run` takes SIGUSR1 as a request to stop, and the
  exit code 75 makes the script queue itself again. Without it the limit just kills.
- `--requeue` is for the rest: what SLURM ends itself, it queues itself. A preemption
  sends SIGTERM first and SIGKILL after the partition's GraceTime; a node that fails
  sends nothing. The job id, and so the directory, stays the same over all starts.
- `srun` matters: signals go to what it started, not to what the script itself runs.
- `Run(grace=…)` should be less than the time between the signal and the kill: a loop
  that has not come round by then is saved without it.
"""

import argparse
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp

from ajaxckpt import KeepLast, MetricsLog, Run, SaveEvery, state_digest

START_AGAIN = 75  # EX_TEMPFAIL: nothing is wrong, but there is more to do
SECONDS_PER_STEP = 0.03  # a real step takes longer than the toy's
STEPS_PER_START = 20

# -------------------------------------------------------------------- the job


@jax.jit
def init_state() -> dict[str, jax.Array]:
    """Return the weights of a polynomial, their momentum, and a key."""
    zeros = jnp.zeros(4)
    return {"weights": zeros, "momentum": zeros, "key": jax.random.key(0)}


@partial(jax.jit, donate_argnums=0)
def train(state: dict[str, jax.Array]) -> tuple[dict[str, jax.Array], jax.Array]:
    """Take one step towards a sine, from random points; return the loss before it."""
    key, key_points = jax.random.split(state["key"])
    x = jax.random.uniform(key_points, (64,), minval=-1.0)
    powers = jnp.stack([jnp.ones_like(x), x, x**2, x**3])
    error = state["weights"] @ powers - jnp.sin(3 * x)
    momentum = 0.9 * state["momentum"] - 0.01 * powers @ error / x.size
    state = {"weights": state["weights"] + momentum, "momentum": momentum, "key": key}
    return state, jnp.mean(error**2)


def work(directory: Path, steps: int) -> None:
    """Train up to a step, from wherever the run has got to.

    Raises:
        SystemExit: the run was asked to stop, and has saved where it stopped.
    """
    with Run(
        directory,
        save=SaveEvery(steps=3),
        keep=KeepLast(2),
        logs=[MetricsLog(directory / "metrics.csv")],
        exit_code=START_AGAIN,
    ) as run:
        start = run.restore_or_init(init_state)
        state, done = start.state, start.step or 0
        print(f"from step {done}", flush=True)
        for step in range(done + 1, steps + 1):
            state, loss = train(state)
            time.sleep(SECONDS_PER_STEP)
            run.log(step, {"loss": loss})
            run.step(state, step=step)
            print(f"step {step}", flush=True)
            if run.stop_requested:
                break
    print(f"digest: {state_digest(state)}")


# -------------------------------------------------------------- the scheduler

PATIENT, IMPATIENT, AT_ONCE = "SIGTERM", "SIGTERM, soon SIGKILL", "SIGKILL"
KINDS = (PATIENT, AT_ONCE, IMPATIENT)


def start_job(directory: Path, steps: int) -> "subprocess.Popen[str]":
    """Start the job, as the script above does."""
    job = [sys.executable, __file__, "--job", str(directory), "--steps", str(steps)]
    return subprocess.Popen(job, stdout=subprocess.PIPE, text=True)


def preempt(job: "subprocess.Popen[str]", kind: str, rng: random.Random) -> str:
    """Take the machine away from a job some steps from now; return what it printed."""
    assert job.stdout is not None
    printed = [job.stdout.readline() for _ in range(rng.randint(2, 6))]
    time.sleep(rng.uniform(0, 2 * SECONDS_PER_STEP))
    if kind != AT_ONCE:
        job.send_signal(signal.SIGTERM)
        grace = 30.0 if kind == PATIENT else rng.uniform(0, SECONDS_PER_STEP / 2)
        try:
            job.wait(grace)
        except subprocess.TimeoutExpired:
            pass
    job.kill()  # does nothing to a job that has left
    return "".join(printed)


def asks_for_more(code: int) -> bool:
    """Tell whether a job is to be started again: it says so, or it was killed."""
    return code in (START_AGAIN, -signal.SIGTERM, -signal.SIGKILL)


def supervise(directory: Path, steps: int, kinds: Sequence[str], seed: int) -> str:
    """Start the job, preempted so often, until it is done; return its last line.

    Raises:
        SystemExit: the job failed.
    """
    rng = random.Random(seed)
    left, code, lines = list(kinds), START_AGAIN, [""]
    while asks_for_more(code):
        kind = left.pop(0) if left else ""
        with start_job(directory, steps) as job:
            assert job.stdout is not None
            printed = preempt(job, kind, rng) if kind else ""
            printed += job.stdout.read()
        code = job.returncode
        lines = printed.splitlines() or ["nothing printed"]
        told = f"{lines[0]}: {kind or 'left alone'} at {lines[-1]!r}, exit code {code}"
        print(told, flush=True)
    if code != 0:
        raise SystemExit(f"the job failed with exit code {code}")
    return lines[-1]


def compare(directory: Path, preemptions: int, seed: int) -> int:
    """Run the job left alone and the job preempted; return 0 if they end alike."""
    steps = STEPS_PER_START * (preemptions + 1)
    kinds = [KINDS[i % len(KINDS)] for i in range(preemptions)]
    random.Random(seed).shuffle(kinds)
    with start_job(directory / "alone", steps) as alone:
        preempted = supervise(directory / "preempted", steps, kinds, seed)
        assert alone.stdout is not None
        unbroken = alone.stdout.read().splitlines()[-1]
    print(f"left alone  {unbroken}\npreempted   {preempted}")
    return 0 if preempted == unbroken else 1


def main(argv: Sequence[str] | None = None) -> int:
    """Be the scheduler, or with --job one of its jobs."""
    parser = argparse.ArgumentParser(description="Preempt a job until it is done.")
    parser.add_argument("--preemptions", type=int, default=7)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--directory", type=Path, help="by default a temporary one")
    parser.add_argument("--job", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.job:
        work(args.job, args.steps)
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        directory = args.directory or Path(temporary)
        return compare(directory, args.preemptions, args.seed)


if __name__ == "__main__":
    sys.exit(main())
