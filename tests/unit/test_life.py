"""The phases of a run and its clock."""

import pytest

from ringmaster_dist.server.life import Life, Phase


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def test_the_phases_in_order_and_the_seconds_in_each():
    clock = Clock()
    life = Life(clock)
    seen = [(life.phase, life.seconds)]
    for step in (life.begin, life.end, life.stop_clock, life.announce_end):
        clock.now += 1.0
        step()
        clock.now += 1.0
        seen.append((life.phase, life.seconds))
    assert [phase for phase, _ in seen] == [
        Phase.GATHERING, Phase.RUNNING, Phase.ENDING, Phase.ENDING, Phase.OVER,
    ]  # fmt: skip
    assert [seconds for _, seconds in seen] == [0.0, 1.0, 3.0, 4.0, 4.0]  # the clock stands again after stop_clock


def test_the_phase_never_moves_back():
    life = Life(Clock())
    life.end()
    life.begin()
    assert life.phase is Phase.ENDING
    assert not life.has_begun
    life.end()
    life.announce_end()
    life.end()
    assert life.is_over
    assert life.seconds == 0.0


@pytest.mark.parametrize("ended", [False, True])
def test_a_later_term_continues_the_clock_unless_the_run_had_ended(ended):
    clock = Clock()
    life = Life(clock)
    life.resume(7.0, ended=ended)
    clock.now += 2.0
    assert life.seconds == (7.0 if ended else 9.0)
    assert life.has_begun is not ended


def test_the_end_is_not_announced_before_it():
    life = Life(Clock())
    life.begin()
    with pytest.raises(AssertionError):
        life.announce_end()
