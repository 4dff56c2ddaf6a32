"""APG's optimiser where a run goes on: kept it changes nothing, reset it does."""

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from example_agents import AGENTS, compile_quickly

from ajaxckpt.testing import assert_resume_equivalent

APG = AGENTS["apg"]
CUT = 32


@pytest.fixture(scope="module", autouse=True)
def settings() -> Iterator[None]:
    """Compile quickly, and let flax add its biases by promotion."""
    with jax.numpy_rank_promotion("allow"):
        compile_quickly()
        yield
        compile_quickly(False)


def resume_with_a_fresh_optimiser(state: Any, n: int) -> Any:
    fresh = int(state.step[0]) > 0
    return APG.module.train(APG.config, n, state, reset_optimizer=fresh)


def test_a_reset_optimiser_is_the_agents_doing_not_the_checkpoints() -> None:
    def compare(**options: Any) -> None:
        advance = resume_with_a_fresh_optimiser
        total, split = APG.total, [24, CUT, (16, 48)]
        assert_resume_equivalent(
            APG.make_skeleton, advance, total=total, split=split, **options
        )

    compare(compare_whole=False)
    with pytest.raises(AssertionError, match=r"^splitting changes it") as failed:
        compare()
    assert any("opt_state" in str(found) for found in failed.value.differences)


def test_a_reset_optimiser_forgets_its_moments_and_counts_and_nothing_else() -> None:
    before, _ = APG.advance(APG.make_skeleton(), CUT)
    kept = jax.tree.map(np.array, before.replace(opt_state=None, key=None))
    key = np.array(jax.random.key_data(before.key))
    assert all(np.any(leaf) for leaf in jax.tree.leaves(before.opt_state))
    after = APG.module.train(APG.config, 0, before, reset_optimizer=True)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(after.opt_state))
    jax.tree.map(
        np.testing.assert_array_equal, after.replace(opt_state=None, key=None), kept
    )
    np.testing.assert_array_equal(jax.random.key_data(after.key), key)


def test_the_learning_rate_falls_over_the_run_whether_kept_or_reset() -> None:
    def rates(reset: bool) -> list[float]:
        """Return how far parameters move at most, at each update: Adam's rate."""
        state = APG.make_skeleton()
        moved = []
        for _ in range(0, APG.total, 8):
            before = jax.tree.map(np.array, state.params)
            state = APG.module.train(APG.config, 8, state, reset_optimizer=reset)
            steps = jax.tree.map(lambda a, b: abs(a - b).max(), before, state.params)
            moved.append(float(max(jax.tree.leaves(steps))))
        return moved

    # a reset Adam moves each parameter by the rate itself
    falling = [APG.config.learning_rate * (1 - k / 8) for k in range(8)]
    np.testing.assert_allclose(rates(reset=True), falling, rtol=1e-3)
    # one that is kept moves them otherwise, yet by less and less
    kept = rates(reset=False)
    assert kept[-1] < 0.25 * kept[0]


def test_a_run_says_that_its_optimiser_is_reset_and_ends_elsewhere(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    module = APG.module
    monkeypatch.setattr(module, "Config", APG.small)
    evaluate = module.evaluate

    def signalled(*args: Any) -> Any:
        if args[-1] == 2:
            signal.raise_signal(signal.SIGTERM)
        return evaluate(*args)

    def stopped_at(directory: Path) -> None:
        with monkeypatch.context() as patched, pytest.raises(SystemExit):
            patched.setattr(module, "evaluate", signalled)
            module.main(["--run", str(directory), "--chunk", "8"])
        capsys.readouterr()

    def end(*arguments: str) -> list[str]:
        module.main([*arguments, "--chunk", "8"])
        return capsys.readouterr().out.splitlines()

    # nothing is restored, so nothing is reset
    unbroken = end("--run", str(tmp_path / "whole"), "--reset-optimizer")
    stopped_at(tmp_path / "kept")
    stopped_at(tmp_path / "reset")
    assert end("--run", str(tmp_path / "kept")) == unbroken
    said, digest = end("--run", str(tmp_path / "reset"), "--reset-optimizer")
    assert said == (
        "the optimiser starts anew at step 32; the learning rate goes on: "
        "it falls to 0 at step 64"
    )
    assert [digest] != unbroken
