"""Evaluate a trained agent out of its checkpoint, knowing nothing but the file.

    python examples/evaluate.py runs/sac_pendulum/step-8000.safetensors

The saved config rebuilds the agent's code; the skeleton says what the file must hold.
Acting needs the actor's parameters and the normaliser, so only these are read: with
`subtree=` the replay buffer, most of the file, is never touched.
"""

import argparse
import sys
from collections.abc import Sequence

import jax
from sac_pendulum import config_from, evaluate, init_agent, show

from ajaxckpt import open_checkpoint, restore_into


def main(argv: Sequence[str] | None = None) -> int:
    """Print the mean evaluation return of each seed in a checkpoint."""
    parser = argparse.ArgumentParser(description="Evaluate a checkpoint.")
    parser.add_argument("path")
    parser.add_argument("--episodes", type=int, default=10)
    parser.add_argument("--seed", type=int, default=123)
    args = parser.parse_args(argv)

    with open_checkpoint(args.path) as checkpoint:
        config, step = config_from(checkpoint.config), checkpoint.step
        # Shapes and types are all that a skeleton must have: nothing is computed here.
        skeleton = jax.eval_shape(lambda: init_agent(config))
        # Both from the one open file, even if training replaces it meanwhile.
        actor_params = restore_into(
            skeleton.actor.params, checkpoint, subtree="actor.params"
        )
        normaliser = restore_into(skeleton.normaliser, checkpoint, subtree="normaliser")

    returns = evaluate(config, actor_params, normaliser, args.episodes, args.seed)
    print(f"{config.env_name}, seeds {list(config.seeds)}, step {step}")
    print(f"mean return of {args.episodes} episodes: {show(returns)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
