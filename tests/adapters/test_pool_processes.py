"""A pool in other processes: a fork has its own copy, and nothing else copies one."""

import copy
import io
import multiprocessing

import pytest
import torch
from adapter_cases import CONFIG, check, make_pool, wait_until, wrapped, write


def serve_from_a_fork(pool, delta):
    """In the child: prefetch needs threads, which a fork does not inherit."""
    torch.set_num_threads(1)
    pool.prefetch(["b"])
    wait_until(lambda: pool.ready("b"))
    with pool.hold(["b"]):
        check(pool, "b", delta, 2.0)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_prefetches_as_its_parent_did(tmp_path):
    states = {name: wrapped(seed=seed) for seed, name in enumerate("ab")}
    pool = make_pool(max_loras=2, host=2)
    for name, (state, _) in states.items():
        pool.register(name, write(tmp_path / name, state, CONFIG))
    pool.prefetch(["a"])
    wait_until(lambda: pool.ready("a"))
    child = multiprocessing.get_context("fork").Process(
        target=serve_from_a_fork, args=(pool, states["b"][1])
    )
    child.start()
    child.join(120)
    assert child.exitcode == 0
    assert pool.names() == ["a"], "the child's pool is its own"


def test_a_pool_is_not_copied():
    """Neither alone nor as part of a model."""
    model = torch.nn.Linear(1, 1)
    model.pool = pool = make_pool()
    for make in (
        lambda: copy.copy(pool),
        lambda: copy.deepcopy(model),
        lambda: torch.save(pool, io.BytesIO()),
    ):
        with pytest.raises(TypeError, match="neither copied nor pickled.* for each model and proc"):
            make()
