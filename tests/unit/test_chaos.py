"""The schedule of faults."""

from collections import Counter

from ringmaster_dist.chaos.faults import WORKER_KINDS, schedule


def test_a_seed_gives_the_same_schedule():
    assert schedule(1, 60, 8, 12, 2) == schedule(1, 60, 8, 12, 2) != schedule(2, 60, 8, 12, 2)


def test_every_kind_comes_equally_often_and_in_time():
    faults = schedule(7, 600, 8, 60, 3)
    counts = Counter(fault.kind for fault in faults)
    assert counts == {**dict.fromkeys(WORKER_KINDS, 15), "restart": 3}
    assert [fault.at_seconds for fault in faults] == sorted(fault.at_seconds for fault in faults)
    assert all(30 <= fault.at_seconds <= 570 for fault in faults)
    assert {fault.slot for fault in faults if fault.kind != "restart"} == set(range(8))
    assert all((fault.lasting_seconds > 0) == (fault.kind == "stop") for fault in faults)
    assert schedule(7, 600, 8, 0, 0) == []
