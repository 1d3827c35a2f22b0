"""The memory of prepared launches: bounded, the least recently used out first, one at a time."""

from __future__ import annotations

import threading

import pytest

pytest.importorskip("triton", reason="Triton has no package for this platform")

from sdpa.kernels.triton.prepared import PreparedLaunches


def test_a_value_is_made_once():
    memory, made = PreparedLaunches(3), []
    for key in "aabab":
        assert memory.get(key, lambda k: made.append(k) or k.upper(), key) == key.upper()
    assert made == ["a", "b"]


def test_nothing_is_a_value_too():
    memory, made = PreparedLaunches(3), []
    for _ in range(2):
        assert memory.get("a", lambda: made.append("a")) is None
    assert made == ["a"]


def test_the_least_recently_used_goes_first_and_alone():
    memory, made = PreparedLaunches(3), []
    for key in "abcadaebcd":
        memory.get(key, made.append, key)
        assert len(memory) <= 3
    #                 b goes for d, then c for e, d for b, a for c, e for d
    assert "".join(made) == "abcdebcd"


def test_threads_share_it():
    memory, wrong = PreparedLaunches(8), []

    def many(seed):
        for n in range(4000):
            key = (n * seed) % 13
            if memory.get(key, lambda k: k * k, key) != key * key:
                wrong.append(key)

    threads = [threading.Thread(target=many, args=(seed,)) for seed in (1, 2, 3, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and len(memory) == 8


def test_a_maker_may_ask_again_inside():
    """As a signal handler or a finaliser does that runs a call of its own."""
    memory = PreparedLaunches(2)
    assert memory.get("outer", lambda: memory.get("inner", lambda: 1) + 1) == 2
    assert len(memory) == 2
